"""Tests of Muon: each linear map against a naive loop, every layout and engine against one process,
checkpoints, muP.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from fem_megatron import catalogue
from fem_megatron.config import ModelConfig
from fem_megatron.mup import MupConfig, update_scale
from fem_megatron.shape import FIXED, OUTPUT, Weight
from pretrain.engines.muon import orthogonal
from pretrain.plan.muon import newton_schulz_flops
from pretrain.plan.run_plan import make_plan, model_weights
from tests.pretrain.conftest import SMALL, Command, data_of
from tests.pretrain.jobs import (
    BEFORE,
    CP2,
    FAMILIES,
    FIRST,
    MUON,
    OVERLAP,
    PLAIN,
    PP2,
    SP,
    TP2,
    Case,
    Done,
    deepspeed,
    engine_of,
    from_starts,
    micro_batches,
    quick_or_slow,
    values_of_cases,
)
from tests.pretrain.test_plan import small
from tests.ranks import losses

# --- the update -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8, 40), (2, 40, 8), (2, 16, 16), (4, 1, 24)])
def test_the_iteration_is_torch_s(shape: tuple[int, int, int]) -> None:
    """Compare in bfloat16, the only dtype of torch's version: 5 steps of products rounded to 8
    bits. float32 gives singular values near 1.
    """
    from torch.optim._muon import _zeropower_via_newtonschulz

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = torch.stack(
        [_zeropower_via_newtonschulz(one, (3.4445, -4.7750, 2.0315), 5, 1e-7) for one in x]
    )
    torch.testing.assert_close(orthogonal(x.bfloat16()), theirs, rtol=0, atol=2**-6)
    values = torch.linalg.svdvals(orthogonal(x))
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("mixer", ["fem_softmax", "cem", "gated_deltanet"])
def test_each_map_of_each_head_by_itself(settings: list[str], mixer: str) -> None:
    """Three steps against loops over heads and slices in float64. Tolerance: fp32's rounding of a
    weight, and 1e-5 of an update after five steps.
    """
    settings = [
        *settings,
        f"model.mixer={mixer}",
        MUON,
        "optimizer.clip_grad=0",
        "train.precision=fp32",
    ]
    with engine_of([*settings, *PLAIN]) as engine:
        (model,), ours = engine.models, engine.config.optimizer
        momentum = {
            name: torch.zeros(weight.shape, dtype=torch.float64)
            for name, weight in model.named_parameters()
        }
        batches, checked = micro_batches(32), 0
        for step in range(3):
            before = {name: weight.detach().double() for name, weight in model.named_parameters()}
            rate = engine.train_step(batches, 4 * (step + 1)).lr
            for name, weight in model.named_parameters():
                if not weight.spec.orthogonal:
                    continue
                gradient = weight.main_grad.double()
                momentum[name] = ours.momentum * momentum[name] + (1 - ours.momentum) * gradient
                direction = (1 - ours.momentum) * gradient + ours.momentum * momentum[name]
                wanted = before[name] * (1 - rate * ours.weight_decay)
                for rows in maps_of(name, engine.config.model, weight.shape):
                    wanted.view(-1, weight.shape[-1])[rows] -= rate * naive(
                        direction.reshape(-1, weight.shape[-1])[rows]
                    )
                    checked += 1
                torch.testing.assert_close(
                    weight.detach().double(), wanted, rtol=2**-23, atol=1e-5 * rate
                )
        assert checked > 3 * 10


def maps_of(name: str, model: ModelConfig, shape: torch.Size) -> list[slice]:
    """Return the maps of a weight: each slice of each head; gate and up; other weights are one
    map.
    """
    heads, rows = model.num_attention_heads, shape.numel() // shape[-1]
    if name.endswith("gate_up"):
        return [slice(0, rows // 2), slice(rows // 2, rows)]
    widths = {
        "fem_softmax": {"mixer.in_proj": [8, 8, 4, 4, 4], "mixer.tdc.out_proj": [8, 8, 4, 4, 4]},
        "cem": {"mixer.query": [8], "mixer.key": [8]},
        "gated_deltanet": {"mixer.in_proj": [4, 4, 8, 8]},
    }[model.mixer].get(".".join(name.split(".")[3:-1]))
    if widths is None:
        return [slice(0, rows)]
    assert heads * sum(widths) == rows, (name, shape)
    starts = [
        head * sum(widths) + sum(widths[:i]) for head in range(heads) for i in range(len(widths))
    ]
    return [
        slice(start, start + width) for start, width in zip(starts, widths * heads, strict=True)
    ]


def naive(x: torch.Tensor) -> torch.Tensor:
    """Return 0.2 sqrt(max(rows, columns)) times the five steps for one matrix, with its Gram matrix
    on the right.
    """
    y = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = y.T @ y
        y = 3.4445 * y + y @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return 0.2 * max(x.shape) ** 0.5 * y


def test_every_mixer_s_matrices_are_cut_into_maps_that_fill_them() -> None:
    for mixer in catalogue.MIXERS:
        if mixer == "fla.*":
            continue
        model = ModelConfig(
            mixer=mixer, hidden_size=64, num_layers=2, num_attention_heads=4, vocab_size=100
        )
        weights = model_weights(model)
        for name, weight in weights.items():
            if weight.orthogonal:
                rows = [
                    row
                    for first, count in weight.linear_maps()
                    for row in range(first, first + count)
                ]
                assert rows == list(range(weight.size // weight.shape[-1])), (mixer, name)
        outer = {
            name: weight
            for name, weight in weights.items()
            if name.startswith(("embedding", "output"))
        }
        assert not any(weight.orthogonal for weight in outer.values())
        assert len(outer) == 2 + (mixer == "yuriiformer")


# --- layouts, engines, checkpoints ----------------------------------------------------------------

# Name -> world size, settings. At DP2, the ranges of ranks end within matrices; at TP2, the
# matrices of the MLP are cut, too.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "PP2": (2, PP2),
    "DP2, plain": (2, PLAIN),
    "DP2, stage 1": (2, deepspeed(1)),
    "TP2 x DP2": (4, TP2),
    "again": (1, []),
    "TP2 + SP": (2, TP2 + SP),
    "CP2": (2, CP2),
    "DP2, overlapped": (2, OVERLAP),
    **{f"DP2, stage {stage}": (2, deepspeed(stage)) for stage in (0, 2)},
    "TP2 x DP2, stage 1": (4, TP2 + deepspeed(1)),
}
QUICK = ("DP2, stage 1", "TP2 x DP2")


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Done]:
    """Results of this session's layouts."""
    folder = tmp_path_factory.mktemp("muon")
    base = [
        *data_of(tiny_data),
        *SMALL,
        *FAMILIES,
        MUON,
        "train.precision=fp32",
        "train.global_batch_size=8",
        "data.seq_length=16",
    ]
    names = values_of_cases(request, "test_every_layout_and_engine_equals_one_process", "name")
    cases = {name: ("plain" if "plain" in name else "whole", *LAYOUTS[name]) for name in names}
    moves: dict[str, Case] = {}
    if "DP2, stage 1" in names:
        moves["moved to the other engine"] = ("DP2, stage 1", 1, [])
    return from_starts(base, folder, {"whole": [], "plain": PLAIN}, cases, names, moves)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", quick_or_slow(LAYOUTS, QUICK))
def test_every_layout_and_engine_equals_one_process(results: dict[str, Done], name: str) -> None:
    """Tolerance 1e-6 in fp32, as for AdamW: other orders of summation, and products of the
    iteration over other batches of maps.

    A resume at the same layout is equal bit for bit.
    """
    wanted = results["whole"].steps[BEFORE:]
    assert results[name].steps == (
        wanted if name == "again" else [pytest.approx(step, rel=1e-6) for step in wanted]
    )
    assert results[f"{name}, resumed"].steps == results[name].steps[FIRST:]
    if name == "DP2, stage 1":
        moved = results["moved to the other engine"]
        assert moved.steps == [pytest.approx(step, rel=1e-6) for step in wanted[FIRST:]]


def test_the_plain_optimizer_s_checkpoint_becomes_the_distributed_one_s(
    pretrain: Command, tmp_path: Path
) -> None:
    from tools.checkpoint.__main__ import main

    pretrain(MUON, *PLAIN)
    wanted, step = losses(pretrain.run_dir), pretrain.checkpoints / "step_00000004"
    split, back = tmp_path / "split", tmp_path / "back"
    assert main(["convert", str(step), "--engine", "megatron", "--out", str(split)]) == 0
    pretrain(MUON, f"run_dir={split}")
    # 1e-6: the sum of the norm in a different order.
    assert losses(split) == {step: pytest.approx(wanted[step], rel=1e-6) for step in range(5, 13)}
    words = ["--engine", "megatron", "--plain-optimizer", "--out", str(back)]
    assert main(["convert", str(split), *words]) == 0
    assert "resumed" in pretrain(MUON, *PLAIN, f"run_dir={back}", "train.steps=13")


def test_what_cannot_be_is_refused_by_name(pretrain: Command) -> None:
    for word in ("engine.zero_stage=3", "engine.offload_optimizer=true"):
        output = pretrain.refused(MUON, "engine.name=deepspeed", word)
        assert "optimizer.name = muon" in output


# --- muP, the plan --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "weight", "power"),
    [
        (Weight((64, 32)), Weight((256, 128)), 0.0),  # from the width to the width
        # From the width to a head; a wider model has more heads.
        (Weight((16, 32), maps=(8,)), Weight((64, 128), maps=(8,)), -0.5),
        (Weight((8, 32), mup=OUTPUT), Weight((8, 128), mup=OUTPUT), -0.5),
        (Weight((32, 8), mup=FIXED), Weight((128, 8), mup=FIXED), 0.5),
    ],
)
def test_under_mup_an_update_s_norm_follows_the_root_of_out_over_in(
    base: Weight, weight: Weight, power: float
) -> None:
    """Condition 1 of arXiv 2310.17813; at the base and in the standard parametrization the update
    has the size of AdamW's.
    """
    mup = MupConfig(base_hidden_size=32)
    narrow, wide = (
        ModelConfig(hidden_size=width, parametrization="mup", mup=mup) for width in (32, 128)
    )
    (_, base_rows), (_, rows) = next(base.linear_maps()), next(weight.linear_maps())
    assert update_scale(narrow, base, base_rows) == pytest.approx(
        0.2 * max(base_rows, base.shape[1]) ** 0.5
    )
    assert update_scale(wide, weight, rows) == pytest.approx(
        4**power * update_scale(narrow, base, base_rows)
    )
    assert update_scale(ModelConfig(hidden_size=128), weight, rows) == pytest.approx(
        0.2 * max(rows, weight.shape[1]) ** 0.5
    )


def test_every_element_of_a_bucket_has_the_rank_of_its_share() -> None:
    """Buckets of random parameters with gaps between them, as the distributed optimizer pads."""
    from pretrain.engines.megatron import _shares

    ranks, random = 5, Random(0)
    buckets, index, offset = [], {}, 0
    for _ in range(3):
        parameters, place = [torch.nn.Parameter(torch.empty(())) for _ in range(6)], offset
        for parameter in parameters:
            begin = place + random.randrange(4)
            place = begin + random.randrange(1, 40)
            index[parameter] = (begin, place, None)
        length = -(-(place - offset) // ranks) * ranks
        buckets.append(
            SimpleNamespace(offset=offset, grad_data=torch.empty(length), params_list=parameters)
        )
        offset += length
    buffer = SimpleNamespace(buckets=buckets, param_index_map=index)
    found = {
        (parameter, element): rank
        for rank, parameter, start, numel in _shares(SimpleNamespace(buffers=[buffer]), ranks)
        for element in range(start, start + numel)
    }
    assert found == {
        (parameter, at - begin): (at - bucket.offset) * ranks // len(bucket.grad_data)
        for bucket in buckets
        for parameter in bucket.params_list
        for begin, end, _ in [index[parameter]]
        for at in range(begin, end)
    }


def test_the_iteration_s_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        orthogonal(torch.randn(3, 8, 40))
    assert (
        counter.get_total_flops()
        == 3 * newton_schulz_flops(8, 40)
        == 3 * newton_schulz_flops(40, 8)
    )


def test_a_plan_counts_one_moment() -> None:
    for words in ([], ["engine.name=deepspeed"]):
        adam, muon = (make_plan(small(*words, *more), 4) for more in ([], [MUON]))
        muons = sum(
            weight.size for weight in model_weights(muon.config.model).values() if weight.orthogonal
        )
        assert 0 < muons < muon.total_parameters
        assert adam.memory[0].optimizer - muon.memory[0].optimizer == pytest.approx(
            4 * muons / 4, abs=8
        )
        assert adam.checkpoint_bytes - muon.checkpoint_bytes == 4 * muons
