"""Tests of ``--processes``: ranks that are forked after one import train as ranks under a launcher,
and end together.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import psutil  # type: ignore[import-untyped]
import pytest

from pretrain.__main__ import main
from pretrain.processes import run_ranks
from tests.pretrain.conftest import DEMO, ROOT
from tests.ranks import PATIENCE, losses, send, started, wait_until

RANKS = """
import os, signal, sys, time
from pretrain import processes
from pretrain.processes import run_ranks
processes.GRACE_SECONDS = 1.0
def say(*words):  # in one write; an unbuffered print writes words one by one, ranks mix them
    os.write(1, f"{{' '.join(words)}}\\n".encode())
def rank():
    number = int(os.environ["RANK"])
    say(os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
    {}
sys.exit(run_ranks(3, rank))
"""


def ranks(body: str) -> Popen[str]:
    """Start a process with three ranks; ``body``: the rest of their function ``rank``."""
    command = [sys.executable, "-c", RANKS.format(body)]
    return Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 0", 0),
        # The other ranks end at SIGTERM, or are killed: they do not sleep to the end.
        ("time.sleep(0.5 if number == 1 else 1000); return 3", 3),
        (
            "time.sleep(0 if number else 0.5); number or os.kill(os.getpid(), signal.SIGKILL); "
            "time.sleep(1000)",
            137,
        ),
        (
            "number and signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(0.5); "
            "return time.sleep(1000) if number else 5",
            5,
        ),
    ],
    ids=["success", "exit code", "signal", "deaf"],
)
def test_the_first_failure_ends_all_ranks(body: str, code: int) -> None:
    process = ranks(body)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code and not errors
    assert sorted(output.splitlines()) == [f"{rank} {rank} 3" for rank in range(3)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_parent_ends_the_ranks(number: signal.Signals) -> None:
    """Each rank receives a stop signal once, and can save; a killed parent's ranks are killed."""
    process = ranks(
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "    try:\n"
        "        say('ready')\n"
        "        time.sleep(1000)\n"
        "    except KeyboardInterrupt: say('saved')\n"
        "    return 0"
    )
    assert process.stdout is not None
    for _ in range(6):
        process.stdout.readline()
    children = psutil.Process(process.pid).children()
    process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE)
    killed = number == signal.SIGKILL
    assert process.returncode == (-9 if killed else 0)
    assert output.split() == ([] if killed else ["saved"] * 3)
    assert len(children) == 3
    until(lambda: not any(child.is_running() for child in children))


def test_no_rank_is_forked_from_a_process_with_threads() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="threads, so it must not fork ranks"):
            run_ranks(1, lambda: 0)
    finally:
        end.set()
        thread.join()


def test_forked_ranks_train_as_ranks_of_a_launcher_and_stop(
    settings: list[str], tmp_path: Path
) -> None:
    """SIGTERM to the parent saves, with exit code 0. All losses are equal to the last bit."""
    words = [DEMO, *settings, "parallel.tensor_model_parallel_size=2", "train.steps=2000"]
    words.append("checkpoint.interval=0")
    process = Popen([sys.executable, "-m", "pretrain", *words, "--processes", "2"], cwd=ROOT)
    until(lambda: process.poll() is not None or len(losses(tmp_path / "run")) >= 5)
    process.terminate()
    assert process.wait(PATIENCE) == 0
    relaunched = (tmp_path / "run" / "relaunch.sh").read_text()
    assert "torchrun" not in relaunched and relaunched.endswith("--processes 2\n")
    assert len([*(tmp_path / "run" / "checkpoints").glob("step_*")]) == 1
    other = tmp_path / "other"
    with started(2, [*words, f"run_dir={other}"], tmp_path / "output") as others:
        wait_until(lambda: len(losses(other)) >= 5, others)
        for rank in others:
            send(rank, signal.SIGTERM)
        for rank in others:
            rank.join(PATIENCE)
    ours, theirs = losses(tmp_path / "run"), losses(other)
    common = ours.keys() & theirs.keys()
    assert len(common) >= 5 and {ours[step] == theirs[step] for step in common} == {True}


@pytest.mark.parametrize(
    ("words", "variable"),
    [
        (["--processes", "0"], ""),
        (["--processes", "2", "--check"], ""),
        (["--processes", "2"], "2"),
    ],
)
def test_what_processes_cannot_be_combined_with(
    words: list[str],
    variable: str,
    settings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", variable)
    assert main([DEMO, *settings, *words]) == 2
    assert f"pretrain: error: --processes {words[1]}: give" in capsys.readouterr().err
