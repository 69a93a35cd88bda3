"""Tests of a rank's keeper with real processes that exit, crash, hang, are killed, leave children,
and print secrets.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launch.job import rank_log, rank_record
from launch.node import rank, stacks
from launch.node.failures import Findings
from launch.node.logs import Scribe
from tests.launch.supervised import alive, state_of, wait_for

ROOT = Path(__file__).resolve().parents[2]
SECRET = "s3cr3t/value+of a key"
HANDLES = (
    "import faulthandler, signal, sys, time; faulthandler.register(signal.SIGUSR2,"
    " all_threads=True)\n"
)


class Kept:
    """A command under its keeper, in a separate attempt folder."""

    def __init__(
        self, attempt: Path, *command: str, environment: Mapping[str, str], begin: str | None = None
    ) -> None:
        """Start the command. ``begin``: Python code that the keeper runs first."""
        self.attempt = attempt
        environ = {
            **os.environ,
            "RANK": "3",
            "LOCAL_RANK": "1",
            "PYTHONPATH": str(ROOT),
            **environment,
        }
        keeper = (
            ["-c", f"{begin}; raise SystemExit(rank.main())"]
            if begin
            else ["-m", "launch.node.rank"]
        )
        argv = [sys.executable, *keeper, str(attempt), "--", *command]
        # Start it as torchrun does: in a separate session, and with USR1 and USR2 ignored from the
        # start.
        self.process = subprocess.Popen(
            argv,
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=ignore_users,
        )

    def wait(self, seconds: float = 180) -> int:
        """Return the keeper's exit code."""
        self.stderr = self.process.communicate(timeout=seconds)[1]
        return self.process.returncode

    @property
    def record(self) -> dict[str, Any]:
        """The rank's record."""
        value: dict[str, Any] = json.loads(rank_record(self.attempt, 3).read_text())
        return value

    def file(self, name: str) -> str:
        """Return the text of one of its files, empty if it does not exist."""
        path = self.attempt / name
        return path.read_text(errors="replace") if path.exists() else ""

    log = property(lambda self: self.file("logs/rank_00003.log"))  # includes the time stamps
    dump = property(lambda self: self.file("dumps/rank_00003.txt"))  # its stacks

    def wait_for_text(self, text: str) -> None:
        """Wait until the log contains a text."""
        wait_for(lambda: text in self.log)


def ignore_users() -> None:
    """Ignore the signals that the batch script ignores by ``trap '' USR1 USR2``."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def texts(log: str) -> list[str]:
    """Return the log's lines without stamps, after checking the stamps."""
    pairs = [line.split(" ", 1) for line in log.splitlines()]
    stamps = [float(stamp) for stamp, _ in pairs]
    assert stamps == sorted(stamps) and all(abs(stamp - time.time()) < 600 for stamp in stamps)
    return [text for _, text in pairs]


Keep = Callable[..., Kept]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    """Start commands, or Python code given as one word, under keepers; remaining processes are
    killed at the end.
    """
    started: list[Kept] = []

    def start(*command: str, begin: str | None = None, **environment: str) -> Kept:
        words = command if len(command) > 1 else (sys.executable, "-c", *command)
        started.append(
            Kept(tmp_path / f"{len(started) + 1:04}", *words, environment=environment, begin=begin)
        )
        return started[-1]

    yield start
    for kept in started:
        if kept.process.poll() is None:
            os.killpg(kept.process.pid, signal.SIGKILL)
        kept.process.communicate()


def test_the_keeper_ends_as_the_command_does(keep: Keep, tmp_path: Path) -> None:
    ends = {f"exit {code}": code for code in (0, 1, 2, 75)}
    ends |= {"kill -KILL $$": 137, "kill -TERM $$": 143, "kill -INT $$": 130}
    ends["kill -40 $$"] = 168  # a real-time signal, for which Python has no name
    signals = {
        "kill -KILL $$": "SIGKILL",
        "kill -TERM $$": "SIGTERM",
        "kill -INT $$": "SIGINT",
        "kill -40 $$": "signal 40",
    }
    kept = {end: keep("bash", "-c", end) for end in ends}
    (tmp_path / "data").write_text("not a program")
    missing, data = keep("/nowhere/python", "x"), keep(str(tmp_path / "data"), "x")
    assert {end: one.wait() for end, one in kept.items()} == ends
    for end, one in kept.items():
        record = one.record
        assert (record["rank"], record["local_rank"]) == (3, 1), end
        assert (record["exit"], record["told"]) == (ends[end], {}), end
        assert record["signal"] == signals.get(end)
        assert record["kind"] == {0: None, 2: "config", 75: "busy", 1: "exit"}.get(
            ends[end], "signal"
        )
        assert (
            record["pid"] == one.process.pid and record["started"] <= record["ended"] <= time.time()
        )
    assert (missing.wait(), data.wait()) == (127, 126)
    assert "Permission denied" in data.record["error"]
    for report in (missing.record["error"], missing.log, missing.stderr):
        assert "cannot start /nowhere/python" in report


def test_the_error_is_the_last_tracebacks_last_line_and_a_running_rank_has_a_record_without_an_end(
    keep: Keep,
) -> None:
    running = keep("import time; print('up'); time.sleep(60)", SLURMD_NODENAME="node7")
    code = (
        'def inner(): {}["step"]\ntry: inner()\nexcept KeyError as error: raise RuntimeError("no'
        ' step\\nsecond line") from error\n'
    )
    kept = keep(code)
    assert kept.wait() == 1
    record = kept.record
    assert record["error"] == "RuntimeError: no step" and record["kind"] == "exit"
    assert (
        record["traceback"].startswith("Traceback")
        and "KeyError: 'step'" in record["traceback"]
        and "in inner" in record["traceback"]
    )
    assert record["started"] < record["error_time"] <= record["ended"]
    running.wait_for_text("up")
    record = running.record
    assert (
        record["ended"] is None
        and record["exit"] is None
        and record["host"] == "node7"
        and alive(record["child"])
    )


FOREIGN = "1:cpu:/\n0::/\n"
COUNTERS = {  # /proc/self/cgroup -> the counter under /sys/fs/cgroup
    "0::/slurm/job_7/step_0\n": "slurm/job_7/step_0/memory.events",
    f"4:memory:/slurm/job_7\n{FOREIGN}": "memory/slurm/job_7/memory.oom_control",
    # The mount of a container begins at the container's own cgroup.
    f"{FOREIGN}4:memory:/docker/af31\n": "memory/memory.oom_control",
    "0::/": "memory.events",
    FOREIGN: None,
    "": None,
}


def test_the_kernels_counter_of_out_of_memory_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (cgroups, counter) in enumerate(COUNTERS.items()):
        monkeypatch.setattr(rank, "OWN_CGROUPS", tmp_path / f"cgroup-{number}")
        monkeypatch.setattr(rank, "CGROUPS", tmp_path / f"{number}")
        rank.OWN_CGROUPS.write_text(cgroups)
        if counter is not None:
            (rank.CGROUPS / counter).parent.mkdir(parents=True)
            (rank.CGROUPS / counter).write_text("oom 9\noom_kill 3\noom_group_kill 5\n")
        found = rank.oom_counter()
        assert found == (counter and rank.CGROUPS / counter) and rank.oom_kills(found) == (
            3 if counter else 0
        ), cgroups
    monkeypatch.setattr(rank, "OWN_CGROUPS", tmp_path / "nowhere")
    assert rank.oom_counter() is None and rank.oom_kills(tmp_path / "nowhere") == 0


def test_a_kill_that_the_kernel_counts_is_out_of_memory_except_after_a_signal_to_end(
    keep: Keep, tmp_path: Path
) -> None:
    own, counter = tmp_path / "cgroup", tmp_path / "memory.events"
    own.write_text("0::/")
    counter.write_text("oom_kill 1\n")
    begin = "from pathlib import Path; from launch.node import rank"
    begin += f"; rank.OWN_CGROUPS, rank.CGROUPS = Path({str(own)!r}), Path({str(tmp_path)!r})"
    torch_message = "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. "
    trace = f"echo 'Traceback (most recent call last):'; echo '{torch_message}'; exit 1"
    untouched = keep("bash", "-c", "kill -KILL $$", begin=begin)
    assert untouched.wait() == 137 and untouched.record["kind"] == "signal"
    wait = "echo ready; until [ -e go ]; do sleep 0.02; done;"
    ends = {
        "kill -KILL $$": ("memory", "killed by SIGKILL: out of memory (OOM kill)"),
        "exit 137": ("memory", "killed by SIGKILL: out of memory (OOM kill)"),
        trace: ("memory", f"{torch_message.rstrip('. ')}: out of memory (OOM kill)"),
        "kill -SEGV $$": ("signal", None),
        "exit 0": (None, None),
        "trap '' TERM; kill -TERM $PPID; sleep 0.5; kill -KILL $$": ("signal", None),
    }
    kept = {end: keep("bash", "-c", f"cd {tmp_path}; {wait} {end}", begin=begin) for end in ends}
    for one in kept.values():
        one.wait_for_text("ready")
    counter.write_text("oom_kill 2\n")
    (tmp_path / "go").touch()
    for end, one in kept.items():
        one.wait()
        assert (one.record["kind"], one.record["error"]) == ends[end], end
    (tmp_path / "go").unlink()
    begin += "; rank.OOM_SECONDS = rank.PATIENCE_SECONDS = 0.1"
    late = keep("bash", "-c", f"cd {tmp_path}; {wait} sleep 1; kill -KILL $$", begin=begin)
    late.wait_for_text("ready")
    counter.write_text("oom_kill 3\n")
    (tmp_path / "go").touch()
    assert late.wait() == 137 and late.record["kind"] == "signal", "a kill long before"


def fed(data: bytes, chunks: random.Random, tmp_path: Path, *hidden: str) -> str:
    """Return the log that a scribe writes for data in random chunks."""
    path = tmp_path / f"{chunks.random()}.log"
    scribe = Scribe(path, hidden, Findings())
    while data:
        size = chunks.choice((1, 2, 7, 50, 5000))
        scribe.feed(data[:size])
        data = data[size:]
    scribe.flush()
    assert scribe.lost == 0
    return path.read_text(errors="replace")


def test_lines_are_those_of_the_command_however_they_come(tmp_path: Path) -> None:
    words = ["", "step 1", "é✓", "1795296019.584 looks stamped", "tab\tand  spaces ", "x" * 3000]
    for seed in range(20):
        chance = random.Random(seed)
        lines = [chance.choice(words) for _ in range(chance.randrange(1, 40))]
        assert texts(fed("\n".join([*lines, ""]).encode(), chance, tmp_path)) == lines
    # The log keeps the last state of a progress bar. Bytes that are not text and lines without an
    # end do no harm.
    bar = fed(b"0%\r50%\r100%\nwindows\r\nopen\rend", random.Random(1), tmp_path)
    assert texts(bar) == ["100%", "windows", "end"]
    output = texts(
        fed(b"\xff\xfe\x00\n" + b"y" * 200_000 + b"\nafter\n", random.Random(2), tmp_path)
    )
    assert (
        output[-1] == "after"
        and sum(len(text) for text in output[1:-1]) == 200_000
        and len(output) <= 6
    )


def test_no_secret_passes_in_any_form_or_piece(tmp_path: Path, keep: Keep) -> None:
    secrets = [SECRET, 'with "quotes" and \\', "s3cr3t/value+of a key and more", "zürich-geheim"]
    forms = [
        *secrets,
        json.dumps(secrets[1])[1:-1],
        "s3cr3t%2Fvalue%2Bof%20a%20key",
        json.dumps(secrets[3])[1:-1],
    ]
    for seed in range(20):
        chance = random.Random(seed)
        data = "".join(chance.choice([*forms, "plain ", "\n", "key="]) for _ in range(60)).encode()
        log = fed(data, chance, tmp_path, *secrets)
        assert "***" in log and not any(form in log for form in forms) and "and more" not in log
    code = (
        "import os, sys; print('key', os.environ['WANDB_API_KEY'] == sys.argv[1], sys.argv[1]);"
        " raise ValueError(sys.argv[1])"
    )
    kept = keep(sys.executable, "-c", code, SECRET, WANDB_API_KEY=SECRET)
    assert kept.wait() == 1
    assert "key True ***" in kept.log and kept.record["error"] == "ValueError: ***"
    files = [path for path in kept.attempt.rglob("*") if path.is_file()]
    assert len(files) == 2 and not any(SECRET in path.read_text() for path in files)


def test_a_full_disk_does_not_stop_the_command_and_an_unfinished_line_is_seen(
    keep: Keep, tmp_path: Path
) -> None:
    (tmp_path / "0001" / "logs").mkdir(parents=True)
    rank_log(tmp_path / "0001", 3).symlink_to("/dev/full")
    full = keep(f"for i in range(9000): print(i)\nopen({str(tmp_path / 'done')!r}, 'w')")
    code = (
        "import sys, time; sys.stdout.write('waiting for the others ...'); sys.stdout.flush();"
        " time.sleep(60)"
    )
    unfinished = keep(code, begin="from launch.node import rank; rank.PATIENCE_SECONDS = 0.2")
    assert full.wait() == 0 and (tmp_path / "done").exists() and full.record["lines_lost"] == 9000
    unfinished.wait_for_text("waiting for the others ...")


def test_signals_reach_a_command_that_is_ready_and_do_not_end_one_that_is_not(
    keep: Keep, tmp_path: Path
) -> None:
    code = f"""
import os, signal, sys, time
print("starting")
while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.02)
signal.signal(signal.SIGUSR1, lambda *_: print("asked to save"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
print("ready")
while True: time.sleep(0.05)
"""
    kept = keep(code)
    kept.wait_for_text("starting")
    for number in (signal.SIGUSR1, signal.SIGUSR2) * 3:
        kept.process.send_signal(number)
    wait_for(lambda: "SIGUSR1" in kept.record["told"] and kept.dump)
    (tmp_path / "go").touch()
    kept.wait_for_text("ready")
    assert "asked to save" not in kept.log
    kept.process.send_signal(signal.SIGUSR1)
    kept.wait_for_text("asked to save")
    kept.process.send_signal(signal.SIGTERM)
    assert (
        kept.wait() == 1
        and "asked to end" in kept.log
        and list(kept.record["told"]) == ["SIGUSR1", "SIGTERM"]
    )


def test_when_the_parent_or_the_keeper_dies_nothing_lives_on(keep: Keep, tmp_path: Path) -> None:
    folder = str(tmp_path / "kept")
    words = f'[sys.executable, "-m", "launch.node.rank", {folder!r}, "--", "sleep", "300"]'
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0"}
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.Popen({words}).wait()"],
        env=environ,
    )
    try:
        wait_for(lambda: rank_record(Path(folder), 0).exists())
        record = json.loads(rank_record(Path(folder), 0).read_text())
        assert alive(record["pid"]) and alive(record["child"])
        os.kill(record["child"], signal.SIGSTOP)  # also ends a child that hangs
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not alive(record["pid"]) and not alive(record["child"]))
    kept = keep(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up');"
        " time.sleep(300)"
    )
    kept.wait_for_text("up")
    child = kept.record["child"]
    kept.process.kill()
    assert kept.wait() == -9
    wait_for(lambda: not alive(child))
    assert kept.record["ended"] is None


def test_what_the_command_leaves_running_is_ended(keep: Keep, tmp_path: Path) -> None:
    pid = str(tmp_path / "pid")
    inner = (
        f"import os, time; print('left'); open({pid!r}, 'w').write(str(os.getpid()));"
        " time.sleep(300)"
    )
    between = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}],"
        " start_new_session=True)"
    )
    wait = f"while not os.path.exists({pid!r}) or not open({pid!r}).read(): time.sleep(0.02)"
    kept = keep(
        "import os, subprocess, sys, time\nsubprocess.run([sys.executable, '-c',"
        f" {between!r}])\n{wait}"
    )
    assert kept.wait() == 0 and not alive(int(Path(pid).read_text()))
    assert (
        "left" in kept.log and "[launch] ended 1 process that the command left running" in kept.log
    )
    assert kept.record["last_line"] == "left"


def test_usr2_dumps_the_stacks_and_the_command_continues(keep: Keep, tmp_path: Path) -> None:
    """For commands with a handler, without one, and stopped."""
    os.mkfifo(go := tmp_path / "go")
    waits = (
        f"{HANDLES}def waits_for_peers(secret):\n  print('up')\n  open({str(go)!r})\n  print('went"
        " on', secret)\n"
    )
    waits += f"waits_for_peers({SECRET!r})"
    kept = keep(waits, MY_TOKEN=SECRET)
    bare = keep(
        "from signal import *; signal(SIGUSR2, SIG_DFL)\ndef sits(): print('up'); pause()\nsits()"
    )
    stopped = keep(f"{HANDLES}def sits(): print('up'); time.sleep(300)\nsits()")
    for one in (kept, bare, stopped):
        one.wait_for_text("up")
    os.kill(stopped.record["child"], signal.SIGSTOP)
    states = [(kept, "S"), (bare, "S"), (stopped, "T")]
    wait_for(lambda: all(state_of(one.record["child"]) == state for one, state in states))
    for one in (kept, bare, stopped):
        one.process.send_signal(signal.SIGUSR2)
    wait_for(lambda: "SIGUSR2 was sent" in kept.dump and "most recent call first" in kept.log)
    assert stacks.stopped_ranks(kept.attempt / "dumps") == []
    assert (
        "waits_for_peers" in kept.dump and "S (sleeping)" in kept.dump and SECRET not in kept.dump
    )
    wait_for(lambda: "sits" in bare.dump and "sits" in stopped.dump)
    assert "SIGUSR2 was sent" not in bare.dump and alive(bare.record["child"])
    assert "T (stopped)" in stopped.dump and stacks.stopped_ranks(stopped.attempt / "dumps") == [3]
    go.write_text("")
    assert kept.wait() == 0 and "went on ***" in kept.log and "in waits_for_peers" in kept.log


def test_nccls_flight_recorder_is_requested_and_set_up_where_nobody_did_and_there_may_be_gpus(
    keep: Keep, tmp_path: Path
) -> None:
    """torch warns about older names of its variables in every rank's log."""
    code = """
import os
prefix = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
path = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
os.mkfifo(path)
pipe = os.open(path, os.O_RDWR)  # as its own writer it waits for a byte
print("pipe", path)
os.read(pipe, 1)
open(prefix + os.environ["RANK"], "w").write("recorded")
"""
    kept = keep(code)
    kept.wait_for_text("pipe")
    path = Path(kept.log.split("pipe ")[1].split()[0])
    kept.process.send_signal(signal.SIGUSR2)
    assert kept.wait() == 0 and not path.exists()
    assert kept.file("flight/rank_3") == "recorded" and "flight recorder writes" in kept.dump
    show = (
        'echo "$TORCH_FR_DUMP_TEMP_FILE $TORCH_FR_BUFFER_SIZE $TORCH_NCCL_TRACE_BUFFER_SIZE'
        ' $TORCH_NCCL_DEBUG_INFO_TEMP_FILE"'
    )
    mine = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "mine" / "fr_")}
    own = keep("bash", "-c", show, CUDA_VISIBLE_DEVICES="-1", **mine)
    old = keep("bash", "-c", show, CUDA_VISIBLE_DEVICES="0,1")
    assert (
        own.wait() == old.wait() == 0
        and texts(own.log) == [f"{tmp_path}/mine/fr_ 2000  "]
        and (tmp_path / "mine").is_dir()
    )
    assert texts(old.log) == [f"{old.attempt}/flight/rank_ 2000 2000 {old.attempt}/flight/rank_"]
