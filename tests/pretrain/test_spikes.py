"""The spike guard: what it calls a spike, and that a run with it resumes to the bit. One process."""

from __future__ import annotations

import math
import random
import shutil

from pretrain.spikes import Recent, Spikes
from tests.pretrain.conftest import Command
from tests.ranks import records

GUARD = Spikes(deviations=6.0, window=100)


def series(steps: int, seed: int) -> list[tuple[float, float]]:
    """Losses that fall as a run's do, 8 to 3 nats, and norms that fall from a start ten times as large; both scatter from step to step."""
    dice = random.Random(seed)
    losses = [3 + 5 / (1 + step / 20) + dice.gauss(0, 0.08) for step in range(steps)]
    return [(loss, (0.5 + 5 * math.exp(-step / 50)) * math.exp(dice.gauss(0, 0.25))) for step, loss in enumerate(losses)]


def alarms(steps: list[tuple[float, float]]) -> dict[int, str]:
    found: dict[int, str] = {}
    recent: Recent = ()
    for number, (loss, norm) in enumerate(steps):
        if spike := GUARD.found(recent, loss, norm):
            found[number] = spike
        else:
            recent = GUARD.learned(recent, loss, norm)
    return found


def test_spikes_of_loss_and_norm_are_found_and_nothing_else_is() -> None:
    """Ten runs of 2000 steps without an alarm: 6 deviations of a Gaussian are 1e-9 a step. Then with one of each."""
    for seed in range(10):
        steps = series(2000, seed)
        assert not alarms(steps)
        steps[700], steps[702], steps[50] = (steps[700][0] + 1.5, 0.5), (steps[702][0], 50.0), (20.0, 1000.0)
        steps[1500] = (0.0, 1e-6)  # downwards is no spike
        found = alarms(steps)
        assert list(found) == [700, 702], "and step 50 is within the first window"
        assert found[700].startswith("loss ") and found[702].startswith("gradient norm 50, ") and "last 100 steps" in found[702]


def test_a_run_that_skips_spikes_resumes_to_the_bit(pretrain: Command) -> None:
    """With a guard that takes any rise for a spike. Skipped steps are told with their samples; what is unlike is not the finite loss."""
    guard = ("train.on_spike=skip", "train.spike_window=2", "train.spike_deviations=0.5", "train.max_bad_steps=12", "log.interval=1")
    assert pretrain(*guard) == 0, pretrain.err
    told = {line["step"]: (line["loss"], line["grad_norm"], line["skipped"]) for line in records(pretrain.run_dir) if "loss" in line}
    skipped = [step for step, (*_, skip) in told.items() if skip]
    assert skipped and min(skipped) > 2 and len(skipped) < 10 and all(math.isfinite(loss) for loss, *_ in told.values())
    first = skipped[0]
    assert f"step {first} skipped, a spike: " in pretrain.out and f"its samples are {4 * first - 4} to {4 * first - 1}, " in pretrain.out
    assert pretrain.out.count("SPIKE, step skipped") == len(skipped) and "NOT FINITE" not in pretrain.out
    for step in (8, 12):
        shutil.rmtree(pretrain.checkpoints / f"step_{step:08}")
    (pretrain.run_dir / "metrics.jsonl").unlink()
    assert pretrain(*guard) == 0, pretrain.err
    again = {line["step"]: (line["loss"], line["grad_norm"], line["skipped"]) for line in records(pretrain.run_dir) if "loss" in line}
    assert again == {step: line for step, line in told.items() if step > 4}
    assert pretrain("run_dir=" + str(pretrain.run_dir) + "2") == 0
    plain = {line["step"]: line["loss"] for line in records(pretrain.run_dir.with_name("run2")) if "loss" in line}
    assert all(plain[step] == told[step][0] for step in range(1, first + 1)), "until a step is skipped the guard changes nothing"
    assert plain[first + 1] != told[first + 1][0]
