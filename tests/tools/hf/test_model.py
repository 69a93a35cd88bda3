"""The exported model: the equations against its logits, every mixer of the catalogue against Megatron, configuration, the folder.

Long, because the loops that the equations are compared with are here and nothing else uses them. What a mixer computes is its own room's
matter; here a new name of the catalogue is tested with no new line.
"""

from __future__ import annotations

import cmath
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import sigmoid

from fem_common.errors import ConfigError, StorageError
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.fem.shape import FemConfig, FemShape
from pretrain.plan.run_plan import model_weights
from tests.one_process import megatron_of_one_process
from tests.tools.hf.small import NAMES, VOCAB, Exported, close, export, random_state, small, tokens, write_tokenizer
from tools.hf.__main__ import main
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.modeling_fem import FemCache, FemLMForCausalLM
from tools.hf.recipes import hf_name


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


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    with megatron_of_one_process():
        yield


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_megatrons(exported: Callable[[str], Exported], name: str) -> None:
    from fem_megatron.megatron.model import Layout, build

    given, ids = exported(name), tokens(2, 21)
    (trained,) = build(given.config, Layout(), 21, seed=0)
    answer = trained.load_state_dict(given.state, strict=False)
    assert not answer.unexpected_keys and all(key.endswith("_extra_state") or key == "output_layer.weight" for key in answer.missing_keys)
    with torch.no_grad():
        wanted = trained(ids, torch.arange(21).expand(2, 21), None)[..., :VOCAB]
        # Rounding of float32: the same operations, the output layer's product over 50 rows or 64.
        close(given.model(ids).logits, wanted, 1e-5)


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
    first, second = (load(config, random_state(config)) for config in (small(), small("cem")))
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
        with pytest.raises(ConfigError, match=message):
            export(config, tmp_path / "out", state=bad)
    with pytest.raises(ConfigError, match="has 51 entries, the model's vocabulary only 50"):
        export(config, tmp_path / "out", tokenizer_dir=write_tokenizer(tmp_path / "tokenizer", VOCAB + 1))
    with pytest.raises(ConfigError, match="no tokenizer folder"):
        export(config, tmp_path / "out", tokenizer_dir=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer"]


def test_another_packages_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.mixer=fla\.GatedLinearAttention is another package's layer"):
        export(small("fla.GatedLinearAttention"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_occupied_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = small(), tmp_path / "out"
    out.mkdir()
    export(config, out)
    (out / "stray").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        export(config, out)
    assert main(["export", str(tmp_path / "checkpoint"), str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tools.hf: error: {out} is not empty") and error.count("\n") == 1
    export(config, out, overwrite=True)
    assert not (out / "stray").exists() and (out / "model.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="is a file"):
        export(config, out / "config.json")


def test_interrupted_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("tools.hf.export.model_card", fail)
    with pytest.raises(StorageError, match="disk full"):
        export(small(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
