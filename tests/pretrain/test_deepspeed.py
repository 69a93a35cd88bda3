"""DeepSpeed trains the same model as Megatron's engine in one process: every stage and layout, real
gloo ranks, real DeepSpeed.

Every case starts from a checkpoint of the Megatron engine, so each case also resumes the other
engine's optimizer state, mostly at another layout. Losses alone are not sufficient: AdamW hides a
gradient that is wrong by a factor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from fem_megatron.megatron import upstream
from pretrain.checkpoint.reader import load_full_model_state
from tests.pretrain.conftest import DEMO, SMALL, data_of
from tests.pretrain.jobs import (
    BEFORE,
    FIRST,
    MUON,
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
    same,
    values_of_cases,
)
from tests.ranks import answer, finished, losses

STAGES = (0, 1, 2, 3)
pytestmark = pytest.mark.timeout(1500)  # the first case waits for the processes of all cases

# Split every parameter. At the default threshold of 1e5 elements, no parameter of this small model
# would be split.
SPLIT = [*deepspeed(3), "engine.deepspeed.param_persistence_threshold=0"]
OFFLOADED = [*deepspeed(3), "engine.offload_optimizer=true", "engine.offload_parameters=true"]
BF16 = "train.precision=bf16"
# Name -> world size, settings. A step has four micro-batches at TP2 and two at DP2 unless the
# settings change that.
CASES: dict[str, tuple[int, list[str]]] = {
    "stage 1": (1, deepspeed(1)),
    **{f"DP2, stage {stage}": (2, deepspeed(stage)) for stage in STAGES},
    "DP2, stage 1, one micro-batch": (2, [*deepspeed(1), "train.micro_batch_size=4"]),
    "DP2, stage 2, four micro-batches, overlapped": (
        2,
        [*deepspeed(2), "train.micro_batch_size=1", "parallel.overlap_grad_reduce=true"],
    ),
    "DP2, stage 3, four micro-batches, split": (2, [*SPLIT, "train.micro_batch_size=1"]),
    "DP2, stage 2, offload": (2, [*deepspeed(2), "engine.offload_optimizer=true"]),
    "DP2, stage 3, all offloaded": (2, OFFLOADED),
    "TP2, stage 1": (2, TP2 + deepspeed(1)),
    "TP2 x DP2, stage 2": (4, TP2 + deepspeed(2)),
    "TP2 x DP2 + SP, stage 1": (4, TP2 + SP + deepspeed(1)),
    "TP2 x DP2 + SP, split, recompute": (4, [*TP2, *SP, *SPLIT, "train.recompute=full"]),
    **{f"bf16 DP2, stage {stage}": (2, [*deepspeed(stage), BF16]) for stage in (1, 2, 3)},
    "bf16 TP2 x DP2 + SP, stage 3": (4, [*TP2, *SP, *deepspeed(3), BF16]),
}
QUICK = [
    *(f"DP2, stage {stage}" for stage in STAGES),
    "DP2, stage 2, four micro-batches, overlapped",
    "TP2 x DP2, stage 2",
]
QUICK += ["bf16 DP2, stage 3"]
# Cases that resume in the layout that wrote the checkpoint, bit for bit.
RESUMED = [
    *(f"bf16 DP2, stage {stage}" for stage in (1, 2, 3)),
    *(f"DP2, stage {stage}" for stage in (0, 1)),
    "DP2, stage 3, all offloaded",
    "TP2 x DP2, stage 2",
    "TP2 x DP2 + SP, split, recompute",
]
# (case that wrote the checkpoint, world size, settings of the run that reads it): the layout, the
# stage or the engine differs.
MOVES: list[Case] = [
    ("DP2, stage 3, all offloaded", 1, []),
    ("TP2 x DP2 + SP, split, recompute", 1, []),
    ("TP2 x DP2, stage 2", 2, TP2 + deepspeed(1)),
    ("TP2 x DP2, stage 2", 2, deepspeed(2)),
    ("DP2, stage 1", 2, TP2 + SP + deepspeed(3)),
    ("TP2 x DP2 + SP, split, recompute", 2, PP2),
    ("DP2, stage 3", 1, []),
]
QUICK_RESUMED, QUICK_MOVES = ("bf16 DP2, stage 3", "DP2, stage 1", "TP2 x DP2, stage 2"), (3, 4, 6)


def settings_of(data: Path) -> list[str]:
    return [
        *data_of(data),
        *SMALL,
        "model.tie_embeddings=false",
        "data.seq_length=16",
        "train.precision=fp32",
        "train.global_batch_size=8",
    ]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Done]:
    """Results of this session's cases; cases of one world size share processes."""
    folder, base = tmp_path_factory.mktemp("deepspeed"), settings_of(tiny_data)
    resumed = values_of_cases(request, "test_resumes_to_the_last_bit_at_the_same_layout", "name")
    moves = {
        f"move {number}": MOVES[number]
        for number in values_of_cases(
            request, "test_resumes_at_another_layout_stage_and_engine", "number"
        )
    }
    compared = values_of_cases(request, "test_equals_the_megatron_engine", "name")
    wanted = {*compared, *resumed, *(case for case, *_ in moves.values())}
    cases = {
        name: ("bf16 megatron" if name.startswith("bf16") else "megatron", *CASES[name])
        for name in CASES
        if name in wanted
    }
    starts = {"megatron": [], "bf16 megatron": [BF16]}
    return from_starts(base, folder, starts, cases, resumed, moves)


@pytest.mark.parametrize("name", quick_or_slow(CASES, QUICK))
def test_equals_the_megatron_engine(results: dict[str, Done], name: str) -> None:
    """Tolerance in fp32: 1e-6, a different order of summation. bf16: as between Megatron's own
    layouts (tests/pretrain/test_parity.py).
    """
    low = name.startswith("bf16")
    wanted = results["bf16 megatron" if low else "megatron"].steps[BEFORE:]
    for (loss, norm), (wanted_loss, wanted_norm) in zip(results[name].steps, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=3e-4 if low else 1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-2 if low else 1e-6)


@pytest.mark.parametrize("name", quick_or_slow(RESUMED, QUICK_RESUMED))
def test_resumes_to_the_last_bit_at_the_same_layout(results: dict[str, Done], name: str) -> None:
    assert results[f"{name}, resumed"].steps == results[name].steps[FIRST:]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id=" -> ".join(map(str, move)),
            marks=[] if number in QUICK_MOVES else pytest.mark.slow,
        )
        for number, move in enumerate(MOVES)
    ],
)
def test_resumes_at_another_layout_stage_and_engine(results: dict[str, Done], number: int) -> None:
    # 1e-6: as between layouts. The values that are read are bit-identical to those that were
    # written.
    assert results[f"move {number}"].steps == [
        pytest.approx(step, rel=1e-6) for step in results["megatron"].steps[BEFORE + FIRST :]
    ]


@pytest.mark.slow
def test_fifty_steps_give_the_megatron_engines_curve(settings: list[str], tmp_path: Path) -> None:
    """The full command, from equal initial weights, also writes weights with the names and shapes
    that every export reads.
    """
    curves, weights = {}, {}
    for name, more in {"megatron": [], "deepspeed": deepspeed(3)}.items():
        run = [f"run_dir={tmp_path / name}", "train.steps=50", "train.eval_interval=25"]
        finished(1, [DEMO, *settings, *more, *run], tmp_path / f"out.{name}")
        curves[name], state = losses(tmp_path / name), load_full_model_state(tmp_path / name)[0]
        weights[name] = {key: (value.shape, value.dtype) for key, value in state.items()}
    assert weights["deepspeed"] == weights["megatron"] and len(curves["megatron"]) == 50
    for step, wanted in curves["megatron"].items():
        # Adam divides a gradient that is mere rounding error by its own root, so a difference of
        # 1e-7 at the start grows with every step.
        assert curves["deepspeed"][step][0] == pytest.approx(wanted[0], rel=1e-5)


# --- inside the engine ----------------------------------------------------------------------------


def observe_stages(settings: list[str], stages: list[int]) -> dict[int, dict[str, Any]]:
    """Return stage -> observations for the tests: train a few steps, spoil two steps, restore, and
    inspect; on a separate rank.
    """
    upstream.import_megatron()
    found = {}
    for stage in stages:
        with engine_of(
            [*settings, *deepspeed(stage), "engine.deepspeed.param_persistence_threshold=0"]
        ) as engine:
            found[stage] = _observe(engine)
    return found


def _observe(engine: Any) -> dict[str, Any]:
    def step(samples: int, weight: float = 1.0) -> bool:
        return bool(engine.train_step(micro_batches(16, weight), samples).skipped)

    def steps() -> list[float]:
        return [float(engine.state.adam.state[one]["step"]) for one in engine.state.flat()]

    skipped = [step(8)]
    before = _tensors(engine)
    skipped.append(step(16, math.nan))
    skipped.append(step(20, 0.0))
    untouched = same(before, _tensors(engine))
    # Change one number of the loss: all gradients are finite until this rank makes them infinite or
    # NaN.
    forward = engine._forward

    def infinite(batch: Any) -> Any:
        total, tokens = forward(batch)
        return total + (math.inf - total.detach()), tokens

    engine._forward = infinite
    skipped.append(step(24))
    engine._forward = forward
    untouched = untouched and same(before, _tensors(engine))
    skipped.append(step(32))
    moved = not same(before, _tensors(engine))
    saved = engine.sharded_state()
    engine.restore(lambda values_of_cases: _filled(values_of_cases, saved))
    restored = steps()
    step(40)
    groups = engine.engine.optimizer.param_groups
    return {
        "skipped": skipped,
        "untouched": untouched,
        "moved": moved,
        "steps": [restored, steps()],
        "decays": sorted({group["weight_decay"] for group in groups}),
        "rates": sorted({group["lr"] for group in groups}),
        "groups": [group["step"] for group in engine.state.groups()],
    }


def _entries(state: Any) -> Iterator[ShardedTensor]:
    """Yield every sharded tensor of a state, each complete because the group has one rank."""
    for value in state.values():
        if isinstance(value, ShardedTensor):
            assert value.local_shape == value.global_shape
            yield value
        elif isinstance(value, dict):
            yield from _entries(value)


def _tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Return the contents of a checkpoint by their stored names."""
    return {entry.key: entry.data.clone() for entry in _entries(engine.sharded_state())}


def _filled(values_of_cases: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return the result of reading a checkpoint: the requested tensors and the common part."""
    by_key = {entry.key: entry.data for entry in _entries(saved)}

    def values(state: dict[str, Any]) -> dict[str, Any]:
        return {
            name: by_key[value.key] if isinstance(value, ShardedTensor) else values(value)
            for name, value in state.items()
        }

    given = values(values_of_cases)
    return {
        **given,
        "optimizer": {**given.get("optimizer", {}), "optimizer": saved["optimizer"]["optimizer"]},
    }


@pytest.fixture(scope="module")
def observations(
    request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    stages = values_of_cases(
        request,
        "test_a_step_that_is_not_finite_changes_nothing_and_restored_groups_keep_their_own_steps",
        "stage",
    )
    found: dict[int, dict[str, Any]] = answer(
        1,
        observe_stages,
        settings_of(tiny_data),
        stages,
        output=tmp_path_factory.mktemp("looks") / "out",
    )
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_finite_changes_nothing_and_restored_groups_keep_their_own_steps(
    observations: dict[int, dict[str, Any]], stage: int
) -> None:
    """Cases: a NaN in the loss, no token to learn from, and an infinite loss with finite gradients.

    DeepSpeed's own loading shares one step tensor among all groups, to which Adam then adds for
    each, and copies the first group's settings.
    """
    found = observations[stage]
    assert found["skipped"] == [False, True, True, True, False]
    assert found["untouched"] and found["moved"]
    restored, later = found["steps"]
    assert len(restored) >= 2 and set(restored) == {2.0} and set(later) == {3.0}
    assert found["decays"] == [0.0, 0.1] and len(found["rates"]) == 1
    assert set(found["groups"]) == {3.0}


# Stage 0, each of DeepSpeed's three ZeRO optimizers, and the tensors that are in other places while
# an optimizer is offloaded.
GUARDED: dict[str, list[str]] = {
    **{f"stage {stage}": deepspeed(stage) for stage in STAGES},
    "bf16 stage 1": [*deepspeed(1), BF16],
    "bf16 stage 3": [*SPLIT, BF16],
    "stage 2, offload": [*deepspeed(2), "engine.offload_optimizer=true"],
    "stage 3, all offloaded": OFFLOADED,
    "stage 2, muon": [*deepspeed(2), MUON],
}
QUICK_GUARDED = ("stage 0", "stage 2", "bf16 stage 1", "bf16 stage 3")


def skip_one(settings: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """Return case -> the steps of an engine, the guard's calls, and whether the state changed.

    The second step is rejected, the third is not judged, and the fourth has no token to learn from.
    """
    upstream.import_megatron()
    reported: list[tuple[float, float]] = []

    def taken(loss: float, grad_norm: float) -> bool:
        reported.append((loss, grad_norm))
        return False

    found = {}
    for name in names:
        reported.clear()
        with engine_of([*settings, *GUARDED[name], "train.on_spike=skip"]) as engine:
            steps, states = [], []
            for judge, weight in (
                (taken, 1.0),
                (lambda *pair: not taken(*pair), 1.0),
                (None, 1.0),
                (taken, 0.0),
            ):
                steps.append(engine.train_step(micro_batches(16, weight), 8, unwanted=judge))
                states.append(_tensors(engine))
            moved = [not same(*pair) for pair in itertools.pairwise(states)]
            found[name] = {
                "steps": [(one.loss, one.grad_norm, one.skipped) for one in steps],
                "asked": [*reported],
                "moved": moved,
            }
    return found


@pytest.fixture(scope="module")
def skips(
    request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    names = values_of_cases(
        request, "test_an_unwanted_step_changes_nothing_and_leaves_no_gradient_to_the_next", "name"
    )
    found: dict[str, dict[str, Any]] = answer(
        1, skip_one, settings_of(tiny_data), names, output=tmp_path_factory.mktemp("skips") / "out"
    )
    return found


@pytest.mark.parametrize("name", quick_or_slow(GUARDED, QUICK_GUARDED))
def test_an_unwanted_step_changes_nothing_and_leaves_no_gradient_to_the_next(
    skips: dict[str, dict[str, Any]], name: str
) -> None:
    """All steps read the same samples: after a skipped step the next, unjudged one has its loss and
    norm bit for bit.
    """
    found = skips[name]
    first, skipped, taken, empty = found["steps"]
    assert [first[2], skipped[2], taken[2], empty[2]] == [False, True, False, True]
    assert found["moved"] == [False, True, False]
    assert all(map(math.isnan, empty[:2]))
    assert found["asked"] == [first[:2], skipped[:2]], "once a step, with what the step tells"
    assert skipped[:2] == taken[:2] != first[:2]


def half_empty(settings: list[str]) -> list[tuple[float, float]]:
    """Return (loss, norm) of a step in which all tokens count, and of one in which no token of rank
    0 counts; neither updates weights.
    """
    upstream.import_megatron()
    with engine_of([*settings, "train.on_spike=skip"]) as engine:
        mine = 1.0 if torch.distributed.get_rank() else 0.0
        steps = [
            engine.train_step(micro_batches(16, weight), 8, unwanted=lambda *pair: True)
            for weight in (1.0, mine)
        ]
    return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.parametrize(
    "engine", [pytest.param([], id="megatron"), pytest.param(deepspeed(1), id="stage 1")]
)
def test_a_rank_without_a_token_that_counts_leaves_the_mean_to_the_others(
    engine: list[str], tiny_data: Path, tmp_path: Path
) -> None:
    """Both ranks read the same samples, so the mean over the tokens of one equals that over
    both.
    """
    full, half = answer(2, half_empty, [*settings_of(tiny_data), *engine], output=tmp_path / "out")
    # fp32 sums of half as many terms.
    assert half == pytest.approx(full, rel=1e-6) and full[1] > 0.1
