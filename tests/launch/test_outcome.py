"""Tests of an attempt's outcome: the meaning of ranks' output, the first failure, Slurm's report of
the job, and nodes to avoid.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cluster.slurm import fields
from launch.job import rank_log, write_json
from launch.node.failures import (
    Cause,
    Findings,
    all_signalled,
    failures,
    first_failure,
    kind_of,
    wrong_on,
)
from launch.node.hardware import Gpu
from launch.supervise.classify import (
    Observed,
    cancelled,
    classify,
    is_away,
    is_lasting,
    last_step,
    taken,
)
from launch.supervise.journal import cordon, cordoned
from launch.supervise.policy import blamed
from launch.supervise.run_files import RunState, has_stepped, read_state
from tests.launch.folders import RESET, record, trace

WATCHDOG = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE,"
    " Timeout(ms)=600000) ran for 600042 ms."
)

CHAIN = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
NCCL = (
    trace(
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited"
        " or there was a network error"
    )
    + "\nncclRemoteError: A call failed possibly due to a network error.\nLast error:\n"
)
ABORT = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [Rank 3]"
    f" {WATCHDOG}\nFatal Python error: Aborted\n"
)
SEGV = "Fatal Python error: Segmentation fault"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
LOGS: list[tuple[str, str | None, str | None]] = [
    ("step 1\n" + trace("ValueError: boo") + "\ngoodbye", None, "ValueError: boo"),
    (trace("ValueError: boo", "[rank3]: "), None, "ValueError: boo"),
    (trace("ValueError: boo", "    "), None, "ValueError: boo"),
    (trace("A: 1") + CHAIN + trace("B: 2"), None, "B: 2"),
    (trace("A: 1") + "\nException ignored in: <function f>\n" + trace("B: 2"), None, "A: 1"),
    ("Exception ignored in: <function f>\n" + trace("B: 2"), None, "B: 2"),
    (
        trace("OSError: retried") + "\nstep 7\npretrain: error: too many bad steps",
        None,
        "pretrain: error: too many bad steps",
    ),
    (f"{SEGV}\n\nCurrent thread 0x1 (most recent call first):", "SIGSEGV", SEGV),
    (ABORT, "SIGABRT", f"what():  [Rank 3] {WATCHDOG}"),
    (
        NCCL + "socketProgress: Connection closed by remote peer node2<41234>",
        None,
        "Connection closed by remote peer node2<41234>)",
    ),
    (XID, None, XID),
    ("step 1\nstep 2", None, None),
    (trace("ValueError: long ago") + "\nstep" * 500, "SIGSEGV", None),
    (trace("ValueError: boo"), "SIGKILL", None),
]


def cause_of(text: str, by: str | None = None) -> Cause | None:
    """Return the cause that a text reports, with one second per line."""
    findings = Findings()
    for number, line in enumerate(text.splitlines()):
        findings.see(line, 100.0 + number)
    return findings.cause(by)


def test_the_error_of_a_log() -> None:
    for text, by, expected in LOGS:
        cause = cause_of(text, by)
        assert (cause and cause.message) == expected or (
            cause and expected and cause.message.endswith(expected)
        ), text[:200]
    cause = cause_of(trace("A: 1") + CHAIN + trace("B: 2"))
    assert (
        cause
        and cause.traceback
        and "A: 1" in cause.traceback
        and cause.traceback.endswith("B: 2")
        and cause.time == 100.0
    )
    deep = (
        "Traceback (most recent call last):\n"
        + '  File "é.py", line 1, in f\n' * 2000
        + "RecursionError: deep"
    )
    long = cause_of(deep)
    assert (
        long
        and long.traceback
        and len(long.traceback.encode()) <= 8192
        and long.traceback.endswith("RecursionError: deep")
    )


KINDS = f"""\
config     2 pretrain: error: model.mixr is unknown
busy      75 pretrain: error: runs/x is in use by process 12
diverged   3 pretrain: error: the loss was not finite for 9 steps in a row
memory     1 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
memory     1 MemoryError
node       1 RuntimeError: CUDA error: uncorrectable ECC error encountered
node       1 RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable
exit       1 RuntimeError: CUDA error: an illegal memory access was encountered
nccl     134 {WATCHDOG}
exit       1 ValueError: boo
place      1 OSError: [Errno 116] Stale file handle
place      1 OSError: [Errno 116] Stale file handle: '/a/nccl/x.json'
place      1 OSError: [Errno 5] Input/output error: '/a/b'
place      1 OSError: [Errno 107] Transport endpoint is not connected: '/a/b'
place      1 BrokenPipeError: [Errno 108] Cannot send after transport endpoint shutdown: '/a/b'
place      1 OSError: [Errno 112] Host is down: '/a/b'
place      1 OSError: [Errno 121] Remote I/O error
place      1 TimeoutError: [Errno 110] Connection timed out: '/a/b'
place      1 safetensors_rust.SafetensorError: I/O error: Stale NFS file handle (os error 116)
place      1 RuntimeError: unable to mmap 8 bytes from file </a/b>: Input/output error (5)
place      1 pretrain: error: a/b: Stale file handle
place      1 data_prep: error: cannot read /a/b: Transport endpoint is not connected
exit       1 TimeoutError: [Errno 110] Connection timed out
exit       1 urllib.error.URLError: https://github.com/x: Connection timed out
exit       1 FileNotFoundError: [Errno 2] No such file or directory: '/a/b'
nccl       1 RuntimeError: [/p/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3
nccl       1 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out
nccl       1 RuntimeError: NCCL error: ibv_reg_mr failed with error Input/output error
signal   137
"""  # noqa: E501


def test_the_kind_of_a_failure() -> None:
    signals = {"134": "SIGABRT", "137": "SIGKILL"}
    for line in KINDS.splitlines():
        kind, code, message = [*line.split(maxsplit=2), ""][:3]
        assert kind_of(message, int(code), signals.get(code)) == kind, line


TOLD = {"SIGTERM": 1000.0}
OWN: list[dict[str, Any]] = [
    {"error": "ValueError: boo"},
    {"exit": 137, "signal": "SIGKILL"},
    {"exit": 139, "signal": "SIGSEGV", "error": SEGV},
    {"error": "torch.OutOfMemoryError: CUDA out of memory."},
]
CONSEQUENCES: list[dict[str, Any]] = [
    {"error": RESET},
    {"error": WATCHDOG, "exit": 134, "signal": "SIGABRT"},
    {"exit": 143, "signal": "SIGTERM", "told": TOLD},
    {"ended": None, "exit": None, "told": TOLD},
    {"exit": 0},
]


def test_the_cause_is_found_among_its_consequences_whatever_the_clocks_state(
    tmp_path: Path,
) -> None:
    for seed in range(20):
        chance, attempt = random.Random(seed), tmp_path / str(seed)
        guilty = chance.randrange(12)
        for rank in range(12):
            record(
                attempt,
                rank,
                2000 + chance.random(),
                **chance.choice(OWN if rank == guilty else CONSEQUENCES),
            )
        first = first_failure(attempt)
        assert first and (first.rank, first.host, first.lost_peer) == (
            guilty,
            f"node{guilty // 2}",
            False,
        )


def test_of_several_causes_the_earliest_is_first_and_one_that_vanished_before_those_who_lost_it(
    tmp_path: Path,
) -> None:
    assert first_failure(tmp_path / "nowhere") is None
    for rank, at in enumerate((2005.0, 2001.0, 2003.0)):
        record(tmp_path, rank, 2010.0 - rank, error="ValueError: boo", error_time=at)
    record(tmp_path, 3, 1990.0, exit=7, last_line="step 12")
    assert [failure.rank for failure in failures(tmp_path)] == [1, 2, 0, 3]
    assert failures(tmp_path)[3].message == "exited with 7; its last line: step 12"
    (tmp_path / "ranks" / "rank_00004.json").write_text('{"rank": 4, "exit"')
    gone = tmp_path / "gone"
    record(gone, 0, 2000.0, error=RESET)
    record(gone, 1, 0.0, ended=None, exit=None)
    rank_log(gone, 1).parent.mkdir()
    rank_log(gone, 1).write_text("1990.000 step 1\n1991.500 step 2\n")
    first = first_failure(gone)
    assert first and (first.rank, first.kind, first.time, first.exit) == (1, "lost", 1991.5, None)
    while_running = first_failure(gone, running=True)
    assert while_running and while_running.rank == 0 and while_running.lost_peer
    record(gone, 2, 2001.0, error="ValueError: boo")
    assert [failure.rank for failure in failures(gone)] == [2, 1, 0]


def test_an_abort_after_an_exception_is_the_exception(tmp_path: Path) -> None:
    abort, crash = ("E: boo", "exit", None), ("E: boo (SIGSEGV)", "signal", "SIGSEGV")
    for exit_code, by, expected in ((134, "SIGABRT", abort), (139, "SIGSEGV", crash)):
        record(
            tmp_path,
            0,
            2000.0,
            exit=exit_code,
            signal=by,
            error="E: boo",
            traceback=trace("E: boo"),
        )
        (first,) = failures(tmp_path)
        assert (first.message, first.kind, first.signal) == expected


def test_ranks_that_were_all_signalled_to_end_were_not_the_cause(tmp_path: Path) -> None:
    steps: list[tuple[int, float, dict[str, Any], bool]] = [
        (0, 2000.0, {"exit": 0, "told": TOLD}, False),
        (1, 2000.0, {"exit": 143, "signal": "SIGTERM", "told": TOLD}, True),
        (2, 0.0, {"ended": None, "exit": None, "told": TOLD}, True),
        (3, 2001.0, {"error": RESET, "told": TOLD}, True),
        # Before the rank received the signal.
        (4, 980.0, {"error": "ValueError: boo", "told": TOLD}, False),
        (4, 2000.0, {"exit": 0}, True),
        (5, 2002.0, {"error": RESET, "told": {"SIGUSR1": 990.0}}, False),
    ]
    for rank, at, values, expected in steps:
        record(tmp_path, rank, at, **values)
        assert all_signalled(tmp_path) is expected, (rank, values)


def test_the_input_is_wrong_on_hosts_where_ranks_reported_it_if_others_did_not(
    tmp_path: Path,
) -> None:
    for rank in range(6):
        record(tmp_path, rank, 2000.0, exit=143)
    assert wrong_on(tmp_path) == ()
    for rank, hosts in ((2, ("node1",)), (5, ("node1", "node2")), (0, ())):
        record(tmp_path, rank, 2000.0, exit=2)
        assert wrong_on(tmp_path) == hosts


BEFORE = RunState("failed", 45, 40, None, ("n1", 1, 1.0), 900, 45)
NOW = replace(BEFORE, state="running", writer=("n1", 2, 2.0))
TERM = {"told": {"SIGTERM": 1900.0}, "exit": 143, "signal": "SIGTERM"}
SILENT = "not saved and ended before the job's end"


def end(code: int | None = 1, **changes: Any) -> Observed:
    """Return the observation of an attempt that ended with a code."""
    observed = {
        name: changes.pop(name) for name in ("state", "step", "said", "metrics") if name in changes
    }
    return Observed(code, BEFORE, replace(NOW, **observed), **changes)


def test_what_the_run_states_of_its_end_decides(tmp_path: Path) -> None:
    record(tmp_path, 0, 2000.0, **TERM)
    for state, outcome in (("stopped", "saved"), ("complete", "finished")):
        for code in (0, 1, 143, None):
            for changes in ({}, {"hang": SILENT}, {"taken": True}):
                assert classify("run", tmp_path, end(code, state=state, **changes)) == (
                    outcome,
                    None,
                )
        old = Observed(1, replace(BEFORE, state=state), replace(BEFORE, state=state))
        assert classify("run", tmp_path, old)[0] == "failed", "an earlier attempt's words"


ENDS: list[tuple[str, Observed, str, str | None]] = [
    *(
        ("run", end(taken=True, **changes), "interrupted", None)
        for changes in (
            {},
            {"hang": SILENT},
            {"faults": {"n1": ["x"]}},
            {"refused": "srun"},
            {"down": {"n1": "x"}},
        )
    ),
    ("run", end(taken=True, cancelled=True), "cancelled", None),
    ("command", end(taken=True, signalled=True), "saved", None),
    ("command", end(143, signalled=True), "saved", None),
    ("command", end(143, signalled=True, cancelled=True), "cancelled", None),
    ("command", end(0), "finished", None),
    ("run", end(0, signalled=True), "saved", None),
    ("run", end(0), "failed", "exit"),  # ended before its last step
    ("run", end(hang="no step"), "hang", "hang"),
    ("run", end(faults={"n1": ["ECC"]}), "unhealthy", "health"),
    ("run", end(None, refused="no", queue=True), "failed", "place"),
    ("run", end(None, refused="no"), "failed", "exit"),
    ("run", end(137, down={"n1": "x"}), "failed", "node"),
    ("run", end(137), "failed", "lost"),
    ("run", end(1), "failed", "exit"),
]


def test_without_a_ranks_word_the_supervisors_observation_decides(tmp_path: Path) -> None:
    for kind, seen_of_it, outcome, failure in ENDS:
        found = classify(kind, tmp_path, seen_of_it)
        assert (found[0], found[1] and found[1].kind) == (outcome, failure), seen_of_it


def test_codes_of_ranks_have_their_meaning_and_what_one_host_misses_is_its_own_fault(
    tmp_path: Path,
) -> None:
    for code, kinds in (
        (3, ["diverged", "exit"]),
        (75, [None, None]),
        (2, ["config", "config"]),
        (1, ["exit", "exit"]),
    ):
        record(tmp_path / str(code), 0, 2000.0, exit=code, error="pretrain: error: what it says")
        found = [classify(kind, tmp_path / str(code), end(code)) for kind in ("run", "command")]
        assert [failure and failure.kind for _, failure in found] == kinds
        assert {outcome for outcome, _ in found} == {"busy" if code == 75 else "failed"}
    # On the same host: no node differs from the others.
    record(tmp_path / "2", 1, 2001.0, error=RESET)
    assert (failure := classify("run", tmp_path / "2", end())[1]) and failure.kind == "config"
    missing = {"exit": 2, "error": "pretrain: error: x.bin not found"}
    for rank in range(4):
        record(tmp_path, rank, 2000.0, **(TERM if rank < 2 else missing))
    _, failure = classify("run", tmp_path, end())
    assert (
        failure
        and (failure.kind, failure.host, failure.exit) == ("node", "node1", 2)
        and "x.bin not found" in failure.message
    )
    record(tmp_path, 0, 2001.0, **missing)
    assert (failure := classify("run", tmp_path, end())[1]) and failure.kind == "config"


KILLED, VANISHED = {"exit": 137, "signal": "SIGKILL"}, {"ended": None, "exit": None}
WORKER = {"error": "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "}
OOM_LINES = [
    (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have"
        " been OOM Killed."
    ),
    (
        "[2026-01-01T00:00:00.784] error: Detected 11 oom_kill events in StepId=12.0. Some of the"
        " step tasks have been OOM Killed."
    ),
    (
        "slurmstepd-n1: error: Detected 1 oom-kill event(s) in step 12.0 cgroup. Some of your"
        " processes may have been killed by"
    ),
    "srun: error: node1: task 0: Out Of Memory",
    "srun: error: node1: tasks 0-2,5: Out Of Memory",
    "slurmstepd: error: StepId=12.0 exceeded memory limit (12 > 10), being killed",
    "slurmstepd: error: Step 12.0 exceeded 4194304 KB memory limit, being killed",
    "slurmstepd: error: Exceeded job memory limit",
]
NO_OOM_LINES = [
    "slurmstepd: error: Exceeded job memory limit at some point.",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "",
]
WORDS = ": out of memory (OOM kill); the job's limit is 300 MiB a node"


def write_attempt(attempt: Path, line: str, after: int = 0) -> Path:
    """Write an attempt whose agents' log has a line of srun or Slurm, followed by lines of
    torchrun.
    """
    (attempt / "logs").mkdir(parents=True)
    log = attempt / "logs" / ("agents.log" if line.startswith("srun") else "agents_node0.log")
    log.write_text(f"W torchrun\n{line}\n" + "E torch.distributed.elastic: x\n" * after)
    return attempt


def memory_of(attempt: Path, code: int = 1, **changes: Any) -> tuple[str, str]:
    """Return the kind and the message of an attempt's failure."""
    _, failure = classify("run", attempt, end(code, limit=WORDS.partition("; ")[2], **changes))
    assert failure is not None and (failure.kind != "memory" or blamed(failure) is None)
    return failure.kind, failure.message


def test_slurms_log_reports_an_out_of_memory_kill(tmp_path: Path) -> None:
    expected = ("memory", f"killed by SIGKILL{WORDS}")
    for number, line in enumerate([*OOM_LINES, *NO_OOM_LINES]):
        attempt = write_attempt(tmp_path / str(number), line, after=5000)
        record(attempt, 0, 1999.0, error=RESET)
        record(attempt, 1, 2000.0, **KILLED)
        record(attempt, 2, 2001.0, told=TOLD, **KILLED)
        assert (
            memory_of(attempt) == expected
            if line in OOM_LINES
            else memory_of(attempt)[0] == "signal"
        ), line
        failure = classify("run", attempt, end())[1]
        assert failure and (failure.rank, failure.host, failure.exit) == (1, "node0", 137)
    ends: dict[str, tuple[dict[str, Any] | None, str, str]] = {
        "lost": (VANISHED, *expected),
        "worker": (WORKER, "memory", WORKER["error"].rstrip(". ") + WORDS),
        "bash": ({"exit": 137, "last_line": "job.sh: line 3: 17 Killed"}, *expected),
        "no rank": (None, *expected),
        "told": (
            {"told": TOLD, **KILLED},
            "signal",
            "killed by SIGKILL: the kernel's out-of-memory killer, or a user",
        ),
        "its own": ({"error": "ValueError: boo"}, "exit", "ValueError: boo"),
        "the GPU's": (
            {"error": "RuntimeError: CUDA error: out of memory"},
            "memory",
            "RuntimeError: CUDA error: out of memory",
        ),
        "input": (
            {"exit": 2, "error": "a worker died with <Signals.SIGKILL: 9>"},
            "config",
            "a worker died with <Signals.SIGKILL: 9>",
        ),
    }
    for name, (values, kind, message) in ends.items():
        attempt = write_attempt(tmp_path / name, OOM_LINES[0])
        if values is not None:
            record(attempt, 0, 2000.0, **values)
        assert memory_of(attempt, 137) == (kind, message), name
    assert memory_of(tmp_path / "lost", down={"node0": "DRAINING: Kill task failed"}) == expected


def test_the_kernels_count_reports_an_out_of_memory_kill(tmp_path: Path) -> None:
    ends: dict[str, dict[str, Any]] = {
        "killed": KILLED,
        "lost": VANISHED,
        "worker": WORKER,
        "own": {"error": "ValueError: boo"},
    }
    for what, values in ends.items():
        record(tmp_path / what, 0, 2000.0, **values)
    kinds = [memory_of(tmp_path / what, 137, oom_kill=True)[0] for what in (*ends, "none")]
    # The supervisor's own count: only where no keeper is alive.
    assert kinds == "signal memory exit exit memory".split()
    kinds = [memory_of(tmp_path / what, 137)[0] for what in (*ends, "none")]
    assert kinds == "signal lost exit exit lost".split()
    # The process that watches a rank reports the kill, too.
    record(tmp_path, 0, 2000.0, **KILLED, error="killed by SIGKILL: out of memory (OOM kill)")
    record(tmp_path, 1, 1990.0, **KILLED, told={"SIGTERM": 1980.0})
    assert memory_of(tmp_path) == memory_of(tmp_path / "lost", 137, oom_kill=True)


def test_lines_that_an_earlier_attempt_left_are_no_steps_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000040").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 45}\n')
    write_json(tmp_path / "progress.json", {"state": "failed", "step": 45, "pid": 1})
    before = read_state(tmp_path)
    write_json(tmp_path / "progress.json", {"state": "starting", "step": 40, "pid": 2})
    now = read_state(tmp_path)
    assert not has_stepped(before, now) and last_step(Observed(1, before, now)) == 40
    (tmp_path / "metrics.jsonl").write_text('{"step": 45}\n{"step": 41}\n')
    write_json(tmp_path / "progress.json", {"state": "running", "step": 41, "pid": 2})
    assert has_stepped(before, read_state(tmp_path))


RUNNING = "JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0 PreemptTime=None"
# Fields of scontrol, whether a person ended the job, whether the allocation is taken away.
FIELDS: dict[str, tuple[bool, bool | None]] = {
    "": (False, None),
    "JobState=COMPLETING": (True, False),
    "JobState=CANCELLED": (True, False),
    "PreemptTime=2026-01-01T00:00:00": (False, True),  # preempted with time to save
    # PreemptMode=CANCEL
    "JobState=COMPLETING PreemptTime=2026-01-01T00:00:00": (False, True),
    "JobState=PREEMPTED": (False, True),
    # requeued by a person, or because of a lost node
    "JobState=COMPLETING Restarts=2": (False, True),
    "JobState=PENDING Restarts=2 Reason=BeginTime": (False, True),
    "JobState=COMPLETING Reason=NodeDown": (False, True),
    "JobState=COMPLETING Reason=TimeLimit": (False, False),
    "JobState=TIMEOUT Reason=TimeLimit": (False, False),
}


def test_what_slurm_states() -> None:
    for changed, expected in FIELDS.items():
        known = fields(RUNNING) | fields(changed)
        assert (cancelled(known, 1), taken(known, 1)) == expected, changed
    for words in (
        "Slurm gave no answer in 20 seconds; is slurmctld up? (scontrol ping)",
        "Unable to contact slurm controller (connect failure)",
        "Unexpected message received for job 7",
        "slurm_update error: Socket timed out on send/recv operation",
    ):
        assert is_away(f"scontrol: {words}")
    assert not is_away("Requested operation is presently disabled for job 7")
    assert not is_away("Job is pending execution for job 7")


SOUND = Gpu(
    3,
    "GPU-1",
    "H100",
    "0000:3B:00.0",
    "550",
    memory_total=80000,
    memory_used=0,
    ecc_uncorrected=0,
    temperature=40,
)
BROKEN: list[dict[str, Any]] = [
    {"ecc_uncorrected": 2},
    {"row_pending": True},
    {"row_failure": True},
    {"recovery": "Reset"},
]
LASTING = [
    *(replace(SOUND, **broken).faults()[0] for broken in BROKEN),
    "Xid 79 (PCI:0000:3b:00) 4 minutes ago: GPU has fallen off the bus.",
    "7 GPUs are visible, the profile says 8",
    "nvidia-smi: Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.",
    "GPU 3 (0000:3B:00.0): 12 entries of a product are wrong",
]
PASSING = [
    # No GPU was requested, or the driver is not loaded yet.
    "0 GPUs are visible, the profile says 8",
    "GPU 3 (0000:3B:00.0): a product did not end in time: it hangs",
    "GPU 3 (0000:3B:00.0): 71000 MiB in use by pid 12 (python, 71000 MiB)",
    "did not answer the health check: it hangs, or cannot see this folder",
    "/shared: cannot be written on this node: Permission denied (is it mounted?)",
    "/tmp: 0.20 GB free; 1 are required",
]


def test_a_fault_of_the_hardware_stays() -> None:
    assert all(map(is_lasting, LASTING)) and not any(map(is_lasting, PASSING))


def test_the_cordon_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cordon.jsonl"
    assert cordoned(path) == {}
    assert cordon(path, ["n1", "n2", "n1"], "ECC", tmp_path / "run") == ["n1", "n2"]
    assert cordon(path, ["n2", "n3"], "again", "other", until=1.0) == ["n3"]
    assert cordoned(path, now=0.5) == {"n1": "ECC", "n2": "ECC", "n3": "again"} and list(
        cordoned(path)
    ) == [
        "n1",
        "n2",
    ]  # n3 is missing from the second list: its entry has expired
    assert cordon(path, ["n3"], "third", "run") == ["n3"] and cordoned(path)["n3"] == "third"
    for slip in ("", "n1", "[]", "{}", '{"node": 3}', '{"node": ""}', '{"node": "n1"', "\x00"):
        path.write_text(f'{slip}\n{{"node": "n2", "until": "soon", "time": null}}\n{slip}\n')
        assert list(cordoned(path)) == ["n2"]
    with pytest.raises(OSError, match=tmp_path.name):
        cordoned(tmp_path)
