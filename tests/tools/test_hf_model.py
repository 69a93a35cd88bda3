"""The exported model against plain loops in float64, against itself (cache, padding), and against the released code's numbers.

Long, because the loops that every part is compared with are here and nothing else uses them.
"""

from __future__ import annotations

import ast
import cmath
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import layer_norm, sigmoid, softplus

from fem_megatron.config import FemConfig, ModelConfig
from pretrain.loader import ConfigError
from tools.hf import modeling_fem
from tools.hf.__main__ import main
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.export import ExportError, export_state_dict, hf_name, parameter_shapes
from tools.hf.modeling_fem import FemCache, FemLMForCausalLM, FemMixer, fem_read, time_decay_scan

FIXTURE = Path(__file__).parents[1] / "fixtures" / "fem_softmax_full.npz"
ROOT = Path(__file__).parents[2]
VOCAB = 50

# Conditioner, gate, and the three meanings of (free energy, temperature); all off is the plain Transformer's mixer.
SWITCHES = [(c, g, read) for c in (True, False) for g in (True, False) for read in ("LT", "L", "")]


def model_config(c: bool = True, g: bool = True, read: str = "LT", budget: str = "i", **changes: Any) -> ModelConfig:
    fem = FemConfig(
        conditioner=c, free_energy="L" in read, temperature="T" in read, gate=g, budget=budget, conditioner_size=4 if c else None
    )
    sizes: dict[str, Any] = {"hidden_size": 24, "num_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 40}
    return ModelConfig(**(sizes | {"vocab_size": VOCAB, "make_vocab_size_divisible_by": 32, "fem": fem} | changes))


def random_state(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Weights large enough that no part of the model is near the identity or zero."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in parameter_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        state[name] = (1 + 0.2 * noise if "norm" in name else 0.3 * noise).to(dtype)
    return state


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Exports a state and loads it as a stranger would: AutoModelForCausalLM, code from the folder, module cache of its own."""
    cache = tmp_path_factory.mktemp("hf_modules")
    patch = pytest.MonkeyPatch()
    patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache))
    patch.setattr(sys, "path", [*sys.path])
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM

    def export_and_load(config: ModelConfig, state: dict[str, Tensor], dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        out = tmp_path_factory.mktemp("export") / "model"
        export_state_dict(state, config, out, tokenizer_dir=None, dtype=dtype, card={}, **options)
        model, info = loader.from_pretrained(out, trust_remote_code=True, output_loading_info=True)
        assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
        assert model.dtype == dtype and type(model).__module__.startswith("transformers_modules.")
        return model.eval()

    yield export_and_load
    patch.undo()


# ---------------------------------------------------------------- the oracle: the equations, one number or one row at a time


def oracle_logits(config: ModelConfig, state: dict[str, Tensor], ids: list[int]) -> Tensor:
    """[t, vocab] for one sequence."""
    embedding = state["embedding.word_embeddings.weight"]
    x = torch.stack([embedding[i] for i in ids])
    for layer in range(config.num_layers):
        part = {name.split(".", 3)[3]: value for name, value in state.items() if name.startswith(f"decoder.layers.{layer}.")}
        x = x + oracle_mixer(config, part, oracle_rms(x, config.norm_eps) * part["input_layernorm.weight"])
        h = oracle_rms(x, config.norm_eps) * part["pre_mlp_layernorm.weight"]
        rows = part["mlp.linear_fc1.weight"]
        gate, up = h @ rows[: config.ffn_size].T, h @ rows[config.ffn_size :].T
        x = x + (gate * sigmoid(gate) * up) @ part["mlp.linear_fc2.weight"].T
    x = oracle_rms(x, config.norm_eps) * state["decoder.final_layernorm.weight"]
    return x @ state.get("output_layer.weight", embedding)[: config.vocab_size].T


def oracle_rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def oracle_mixer(config: ModelConfig, part: dict[str, Tensor], h: Tensor) -> Tensor:
    shape = config.mixer_shape()
    z = h @ part["self_attention.in_proj.weight"].T
    if shape.conditioner:
        z = z * (1 + oracle_conditioner(config, part, h))
    output = []
    for head in range(shape.heads):
        own = z[:, head * shape.head_width : (head + 1) * shape.head_width]
        q, k, v, lam, gate = own.split(list(shape.head_widths), dim=1)
        if config.rope:
            q, k = oracle_rope(q, config.rope_base), oracle_rope(k, config.rope_base)
        beta = torch.ones(shape.value_head, dtype=z.dtype)
        if shape.temperature:
            raw = part["self_attention.beta"][head * shape.value_head : (head + 1) * shape.value_head]
            beta = torch.log(1 + torch.exp(raw + 1.8))
        for t in range(len(h)):
            scores = torch.stack([(q[t] * k[i]).sum() / math.sqrt(shape.qk_head) for i in range(t + 1)])
            p = torch.exp(scores) / torch.exp(scores).sum()
            read = mu = (p[:, None] * v[: t + 1]).sum(0)
            if shape.free_energy:
                free_energy = torch.log((p[:, None] * torch.exp(beta * v[: t + 1])).sum(0)) / beta
                read = (1 - sigmoid(lam[t])) * mu + sigmoid(lam[t]) * free_energy if shape.temperature else free_energy
            if shape.gate:
                read = read * oracle_rms(torch.log(1 + torch.exp(gate[t])), config.norm_eps)
            output.append((t, head, read))
    rows = [torch.cat([read for at, _, read in output if at == t]) for t in range(len(h))]
    return torch.stack(rows) @ part["self_attention.out_proj.weight"].T


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

    size = config.mixer_shape().conditioner
    rows = part["self_attention.tdc.in_proj.weight"].unflatten(0, (size, 3))
    s, phi = torch.zeros(size, dtype=h.dtype), []
    for token in h:
        u = norm(token, part["self_attention.tdc.norm.weight"])
        a, f, r = -torch.log(1 + torch.exp(rows[:, 0] @ u)), rows[:, 1] @ u, torch.log(1 + torch.exp(rows[:, 2] @ u))
        s = torch.exp(a) * s + f
        r = r / torch.sqrt((r * r).sum()) * math.sqrt(size)
        phi.append(part["self_attention.tdc.out_proj.weight"] @ (r * norm(s, part["self_attention.tdc.state_norm.weight"])))
    return torch.stack(phi)


# ---------------------------------------------------------------- logits, loss, gradients


@pytest.mark.parametrize(("number", "c", "g", "read"), [(i, *switches) for i, switches in enumerate(SWITCHES)])
@pytest.mark.parametrize("budget", ["i", "ii"])
def test_logits_are_the_equations(load: Any, number: int, c: bool, g: bool, read: str, budget: str) -> None:
    config = model_config(c, g, read, budget, tie_embeddings=number % 2 == 0, rope=number % 3 != 1, norm_eps=1e-5)
    state = random_state(config, seed=number)
    ids = tokens(2, 7)
    expected = torch.stack([oracle_logits(config, state, row.tolist()) for row in ids])
    # float64 rounding through two blocks; logits are of order one to ten.
    torch.testing.assert_close(load(config, state)(ids).logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_plain_transformer(load: Any, tied: bool) -> None:
    config = model_config(mixer="transformer", tie_embeddings=tied, attention_backend="reference")
    state = random_state(config)
    model = load(config, state)
    ids = tokens(1, 9)
    torch.testing.assert_close(model(ids).logits[0], oracle_logits(config, state, ids[0].tolist()), rtol=1e-9, atol=1e-9)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_loss_and_gradient(load: Any) -> None:
    config = model_config(budget="ii")
    state = random_state(config)
    model = load(config, state).train()
    ids = tokens(2, 8)
    labels = ids.clone()
    labels[0, :3] = -100
    logits = torch.stack([oracle_logits(config, state, row.tolist()) for row in ids]).log_softmax(-1)
    wanted = [logits[b, t, ids[b, t + 1]] for b in range(2) for t in range(7) if labels[b, t + 1] != -100]
    loss = model(ids, labels=labels).loss
    # transformers computes the loss in float32.
    assert loss.item() == pytest.approx(-torch.stack(wanted).mean().item(), rel=1e-6)

    def smooth() -> Tensor:
        return (model(ids).logits * weights).sum()

    weights = torch.randn(2, 8, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    smooth().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert len(gradients) == len(state) and all(g is not None and g.isfinite().all() and g.abs().max() > 0 for g in gradients.values())
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            direction, step = torch.randn(parameter.shape, generator=generator, dtype=torch.float64), 1e-6
            parameter += step * direction
            above = smooth()
            parameter -= 2 * step * direction
            slope = (above - smooth()).item() / (2 * step)
            parameter += step * direction
            expected = (gradients[name] * direction).sum().item()
            # Central differences with steps of 1e-6: truncation ~1e-10 and rounding ~1e-9 of the sum's size, which is about 100.
            assert slope == pytest.approx(expected, rel=1e-5, abs=1e-5), name


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_training_recomputes_the_same_gradient(load: Any) -> None:
    model = load(model_config(), random_state(model_config()))
    ids = tokens(2, 8)
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    # The same operations in the same order.
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---------------------------------------------------------------- the read


def read_inputs(spread: float, t: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = normal(2, 3, t, 4) * spread
    return normal(2, 3, t, 8).to(dtype), normal(2, 3, t, 8).to(dtype), values.to(dtype), normal(3, 4).exp().to(dtype)


def oracle_read(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    mu, free_energy = torch.empty_like(v), torch.empty_like(v)
    for b, h, t, j in itertools.product(*(range(n) for n in v.shape)):
        scores = [(q[b, h, t] @ k[b, h, i]).item() / math.sqrt(q.shape[-1]) for i in range(t + 1)]
        norm = math.log(math.fsum(math.exp(s) for s in scores))
        terms = [s - norm + beta[h, j].item() * v[b, h, i, j].item() for i, s in enumerate(scores)]
        top = max(terms)
        mu[b, h, t, j] = math.fsum(math.exp(s - norm) * v[b, h, i, j].item() for i, s in enumerate(scores))
        free_energy[b, h, t, j] = (top + math.log(math.fsum(math.exp(term - top) for term in terms))) / beta[h, j].item()
    return mu, free_energy


@pytest.mark.parametrize(("spread", "fused"), [(0.01, True), (1.0, True), (300.0, False)])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_read_at_any_range(monkeypatch: pytest.MonkeyPatch, spread: float, fused: bool, backend: str) -> None:
    """beta v spans hundredths (kappa = 1), tens (kappa = 0 and 1), thousands (the exact form takes over)."""
    exact_reads: list[int] = []
    exact = modeling_fem._exact_read

    def counted(*given: Any) -> Any:
        exact_reads.append(1)
        return exact(*given)

    monkeypatch.setattr(modeling_fem, "_exact_read", counted)
    # Rounding of the log, which beta divides, and of values: a few times 2^-53 and 2^-24, and in float64 the oracle's own.
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        inputs = read_inputs(spread, dtype=dtype)
        mu, gap = fem_read(*inputs, backend=backend)
        wide = [x.double() for x in inputs]
        expected_mu, expected_free_energy = oracle_read(*wide)
        beta, size = wide[3][:, None], wide[2].abs().max()
        assert mu.isfinite().all() and gap.isfinite().all()
        assert ((mu - expected_mu).abs() <= tolerance * size).all()
        assert ((mu + gap - expected_free_energy).abs() <= tolerance * (size + 1 / beta)).all()
    assert bool(exact_reads) == (backend == "reference" or not fused)


def test_reads_in_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, beta = inputs = [x.requires_grad_() for x in read_inputs(300.0)]
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, :3] = False
    results = []
    for elements in (1 << 25, 5 * v.numel()):
        monkeypatch.setattr(modeling_fem, "EXACT_READ_ELEMENTS", elements)
        mu, gap = fem_read(q, k, v, beta, valid)
        results.append([mu, gap, *torch.autograd.grad((mu + gap.sin()).sum(), inputs)])
    for whole, pieces in zip(*results, strict=True):
        # Rounding alone: sums over the keys are the same, those over queries are taken in another order.
        torch.testing.assert_close(pieces, whole, rtol=1e-10, atol=1e-10)


def test_small_values_keep_their_gap() -> None:
    """kappa = 1: the error of F - mu stays relative to the values, however small beta v is (else it is 6e-8 / beta)."""
    q, k, v, beta = read_inputs(1e-3, dtype=torch.float32)
    mu, free_energy = oracle_read(*(x.double() for x in (q, k, v, beta)))
    gap = fem_read(q, k, v, beta)[1]
    # A few roundings of float32, 6e-8 each.
    assert ((gap - (free_energy - mu)).abs() <= 3e-7 * v.abs().max()).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gradient_of_the_read(backend: str) -> None:
    inputs = [x[:1, :, :5].requires_grad_() if x.dim() == 4 else x.requires_grad_() for x in read_inputs(1.0)]
    valid = torch.tensor([[False, True, True, True, True]])
    assert torch.autograd.gradcheck(lambda q, k, v, beta: fem_read(q, k, v, beta, valid, backend), inputs)


def test_bounds_of_the_read() -> None:
    q, k, v, beta = read_inputs(3.0)
    mu, gap = fem_read(q, k, v, beta)
    free_energy, largest = mu + gap, v.cummax(dim=2).values
    # mu <= F <= max; rounding of float64.
    assert (gap >= 0).all() and (free_energy <= largest + 1e-12).all()
    # One token is read as it is.
    torch.testing.assert_close(free_energy[:, :, 0], v[:, :, 0], rtol=1e-12, atol=1e-12)


def test_scan_is_the_recurrence() -> None:
    generator = torch.Generator().manual_seed(5)
    a = -softplus(3 * torch.randn(2, 301, 5, generator=generator, dtype=torch.float64))
    x = torch.randn(2, 301, 5, generator=generator, dtype=torch.float64)
    initial = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    s, expected = initial, []
    for t in range(301):
        s = a[:, t].exp() * s + x[:, t]
        expected.append(s)
    # float64 rounding of sums in another order.
    torch.testing.assert_close(time_decay_scan(a, x, initial), torch.stack(expected, dim=1), rtol=1e-11, atol=1e-11)


# ---------------------------------------------------------------- cache, padding, generation


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("mixer", ["fem_softmax", "transformer"])
def test_cached_steps_equal_the_parallel_forward(load: Any, mixer: str, dtype: torch.dtype, tolerance: float) -> None:
    """A prompt of 9, a piece of 3, then single tokens, to 64. Tolerances: rounding, relative to logits of order one."""
    config = model_config(mixer=mixer)
    state = {name: value * (1 if "norm" in name else 0.5) for name, value in random_state(config).items()}
    model = load(config, state, dtype=dtype)
    ids = tokens(2, 64)
    steps: list[Tensor] = []
    cache: Any = None
    with torch.no_grad():
        parallel = model(ids, use_cache=False)
        for piece in ids.split([9, 3, *[1] * 52], dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
    assert parallel.past_key_values is None
    assert (torch.cat(steps, dim=1) - parallel.logits).abs().max().item() <= tolerance * max(1.0, parallel.logits.abs().max().item())
    layer, shape = cache.layers[0], config.mixer_shape()
    assert layer.keys.shape == (2, 2, 64, shape.qk_head) and layer.values.shape == (2, 2, 64, shape.value_head)
    assert layer.state is None if mixer == "transformer" else layer.state.shape == (2, shape.conditioner)


def test_left_padding_changes_nothing(load: Any) -> None:
    model = load(model_config(), random_state(model_config()))
    lengths, width = (3, 8, 5), 8
    ids, mask = tokens(3, width), torch.zeros(3, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    new = tokens(3, 6, seed=2)
    with torch.no_grad():
        batch = model(ids, attention_mask=mask, use_cache=True)
        longer = torch.cat((mask, torch.ones_like(new)), dim=1)
        after = model(new, attention_mask=longer, past_key_values=batch.past_key_values)
        whole = model(torch.cat((ids, new), dim=1), attention_mask=longer)
        for row, length in enumerate(lengths):
            alone = model(torch.cat((ids[row, width - length :], new[row]))[None]).logits[0]
            # float64 rounding.
            torch.testing.assert_close(batch.logits[row, width - length :], alone[:length], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(after.logits[row], alone[length:], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(whole.logits[row, width - length :], alone, rtol=1e-10, atol=1e-10)


def test_masked_tokens_anywhere_change_nothing(load: Any) -> None:
    """A hole in the middle shows that positions are counted without it: RoPE would not notice a shift of all of them."""
    model = load(model_config(), random_state(model_config()))
    ids = tokens(1, 9)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0, 1]])
    kept = mask[0].bool()
    with torch.no_grad():
        # float64 rounding.
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[0, kept], model(ids[:, kept]).logits[0], rtol=1e-10, atol=1e-10)


def test_right_padding_changes_nothing(load: Any) -> None:
    model = load(model_config(), random_state(model_config()))
    ids, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad():
        alone = model(ids[1:, :5]).logits[0]
        # float64 rounding.
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[1, :5], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("switches", [(True, True, "LT"), (True, False, "L"), (False, False, "")])
def test_generate_with_and_without_cache(load: Any, switches: tuple[bool, bool, str]) -> None:
    model = load(model_config(*switches), random_state(model_config(*switches)), dtype=torch.float32)
    prompts = [tokens(length, seed=length) for length in (4, 7, 2)]
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
    greedy = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, attention_mask=mask, **greedy)
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **greedy))
    for row, prompt in enumerate(prompts):
        assert torch.equal(cached[row, 7:], model.generate(prompt[None], **greedy)[0, len(prompt) :])
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        sampled.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, max_new_tokens=8, do_sample=True, pad_token_id=0))
    assert torch.equal(*sampled) and not torch.equal(sampled[0], cached[:, : sampled[0].shape[1]])


def test_beam_search_reorders_the_state(load: Any) -> None:
    model = load(model_config(), random_state(model_config()))
    ids = tokens(2, 5)
    beams = {"max_new_tokens": 16, "num_beams": 4, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, **beams)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **beams))
    cache: Any = FemCache(model.config)
    layer = cache.layers[0]
    layer.update(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4))
    layer.state = torch.tensor([[1.0], [2.0]])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert layer.state.flatten().tolist() == [2.0, 2.0]
    cache.batch_repeat_interleave(2)
    assert layer.state.shape == (4, 1) and layer.keys.shape[0] == 4
    cache.reset()
    assert layer.state is None and cache.get_seq_length() == 0


def test_refused_inputs(load: Any) -> None:
    from transformers import DynamicCache

    model = load(model_config(), random_state(model_config()))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(tokens(1, 5), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="needs its own FemCache"):
        model(tokens(1, 5), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="free_energy=True"):
        FemLMConfig(learned_temperature=True, free_energy=False)
    with pytest.raises(ValueError, match="qk_head_dim=21 is odd"):
        FemLMConfig(qk_head_dim=21)


def test_fresh_model_starts_as_trained_ones_do() -> None:
    torch.manual_seed(0)
    config = FemLMConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, qk_head_dim=32)
    model = FemLMForCausalLM(config)
    mixer = model.model.layers[0].self_attn
    assert not mixer.tdc.out_proj.weight.any() and not mixer.beta.any() and bool((mixer.tdc.norm.weight == 1).all())
    # Standard deviation of about 10^4 draws: within 5%.
    assert mixer.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)


# ---------------------------------------------------------------- the released code's numbers


def released(p: dict[str, Tensor], x: Tensor, sizes: dict[str, Any], eps: dict[str, float]) -> Tensor:
    """The released code's mixer as its numbers show it: parameter names, order of phi's slices, places of its epsilons.

    in_f, x_f, shortcut are W_a, W_f, W_r; out_proj is applied untransposed; phi's slices are v, q, k, lambda, g, each head-major.
    """
    heads, dk, dv, t = sizes["H"], sizes["d_k"], sizes["d_v"], x.shape[1]
    u = layer_norm(x, x.shape[-1:], p["tdc.fwd.norm.weight"], None, 1e-5)
    a = -softplus(u @ p["tdc.fwd.in_f.weight"].T)
    f, r = u @ p["tdc.fwd.x_f.weight"].T, softplus(u @ p["tdc.fwd.shortcut.weight"].T) + eps["r"]
    r = r / r.norm(dim=-1, keepdim=True) * math.sqrt(r.shape[-1])
    c = a.cumsum(1)
    s = c.exp() * (f / (c.exp() + eps["scan"])).cumsum(1)
    phi = (r * layer_norm(s, s.shape[-1:], p["tdc.fwd.ln.weight"], None, 1e-5)) @ p["tdc.fwd.out_proj"]
    names, widths = ("v", "q", "k", "lambda", "gate"), (heads * dv, heads * dk, heads * dk, heads * dv, heads * dv)
    z = {n: x @ p[f"W_{n}.weight"].T * (1 + part) for n, part in zip(names, phi.split(widths, dim=-1), strict=True)}
    split = {n: value.unflatten(-1, (heads, -1)).transpose(1, 2) for n, value in z.items()}
    gate = softplus(split["gate"]) + eps["gate"]
    gate = gate / gate.square().mean(-1, keepdim=True).sqrt()
    beta = (softplus(p["_beta_param"]) + eps["beta"]).view(heads, 1, dv)
    scores = split["q"] @ split["k"].transpose(-1, -2) / math.sqrt(dk)
    prior = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    mu, free_energy = prior @ split["v"], torch.log(prior @ torch.exp(beta * split["v"])) / beta
    lam = sigmoid(split["lambda"])
    o = gate * ((1 - lam) * mu + lam * free_energy)
    return o.transpose(1, 2).flatten(2) @ p["W_o.weight"].T


def mixer_from_released(p: dict[str, Tensor], sizes: dict[str, Any], beta_eps: float) -> FemMixer:
    """Our mixer with the released parameters; beta's epsilon is absorbed into b, norms take the released code's epsilons."""
    heads, dk, dv, size = sizes["H"], sizes["d_k"], sizes["d_v"], p["tdc.fwd.ln.weight"].shape[0]
    config = FemLMConfig(
        hidden_size=sizes["D"],
        num_attention_heads=heads,
        qk_head_dim=dk,
        value_head_dim=dv,
        conditioner_size=size,
        rope=False,
        norm_eps=0.0,
    )
    mixer = FemMixer(config, 0).double()
    assert mixer.tdc is not None
    mixer.tdc.eps = mixer.tdc.norm.eps = 1e-5

    def pack(rows: dict[str, Tensor]) -> Tensor:
        return torch.cat([rows[n].unflatten(0, (heads, -1)) for n in ("q", "k", "v", "lambda", "gate")], dim=1).flatten(0, 1)

    phi_rows = p["tdc.fwd.out_proj"].T.split([heads * dv, heads * dk, heads * dk, heads * dv, heads * dv])
    beta = softplus(p["_beta_param"]) + beta_eps
    weights = {
        "beta": beta + torch.log(-torch.expm1(-beta)) - 1.8,
        "in_proj.weight": pack({n: p[f"W_{n}.weight"] for n in ("q", "k", "v", "lambda", "gate")}),
        "out_proj.weight": p["W_o.weight"],
        "tdc.norm.weight": p["tdc.fwd.norm.weight"],
        "tdc.state_norm.weight": p["tdc.fwd.ln.weight"],
        "tdc.in_proj.weight": torch.stack([p[f"tdc.fwd.{n}.weight"] for n in ("in_f", "x_f", "shortcut")], dim=1).flatten(0, 1),
        "tdc.out_proj.weight": pack(dict(zip(("v", "q", "k", "lambda", "gate"), phi_rows, strict=True))),
    }
    mixer.load_state_dict(weights)
    return mixer


def test_released_numbers() -> None:
    data = np.load(FIXTURE, allow_pickle=False)
    sizes = json.loads(str(data["meta"]))
    p = {key.removeprefix("param/"): torch.tensor(data[key]) for key in data.files if key.startswith("param/")}
    x, y, w, dx = (torch.tensor(data[key]) for key in ("x", "y", "w", "dx"))
    epsilons = {"r": 1e-8, "scan": 1e-12, "gate": 1e-6, "beta": 1e-6}

    def output_and_gradient(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        output = function(leaf)
        return output.detach(), torch.autograd.grad((output * w).sum(), leaf)[0]

    def ours(beta_eps: float) -> tuple[Tensor, Tensor]:
        mixer = mixer_from_released(p, sizes, beta_eps)
        return output_and_gradient(lambda leaf: mixer(leaf, None, None, None))

    def close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
        for a, b in zip(got, expected, strict=True):
            assert (a - b).abs().max().item() <= tolerance * b.abs().max().item()

    # The restatement with its epsilons is the released code, and without them our mixer: rounding of float64.
    close(output_and_gradient(lambda leaf: released(p, leaf, sizes, epsilons)), (y, dx), 1e-12)
    close(ours(0.0), output_and_gradient(lambda leaf: released(p, leaf, sizes, dict.fromkeys(epsilons, 0.0))), 1e-12)
    # So ours differs from the released numbers by these epsilons alone: 1e-6 on a gate of order one, 1e-12 / exp(-18) in the scan.
    close(ours(epsilons["beta"]), (y, dx), 1e-6)


# ---------------------------------------------------------------- the folder


def test_weights_are_copied_bit_by_bit(load: Any) -> None:
    config = model_config(num_layers=3)
    state = random_state(config, dtype=torch.float32)
    model = load(config, state, dtype=torch.float32, max_shard_size="8KB")
    exported = model.state_dict()
    assert exported.keys() == {hf_name(name) for name in state}
    for name, tensor in state.items():
        rows = tensor[:VOCAB] if "embedding" in name or "output_layer" in name else tensor
        assert torch.equal(exported[hf_name(name)], rows), name
    files = {file.name for file in Path(model.config._name_or_path).iterdir()}
    assert "model.safetensors.index.json" in files and len([name for name in files if name.endswith(".safetensors")]) > 3


def export(config: ModelConfig, out: Path, **changes: Any) -> None:
    state = changes.pop("state", random_state(config, dtype=torch.float32))
    options: dict[str, Any] = {"tokenizer_dir": None, "dtype": torch.float32, "card": {}}
    export_state_dict(state, config, out, **(options | changes))


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
    config = model_config()
    state = random_state(config)
    lacking = {name: tensor for name, tensor in state.items() if name != "decoder.layers.1.mlp.linear_fc2.weight"}
    wrong = state | {"decoder.layers.0.self_attention.beta": torch.zeros(3)}
    for bad, message in (
        (lacking, "lacks decoder.layers.1.mlp.linear_fc2.weight"),
        (state | {"decoder.layers.2.mlp.linear_fc2.weight": torch.zeros(1)}, "besides the model's, decoder.layers.2"),
        (wrong, r"beta has shape \(3,\) in the checkpoint, \(12,\)"),
    ):
        with pytest.raises(ExportError, match=message):
            export(config, tmp_path / "out", state=bad)
    with pytest.raises(ExportError, match="has 51 entries, the model's vocabulary only 50"):
        export(config, tmp_path / "out", tokenizer_dir=write_tokenizer(tmp_path / "tokenizer", VOCAB + 1))
    with pytest.raises(ExportError, match="no tokenizer folder"):
        export(config, tmp_path / "out", tokenizer_dir=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer"]


def test_occupied_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = model_config(), tmp_path / "out"
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
    config, data = model_config(), tmp_path / "data"
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
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("tools.hf.export.shutil.copyfile", fail)
    with pytest.raises(OSError, match="disk full"):
        export(model_config(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_code_files_stand_alone() -> None:
    for name in ("configuration_fem.py", "modeling_fem.py"):
        for node in ast.walk(ast.parse((ROOT / "tools" / "hf" / name).read_text())):
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] in {"math", "torch"} for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                root = (node.module or "").split(".")[0]
                assert root in {"__future__", "torch", "transformers", "typing"} or (node.level == 1 and root == "configuration_fem")


STRANGER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer("w1 w2 w3", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False)
assert not {"fem_megatron", "kernels", "pretrain", "tools", "megatron"} & {name.split(".")[0] for name in sys.modules}
print(model.config.eos_token_id, model.generation_config.pad_token_id, tokens.shape[1], model(tokens).logits.double().sum().item())
"""


def test_stranger_loads_the_folder(tmp_path: Path) -> None:
    """In a process of its own, far from this repository, offline."""
    config, out = model_config(), tmp_path / "out"
    card = {"name": "small", "data": "none | nothing", "tokens": 12345, "heldout_loss": 3.25, "seq_length": 77, "note": True}
    export(config, out, tokenizer_dir=write_tokenizer(tmp_path / "tokenizer", VOCAB), card=card)
    home = tmp_path / "home"
    env = os.environ | {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", STRANGER, str(out)]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    eos, pad, length, _ = run.stdout.split()[-4:]
    assert (eos, pad) == ("0", "0") and 4 <= int(length) <= 8
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1
    text = (out / "README.md").read_text()
    for piece in (
        "# small",
        "| Tokens seen | 12,345 |",
        "| Held-out loss (nats per token) | 3.2500 |",
        "none \\| nothing",
        "| note | yes |",
    ):
        assert piece in text
    settings = json.loads((out / "config.json").read_text())
    assert settings["max_position_embeddings"] == 77 and settings["vocab_size"] == VOCAB
