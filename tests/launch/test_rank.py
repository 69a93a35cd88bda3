"""launch.node.rank: a rank's keeper: real processes that exit, crash, hang, are killed, leave children behind, and try to tell secrets."""

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
from launch.node import stacks
from launch.node.failures import Findings
from launch.node.logs import Scribe

ROOT = Path(__file__).resolve().parents[2]
SECRET = "s3cr3t/value+of a key"
HANDLES = "import faulthandler, signal, sys, time; faulthandler.register(signal.SIGUSR2, all_threads=True)\n"


class Kept:
    """A command under its keeper, in an attempt folder of its own."""

    def __init__(self, attempt: Path, *command: str, environment: Mapping[str, str]) -> None:
        self.attempt, self.rank = attempt, 3
        environ = {**os.environ, "RANK": "3", "LOCAL_RANK": "1", "PYTHONPATH": str(ROOT), **environment}
        argv = [sys.executable, "-m", "launch.node.rank", str(attempt), "--", *command]
        # As torchrun does: a session of its own, and USR1, USR2 ignored from the start.
        self.process = subprocess.Popen(
            argv, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=ignore_users
        )

    def wait(self, seconds: float = 30) -> int:
        """The keeper's exit code."""
        self.stderr = self.process.communicate(timeout=seconds)[1]
        return self.process.returncode

    def record(self) -> dict[str, Any]:
        """The rank's record."""
        value = json.loads(rank_record(self.attempt, self.rank).read_text())
        assert isinstance(value, dict)
        return value

    def log(self) -> str:
        """The rank's log, stamps and all."""
        path = rank_log(self.attempt, self.rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, text: str) -> None:
        """Wait until the log has a text."""
        until(lambda: text in self.log(), f"{text!r} in the log")

    def child(self) -> int:
        """The command's pid."""
        return int(self.record()["child"])


def ignore_users() -> None:
    """What the batch script's ``trap '' USR1 USR2`` does."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def until(condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def state_of(pid: int) -> str | None:
    """A process's state letter, None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    return state_of(pid) in (None, "Z", "X")


def texts(log: str) -> list[str]:
    """The log's lines without stamps; the stamps are checked."""
    pairs = [line.split(" ", 1) for line in log.splitlines()]
    stamps = [float(stamp) for stamp, _ in pairs]
    assert stamps == sorted(stamps) and all(abs(stamp - time.time()) < 600 for stamp in stamps)
    return [text for _, text in pairs]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    """Starts commands under keepers; what is left at the end is killed."""
    started: list[Kept] = []

    def start(*command: str, **environment: str) -> Kept:
        started.append(Kept(tmp_path / f"{len(started) + 1:04}", *command, environment=environment))
        return started[-1]

    yield start
    for kept in started:
        if kept.process.poll() is None:
            os.killpg(kept.process.pid, signal.SIGKILL)
        kept.process.communicate()


def python(keep: Callable[..., Kept], code: str, **environment: str) -> Kept:
    """A Python program under a keeper."""
    return keep(sys.executable, "-c", code, **environment)


# --- how it ends -----------------------------------------------------------------------------------------------------------------


def test_the_keeper_ends_as_the_command_does(keep: Callable[..., Kept]) -> None:
    ends = {"exit 0": 0, "exit 1": 1, "exit 2": 2, "exit 75": 75, "kill -KILL $$": 137, "kill -TERM $$": 143, "kill -SEGV $$": 139}
    ends["kill -40 $$"] = 168  # a real-time signal, for which Python has no name
    kept = {end: keep("bash", "-c", end) for end in ends}
    assert {end: one.wait() for end, one in kept.items()} == ends
    for end, one in kept.items():
        record = one.record()
        assert (record["rank"], record["local_rank"], record["exit"], record["told"]) == (3, 1, ends[end], {}), end
        assert record["signal"] == ("signal 40" if "40" in end else f"SIG{end.split()[1][1:]}" if "kill" in end else None)
        assert record["kind"] == {0: None, 2: "config", 75: "busy", 1: "exit"}.get(ends[end], "signal")
        assert record["pid"] == one.process.pid and record["started"] <= record["ended"] <= time.time()


def test_a_running_rank_has_a_record_without_an_end(keep: Callable[..., Kept]) -> None:
    kept = python(keep, "import time; print('up'); time.sleep(60)", SLURMD_NODENAME="node7")
    kept.says("up")
    record = kept.record()
    assert record["ended"] is None and record["exit"] is None and record["host"] == "node7" and not gone(record["child"])


def test_the_error_is_the_last_tracebacks_last_line(keep: Callable[..., Kept]) -> None:
    code = """
def inner(): {}["step"]
try: inner()
except KeyError as error: raise RuntimeError("no step\\nsecond line") from error
"""
    kept = python(keep, code)
    assert kept.wait() == 1
    record = kept.record()
    assert record["error"] == "RuntimeError: no step" and record["kind"] == "exit"
    assert record["traceback"].startswith("Traceback") and "KeyError: 'step'" in record["traceback"] and "in inner" in record["traceback"]
    assert record["started"] < record["error_time"] <= record["ended"]


def test_a_command_that_cannot_be_started_says_so(keep: Callable[..., Kept], tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a program")
    missing, data = keep("/nowhere/python"), keep(str(tmp_path / "data"))
    assert (missing.wait(), data.wait()) == (127, 126)
    assert missing.record()["error"] == "cannot start /nowhere/python: No such file or directory"
    assert "cannot start /nowhere/python" in missing.log() and "cannot start /nowhere/python" in missing.stderr
    assert "Permission denied" in data.record()["error"]


@pytest.mark.parametrize("words", [[], ["folder"], ["folder", "true"], ["folder", "--"]])
def test_a_wrong_command_line_is_refused_in_one_line(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "launch.node.rank", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("launch.node.rank: error: usage:") and done.stderr.count("\n") == 1


# --- what it says ----------------------------------------------------------------------------------------------------------------


def fed(data: bytes, chunks: random.Random, tmp_path: Path, *hidden: str) -> str:
    """The log that a scribe makes of data that comes in pieces."""
    path = tmp_path / f"{chunks.random()}.log"
    scribe = Scribe(path, hidden, Findings())
    while data:
        size = chunks.choice((1, 2, 7, 50, 5000))
        scribe.feed(data[:size])
        data = data[size:]
    scribe.flush()
    assert scribe.lost == 0
    return path.read_text(errors="replace")


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_those_of_the_command_however_they_come(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    words = ["", "step 1", "é✓", "1795296019.584 looks stamped", "tab\tand  spaces ", "x" * 3000]
    lines = [chance.choice(words) for _ in range(chance.randrange(1, 40))]
    assert texts(fed("\n".join([*lines, ""]).encode(), chance, tmp_path)) == lines


def test_a_progress_bar_leaves_its_last_state(tmp_path: Path) -> None:
    assert texts(fed(b"0%\r50%\r100%\nwindows\r\nopen\rend", random.Random(1), tmp_path)) == ["100%", "windows", "end"]


def test_bytes_that_are_no_text_and_lines_without_end_do_no_harm(tmp_path: Path) -> None:
    log = fed(b"\xff\xfe\x00\n" + b"y" * 200_000 + b"\nafter\n", random.Random(2), tmp_path)
    said = texts(log)
    assert said[-1] == "after" and sum(len(text) for text in said[1:-1]) == 200_000 and len(said) <= 6


@pytest.mark.parametrize("seed", range(20))
def test_no_secret_passes_in_any_form_or_piece(seed: int, tmp_path: Path) -> None:
    secrets = [SECRET, 'with "quotes" and \\', "s3cr3t/value+of a key and more", "zürich-geheim"]
    forms = [*secrets, json.dumps(secrets[1])[1:-1], "s3cr3t%2Fvalue%2Bof%20a%20key", json.dumps(secrets[3])[1:-1]]
    chance = random.Random(seed)
    data = "".join(chance.choice([*forms, "plain ", "\n", "key="]) for _ in range(60)).encode()
    log = fed(data, chance, tmp_path, *secrets)
    assert "***" in log and not any(form in log for form in forms) and "and more" not in log


def test_secrets_reach_the_command_and_nothing_on_disk(keep: Callable[..., Kept]) -> None:
    code = "import os, sys; print('key', os.environ['WANDB_API_KEY'] == sys.argv[1], sys.argv[1]); raise ValueError(sys.argv[1])"
    kept = keep(sys.executable, "-c", code, SECRET, WANDB_API_KEY=SECRET)
    assert kept.wait() == 1
    assert "key True ***" in kept.log() and kept.record()["error"] == "ValueError: ***"
    files = [path for path in kept.attempt.rglob("*") if path.is_file()]
    assert len(files) == 2 and not any(SECRET in path.read_text() for path in files)


def test_a_full_disk_does_not_stop_the_command(keep: Callable[..., Kept], tmp_path: Path) -> None:
    (tmp_path / "0001" / "logs").mkdir(parents=True)
    rank_log(tmp_path / "0001", 3).symlink_to("/dev/full")
    kept = python(keep, f"for i in range(9000): print(i)\nopen({str(tmp_path / 'done')!r}, 'w')")
    assert kept.wait() == 0 and (tmp_path / "done").exists() and kept.record()["lines_lost"] == 9000


def test_an_unfinished_line_is_seen_while_the_command_goes_on(keep: Callable[..., Kept]) -> None:
    kept = python(keep, "import sys, time; sys.stdout.write('waiting for the others ...'); sys.stdout.flush(); time.sleep(60)")
    kept.says("waiting for the others ...")


# --- signals ---------------------------------------------------------------------------------------------------------------------


def test_signals_reach_a_command_that_is_ready_and_do_not_end_one_that_is_not(keep: Callable[..., Kept]) -> None:
    code = """
import signal, sys, time
print("starting"); sys.stdin.read(); time.sleep(1)
signal.signal(signal.SIGUSR1, lambda *_: print("asked to save"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
print("ready")
while True: time.sleep(0.05)
"""
    kept = python(keep, code)
    kept.says("starting")
    for _ in range(5):
        kept.process.send_signal(signal.SIGUSR1)
        kept.process.send_signal(signal.SIGUSR2)
        time.sleep(0.02)
    kept.says("ready")
    assert "asked to save" not in kept.log()
    kept.process.send_signal(signal.SIGUSR1)
    kept.says("asked to save")
    until(lambda: "SIGUSR1" in kept.record()["told"], "the record of the signal")
    kept.process.send_signal(signal.SIGTERM)
    assert kept.wait() == 1 and "asked to end" in kept.log()
    assert list(kept.record()["told"]) == ["SIGUSR1", "SIGTERM"]


def test_when_the_parent_dies_nothing_lives_on(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
keeper = subprocess.Popen([sys.executable, "-m", "launch.node.rank", {str(tmp_path)!r}, "--", "sleep", "300"])
time.sleep(300)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0"}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environ)
    try:
        until(lambda: rank_record(tmp_path, 0).exists(), "a record")
        record = json.loads(rank_record(tmp_path, 0).read_text())
        assert not gone(record["pid"]) and not gone(record["child"])
        os.kill(record["child"], signal.SIGSTOP)  # one that hangs, too
    finally:
        parent.kill()
        parent.wait()
    until(lambda: gone(record["pid"]) and gone(record["child"]), "the end of keeper and command", 5)


def test_when_the_keeper_is_killed_the_command_dies(keep: Callable[..., Kept]) -> None:
    kept = python(keep, "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(300)")
    kept.says("up")
    child = kept.child()
    kept.process.kill()
    assert kept.wait() == -9
    until(lambda: gone(child), "the command's end", 5)
    assert kept.record()["ended"] is None


def test_what_the_command_leaves_running_is_ended(keep: Callable[..., Kept], tmp_path: Path) -> None:
    pid = str(tmp_path / "pid")
    inner = f"import os, time; open({pid!r}, 'w').write(str(os.getpid())); print('left'); time.sleep(300)"
    between = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)"
    code = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {between!r}])
while not os.path.exists({pid!r}): time.sleep(0.02)
time.sleep(0.3)
"""
    kept = python(keep, code)
    assert kept.wait() == 0
    assert gone(int(Path(pid).read_text()))
    assert "left" in kept.log() and "[launch] ended 1 process that the command left running" in kept.log()
    assert kept.record()["last_line"] == "left"


# --- stacks ----------------------------------------------------------------------------------------------------------------------


def dumps(kept: Kept) -> str:
    """The rank's dump."""
    path = kept.attempt / "dumps" / "rank_00003.txt"
    return path.read_text() if path.exists() else ""


def test_usr2_dumps_the_stacks_and_the_command_goes_on(keep: Callable[..., Kept]) -> None:
    code = f"{HANDLES}def waits_for_peers(secret):\n  print('up'); time.sleep(4); print('went on', secret)\nwaits_for_peers({SECRET!r})"
    kept = python(keep, code, MY_TOKEN=SECRET)
    kept.says("up")
    kept.process.send_signal(signal.SIGUSR2)
    until(lambda: "SIGUSR2 was sent" in dumps(kept), "a dump")
    assert stacks.stopped_ranks(kept.attempt / "dumps") == []
    assert "waits_for_peers" in dumps(kept) and "S (sleeping)" in dumps(kept) and SECRET not in dumps(kept)
    assert kept.wait() == 0 and "went on ***" in kept.log()
    assert "most recent call first" in kept.log() and "in waits_for_peers" in kept.log()


def test_a_command_without_a_handler_is_dumped_and_lives(keep: Callable[..., Kept]) -> None:
    kept = python(keep, "from signal import *; signal(SIGUSR2, SIG_DFL)\ndef sits(): print('up'); pause()\nsits()")
    kept.says("up")
    kept.process.send_signal(signal.SIGUSR2)
    until(lambda: "sits" in dumps(kept), "a dump")
    assert "SIGUSR2 was sent" not in dumps(kept) and not gone(kept.child())


def test_a_stopped_command_is_dumped_too(keep: Callable[..., Kept]) -> None:
    kept = python(keep, f"{HANDLES}def sits(): print('up'); time.sleep(300)\nsits()")
    kept.says("up")
    os.kill(kept.child(), signal.SIGSTOP)
    until(lambda: state_of(kept.child()) == "T", "the stop")
    kept.process.send_signal(signal.SIGUSR2)
    until(lambda: "sits" in dumps(kept), "a dump")
    assert "T (stopped)" in dumps(kept) and state_of(kept.child()) == "T"
    assert stacks.stopped_ranks(kept.attempt / "dumps") == [3]


def test_nccls_flight_recorder_is_asked_and_has_its_folders(keep: Callable[..., Kept]) -> None:
    code = """
import os, time
prefix = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
path = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
os.mkfifo(path)
pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
print("pipe", path)
while not os.read(pipe, 1): time.sleep(0.05)
open(prefix + os.environ["RANK"], "w").write("recorded")
"""
    kept = python(keep, code)
    kept.says("pipe")
    path = Path(kept.log().split("pipe ")[1].split()[0])
    kept.process.send_signal(signal.SIGUSR2)
    assert kept.wait() == 0
    assert (kept.attempt / "flight" / "rank_3").read_text() == "recorded" and "flight recorder writes" in dumps(kept)
    assert not path.exists()


@pytest.mark.parametrize(("visible", "older"), [("0,1", True), ("", False), ("-1", False)])
def test_older_names_of_the_recorder_are_set_where_there_may_be_gpus(
    visible: str, older: bool, keep: Callable[..., Kept], tmp_path: Path
) -> None:
    """torch warns of them in every rank's log."""
    names = ["TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    kept = python(keep, f"import os; print([os.environ.get(name) for name in {names}])", CUDA_VISIBLE_DEVICES=visible)
    assert kept.wait() == 0
    assert texts(kept.log()) == [str(["2000", f"{kept.attempt}/flight/rank_"] if older else [None, None])]


def test_a_rank_without_gpus_gets_no_warning_of_torch(keep: Callable[..., Kept], tmp_path: Path) -> None:
    code = f"""
import torch.distributed as d
d.init_process_group("gloo", store=d.FileStore("{tmp_path / "store"}", 1), rank=0, world_size=1)
d.barrier()
d.destroy_process_group()
"""
    kept = python(keep, code, CUDA_VISIBLE_DEVICES="")
    assert kept.wait(120) == 0 and texts(kept.log()) == []


def test_what_the_user_set_is_kept(keep: Callable[..., Kept], tmp_path: Path) -> None:
    code = "import os; print(os.environ['TORCH_FR_DUMP_TEMP_FILE'], os.environ['PYTHONUNBUFFERED'], os.environ['TORCH_FR_BUFFER_SIZE'])"
    kept = python(keep, code, TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "mine" / "fr_"), PYTHONUNBUFFERED="0")
    assert kept.wait() == 0 and texts(kept.log()) == [f"{tmp_path}/mine/fr_ 0 2000"] and (tmp_path / "mine").is_dir()
