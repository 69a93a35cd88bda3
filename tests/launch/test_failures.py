"""What a rank's words mean, and which rank failed first: by records of every kind, and by a real torchrun."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.job import rank_log
from launch.node.failures import Findings, all_told, failures, first_failure, kind_of, wrong_on
from tests.launch.ranks import RESET, record, trace

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)"
    " ran for 600042 milliseconds before timing out."
)


# --- what a rank's words mean ----------------------------------------------------------------------------------------------------


def seen(text: str) -> Findings:
    """Findings after a text, a second a line."""
    findings = Findings()
    for number, line in enumerate(text.splitlines()):
        findings.see(line, 100.0 + number)
    return findings


def message(text: str, by: str | None = None) -> str | None:
    """The error that a text is found to tell."""
    cause = seen(text).cause(by)
    return cause.message if cause else None


NCCL_ERROR = trace(
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error"
)
NCCL_LAST = (
    f"{NCCL_ERROR}\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
)
ABORT = (
    f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [Rank 3] {WATCHDOG}\nFatal Python error: Aborted\n"
)


@pytest.mark.parametrize(
    ("text", "by", "expected"),
    [
        ("step 1\n" + trace("ValueError: boo") + "\ngoodbye", None, "ValueError: boo"),
        (trace("ValueError: boo", "[rank3]: "), None, "ValueError: boo"),
        (trace("ValueError: boo", "    "), None, "ValueError: boo"),
        (trace("A: 1") + "\n\nDuring handling of the above exception, another exception occurred:\n\n" + trace("B: 2"), None, "B: 2"),
        (trace("A: 1") + "\nException ignored in: <function f>\n" + trace("B: 2"), None, "A: 1"),
        ("Exception ignored in: <function f>\n" + trace("B: 2"), None, "B: 2"),
        (trace("OSError: retried") + "\nstep 7\npretrain: error: too many bad steps", None, "pretrain: error: too many bad steps"),
        (
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):",
            "SIGSEGV",
            "Fatal Python error: Segmentation fault",
        ),
        (ABORT, "SIGABRT", f"what():  [Rank 3] {WATCHDOG}"),
        (
            NCCL_LAST + "socketProgress: Connection closed by remote peer node2<41234>",
            None,
            "Connection closed by remote peer node2<41234>)",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
            None,
            "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        ),
        ("step 1\nstep 2", None, None),
        (trace("ValueError: long ago") + "\nstep" * 500, "SIGSEGV", None),
        (trace("ValueError: boo"), "SIGKILL", None),
    ],
)
def test_the_error_of_a_log(text: str, by: str | None, expected: str | None) -> None:
    found = message(text, by)
    assert found == expected if expected is None or not expected.endswith(")") else found and found.endswith(expected)


def test_a_chain_is_kept_whole_and_long_ones_keep_their_end() -> None:
    cause = seen(trace("A: 1") + "\n\nThe above exception was the direct cause of the following exception:\n\n" + trace("B: 2")).cause(None)
    assert cause and cause.traceback and "A: 1" in cause.traceback and cause.traceback.endswith("B: 2") and cause.time == 100.0
    deep = "Traceback (most recent call last):\n" + '  File "é.py", line 1, in f\n' * 2000 + "RecursionError: deep"
    long = seen(deep).cause(None)
    assert long and long.traceback and len(long.traceback.encode()) <= 8192 and long.traceback.endswith("RecursionError: deep")


@pytest.mark.parametrize(
    ("error", "code", "by", "kind"),
    [
        ("pretrain: error: model.mixr is unknown", 2, None, "config"),
        ("pretrain: error: runs/x is in use by process 12", 75, None, "busy"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", 1, None, "memory"),
        ("MemoryError", 1, None, "memory"),
        ("pretrain: error: the loss was not finite for 9 steps in a row", 3, None, "diverged"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 1, None, "node"),
        ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", 1, None, "node"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", 1, None, "exit"),
        (WATCHDOG, 134, "SIGABRT", "nccl"),
        ("ValueError: boo", 1, None, "exit"),
        ("", 137, "SIGKILL", "signal"),
    ],
)
def test_the_kind_of_a_failure(error: str, code: int, by: str | None, kind: str) -> None:
    assert kind_of(error, code, by) == kind


# --- which rank failed first -----------------------------------------------------------------------------------------------------


OWN: list[dict[str, Any]] = [
    {"error": "ValueError: boo"},
    {"exit": 137, "signal": "SIGKILL"},
    {"exit": 139, "signal": "SIGSEGV", "error": "Fatal Python error: Segmentation fault"},
    {"error": "torch.OutOfMemoryError: CUDA out of memory."},
]
CONSEQUENCES: list[dict[str, Any]] = [
    {"error": RESET},
    {"error": WATCHDOG, "exit": 134, "signal": "SIGABRT"},
    {"exit": 143, "signal": "SIGTERM", "told": {"SIGTERM": 1000.0}},
    {"ended": None, "exit": None, "told": {"SIGTERM": 1000.0}},
    {"exit": 0},
]


@pytest.mark.parametrize("seed", range(20))
def test_the_cause_is_found_among_its_consequences_whatever_the_clocks_say(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    guilty = chance.randrange(12)
    for rank in range(12):
        record(tmp_path, rank, 2000 + chance.random(), **chance.choice(OWN if rank == guilty else CONSEQUENCES))
    first = first_failure(tmp_path)
    assert first and (first.rank, first.host, first.lost_peer) == (guilty, f"node{guilty // 2}", False)


def test_of_several_causes_the_earliest_is_first(tmp_path: Path) -> None:
    for rank, at in enumerate((2005.0, 2001.0, 2003.0)):
        record(tmp_path, rank, 2010.0 - rank, error="ValueError: boo", error_time=at)
    record(tmp_path, 3, 1990.0, exit=2)
    assert [failure.rank for failure in failures(tmp_path)] == [1, 2, 0, 3]


def test_a_rank_that_vanished_is_the_cause_where_the_others_only_lost_it(tmp_path: Path) -> None:
    record(tmp_path, 0, 2000.0, error=RESET)
    record(tmp_path, 1, 0.0, ended=None, exit=None)
    rank_log(tmp_path, 1).parent.mkdir()
    rank_log(tmp_path, 1).write_text("1990.000 step 1\n1991.500 step 2\n")
    first = first_failure(tmp_path)
    assert first and (first.rank, first.kind, first.time, first.exit) == (1, "lost", 1991.5, None)
    while_running = first_failure(tmp_path, running=True)
    assert while_running and while_running.rank == 0 and while_running.lost_peer
    record(tmp_path, 2, 2001.0, error="ValueError: boo")
    assert [failure.rank for failure in failures(tmp_path)] == [2, 1, 0]


def test_where_none_failed_there_is_none(tmp_path: Path) -> None:
    assert first_failure(tmp_path / "nowhere") is None
    record(tmp_path, 0, 2000.0, exit=0)
    (tmp_path / "ranks" / "rank_00001.json").write_text('{"rank": 1, "exit"')
    assert first_failure(tmp_path) is None


def test_an_exit_without_a_word_is_told_with_its_last_line(tmp_path: Path) -> None:
    record(tmp_path, 0, 2000.0, exit=7, last_line="step 12")
    first = first_failure(tmp_path)
    assert first and first.message == "exited with 7; its last line: step 12" and first.exit == 7


PROGRAM = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    dist.all_reduce(torch.ones(1))
    if step == 20 and dist.get_rank() == 1:
        raise ArithmeticError("loss is not finite")
"""


def test_a_real_torchrun_names_the_rank_that_raised(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    keeper = [sys.executable, "-m", "launch.node.rank", str(tmp_path), "--", sys.executable, "-c", PROGRAM]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port()}"]
    done = subprocess.run([*torchrun, "--no-python", *keeper], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    first, *rest = failures(tmp_path)
    assert (first.rank, first.message, first.kind) == (1, "ArithmeticError: loss is not finite", "exit"), failures(tmp_path)
    assert first.exit in (1, 134)  # gloo aborts some interpreters on their way out
    assert first.traceback and "<string>" in first.traceback
    assert [failure.rank for failure in rest] == [0] and all(failure.lost_peer or failure.exit == 143 for failure in rest)


def test_an_abort_after_an_exception_is_the_exception(tmp_path: Path) -> None:
    raised = {"error": "ArithmeticError: boo", "traceback": "Traceback (most recent call last):\n  ...\nArithmeticError: boo"}
    record(tmp_path, 0, 2000.0, exit=134, signal="SIGABRT", **raised)
    (first,) = failures(tmp_path)
    assert (first.message, first.kind, first.signal) == ("ArithmeticError: boo", "exit", None)
    record(tmp_path, 0, 2000.0, exit=139, signal="SIGSEGV", **raised)
    (first,) = failures(tmp_path)
    assert (first.message, first.kind) == ("ArithmeticError: boo (SIGSEGV)", "signal")


def port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_ranks_that_were_all_told_to_end_were_not_the_cause(tmp_path: Path) -> None:
    told = {"SIGTERM": 1990.0}
    assert not all_told(tmp_path)
    record(tmp_path, 0, 2000.0, exit=0, told=told)
    assert not all_told(tmp_path)
    record(tmp_path, 1, 2000.0, exit=143, signal="SIGTERM", told=told)
    record(tmp_path, 2, 0.0, ended=None, exit=None, told=told)
    record(tmp_path, 3, 2001.0, error=RESET, told=told)
    assert all_told(tmp_path)
    record(tmp_path, 4, 1980.0, error="ValueError: boo", told=told)  # before it was told
    assert not all_told(tmp_path)
    record(tmp_path, 4, 2000.0, exit=0)
    record(tmp_path, 5, 2002.0, error=RESET, told={"SIGUSR1": 1990.0})
    assert not all_told(tmp_path)


def test_the_input_is_wrong_on_hosts_where_ranks_said_so_if_others_did_not(tmp_path: Path) -> None:
    for rank in range(6):
        record(tmp_path, rank, 2000.0, exit=143)
    assert wrong_on(tmp_path) == ()
    record(tmp_path, 2, 2000.0, exit=2)
    assert wrong_on(tmp_path) == ("node1",)
    record(tmp_path, 5, 2000.0, exit=2)
    assert wrong_on(tmp_path) == ("node1", "node2")
    record(tmp_path, 0, 2000.0, exit=2)
    assert wrong_on(tmp_path) == ()
