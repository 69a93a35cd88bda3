"""The exported model: the equations against its logits, every mixer of the catalogue against Megatron, the cache, padding, the folder.

Long, because the loops that the equations are compared with are here and nothing else uses them. What a mixer computes is its own room's
matter; here a new name of the catalogue is tested with no new line.
"""

from __future__ import annotations

import cmath
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import sigmoid

from fem_megatron import catalogue
from fem_megatron.config import ModelConfig
from fem_megatron.shapes.fem import FemConfig, FemShape
from pretrain.loader import ConfigError
from pretrain.plan import model_weights
from tests.one_process import megatron_of_one_process
from tools.hf.__main__ import main
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.export import ExportError, export_state_dict, hf_name
from tools.hf.modeling_fem import FemCache, FemLMForCausalLM

VOCAB = 50
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 32,
}
# Layers of the package fla run on a GPU alone.
# Besides each mixer as it is: mixed by layer, with the other's MLP, looped, with switches that change the state or the weights.
COMBINED: dict[str, dict[str, Any]] = {
    "hybrid": {"mixer": "fem_softmax", "pattern": ("fem_softmax", "fem_gla")},
    "cem_mlp_grouped": {"mixer": "transformer", "mlp": "cem", "num_query_groups": 2, "recurrence": 2},
    "cem_attention": {"mixer": "cem", "mlp": "swiglu"},
}
NAMES = [*(name for name in catalogue.MIXERS if not name.startswith("fla.")), *COMBINED]
PADDED = (3, 8, 5)


def small(name: str = "fem_softmax", **changes: Any) -> ModelConfig:
    return ModelConfig(**(SIZES | {"mixer": name} | changes))


def random_state(model: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Every weight well off its start, so that no part of the model is near the identity or zero."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, weight in model_weights(model).items():
        start = weight.init if isinstance(weight.init, int | float) else 0.0
        state[name] = (start + 0.2 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)).to(dtype)
    return state


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def export(model: ModelConfig, out: Path, **changes: Any) -> Path:
    state = changes.pop("state", None) or random_state(model, dtype=torch.float32)
    options: dict[str, Any] = {"tokenizer_dir": None, "dtype": next(iter(state.values())).dtype, "card": {}}
    export_state_dict(state, model, out, **(options | changes))
    return out


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Within ``tolerance`` of the largest value, or of one."""
    assert got.shape == wanted.shape and got.isfinite().all()
    assert (got - wanted).abs().max().item() <= tolerance * max(1.0, wanted.abs().max().item())


@pytest.fixture(scope="module")
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Loads a folder as a stranger would: AutoModelForCausalLM, code from the folder, module cache of its own."""
    cache = tmp_path_factory.mktemp("hf_modules")
    patch = pytest.MonkeyPatch()
    patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache))
    patch.setattr(sys, "path", [*sys.path])
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM

    def load(folder: Path, **options: Any) -> Any:
        model, info = loader.from_pretrained(folder, trust_remote_code=True, output_loading_info=True, **options)
        assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
        assert type(model).__module__.startswith("transformers_modules.")
        return model.eval()

    yield load
    patch.undo()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, open_folder: Callable[..., Any]) -> Any:
    """Exports a state and loads it."""

    def export_and_load(model: ModelConfig, state: dict[str, Tensor], **options: Any) -> Any:
        return open_folder(export(model, tmp_path_factory.mktemp("export") / "model", state=state, **options))

    return export_and_load


@pytest.fixture(scope="module")
def plain(load: Any) -> Any:
    """The default mixer's model in float64."""
    return load(small(), random_state(small()))


# ---------------------------------------------------------------- every mixer


@dataclass
class Exported:
    """A mixer's small model: what trained it, its weights (float32), its folder, and that folder loaded."""

    config: ModelConfig
    state: dict[str, Tensor]
    folder: Path
    model: Any


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, open_folder: Callable[..., Any]) -> Callable[[str], Exported]:
    known: dict[str, Exported] = {}

    def of(name: str) -> Exported:
        if name not in known:
            changes = dict(COMBINED.get(name, {}))
            recurrence = 2 if name in catalogue.MIXERS and catalogue.MIXERS[name].mlp == "none" else 1
            config = small(changes.pop("mixer", name), **{"tie_embeddings": len(name) % 2 == 0, "recurrence": recurrence, **changes})
            state = random_state(config, dtype=torch.float32)
            # The same last name for all: transformers must tell them apart by what is in them.
            folder = export(config, tmp_path_factory.mktemp(name) / "model", state=state)
            known[name] = Exported(config, state, folder, open_folder(folder))
        return known[name]

    return of


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    with megatron_of_one_process():
        yield


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_megatrons(exported: Callable[[str], Exported], name: str) -> None:
    from fem_megatron.model import Layout, build

    given, ids = exported(name), tokens(2, 21)
    (trained,) = build(given.config, Layout(), 21, seed=0)
    answer = trained.load_state_dict(given.state, strict=False)
    assert not answer.unexpected_keys and all(key.endswith("_extra_state") or key == "output_layer.weight" for key in answer.missing_keys)
    with torch.no_grad():
        wanted = trained(ids, torch.arange(21).expand(2, 21), None)[..., :VOCAB]
        # Rounding of float32: the same operations, the output layer's product over 50 rows or 64.
        close(given.model(ids).logits, wanted, 1e-5)


def padded_batch() -> tuple[Tensor, Tensor]:
    ids, mask = tokens(len(PADDED), max(PADDED)), torch.zeros(len(PADDED), max(PADDED), dtype=torch.long)
    for row, length in enumerate(PADDED):
        mask[row, max(PADDED) - length :] = 1
    return ids, mask


@pytest.mark.parametrize("name", NAMES)
def test_generate_with_and_without_cache(exported: Callable[[str], Exported], name: str) -> None:
    """Greedy, a left-padded batch: with the cache as without it, and as each row alone."""
    model, (ids, mask) = exported(name).model, padded_batch()
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, attention_mask=mask, **greedy)
    assert cached.shape == (3, 16)
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **greedy))
    for row, length in enumerate(PADDED):
        alone = ids[row : row + 1, 8 - length :]
        assert torch.equal(cached[row, 8:], model.generate(alone, attention_mask=torch.ones_like(alone), **greedy)[0, length:])


@pytest.mark.parametrize("name", NAMES)
def test_left_padding_changes_nothing(exported: Callable[[str], Exported], name: str) -> None:
    model, (ids, mask), new = exported(name).model, padded_batch(), tokens(3, 4, seed=2)
    longer = torch.cat((mask, torch.ones_like(new)), dim=1)
    with torch.no_grad():
        batch = model(ids, attention_mask=mask, use_cache=True)
        after = model(new, attention_mask=longer, past_key_values=batch.past_key_values)
        for row, length in enumerate(PADDED):
            alone = model(torch.cat((ids[row, 8 - length :], new[row]))[None], use_cache=False).logits[0]
            # Rounding of float32.
            close(torch.cat((batch.logits[row, 8 - length :], after.logits[row])), alone, 1e-5)


STRANGER = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
*folders, out, last = sys.argv[1:]
load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
models = [load(folder) for folder in folders]
with torch.no_grad():
    torch.save([model(torch.arange(2, 13)[None]).logits for model in models], out)
model, tokenizer = load(last), AutoTokenizer.from_pretrained(last, trust_remote_code=True)
tokens = model.generate(**tokenizer("w1 w2 w3", return_tensors="pt"), max_new_tokens=5, do_sample=False)
assert not {"fem_megatron", "kernels", "pretrain", "tools", "megatron"} & {name.split(".")[0] for name in sys.modules}
print(model.config.eos_token_id, model.generation_config.pad_token_id, tokens.shape[1])
"""


def test_a_stranger_loads_every_folder(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    """In one process of its own, far from this repository, offline: models of all mixers beside each other, and one with a tokenizer."""
    card = {"name": "small", "data": "none | nothing", "tokens": 12345, "heldout_loss": 3.25, "seq_length": 77, "note": True}
    last = export(small(), tmp_path / "last", tokenizer_dir=write_tokenizer(tmp_path / "tokenizer", VOCAB), card=card)
    home, saved = tmp_path / "home", tmp_path / "logits.pt"
    env = os.environ | {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    folders = [str(exported(name).folder) for name in NAMES]
    command = [sys.executable, "-I", "-c", STRANGER, *folders, str(saved), str(last)]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    eos, pad, length = run.stdout.split()[-3:]
    assert (eos, pad) == ("0", "0") and 4 <= int(length) <= 8
    for name, logits in zip(NAMES, torch.load(saved), strict=True):
        with torch.no_grad():
            # Rounding of float32: sums in another order with another number of threads.
            close(logits, exported(name).model(torch.arange(2, 13)[None]).logits, 1e-5)
    assert len({file.stat().st_mode for file in last.iterdir()}) == 1
    text = (last / "README.md").read_text()
    for piece in (
        "# small",
        "| Tokens seen | 12,345 |",
        "| Held-out loss (nats per token) | 3.2500 |",
        "none \\| nothing",
        "| note | yes |",
        f"`fem_softmax` ({catalogue.MIXERS['fem_softmax'].about})",
        "it needs torch and transformers alone",
    ):
        assert piece in text
    settings = json.loads((last / "config.json").read_text())
    assert settings["max_position_embeddings"] == 77 and settings["vocab_size"] == VOCAB


def test_a_pattern_and_its_card(load: Any, tmp_path: Path) -> None:
    """A hybrid's layers each have their own mixer, in the model and in what is said of it."""
    config = small(pattern=("fem_softmax", "transformer"), num_layers=4, fem=FemConfig(gate=False))
    model = load(config, random_state(config, dtype=torch.float32))
    kinds = [type(layer.mixer).__name__ for layer in model.model.layers]
    assert kinds[0] != kinds[1] and kinds == kinds[:2] * 2
    text = (Path(model.config._name_or_path) / "README.md").read_text()
    assert "`fem_softmax` (" in text and " or `transformer` (" in text and "| `fem.gate` | no |" in text and "by layer" in text


# ---------------------------------------------------------------- the oracle: the FEM's equations, one number or one row at a time


def oracle_logits(config: ModelConfig, state: dict[str, Tensor], ids: list[int]) -> Tensor:
    """[t, vocab] for one sequence."""
    embedding = state["embedding.word_embeddings.weight"]
    x = torch.stack([embedding[i] for i in ids])
    for layer in range(config.num_layers):
        part = {name.split(".", 3)[3]: value for name, value in state.items() if name.startswith(f"decoder.layers.{layer}.")}
        x = x + oracle_mixer(config, part, oracle_rms(x, config.norm_eps) * part["mixer.norm.weight"])
        h = oracle_rms(x, config.norm_eps) * part["mlp.norm.weight"]
        gate, up = (h @ rows.T for rows in part["mlp.gate_up"])
        x = x + (gate * sigmoid(gate) * up) @ part["mlp.down.weight"].T
    x = oracle_rms(x, config.norm_eps) * state["decoder.final_layernorm.weight"]
    return x @ state.get("output_layer.weight", embedding)[: config.vocab_size].T


def oracle_rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def oracle_mixer(config: ModelConfig, part: dict[str, Tensor], h: Tensor) -> Tensor:
    shape = FemShape.of(config, "softmax")
    z = h @ part["mixer.in_proj.weight"].T
    if shape.conditioner:
        z = z * (1 + oracle_conditioner(config, part, h))
    output = []
    for head in range(shape.heads):
        own = z[:, head * shape.head_width : (head + 1) * shape.head_width]
        q, k, v, lam, gate = own.split(list(shape.slices.values()), dim=1)
        if config.rope:
            q, k = oracle_rope(q, config.rope_base), oracle_rope(k, config.rope_base)
        beta = torch.ones(shape.value_head, dtype=z.dtype)
        if shape.temperature:
            raw = part["mixer.beta"][head * shape.value_head : (head + 1) * shape.value_head]
            beta = torch.log(1 + torch.exp(raw + 1.8))
        for t in range(len(h)):
            scores = torch.stack([(q[t] * k[i]).sum() / math.sqrt(q.shape[1]) for i in range(t + 1)])
            p = torch.exp(scores) / torch.exp(scores).sum()
            read = mu = (p[:, None] * v[: t + 1]).sum(0)
            if shape.free_energy:
                free_energy = torch.log((p[:, None] * torch.exp(beta * v[: t + 1])).sum(0)) / beta
                read = (1 - sigmoid(lam[t])) * mu + sigmoid(lam[t]) * free_energy if shape.temperature else free_energy
            if shape.gate:
                read = read * oracle_rms(torch.log(1 + torch.exp(gate[t])), config.norm_eps)
            output.append((t, head, read))
    rows = [torch.cat([read for at, _, read in output if at == t]) for t in range(len(h))]
    return torch.stack(rows) @ part["mixer.out_proj.weight"].T


def oracle_rope(x: Tensor, base: float) -> Tensor:
    """Channels i and i + d/2 of position t are one complex number, turned by t * base^(-2i/d)."""
    half = x.shape[1] // 2
    turned = x.clone()
    for t, i in itertools.product(range(len(x)), range(half)):
        number = complex(x[t, i].item(), x[t, i + half].item()) * cmath.exp(1j * t * base ** (-2 * i / x.shape[1]))
        turned[t, i], turned[t, i + half] = number.real, number.imag
    return turned


def oracle_conditioner(config: ModelConfig, part: dict[str, Tensor], h: Tensor) -> Tensor:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        centred = x - x.mean()
        return centred / torch.sqrt((centred * centred).mean() + config.norm_eps) * weight

    size = FemShape.of(config, "softmax").conditioner
    rows = part["mixer.tdc.in_proj.weight"].unflatten(0, (size, 3))
    s, phi = torch.zeros(size, dtype=h.dtype), []
    for token in h:
        u = norm(token, part["mixer.tdc.norm.weight"])
        a, f, r = -torch.log(1 + torch.exp(rows[:, 0] @ u)), rows[:, 1] @ u, torch.log(1 + torch.exp(rows[:, 2] @ u))
        s = torch.exp(a) * s + f
        r = r / torch.sqrt((r * r).sum()) * math.sqrt(size)
        phi.append(part["mixer.tdc.out_proj.weight"] @ (r * norm(s, part["mixer.tdc.state_norm.weight"])))
    return torch.stack(phi)


# ---------------------------------------------------------------- logits, loss, gradients


@pytest.mark.parametrize(
    ("fem", "changes"),
    [
        (FemConfig(), {"tie_embeddings": True}),
        (FemConfig(budget="ii"), {"rope": False, "hidden_size": 48}),
        (FemConfig(temperature=False, conditioner=False), {"norm_eps": 1e-3, "hidden_size": 48}),
        (FemConfig(free_energy=False, gate=False), {"recurrence": 1}),
    ],
)
def test_logits_are_the_equations(load: Any, fem: FemConfig, changes: dict[str, Any]) -> None:
    config = small(fem=fem, **changes)
    state, ids = random_state(config), tokens(2, 7)
    model = load(config, state)
    assert model.dtype == torch.float64 and (model.lm_head.weight is model.model.embed_tokens.weight) == config.tie_embeddings
    # float64 rounding through two blocks.
    close(model(ids).logits, torch.stack([oracle_logits(config, state, row.tolist()) for row in ids]), 1e-9)


def test_loss_and_gradient(load: Any) -> None:
    config = small()
    state, ids = random_state(config), tokens(2, 8)
    model = load(config, state).train()
    labels = ids.clone()
    labels[0, :3] = -100
    logits = torch.stack([oracle_logits(config, state, row.tolist()) for row in ids]).log_softmax(-1)
    wanted = [logits[b, t, ids[b, t + 1]] for b in range(2) for t in range(7) if labels[b, t + 1] != -100]
    loss = model(ids, labels=labels).loss
    # transformers computes the loss in float32.
    assert loss.item() == pytest.approx(-torch.stack(wanted).mean().item(), rel=1e-6)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert len(gradients) == len(state) and all(g is not None and g.isfinite().all() and g.any() for g in gradients)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_training_recomputes_the_same_gradient(load: Any) -> None:
    model, ids = load(small(), random_state(small())), tokens(2, 8)
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    # The same operations in the same order.
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(layer.gradient_checkpointing for layer in model.model.layers)


def test_other_ways_in_and_out(plain: Any) -> None:
    """inputs_embeds, position_ids, logits_to_keep, hidden states, tuples."""
    ids = tokens(2, 9)
    with torch.no_grad():
        whole = plain(ids, output_hidden_states=True)
        assert torch.equal(plain(inputs_embeds=plain.get_input_embeddings()(ids)).logits, whole.logits)
        for positions in (torch.arange(9)[None], torch.arange(9).expand(2, 9)):
            assert torch.equal(plain(ids, position_ids=positions).logits, whole.logits)
        assert not torch.allclose(plain(ids, position_ids=torch.arange(9)[None] ** 2).logits, whole.logits)
        close(plain(ids, logits_to_keep=2).logits, whole.logits[:, -2:], 1e-12)
        assert torch.equal(plain(ids, return_dict=False)[0], whole.logits)
        assert len(whole.hidden_states) == 3 and torch.equal(whole.hidden_states[0], plain.get_input_embeddings()(ids))
        close(plain.lm_head(whole.hidden_states[-1]), whole.logits, 1e-12)


# ---------------------------------------------------------------- cache, padding, generation


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_cached_steps_equal_the_parallel_forward(load: Any, dtype: torch.dtype, tolerance: float) -> None:
    """A prompt of 9, a piece of 3, then single tokens, to 64. Tolerances: rounding."""
    model, ids = load(small(), random_state(small(), dtype=dtype)), tokens(2, 64)
    steps: list[Tensor] = []
    cache: Any = None
    with torch.no_grad():
        parallel = model(ids, use_cache=False)
        for piece in ids.split([9, 3, *[1] * 52], dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
    assert parallel.past_key_values is None and cache.get_seq_length() == 64
    close(torch.cat(steps, dim=1), parallel.logits, tolerance)


def test_masked_tokens_anywhere_change_nothing(plain: Any) -> None:
    """Holes and right padding show that positions are counted without them: RoPE would not notice a shift of all."""
    ids, mask = tokens(1, 10), torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0, 1, 0]])
    kept = mask[0].bool()
    with torch.no_grad():
        # float64 rounding.
        close(plain(ids, attention_mask=mask).logits[0, kept], plain(ids[:, kept]).logits[0], 1e-10)


def test_sampling_with_and_without_cache(plain: Any) -> None:
    ids, mask = padded_batch()
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        sampled.append(plain.generate(ids, attention_mask=mask, use_cache=use_cache, max_new_tokens=8, do_sample=True, pad_token_id=0))
    assert torch.equal(*sampled)
    assert not torch.equal(sampled[0], plain.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0))


def test_beam_search_reorders_the_state(plain: Any) -> None:
    beams = {"max_new_tokens": 12, "num_beams": 4, "do_sample": False, "pad_token_id": 0}
    cached = plain.generate(tokens(2, 5), **beams)
    assert torch.equal(cached, plain.generate(tokens(2, 5), use_cache=False, **beams))


def test_the_cache() -> None:
    cache: Any = FemCache(FemLMConfig(small().__dict__))
    assert len(cache) == 2 and cache.get_seq_length() == 0 and not cache.is_croppable
    layer = cache.layers[0]
    layer.state, layer.tokens = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.arange(12.0).view(2, 2, 3)}, 5
    assert cache.get_seq_length() == 5 and cache.get_mask_sizes(3, 0) == (8, 0)
    cache.reorder_cache(torch.tensor([1, 1]))
    assert layer.state["a"].flatten().tolist() == [2.0, 2.0]
    cache.batch_repeat_interleave(2)
    assert layer.state["a"].shape == (4, 1) and layer.state["b"].shape == (4, 2, 3)
    cache.batch_select_indices(torch.tensor([0]))
    assert layer.state["b"].flatten().tolist() == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    cache.crop(0)
    with pytest.raises(ValueError, match="cannot go back"):
        cache.crop(-1)
    cache.reset()
    assert not layer.state and cache.get_seq_length() == 0


def test_refused_inputs(plain: Any) -> None:
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="attention_mask has shape"):
        plain(tokens(1, 5), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="needs its own FemCache"):
        plain(tokens(1, 5), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        plain()
    with pytest.raises(ValueError, match="recurrence=0"):
        FemLMForCausalLM(FemLMConfig(small().__dict__, recurrence=0))
    encoder = FemLMForCausalLM(FemLMConfig(small(causal=False).__dict__)).eval()
    assert encoder(tokens(1, 5), use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="no cache"):
        encoder(tokens(1, 5), past_key_values=FemCache(encoder.config))


# ---------------------------------------------------------------- configuration, initialisation


def test_the_configuration() -> None:
    config = FemLMConfig(small(init_std=0.03).__dict__, num_hidden_layers=4, tie_word_embeddings=True)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.vocab_size) == (32, 4, 4, VOCAB)
    assert config.initializer_range == 0.03 and config.recurrence == 1
    model = ModelConfig.from_dict(config.model_fields())
    assert model == small(init_std=0.03, num_layers=4, tie_embeddings=True)
    config.vocab_size = 60
    assert ModelConfig.from_dict(config.model_fields()).vocab_size == 60
    again = FemLMConfig(**json.loads(config.to_json_string(use_diff=True)))
    assert again.vocab_size == 60 and ModelConfig.from_dict(again.model_fields()) == replace(model, vocab_size=60)
    with pytest.raises(ValueError, match=r"model\.num_attention_heads=5"):
        FemLMConfig(num_attention_heads=5)
    with pytest.raises(TypeError, match="no_such"):
        FemLMConfig({"no_such": 1})


def test_fresh_model_starts_as_trained_ones_do(plain: Any) -> None:
    """The code of this repository, and the same as remote code, which transformers initialises module by module."""
    config = small(hidden_size=128, init_std=0.03)
    for kind, settings in ((FemLMForCausalLM, FemLMConfig), (type(plain), type(plain.config))):
        torch.manual_seed(0)
        model = kind(settings(config.__dict__))
        starts = {hf_name(name): weight for name, weight in model_weights(config).items()}
        assert starts.keys() == model.state_dict().keys()
        for name, weight in model.named_parameters():
            start = starts[name].init
            if isinstance(start, int | float):
                assert not (weight - start).any(), name
            else:
                # The standard deviation of n draws scatters by 1/sqrt(2n): five of these.
                assert weight.std().item() == pytest.approx(0.03, rel=5 / math.sqrt(2 * weight.numel())), name


def test_a_missing_weight_starts_anew(tmp_path: Path, open_folder: Callable[..., Any]) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    out = export(small(), tmp_path / "model")
    weights = load_file(out / "model.safetensors")
    del weights["model.layers.0.mixer.beta"], weights["model.layers.1.mixer.tdc.out_proj.weight"], weights["model.norm.weight"]
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert not model.model.layers[0].mixer.beta.any() and not model.model.layers[1].mixer.tdc.out_proj.weight.any()
    assert (model.model.norm.weight == 1).all() and model.model.layers[1].mixer.beta.any()


def test_recurrence_may_be_raised(load: Any, open_folder: Callable[..., Any]) -> None:
    state, ids = random_state(small()), tokens(2, 6)
    once, thrice = load(small(), state), load(small(recurrence=3), state)
    raised = open_folder(once.config._name_or_path, recurrence=3)
    assert raised.config.recurrence == 3 and raised.config.architecture["recurrence"] == 1
    with torch.no_grad():
        wanted = thrice(ids).logits
        assert torch.equal(raised(ids).logits, wanted) and not torch.allclose(once(ids).logits, wanted)
    assert "every block applied 3 times" in (Path(thrice.config._name_or_path) / "README.md").read_text()
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(raised.generate(ids, **greedy), raised.generate(ids, use_cache=False, **greedy))


def test_saved_again_it_is_the_same(plain: Any, tmp_path: Path, open_folder: Callable[..., Any]) -> None:
    """save_pretrained takes the code along; a resized vocabulary is kept."""
    model = open_folder(plain.config._name_or_path)
    model.resize_token_embeddings(VOCAB + 6)
    model.save_pretrained(tmp_path / "again")
    again = open_folder(tmp_path / "again")
    assert again.config.vocab_size == VOCAB + 6
    with torch.no_grad():
        # float64 rounding: the output layer has more rows.
        close(again(tokens(2, 7)).logits[..., :VOCAB], plain(tokens(2, 7)).logits, 1e-12)


def test_two_models_stand_beside_each_other(load: Any) -> None:
    """Of different code, in folders of one name: what is loaded second does not change the first."""
    ids = tokens(1, 7)
    first, second = (load(config, random_state(config)) for config in (small(), small("transformer")))
    with torch.no_grad():
        before = first(ids).logits
        assert type(first) is not type(second) and type(first.model.layers[0].mixer) is not type(second.model.layers[0].mixer)
        second(ids)
        assert torch.equal(first(ids).logits, before)
        third = load(small(fem=FemConfig(gate=False)), random_state(small(fem=FemConfig(gate=False))))
        assert torch.equal(first(ids).logits, before) and third(ids).logits.isfinite().all()


# ---------------------------------------------------------------- the folder


def test_weights_are_copied_bit_by_bit(load: Any) -> None:
    config = small(num_layers=3)
    state = random_state(config, dtype=torch.float32)
    model = load(config, state, max_shard_size="8KB")
    copied = model.state_dict()
    assert copied.keys() == {hf_name(name) for name in state}
    for name, tensor in state.items():
        rows = tensor[:VOCAB] if "embedding" in name or "output_layer" in name else tensor
        assert torch.equal(copied[hf_name(name)], rows), name
    files = {file.name for file in Path(model.config._name_or_path).iterdir()}
    assert "model.safetensors.index.json" in files and len([name for name in files if name.endswith(".safetensors")]) > 3


def write_tokenizer(folder: Path, entries: int) -> Path:
    from transformers import PreTrainedTokenizerFast

    names = ["<eod>", *(f"w{i}" for i in range(entries - 1))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<eod>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eod>").save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("model_input_names", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_wrong_states_are_refused(tmp_path: Path) -> None:
    config = small()
    state = random_state(config)
    lacking = {name: tensor for name, tensor in state.items() if name != "decoder.layers.1.mlp.down.weight"}
    wrong = state | {"decoder.layers.0.mixer.beta": torch.zeros(3)}
    for bad, message in (
        (lacking, "lacks decoder.layers.1.mlp.down.weight"),
        (state | {"decoder.layers.2.mlp.down.weight": torch.zeros(1)}, "besides the model's, decoder.layers.2"),
        (wrong, r"beta has shape \(3,\) in the checkpoint, \(16,\)"),
    ):
        with pytest.raises(ExportError, match=message):
            export(config, tmp_path / "out", state=bad)
    with pytest.raises(ExportError, match="has 51 entries, the model's vocabulary only 50"):
        export(config, tmp_path / "out", tokenizer_dir=write_tokenizer(tmp_path / "tokenizer", VOCAB + 1))
    with pytest.raises(ExportError, match="no tokenizer folder"):
        export(config, tmp_path / "out", tokenizer_dir=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer"]


def test_another_packages_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"model\.mixer=fla\.GatedLinearAttention is another package's layer"):
        export(small("fla.GatedLinearAttention"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_occupied_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = small(), tmp_path / "out"
    out.mkdir()
    export(config, out)
    (out / "stray").write_text("")
    with pytest.raises(ExportError, match="not empty"):
        export(config, out)
    assert main(["export", str(tmp_path / "checkpoint"), str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tools.hf: error: {out} is not empty") and error.count("\n") == 1
    export(config, out, overwrite=True)
    assert not (out / "stray").exists() and (out / "model.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ExportError, match="is a file"):
        export(config, out / "config.json")


def test_export_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From a checkpoint: dtype, tokenizer, card; the user's errors end in one line and exit code 2."""
    config, data = small(), tmp_path / "data"
    state = random_state(config, dtype=torch.bfloat16)
    write_tokenizer(data / "tokenizer", VOCAB)
    sections: dict[str, Any] = {
        "tokenizer": str(data / "tokenizer"),
        "train": [{"prefix": str(data / "train"), "weight": 1.0}],
        "seq_length": 64,
    }
    manifest = {"config": {"name": "run", "data": sections}, "progress": {"step": 10, "consumed_samples": 80}}

    def load_full_model_state(path: Path) -> tuple[dict[str, Tensor], ModelConfig, dict[str, Any]]:
        if path.name == "nothing":
            raise ConfigError("nothing: no checkpoint there")
        return state, config, manifest

    monkeypatch.setitem(sys.modules, "pretrain.checkpoint", SimpleNamespace(load_full_model_state=load_full_model_state))
    assert main(["export", "checkpoint", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (data / "tokenizer" / "tokenizer.json").read_bytes()
    card = (tmp_path / "out" / "README.md").read_text().splitlines()
    assert {"# run", "| Tokens seen | 5,120 |", "| Optimizer steps | 10 |", "| Context length | 64 |"} <= set(card)
    sections["tokenizer"] = str(tmp_path / "gone")
    assert main(["export", "checkpoint", str(tmp_path / "wide"), "--dtype", "float32", "--tokenizer", str(data / "tokenizer")]) == 0
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    capsys.readouterr()
    for checkpoint, message in (("nothing", "no checkpoint there"), ("checkpoint", "is not there: name its folder with --tokenizer DIR")):
        assert main(["export", checkpoint, str(tmp_path / "bad")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("tools.hf: error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "bad").exists()


def test_interrupted_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("tools.hf.export.model_card", fail)
    with pytest.raises(OSError, match="disk full"):
        export(small(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
