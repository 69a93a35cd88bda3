"""Properties of every mixer of the catalogue; a new name is tested without changes to this file."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fem_common.errors import ConfigError
from fem_common.settings import spec
from fem_megatron import catalogue
from fem_megatron.block import Block
from fem_megatron.config import ModelConfig
from fem_megatron.documents import Documents
from fem_megatron.mixers.attention.shape import AttentionConfig
from fem_megatron.mixers.cem.shape import CemConfig
from fem_megatron.mixers.delta.shape import DeltaConfig
from fem_megatron.mixers.fem.shape import FemConfig
from fem_megatron.mixers.hyperset.shape import HyperSetConfig
from fem_megatron.mixers.nrgpt.shape import NrgptConfig
from fem_megatron.mixers.second_order.shape import SecondOrderConfig
from fem_megatron.parallel import OneProcess
from fem_megatron.rope import RopeScaling
from fem_megatron.shape import BlockShape
from fem_megatron.state import Context
from pretrain.config import load_run
from pretrain.plan.run_plan import forward_flops, parameter_shapes
from tests.fem_megatron import conftest
from tests.fem_megatron.conftest import drawn
from tests.pretrain.conftest import DEMO
from tests.wording import Wording

SMALL = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    ffn_hidden_size=48,
    vocab_size=100,
    tie_embeddings=True,
)
NAMES = [name for name in catalogue.MIXERS if not name.startswith("fla.")]
LENGTH = 13
# Mixers whose independence from future tokens depends on a kernel of torch that rounds several rows
# together: equal up to rounding, not bit-identical.
ROUNDED = 1e-12

LLAMA3 = RopeScaling("llama3", 4.0, 400)
YARN = RopeScaling("yarn", 4.0, 24, beta_fast=4.0, beta_slow=0.5)
SWITCHED: dict[str, Any] = {
    "attention": AttentionConfig(head_dim=6, qkv_bias=True, sliding_window=5),
    "rope_scaling": LLAMA3,
}

# Name -> settings that differ from SMALL: each mixer with its defaults, and the switches that
# change the work of tensor parallelism.
CASES: dict[str, dict[str, Any]] = {name: {"mixer": name} for name in NAMES} | {
    "grouped": {"mixer": "transformer", "num_query_groups": 2},
    "switched": {"mixer": "transformer", "num_query_groups": 2, **SWITCHED},
    "yuriiformer switched": {
        "mixer": "yuriiformer",
        "num_query_groups": 2,
        "qk_norm": True,
        **SWITCHED,
    },
    "normed": {"mixer": "transformer", "num_query_groups": 2, "qk_norm": True},
    "fem normed": {"mixer": "fem_softmax", "qk_norm": True},
    "differential normed": {"mixer": "differential", "qk_norm": True},
    "loop": {"mixer": "transformer", "recurrence": 2},
    "cem mixer twice": {"mixer": "cem", "recurrence": 2, "repeated": "mixer"},
    "MLP twice": {"mixer": "transformer", "recurrence": 2, "repeated": "mlp"},
    "cem powers": {"mixer": "cem", "cem": CemConfig(alibi="powers")},
    "energy transformer both ways": {"mixer": "energy_transformer", "causal": False},
    "nrgpt deep": {"mixer": "nrgpt", "recurrence": 2, "nrgpt": NrgptConfig(feed_forward="ff2")},
    "nrgpt one map": {"mixer": "nrgpt", "nrgpt": NrgptConfig(feed_forward="ff1")},
    "fem budget ii": {
        "mixer": "fem_softmax",
        "hidden_size": 32,
        "fem": FemConfig(budget="ii", value_size=16),
    },
    "fem bidirectional": {
        "mixer": "fem_softmax",
        "causal": False,
        "fem": FemConfig(conditioner_size=4),
    },
    "fem plain": {
        "mixer": "fem_softmax",
        "fem": FemConfig(conditioner=False, free_energy=False, gate=False),
    },
    "gla by channel": {"mixer": "fem_gla", "fem": FemConfig(gla_decay="channel")},
    "gla bidirectional": {
        "mixer": "fem_gla",
        "causal": False,
        "fem": FemConfig(conditioner_size=4),
    },
    "aft inside": {"mixer": "fem_aft", "fem": FemConfig(aft_query="inside")},
    "mamba unnormalised": {"mixer": "fem_mamba", "fem": FemConfig(mamba_normalise=False)},
    "second order, mean": {
        "mixer": "energy_linear",
        "second_order": SecondOrderConfig(linear_read="mean"),
    },
    "second order, log": {"mixer": "mha2nd", "second_order": SecondOrderConfig(temperature="log")},
    "cem mlp": {"mixer": "transformer", "mlp": "cem"},
    "cem attention": {
        "mixer": "cem",
        "mlp": "swiglu",
        "cem": CemConfig(diagonal="head", residual="raw", preconditioner="diagonal"),
    },
    "hyperset deep": {
        "mixer": "hyperset",
        "recurrence": 3,
        "hyperset": HyperSetConfig(lora_rank=2, update="adam", feed_forward="gated"),
    },
    "hyperset linear": {
        "mixer": "hyperset",
        "recurrence": 2,
        "hyperset": HyperSetConfig(
            attention="linear", feed_forward="softmax", update="momentum", step_condition="current"
        ),
    },
    "hyperset sigmoid": {
        "mixer": "hyperset",
        "recurrence": 2,
        "hyperset": HyperSetConfig(attention="sigmoid", update="rmsprop", step_size="fixed"),
    },
    "fem no conditioner": {"mixer": "fem_lrnn_decay", "fem": FemConfig(conditioner=False)},
    "fem no temperature": {"mixer": "fem_gla", "fem": FemConfig(temperature=False)},
    "fem no gate": {"mixer": "fem_linear", "fem": FemConfig(gate=False)},
    "fem no free energy": {"mixer": "fem_mamba", "fem": FemConfig(free_energy=False)},
    "aft plain": {
        "mixer": "fem_aft",
        "fem": FemConfig(conditioner=False, free_energy=False, gate=False),
    },
    "cem plain": {
        "mixer": "cem",
        "cem": CemConfig(
            diagonal="none", preconditioner="identity", steps_attention=1, steps_mlp=1
        ),
    },
    "delta narrow": {
        "mixer": "gated_deltanet",
        "delta": DeltaConfig(
            heads=2, key_size=8, value_size=12, conv_size=1, negative_eigenvalues=True
        ),
    },
    "hyperset both ways": {
        "mixer": "hyperset",
        "causal": False,
        "hyperset": HyperSetConfig(attention="bisoftmax"),
    },
    "fem yarn": {"mixer": "fem_softmax", "rope_scaling": YARN},
    "second order yarn": {"mixer": "mha2nd1st", "rope_scaling": YARN},
    "hyperset yarn": {"mixer": "hyperset", "recurrence": 2, "rope_scaling": YARN},
}


CAUSAL = [name for name in CASES if CASES[name].get("causal", True)]


def model_of(name: str, *, attention_backend: str = "reference", **changes: Any) -> ModelConfig:
    """Return a case's model; only the FEM has a read with a choice of backends."""
    model = replace(SMALL, **{**CASES[name], **changes})
    if model.mixer.startswith("fem_"):
        return replace(model, attention_backend=attention_backend)
    return model


def shape_of(name: str) -> BlockShape:
    return model_of(name).blocks()[0]


def is_causal(name: str) -> bool:
    return bool(CASES[name].get("causal", True))


def block_of(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Block:
    """Return the first block, with every weight perturbed so that zero-initialised parts
    contribute.
    """
    return filled(model_of(name, **changes).blocks()[0], dtype)


def filled(shape: BlockShape, dtype: torch.dtype = torch.float64) -> Block:
    """Return the block of a shape, with every weight perturbed."""
    made: Block = drawn(Block(shape, OneProcess(dtype)), spread=0.2)
    return made


def tokens(name: str, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> Tensor:
    return conftest.tokens(length, hidden=model_of(name).stream_size, dtype=dtype, seed=3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_planned_parameters_are_the_built_ones(name: str, tied: bool) -> None:
    from fem_megatron.megatron.model import Layout, build

    depth = 2 if tied and is_causal(name) else 0
    model = model_of(name, tie_embeddings=tied, mtp_depth=depth)
    built = build(model, Layout(params_dtype=torch.float64), 16, seed=1)[0]
    assert {
        key: tuple(weight.shape) for key, weight in built.named_parameters()
    } == parameter_shapes(model)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1, 2, LENGTH])
def test_every_parameter_has_a_finite_gradient(name: str, length: int) -> None:
    block = block_of(name)
    x = tokens(name, length).requires_grad_()
    y = block(x, Context(causal=is_causal(name)))
    assert y.shape == x.shape and y.dtype == x.dtype
    (y * tokens(name, length).flip(0)).sum().backward()
    for key, value in {"x": x, **dict(block.named_parameters())}.items():
        assert value.grad is not None and value.grad.isfinite().all(), key
        assert length < LENGTH or value.grad.any(), key


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(name: str) -> None:
    block = block_of(name)
    x = tokens(name, 3)[:, :1].requires_grad_()
    context = Context(causal=is_causal(name))
    names = [key for key, _ in block.named_parameters()]

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(
            block, dict(zip(names, weights, strict=True)), (x, context)
        )

    assert torch.autograd.gradcheck(function, (x, *block.parameters()), fast_mode=True)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_the_future_does_not_leak(name: str, scale: float) -> None:
    """Other tokens after t, including extreme ones, do not change outputs up to t, and do change
    later ones.
    """
    block, x = block_of(name), tokens(name)
    changed = torch.cat((x[:6], -scale * x[6:].flip(0)))
    with torch.no_grad():
        before, after = block(x, Context()), block(changed, Context())
    assert (before[:6] - after[:6]).abs().max() <= ROUNDED * before.abs().max()
    assert not torch.allclose(before[6], after[6])


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_near_fp32(name: str) -> None:
    wide, narrow = block_of(name, torch.float32), block_of(name, torch.bfloat16)
    wide.load_state_dict({key: weight.float() for key, weight in narrow.state_dict().items()})
    x, context = tokens(name, dtype=torch.float32), Context(causal=is_causal(name))
    with torch.no_grad():
        exact = wide(x, context)
    rounded = narrow(x.bfloat16(), context)
    rounded.float().square().sum().backward()
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() for weight in narrow.parameters()
    )
    assert rounded.dtype == torch.bfloat16
    # Eight bits per number through a few sums: an error under 5% of the largest output. Some
    # switches divide by small numbers, so they are left out.
    assert name not in NAMES or (exact - rounded.float()).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("documents", [(LENGTH,), (128,), (4, 24, 4, 32)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_planned_flops_are_those_that_torch_counts(name: str, documents: tuple[int, ...]) -> None:
    """Equal, because both count multiply-adds of the same products, except for triangular solves,
    which torch's counter does not include.

    Several documents that fill their rows: each is counted by its length, and no pair of tokens of
    two documents is computed.
    """
    if name in ("differential", "differential normed", "fem budget ii", "fem plain"):
        pytest.skip("on a CPU attention's widths are padded to one, and the zeros are counted, too")
    block = block_of(name, torch.float32, attention_backend="fused")
    length = sum(documents)
    context = Context(causal=is_causal(name))
    costs = [(length, shape_of(name).flops(length, whole_square=True))]
    if len(documents) > 1:
        costs = [
            (size, shape_of(name).flops(length, whole_square=True, document=size))
            for size in documents
        ]
        begins = torch.isin(torch.arange(length), torch.tensor((0, *documents)).cumsum(0))[None]
        context = Context(documents=Documents.of(begins), causal=is_causal(name))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        block(tokens(name, length, torch.float32)[:, :1], context)
    planned = sum(
        size * value for size, cost in costs for part, value in cost.items() if part != "solves"
    )
    assert counter.get_total_flops() == pytest.approx(planned, rel=1e-12)


@pytest.mark.parametrize(
    ("repeated", "order"), [("mixer", "xxxm"), ("mlp", "xmmm")], ids=["mixer", "mlp"]
)
def test_a_part_of_a_block_is_repeated(repeated: str, order: str) -> None:
    """x: the mixer, m: the MLP, in the order in which they are applied."""
    once, block = block_of("cem"), block_of("cem", recurrence=3, repeated=repeated)
    block.load_state_dict(once.state_dict())
    assert once.mlp is not None
    wanted = x = tokens("cem")
    with torch.no_grad():
        for part in order:
            wanted = (once.mixer if part == "x" else once.mlp)(wanted, Context())
        assert torch.equal(block(x, Context()), wanted)


def test_only_a_separate_mlp_is_repeated() -> None:
    with pytest.raises(ValueError, match=r"model\.repeated=mlp: a block of hyperset has no"):
        replace(SMALL, mixer="hyperset", recurrence=2, repeated="mlp").blocks()


@pytest.mark.parametrize("name", NAMES)
def test_recurrence_is_a_stack_of_the_same_block(name: str) -> None:
    if name == "hyperset":
        pytest.skip("its step sizes know the iteration")
    once, thrice = block_of(name), block_of(name, recurrence=3)
    thrice.load_state_dict(once.state_dict())
    x = tokens(name)
    with torch.no_grad():
        wanted = once(once(once(x, Context()), Context()), Context())
        assert torch.equal(thrice(x, Context()), wanted)
    model = replace(SMALL, mixer=name)
    one, three = (forward_flops(replace(model, recurrence=count), 64) for count in (1, 3))
    assert three.pop("output layer") == one.pop("output layer")
    assert three == {part: 3 * value for part, value in one.items()}


def other(value: Any, choices: tuple[Any, ...] | None) -> Any:
    """Return a value of a key's type that is not its default."""
    if choices:
        return next(choice for choice in reversed(choices) if choice != value)
    if isinstance(value, dict):
        return {"expand_v": 2}
    if isinstance(value, bool):
        return not value
    return 12 if value is None else value * 2 or 1


def guarded() -> list[tuple[str, Any]]:
    """Return (key, another value) for every key that not every mixer reads."""
    found = []
    for item in fields(ModelConfig):
        default = getattr(ModelConfig(), item.name)
        if item.name in catalogue.EVERYONES:
            continue
        parts = [(item.name, item, default)]
        if is_dataclass(default) and fields(default):
            parts = [
                (f"{item.name}.{part.name}", part, getattr(default, part.name))
                for part in fields(default)
            ]
        for key, part, value in parts:
            found.append((key, other(value, spec(part).choices)))
    return found


def with_key(model: ModelConfig, key: str, value: Any) -> ModelConfig:
    section, _, name = key.rpartition(".")
    if section:
        changed = {section: replace(getattr(model, section), **{name: value})}
    else:
        changed = {name: value}
    return replace(model, **changed)


def fitting(model: ModelConfig, key: str) -> BlockShape | None:
    """Return the first block, or None if the key's value does not fit, which means that the key is
    read.
    """
    try:
        shape = catalogue.block(model, model.mixer, 0)
    except ValueError as error:
        if key not in str(error) and "model.rope" not in str(error):
            raise
        return None
    return shape


# Keys that are read but do not change the numbers of a short float64 sequence: the method of
# computation, and a limit on lengths.
UNSEEN = ("attention_backend", "second_order.exact_max_length")
# Keys that are read but whose value is already in effect: one width where a prior or the switches
# have only one, T off where L is off.
MET = ("fem.budget", "fem.temperature")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in NAMES else pytest.mark.slow) for name in CASES]
)
def test_a_key_that_no_layer_reads_is_refused_and_no_other(name: str) -> None:
    """A key with a non-default value is refused if and only if it does not change the result of the
    block.
    """
    model, x = replace(SMALL, **CASES[name]), tokens(name)
    with torch.no_grad():
        plain = filled(catalogue.block(model, model.mixer, 0))(x, Context(causal=model.causal))
    for key, value in guarded():
        changed = with_key(model, key, value)
        shape = fitting(changed, key)
        if key in UNSEEN or shape is None or changed == model:
            continue
        refused = key in catalogue.unread(changed)
        if refused:
            with pytest.raises(ValueError, match=f"model.{key}.*: no layer of"):
                changed.blocks()
        with torch.no_grad():
            same = torch.equal(filled(shape)(x, Context(causal=model.causal)), plain)
        assert refused == same or (same and key in MET), key


@pytest.mark.parametrize("key", UNSEEN)
def test_what_is_heard_unseen_is_refused_elsewhere(key: str) -> None:
    models = {
        name: with_key(replace(SMALL, mixer=name), key, dict(guarded())[key]) for name in NAMES
    }
    readers = [name for name, model in models.items() if key not in catalogue.unread(model)]
    assert readers == (
        ["mha2nd"] if "." in key else [name for name in NAMES if name.startswith("fem_")]
    )


def test_a_pattern_repeats_and_survives_its_dictionary() -> None:
    model = replace(
        SMALL, num_layers=6, pattern=("fem_softmax", "transformer", "transformer"), **SWITCHED
    )
    assert catalogue.mixer_names(model) == ["fem_softmax", "transformer", "transformer"] * 2
    assert ModelConfig.from_dict(asdict(model)) == model
    with_bias = ["in_proj.bias" in block.mixer.weights() for block in model.blocks()]
    assert with_bias == [False, True, True] * 2, (
        "a hybrid takes the section for its transformer layers"
    )
    with pytest.raises(
        ValueError, match=r"model.pattern has 3 layers, which does not divide model.num_layers=4"
    ):
        replace(model, num_layers=4).blocks()


TURNING = [name for name in NAMES if shape_of(name).mixer.rotary_size()]


@pytest.mark.parametrize("name", TURNING)
def test_every_mixer_that_turns_stretches(name: str) -> None:
    """linear: positions scaled by the factor; abf: another base; yarn and llama3: every position
    changes, and yarn's factor scales scores.
    """
    # float64: the same angles, computed by another product.
    x, close = tokens(name), dict[str, Any](rtol=1e-10, atol=1e-10)
    positions = torch.arange(LENGTH, dtype=x.dtype)

    def out(context: Context | None = None, **changes: Any) -> Tensor:
        return block_of(name, **changes)(x, context or Context())

    torch.testing.assert_close(
        out(rope_scaling=RopeScaling("linear", 4.0)),
        out(Context(positions=positions / 4.0)),
        **close,
    )
    assert torch.equal(out(rope_scaling=RopeScaling("abf", 50.0)), out(rope_base=500_000))
    plain = out(rope_scaling=RopeScaling())
    slowed = out(rope_scaling=LLAMA3)
    yarn = out(rope_scaling=YARN)
    flat = out(rope_scaling=replace(YARN, attention_factor=1.0))
    assert not any(
        torch.allclose(first, second) for first, second in combinations([plain, slowed, yarn], 2)
    )
    assert torch.equal(yarn, flat) == (name in ("fem_linear", "fem_gla", "energy_linear"))


REFUSED: list[str] = yaml.safe_load(
    Path(__file__).with_name("refused.yaml").read_text(encoding="utf-8")
)


SIZES = (
    "hidden_size=16 num_layers=2 num_attention_heads=2 ffn_hidden_size=24 vocab_size=100"
    " tie_embeddings=false"
)


def test_what_does_not_fit_or_contradicts_itself_is_refused_by_name(wording: Wording) -> None:
    for row in REFUSED:
        with pytest.raises((ConfigError, ValueError)) as refused:
            load_run(
                DEMO, [f"model.{setting}" for setting in f"{SIZES} {row}".split()]
            ).model.blocks()
        assert "\n" not in str(refused.value)
        wording(f"{row}: {refused.value}")


def test_the_table_names_every_mixer() -> None:
    lines = catalogue.table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(catalogue.MIXERS)


LINEAR_TIME = [name for name, mixer in catalogue.MIXERS.items() if mixer.cost == "T"]


def kept_bytes(name: str, length: int) -> int:
    """Return the bytes that autograd saves in a forward pass without parameters; forward and
    backward passes must be finite.
    """
    block = block_of(name, torch.float32, attention_backend="auto")
    x = tokens(name, length, torch.float32)[:, :1].requires_grad_()
    own = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x, Context())
    y.square().mean().backward()
    assert all(
        value is not None and value.isfinite().all()
        for value in (y, x.grad, *(weight.grad for weight in block.parameters()))
    )
    return sum(
        tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own
    )


@pytest.mark.parametrize("name", [*LINEAR_TIME, "switched"])
def test_linear_time_mixers_and_windows_keep_memory_linear_in_the_length(name: str) -> None:
    # The 5% cover what is kept once, independently of the length.
    assert kept_bytes(name, 8192) == pytest.approx(2 * kept_bytes(name, 4096), rel=0.05)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_gradient_flows_back_from_the_past(name: str) -> None:
    x = tokens(name).requires_grad_()
    block_of(name)(x, Context())[:6].square().sum().backward()
    assert x.grad is not None and x.grad[:6].any() and not x.grad[6:].any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_do_not_meet(name: str) -> None:
    block, x = block_of(name), tokens(name)
    with torch.no_grad():
        both, alone = block(x, Context()), block(x[:, 1:], Context())
    # Another batch size may change the order of a sum, but no more than that.
    torch.testing.assert_close(both[:, 1:], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LINEAR_TIME)
def test_8192_tokens_forward_and_backward_are_finite(name: str) -> None:
    block = block_of(name, torch.float32, attention_backend="auto")
    x = tokens(name, 8192, torch.float32)[:, :1].requires_grad_()
    y = block(x, Context())
    y.square().mean().backward()
    assert y.isfinite().all()
    assert all(
        value.grad is not None and value.grad.isfinite().all() for value in (x, *block.parameters())
    )
