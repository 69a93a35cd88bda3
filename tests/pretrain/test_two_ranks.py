"""Two real gloo ranks: the slow one is named, a hung one shows where it waits and lives on, an absent one ends the run."""

from __future__ import annotations

import signal
from pathlib import Path

from pretrain.report.progress_file import read_progress
from tests.pretrain.conftest import DEMO
from tests.ranks import PATIENCE, losses, records, send, started, wait_until

QUIET = ["log.diagnostics_interval=0", "train.steps=8", "checkpoint.interval=4", "train.eval_interval=0"]


def test_the_slow_rank_is_named_and_no_loss_changes_while_a_stopped_one_is_seen_and_goes_on(settings: list[str], tmp_path: Path) -> None:
    """The same run twice: compared at every second step with rank 1's data slow, and never compared with rank 1 stopped for a while."""
    compared, stopped = tmp_path / "compared", tmp_path / "stopped"
    slow = [DEMO, *settings, *QUIET, f"run_dir={compared}", "log.straggler_interval=2"]
    with started(2, slow, tmp_path / "slow", naps={1: 0.1}) as ranks:
        for rank in ranks:
            rank.join(PATIENCE)
    said = (tmp_path / "slow.0").read_text()
    assert [rank.exitcode for rank in ranks] == [0, 0], said
    lines = records(compared, "ranks.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert ["hosts" in line for line in lines] == [True, False, False, False]
    for line in lines:
        # Two micro-batches a step, each after a nap; the other rank waits for that in the reduction.
        assert line["seconds"][1] > 0.2 and line["waiting_seconds"][0] > 0.1
        assert line["slowest"]["rank"] == 1 and line["slowest"]["ratio"] > 1.2 and line["slowest"]["by"] == "step"
    told = [line for line in records(compared) if "ranks/slowest" in line]
    assert [(line["step"], line["ranks/slowest"], line["ranks/slowest_ratio"] > 1.2) for line in told] == [
        (s, 1, True) for s in (2, 4, 6, 8)
    ]
    assert f"step 2: slowest rank 1 on node {lines[0]['hosts'][1]}: " in said and "times the median of 2 ranks (" in said

    alone = [DEMO, *settings, *QUIET, f"run_dir={stopped}", "log.straggler_interval=0"]
    with started(2, alone, tmp_path / "hung", naps={0: 0.05, 1: 0.05}) as ranks:  # slow enough to be stopped in between
        wait_until(lambda: len(losses(stopped)) >= 3, ranks)
        send(ranks[1], signal.SIGSTOP)
        seen = len(losses(stopped))

        def stacks() -> str:
            send(ranks[0], signal.SIGUSR2)
            return (tmp_path / "hung.0").read_text()

        # Rank 0 may be a step further before it waits.
        wait_until(lambda: "train_step" in stacks() and "distributed_c10d.py" in stacks(), ranks)
        assert seen < 8 and read_progress(stopped)["state"] == "running"  # type: ignore[index]
        send(ranks[1], signal.SIGCONT)
        for rank in ranks:
            rank.join(PATIENCE)
    assert [rank.exitcode for rank in ranks] == [0, 0], (tmp_path / "hung.0").read_text()
    assert read_progress(stopped)["state"] == "complete"  # type: ignore[index]
    assert not (stopped / "ranks.jsonl").exists()
    assert losses(stopped) == losses(compared) and len(losses(stopped)) == 8, "to the last bit"


def test_a_rank_that_stays_away_fails_the_run(settings: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [DEMO, *settings, *QUIET, f"run_dir={run_dir}", "train.steps=100000", "parallel.collective_timeout_minutes=0.1"]
    with started(2, arguments, tmp_path / "away") as ranks:
        wait_until(lambda: len(losses(run_dir)) >= 2, ranks)
        send(ranks[1], signal.SIGSTOP)
        ranks[0].join(PATIENCE)
        assert ranks[0].exitcode == 1, (tmp_path / "away.0").read_text()
    told = read_progress(run_dir)
    assert told is not None and told["state"] == "failed" and told["step"] - max(losses(run_dir)) in (0, 1)
    assert "Timed out waiting" in told["message"] and "\n" not in told["message"]
