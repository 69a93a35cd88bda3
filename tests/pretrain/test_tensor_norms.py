"""Norms of every tensor equal those of the checkpoints before and after a step in float64, and at
every layout and engine those of one process.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.report.tensor_norms import KINDS, PREFIX, TensorNorms
from tests.pretrain.conftest import SMALL, data_of
from tests.pretrain.jobs import (
    FAMILIES,
    MUON,
    OVERLAP,
    PLAIN,
    SP,
    TP2,
    Done,
    Job,
    deepspeed,
    engine_of,
    micro_batches,
    quick_or_slow,
    run_all,
    values_of_cases,
)
from tests.pretrain.test_sharded_checkpoints import everything

STEPS = 3  # the last step is compared
CLIP = 0.5  # the gradient of every step exceeds it
BF16 = "train.precision=bf16"
# Name -> settings. Each layout has two ranks; the default is data parallelism with the distributed
# optimizer. test_parity.py has more layouts.
LAYOUTS: dict[str, list[str]] = {
    "DP2": [],
    "DP2, plain": PLAIN,
    "TP2 + SP": TP2 + SP,
    "DP2, overlapped": OVERLAP,
    **{f"stage {stage}": deepspeed(stage) for stage in range(4)},
    "stage 2, offload": [*deepspeed(2), "engine.offload_optimizer=true"],
    "muon, DP2": [MUON],
    "muon, TP2": [*TP2, MUON, *PLAIN],
    "muon, stage 1": [*deepspeed(1), MUON],
    "bf16, DP2": [BF16],
    "bf16, DP2, plain": [BF16, *PLAIN],
    "bf16, stage 1": [*deepspeed(1), BF16],
    "bf16, stage 3": [*deepspeed(3), BF16],
}


NOTICED = (
    "DP2, overlapped",
    "TP2 + SP",
    "stage 0",
    "stage 2, offload",
    "stage 3",
    "muon, stage 1",
    "bf16, stage 1",
)
QUICK = ("plain", "DP2, overlapped", "TP2 + SP", "stage 2", "stage 3", "muon, TP2", "bf16, stage 1")
QUICK_NOTICED = ("TP2 + SP", "stage 3")


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Done], Path]:
    """Results of this session's cases."""
    folder = tmp_path_factory.mktemp("norms")
    base = [
        *data_of(tiny_data, "train"),
        *SMALL,
        *FAMILIES,
        "train.precision=fp32",
        "data.seq_length=16",
        f"optimizer.clip_grad={CLIP}",
    ]

    def job(name: str, more: list[str], steps: int = STEPS, saved: int | None = None) -> Job:
        return Job(name, [*base, *more, f"run_dir={folder / name}"], steps, saved, norms=True)

    alone = [
        job(f"{kind}{steps}", more, steps, steps)
        for kind, more in (("adamw", []), ("muon", [MUON]))
        for steps in (2, 3)
    ]
    alone.append(job("plain", PLAIN))
    noticed = values_of_cases(request, "test_training_does_not_notice", "name")
    report = {
        *values_of_cases(
            request, "test_every_layout_and_engine_reports_what_one_process_does", "name"
        ),
        *noticed,
    }
    several = [job(name, more) for name, more in LAYOUTS.items() if name in report]
    several += [
        replace(job(name, LAYOUTS[name]), name=f"{name}, unseen", norms=False) for name in noticed
    ]
    return run_all([(1, alone), (2, several)], folder), folder


def named(done: Done) -> dict[str, dict[str, float]]:
    """Return kind -> name -> norm for the last step."""
    kinds: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for key, value in done.norms[-1].items():
        assert key.startswith(PREFIX)
        name, _, kind = key.removeprefix(PREFIX).rpartition("/")
        kinds[kind][name] = value
    return kinds


@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_they_are_the_checkpoints_in_float64(
    results: tuple[dict[str, Done], Path], optimizer: str
) -> None:
    """Tolerance 1e-5: fp32 sums of squares of a tensor. The gradient is derived from the momentum
    as a difference of two rounded values: 1e-4.
    """
    done, folder = results

    def stored(step: int) -> dict[str, torch.Tensor]:
        tensors = everything(folder / f"{optimizer}{step}/checkpoints/step_{step:08}")
        return {name: value.double() for name, value in tensors.items()}

    before, after = stored(2), stored(3)
    last, found = done[f"{optimizer}3"], named(done[f"{optimizer}3"])
    assert last.steps[:2] == done[f"{optimizer}2"].steps
    names = [
        name.removeprefix("optimizer.state.param.")
        for name in after
        if name.startswith("optimizer.state.param.")
    ]
    assert (
        sorted(found["weight"])
        == sorted(names)
        == sorted(found["gradient"])
        == sorted(found["update"])
    )
    for kind in ("exp_avg", "exp_avg_sq"):
        wanted = {
            name.removeprefix(f"optimizer.state.{kind}."): value
            for name, value in after.items()
            if f".{kind}." in name
        }
        assert found[kind] == pytest.approx(
            {name: float(value.norm()) for name, value in wanted.items()}, rel=1e-5
        )
    assert (len(found["exp_avg_sq"]) < len(names)) == (optimizer == "muon")
    clipped = CLIP / last.steps[-1][1]
    assert clipped < 1
    for name in names:
        new, old = (state[f"optimizer.state.param.{name}"] for state in (after, before))
        assert found["weight"][name] == pytest.approx(float(new.norm()), rel=1e-5)
        assert found["update"][name] == pytest.approx(float((new - old).norm()), rel=1e-5)
        kept = 0.9 if name in found["exp_avg_sq"] else 0.95
        mean, earlier = (state[f"optimizer.state.exp_avg.{name}"] for state in (after, before))
        assert found["gradient"][name] == pytest.approx(
            float((mean - kept * earlier).norm()) / (1 - kept) / clipped, rel=1e-4
        )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", quick_or_slow(["plain", *LAYOUTS], QUICK))
def test_every_layout_and_engine_reports_what_one_process_does(
    results: tuple[dict[str, Done], Path], name: str
) -> None:
    """Tolerance 1e-4 in fp32: other orders of summation, which Adam's first updates (near signs)
    show for gradients near zero. bf16 is a separate model.
    """
    done, _ = results
    found = named(done[name])
    # Each element counts once: the sum of all squared gradients is the square of the step's norm.
    # With bf16 gradients, DeepSpeed sums values that are rounded differently.
    for (_, grad_norm), report in zip(done[name].steps, done[name].norms, strict=True):
        gradients = torch.tensor(
            [value for key, value in report.items() if key.endswith("/gradient")],
            dtype=torch.float64,
        )
        assert float(gradients.norm()) == pytest.approx(grad_norm, rel=1e-5)
    if "bf16" in name:
        assert {kind: len(values) for kind, values in found.items()} == {
            kind: len(values) for kind, values in named(done["adamw3"]).items()
        }
        return
    wanted = named(done["muon3" if "muon" in name else "adamw3"])
    for kind in KINDS:
        assert found[kind] == pytest.approx(wanted[kind], rel=1e-4), kind


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", quick_or_slow(NOTICED, QUICK_NOTICED))
def test_training_does_not_notice(results: tuple[dict[str, Done], Path], name: str) -> None:
    """Losses and gradient norms of all steps are equal bit for bit with and without norms."""
    done, _ = results
    unseen = done[f"{name}, unseen"]
    assert unseen.steps == done[name].steps and not any(unseen.norms)


@pytest.mark.parametrize("engine", [[], PLAIN, deepspeed(2)], ids=["split", "plain", "deepspeed"])
def test_of_a_step_that_is_not_finite_the_gradients_are_reported_where_they_can_be(
    settings: list[str], engine: list[str]
) -> None:
    with engine_of([*settings, *engine]) as made:
        norms = TensorNorms(made, 2)
        for step, weight in ((1, 1.0), (2, math.nan)):
            with norms(step) as report:
                assert made.train_step(micro_batches(32, weight), 4 * step).skipped == (step == 2)
            assert step == 2 or not report
        assert bool(report) == ("engine.name=deepspeed" not in engine)
        for key, value in report.items():
            if key.endswith("/gradient"):
                assert math.isnan(value), key
            elif key.endswith("/update"):
                assert value == 0.0, key
