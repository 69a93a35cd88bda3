"""Tests of the spike guard: its definition of a spike, and bit-for-bit resumes with it, also on
several ranks with both engines.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state

from fem_common.config import plain
from pretrain import trainer
from pretrain.checkpoint.folder import MANIFEST, Found, find
from pretrain.checkpoint.reader import load_full_model_state
from pretrain.config import load_run
from pretrain.data.datasets import Batch, batches
from pretrain.report.history import History
from pretrain.spikes import Recent, Spikes, carried_over
from tests.pretrain.conftest import DEMO, QUIET, REWINDABLE, Command, back_to, spikes_at, steps_of
from tests.pretrain.data_folder import write_folder, write_pair
from tests.pretrain.jobs import TP2, deepspeed, quick_or_slow, same
from tests.ranks import answer, losses
from tools.tokens.__main__ import main as tokens
from tools.tokens.steps import read_run

GUARD = Spikes(deviations=6.0, window=100)


def series(steps: int, seed: int) -> list[tuple[float, float]]:
    """Return losses that decrease like a run's from 8 to 3 nats, and norms that decrease from a
    start ten times as large; both with scatter.
    """
    dice = random.Random(seed)
    losses = [3 + 5 / (1 + step / 20) + dice.gauss(0, 0.08) for step in range(steps)]
    return [
        (loss, (0.5 + 5 * math.exp(-step / 50)) * math.exp(dice.gauss(0, 0.25)))
        for step, loss in enumerate(losses)
    ]


def alarms(steps: list[tuple[float, float]], guard: Spikes = GUARD) -> dict[int, str]:
    found: dict[int, str] = {}
    recent: Recent = ()
    for number, (loss, norm) in enumerate(steps):
        if spike := guard.found(recent, loss, norm):
            found[number] = spike
        else:
            recent = guard.learned(recent, loss, norm)
    return found


def judged(run_dir: Path) -> dict[int, tuple[float, float, bool]]:
    """Return step -> (loss, gradient norm, True if the step was skipped)."""
    return {
        line["step"]: (line["loss"], line["grad_norm"], line["skipped"])
        for line in steps_of(run_dir)
    }


def test_spikes_of_loss_and_norm_are_found_and_nothing_else_is() -> None:
    """Ten runs of 2000 steps without an alarm: 6 deviations of a Gaussian have probability 1e-9 per
    step. Then with one of each.
    """
    for seed in range(10):
        steps = series(2000, seed)
        assert not alarms(steps)
        steps[700] = (steps[700][0] + 1.5, 0.5)
        steps[702] = (steps[702][0], 50.0)
        steps[50] = (20.0, 1000.0)
        steps[1500] = (0.0, 1e-6)  # a sudden decrease is no spike
        found = alarms(steps)
        assert list(found) == [700, 702], "and step 50 is within the first window"
        assert found[700].startswith("loss ")
        assert found[702].startswith("gradient norm 50, ")
        assert "last 100 steps" in found[702]


def test_a_run_that_skips_spikes_resumes_to_the_bit(pretrain: Command) -> None:
    """The guard treats any increase as a spike. Skipped steps are reported with their samples; the
    finite loss is unaffected.
    """
    guard = (
        "train.on_spike=skip",
        "train.spike_window=2",
        "train.spike_deviations=0.5",
        "train.max_bad_steps=12",
        "log.interval=1",
    )
    pretrain(*guard)
    report = judged(pretrain.run_dir)
    skipped = [step for step, (*_, skip) in report.items() if skip]
    assert skipped
    assert min(skipped) > 2
    assert len(skipped) < 10
    assert all(math.isfinite(loss) for loss, *_ in report.values())
    steps = [report[step][:2] for step in sorted(report)]
    assert skipped == [1 + at for at in alarms(steps, Spikes(deviations=0.5, window=2))]
    first = skipped[0]
    assert f"step {first} skipped, a spike: " in pretrain.out
    assert f"its samples are {4 * first - 4} to {4 * first - 1}, " in pretrain.out
    assert pretrain.out.count("SPIKE, step skipped") == len(skipped)
    assert "NOT FINITE" not in pretrain.out
    back_to(pretrain.run_dir, 4)
    (pretrain.run_dir / "metrics.jsonl").unlink()
    pretrain(*guard)
    assert judged(pretrain.run_dir) == {step: line for step, line in report.items() if step > 4}
    pretrain("run_dir=" + str(pretrain.run_dir) + "2")
    plain = losses(pretrain.run_dir.with_name("run2"))
    assert all(plain[step][0] == report[step][0] for step in range(1, first + 1)), (
        "until a step is skipped the guard changes nothing"
    )
    assert plain[first + 1][0] != report[first + 1][0]


@pytest.mark.parametrize(
    ("kept", "of"),
    [(6, "run"), *(pytest.param(kept, "straight", marks=pytest.mark.slow) for kept in (6, 4))],
)
def test_a_run_that_goes_back_passes_samples_over_through_kills_to_the_bit(
    kept: int, of: str, pretrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spike at the seventh of twelve steps; kills after the next checkpoint, before it, and
    before the spike.
    """
    bad = set[float]()
    begun = list[int]()
    most = [99.0]

    def found(ours: Spikes, recent: Any, loss: float, norm: float) -> str | None:
        return "loss" if loss in bad or recent[:1] > (most[0],) else None

    monkeypatch.setattr(Spikes, "found", found)

    def noted(data: Any, first: int, *rest: Any) -> Iterator[Batch]:
        begun.append(first)
        return batches(data, first, *rest)

    monkeypatch.setattr(trainer, "batches", noted)
    base, straight = [*REWINDABLE, "data.valid=[]"], tmp_path / "straight"
    rewind = (*base, "train.on_spike=rewind")
    pretrain(*base, "train.on_spike=skip", f"run_dir={straight}")
    before = losses(straight)
    bad.add(before[7][0])
    pretrain(*rewind)
    wanted, run = losses(pretrain.run_dir), pretrain.run_dir
    assert begun == [0, 0, 28], (
        "after the seventh step the order goes on at its eighth's first sample"
    )
    assert all((wanted[step] == before[step]) == (step < 5) for step in before)
    back = (
        f"a spike: loss; its samples are 24 to 27, its documents: python -m tools.tokens {run}"
        f" --sample 27; back at {run}/"
    )
    assert f"step 7, {back}checkpoints/step_00000004, 12 samples passed over so far" in pretrain.out
    steps = read_run(run)[0].steps
    assert [steps.samples(step).start for step in (1, 4, 5, 12)] == [0, 12, 28, 56]
    assert [steps.of(sample) for sample in (15, 16, 27, 28, 59)] == [4, None, None, 5, 12]
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / of, resumed)
    back_to(resumed, kept)
    pretrain(*rewind, "checkpoint.keep_last=1", f"run_dir={resumed}")
    assert f"resumed from {resumed}" in pretrain.out
    assert losses(resumed) == wanted
    most[0] = 3.0
    pretrain(*rewind, "train.max_bad_steps=2", f"run_dir={tmp_path / 'again'}", code=3)
    assert pretrain.out.count("back at") == 2
    assert "training has gone back 2 times from about this step" in pretrain.err


@pytest.mark.parametrize("blended", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_samples_passed_over_are_made_up_for_by_a_longer_order_or_the_end_is_reported(
    blended: bool,
    pretrain: Command,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A blend's order has no spare samples and is extended; one that ends with the tokens of its
    only source starts again.
    """
    spikes_at(monkeypatch, 7)
    read = list[tuple[int, ...]]()

    def noted(data: Any, *given: Any) -> Iterator[Batch]:
        for batch in batches(data, *given):
            read.extend(tuple(row) for row in batch["tokens"].tolist())
            yield batch

    monkeypatch.setattr(trainer, "batches", noted)
    base = [*REWINDABLE, "data.valid=[]", "train.on_spike=rewind"]
    if blended:
        base.append(
            f"data.train=[{{prefix: {tiny_data / 'train'}, weight: 3}}, {{prefix:"
            f" {tiny_data / 'valid'}}}]"
        )
    else:
        # 48 samples and a last label: the data that twelve steps read.
        write_pair(tmp_path / "short", [[*range(49 * 32)]], "int32")
        base += [f"data.train=[{{prefix: {tmp_path / 'short'}}}]", "model.vocab_size=2000"]
    assert "12 samples passed over so far" in pretrain(*base)
    assert len(set(read)) == (60 if blended else 48), (
        "of twelve steps, and three that were gone back from"
    )
    again = (
        "the data order ends 12 samples before the end of the run: the last steps will read its"
        " first samples again"
    )
    assert (again in pretrain.out) is not blended
    wanted = losses(pretrain.run_dir)
    back_to(pretrain.run_dir, 11)
    pretrain(*base)
    assert losses(pretrain.run_dir) == wanted
    assert (again in pretrain.out) is not blended


# --- changes of the meaning of loss or norm -------------------------------------------------------

ENGINES = ["engine.name=megatron", "engine.name=deepspeed"]
TINY = [
    "model.hidden_size=16",
    "model.ffn_hidden_size=16",
    "model.num_layers=1",
    "data.seq_length=16",
    "train.global_batch_size=2",
]
TINY += ["data.valid=[]", *QUIET, "optimizer.warmup_steps=1", "checkpoint.keep_last=9"]
STATE = (100.0, 3.0, 0.1, 0.5, 0.2)


@pytest.fixture
def ids(tmp_path: Path) -> dict[str, str]:
    """Return name -> a training blend: of ids 0 to 7, of ids 0 to 399, of documents with one
    token.
    """
    dice, found = random.Random(0), {}
    for name, most, number, length in (
        ("low", 8, 200, 30),
        ("high", 400, 200, 30),
        ("ends", 0, 3000, 0),
    ):
        documents = [[*(dice.randrange(most) for _ in range(length)), 499] for _ in range(number)]
        found[name] = (
            f"[{{prefix: {write_folder(tmp_path / name, documents=documents) / 'train'}}}]"
        )
    return found


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        (["data.documents=separate"], False),
        (["data.eod_loss=false"], False),
        (["data.reset_positions=true"], False),
        (["data.seq_length=64"], False),
        (["data.packing=best_fit"], False),
        (["data.train.0.weight=2"], False),
        (["train.global_batch_size=8"], False),
        (["train.z_loss=1e-4"], False),
        (["model.rope_scaling.factor=2"], False),
        (["data.train.0.prefix=moved/train", "run_dir=moved"], True),
        (
            [
                "optimizer.lr=1",
                "optimizer.clip_grad=9",
                "train.micro_batch_size=1",
                "train.steps=99",
                "train.spike_deviations=2",
            ],
            True,
        ),
        (
            [
                "train.on_spike=rewind",
                "engine.name=deepspeed",
                "parallel.sequence_parallel=true",
                "train.loss_chunk=9",
            ],
            True,
        ),
    ],
)
def test_the_guard_starts_anew_where_a_key_gives_loss_or_norm_another_meaning(
    changed: list[str], kept: bool
) -> None:
    manifest = {
        "config": plain(load_run(DEMO)),
        "progress": {"step": 9, "consumed_samples": 9, "order_samples": 99, "recent": STATE},
    }
    assert carried_over(Found(Path(), manifest), load_run(DEMO, changed)) == (STATE if kept else ())
    assert carried_over(Found(Path(), manifest), load_run(DEMO), other_data=True) == ()
    # Older versions wrote this.
    manifest["progress"]["recent"] = (100.0, math.nan, math.nan, 0.5, 0.2)
    assert carried_over(Found(Path(), manifest), load_run(DEMO)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stage_of_other_data_or_batch_is_passed_with_the_guard_on(
    engine: str, pretrain: Command, ids: dict[str, str]
) -> None:
    """The loss increases by 9 nats; the norm of a batch of 1 scatters more than that of 8. Within
    "again" the guard stays active.
    """
    stages = "{name: low, steps: 60}, {name: again, steps: 4, lr: 1e-2, schedule: constant}, "
    stages += f"{{name: high, steps: 12, data: {ids['high']}}}, "
    stages += "{name: one, steps: 12, global_batch_size: 1, micro_batch_size: 1}"
    guard = [
        "train.on_spike=skip",
        "train.spike_window=12",
        "checkpoint.interval=0",
        "optimizer.lr=1e-2",
    ]
    base = [
        *TINY,
        "train.global_batch_size=8",
        f"data.train={ids['low']}",
        "train.steps=null",
        engine,
    ]
    pretrain(*base, *guard, f"stages=[{stages}]")
    report = losses(pretrain.run_dir)
    assert report[65][0] > report[64][0] + 6 and "SPIKE" not in pretrain.out
    steps = {
        find(path).progress.step: find(path).progress.recent[0]
        for path in pretrain.checkpoints.glob("step_*")
    }
    assert steps == {60: 12, 64: 12, 76: 12, 88: 12}
    back_to(pretrain.run_dir, 76)
    pretrain(*base, *guard, f"stages=[{stages.replace('steps: 12, global', 'steps: 3, global')}]")
    assert find(pretrain.run_dir).progress.recent[0] == 3


@pytest.mark.parametrize(
    ("engine", "every"),
    [
        (ENGINES[0], False),
        *(pytest.param(engine, True, marks=pytest.mark.slow) for engine in ENGINES),
    ],
)
def test_forks_and_resumes_start_the_guard_anew_where_they_change_what_is_measured(
    engine: str, every: bool, pretrain: Command, ids: dict[str, str], tmp_path: Path
) -> None:
    """After six steps and two more: the number of steps that the guard has learned from."""
    base = [
        *TINY,
        f"data.train={ids['low']}",
        engine,
        "train.on_spike=skip",
        "train.spike_deviations=1e6",
    ]
    pretrain(*base, "train.steps=6")
    forks = {f"data.train={ids['high']}": 2, "optimizer.lr=2e-3": 8}
    resumes = {"train.global_batch_size=4": 2, "train.on_spike=none": 0}
    if every:
        forks["data.seq_length=32"] = 2
        resumes |= {"data.documents=separate": 2, "data.eod_loss=false": 2, "optimizer.lr=2e-3": 8}
    for number, (change, learned) in enumerate([*forks.items(), *resumes.items()]):
        run = tmp_path / f"run{number}"
        if number < len(forks):
            pretrain.fork(pretrain.run_dir, run, "train.steps=8", change)
        else:
            shutil.copytree(pretrain.run_dir, run)
            pretrain(*base, f"run_dir={run}", "train.steps=8", change)
        progress = find(run).progress
        assert (progress.step, (*progress.recent, 0)[0]) == (8, learned), (number, change)


@pytest.mark.parametrize("engine", quick_or_slow(ENGINES, ENGINES[1:]))
def test_going_back_past_such_a_change_starts_the_guard_anew(
    engine: str, pretrain: Command, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 4 is the first attempt's, with four joined steps in its statistics."""
    spikes_at(monkeypatch, 8)
    base = [
        *TINY,
        engine,
        f"data.train={ids['low']}",
        "train.on_spike=rewind",
        "train.spike_rewind=4",
        "checkpoint.interval=2",
    ]
    pretrain(*base, "train.steps=4")
    pretrain(*base, "train.steps=12", "data.documents=separate")
    assert "step_00000004, 8 samples passed over" in pretrain.out
    assert find(pretrain.run_dir).progress.recent[0] == 12 - 4


@pytest.mark.parametrize("how", ["staged", "forked", "staged, rewound"])
def test_the_commands_that_messages_name_print_the_samples_that_they_name(
    how: str,
    pretrain: Command,
    ids: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two steps that the guard learns from, in an order of samples that begins at step 3, then only
    spikes.
    """
    monkeypatch.setattr(
        Spikes, "found", lambda ours, recent, loss, norm: "loss" if recent[:1] > (1.0,) else None
    )
    base = [
        *TINY,
        f"data.train={ids['low']}",
        "train.max_bad_steps=3",
        "checkpoint.interval=2",
        "train.on_spike=skip",
        "optimizer.lr=1e-2",
    ]
    run = tmp_path / "a run"
    if how == "forked":
        pretrain(*base, "train.steps=2")
        other = f"data.train={ids['high']}"
        pretrain.fork(pretrain.run_dir, run, "train.steps=12", other, code=3)
    else:
        stages = (
            "stages=[{name: low, steps: 2, seq_length: 8}, {name: my data, steps: 8, data:"
            f" {ids['high']}}}]"
        )
        more = (
            ["train.on_spike=rewind", "train.spike_rewind=1", "train.max_bad_steps=1"]
            if "rewound" in how
            else []
        )
        pretrain(*base, "train.steps=null", stages, f"run_dir={run}", *more, code=3)
    hint = (
        r"(?:its samples are (\d+) to (\d+), its documents: |from step (\d+) on: )python -m"
        r" tools.tokens ([^;\n]+)"
    )
    report = re.findall(hint, pretrain.out + pretrain.err)
    if "rewound" in how:
        assert [samples[:2] for samples in report] == [("4", "5"), ("6", "7")]
        command = shlex.split(report[0][-1])
        assert command == [str(run), "--sample", "my data:5"]
        assert tokens(command) == 0 and " my data:5  True" in capsys.readouterr().out
        return
    assert [samples[:3] for samples in report] == [
        ("4", "5", ""),
        ("6", "7", ""),
        ("8", "9", ""),
        ("", "", "5"),
    ]
    for first, last, begin, command in report:
        assert tokens([*shlex.split(command), "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        place = "my data:" if how == "staged" else ""
        wanted = [f"{place}{sample}" for sample in range(int(first or 4), int(last or 5) + 1)]
        assert sorted({str(row["sample"]) for row in rows}) == wanted
        assert {row["source"] for row in rows} == {str(tmp_path / "high" / "train")}
        assert {row["step"] for row in rows} == {int(begin or 3 + int(first) // 2)}


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_without_a_token_that_counts_are_skipped_and_leave_json_behind(
    engine: str, pretrain: Command, ids: dict[str, str]
) -> None:
    """Documents that consist only of their end. Validation has no token to score either."""
    blends = [f"data.train={ids['ends']}", f"data.valid={ids['ends'].replace('/train', '/valid')}"]
    pretrain(*TINY, *blends, "data.eod_loss=false", engine, "train.steps=4", "train.on_spike=skip")

    def refused(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    lines = [
        json.loads(line, parse_constant=refused)
        for line in (pretrain.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert [
        (line["loss"], line["grad_norm"], line["skipped"]) for line in lines if "loss" in line
    ] == [(None, None, True)] * 4
    assert [line["valid_loss"] for line in lines if "valid_loss" in line] == [None]
    assert math.isnan(History.read(pretrain.run_dir).validations[0][1])
    manifest = json.loads(
        (find(pretrain.run_dir).path / MANIFEST).read_text(), parse_constant=refused
    )
    assert (manifest["progress"]["skipped_steps"], manifest["progress"]["recent"]) == (4, [])
    assert all(
        weight.isfinite().all() for weight in load_full_model_state(pretrain.run_dir)[0].values()
    )


# --- several ranks --------------------------------------------------------------------------------

LAYOUTS = {
    "DP2": ["parallel.use_distributed_optimizer=true"],
    "TP2": TP2,
    "ZeRO-1 in bf16, DP2": [*deepspeed(1), "train.precision=bf16"],
    "ZeRO-2, DP2, offload": [*deepspeed(2), "engine.offload_optimizer=true"],
    "ZeRO-3, TP2": deepspeed(3) + TP2,
}
Calls = list[tuple[float, float]]


def guarded(arguments: list[str], bad: float, lost: slice) -> tuple[int, Calls]:
    """Run ``python -m pretrain`` on this rank; return its exit code, and the (loss, norm) pairs
    that its guard judged.

    bad: the exact loss that is a spike. lost: the steps whose samples the data does not deliver.
    """
    from pretrain.__main__ import main

    requested: Calls = []

    def found(self: Spikes, recent: Recent, loss: float, grad_norm: float) -> str | None:
        requested.append((loss, grad_norm))
        return "loss" if loss == bad else None

    def without(data: Any, first: int, *rest: Any) -> Iterator[Batch]:
        per_step = 4 // (rest[0] * parallel_state.get_data_parallel_world_size())
        return (
            batch
            for number, batch in enumerate(batches(data, first, *rest))
            if number // per_step not in range(12)[lost]
        )

    Spikes.found = found  # type: ignore[method-assign]
    vars(trainer)["batches"] = without
    return main([DEMO, *arguments]), requested


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", quick_or_slow(LAYOUTS, ("DP2",)))
def test_ranks_go_back_together_to_what_a_straight_run_without_these_samples_is(
    layout: str, settings: list[str], tmp_path: Path
) -> None:
    """Each rank decides by its own copy of the loss. The data of the straight run lacks the samples
    of the three steps.
    """
    base = [*settings, *REWINDABLE, "data.valid=[]", *LAYOUTS[layout]]
    base += ["train.steps=9", "train.on_spike=rewind", "train.micro_batch_size=1"]

    def run(
        name: str, bad: float = math.nan, lost: slice = slice(0)
    ) -> dict[int, tuple[float, float]]:
        output = tmp_path / f"{name}.out"
        answer(2, guarded, [*base, f"run_dir={tmp_path / name}"], bad, lost, output=output)
        (code, requested), other = (
            pickle.loads(Path(f"{output}.{rank}.answer").read_bytes()) for rank in range(2)
        )
        assert code == 0 and (code, requested) == other, "both ranks were asked the same"
        return losses(tmp_path / name)

    plain = run("plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "killed")
    back_to(tmp_path / "killed", 6)
    back = run("back", bad=plain[7][0])
    assert "back at" in (tmp_path / "back.out.0").read_text()
    straight = run("straight", lost=slice(4, 7))
    assert back == straight and all((back[step] == plain[step]) == (step < 5) for step in plain)
    assert run("killed", bad=plain[7][0]) == straight, (
        "killed after step 6, it meets the spike and decides again"
    )
    ours, *others = (
        load_full_model_state(tmp_path / name)[0] for name in ("back", "straight", "killed")
    )
    assert all(same(ours, other) for other in others)
