"""``python -m launch.node.checks [FOLDER]``: is this node fit for a run? Standard library alone, nvidia-smi, and a matmul in the
ranks' interpreter.

Runs on every node before an attempt, from the snapshot, and writes FOLDER/NODE.json: {"node", "ok", "faults", "warnings", "facts", "time"}.
Each thing is looked at on a thread of its own with a time limit: a driver or a file system that hangs is a fault by name, not a wait.
`check_command` makes its command line from a profile, `read_reports` reads what came back and names the nodes that did not answer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launch.job import last_lines, read_json, write_json
from launch.node import hardware

REMEDY = "tell the administrators, and meanwhile name it in slurm.exclude"
NO_ANSWER = "did not answer the health check"
SMI_SECONDS = 60.0  # for nvidia-smi's answers; without its persistence mode each takes seconds
RELEASE_SECONDS = 20.0  # how long the memory of ranks that were just ended may still be in use
SLOW = 0.5  # of the node's median speed: a GPU below it is a fault
SHARE = 0.85  # of health.timeout_seconds for the checks themselves: the rest is for starting them
OF_GPUS = 0.85  # of that time for all that is done with the GPUs, so that what was found is told when a later part hangs


@dataclass(frozen=True)
class Check:
    """A line of `launch doctor`: how something is, and what to do where it is not well."""

    level: str  # ok | absent: not there, and training does without | warning | FAILED
    name: str
    text: str
    remedy: str = ""


@dataclass
class Findings:
    """What a check, or all of them, found: lines, and facts by name."""

    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Findings) -> None:
        """Take in another's."""
        self.faults += other.faults
        self.warnings += other.warnings
        self.facts |= other.facts


@dataclass(frozen=True)
class Report:
    """A node's findings. Unfit when there is a fault; a warning does not count."""

    node: str
    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    time: float = 0.0  # unix time, by the node's clock, at which it was written

    @property
    def ok(self) -> bool:
        """Whether the node is fit."""
        return not self.faults

    def checks(self) -> Iterator[Check]:
        """The findings for `launch doctor`."""
        name = f"node {self.node}"
        yield from (Check("FAILED", name, fault, REMEDY) for fault in self.faults)
        yield from (Check("warning", name, warning) for warning in self.warnings)
        if self.ok:
            yield Check("ok", name, ", ".join(self._facts()))

    def _facts(self) -> Iterator[str]:
        known = self.facts
        if gpus := known.get("gpus"):
            yield f"{len(gpus)} x {gpus[0].rpartition(' ')[0]}, driver {known.get('driver')}"
        if speeds := [speed for speed in known.get("tflops") or () if speed]:
            yield f"{min(speeds):.0f} to {max(speeds):.0f} TFLOP/s in bfloat16"
        if "free_memory_gb" in known:
            yield f"{known['cpus']} CPUs, {known['free_memory_gb']:.0f} of {known['memory_gb']:.0f} GB of memory free"
        if ports := known.get("ports"):
            yield f"{sum(state == 'ACTIVE' for state in ports.values())} of {len(ports)} network ports active"


# --- for those who run it --------------------------------------------------------------------------------------------------------


def check_command(
    profile: Mapping[str, Any],
    out: Path | str,
    *,
    python: str | None = None,
    host_python: str = sys.executable,
    folders: Sequence[str] = (),
) -> list[str]:
    """The command to run once on each node, the same on all; its report lands in the folder `out` as NODE.json, and it ends with 0.

    profile: `Profile.as_json()`. python: the ranks' interpreter, for the matmul (None: none); host_python: the check's own.
    folders: more folders that the node must be able to write, beside the profile's paths.shared. PYTHONPATH must lead to `launch`.
    It takes health.timeout_seconds at most; whoever runs it ends it then, and calls `read_reports`.
    """
    health, nodes = profile.get("health") or {}, profile.get("nodes") or {}
    shared = [*((profile.get("paths") or {}).get("shared") or ()), *folders]
    seconds = float(health.get("timeout_seconds") or 180)
    command = [host_python, "-m", "launch.node.checks", str(out), f"--seconds={SHARE * seconds:g}"]
    command += [f"--{name.replace('_', '-')}={float(health.get(name) or 0):g}" for name in ("free_memory_gb", "free_disk_gb")]
    command.append(f"--expect-gpus={int(nodes.get('gpus') or 0)}")
    if python:
        command += [f"--python={python}", *(["--matmul"] if nodes.get("gpus") and health.get("matmul", True) else [])]
    contained = (profile.get("container") or {}).get("runtime", "none") != "none"
    if nodes.get("numa", "none") != "none" and not contained:
        command.append(f"--numa={nodes['numa']}")
    return [*command, *(f"--folder={folder}" for folder in dict.fromkeys(map(str, shared)))]


def read_report(path: Path) -> Report | None:
    """A node's report, or None where there is none, or not a whole one."""
    raw = read_json(path)
    try:
        faults, warnings = (tuple(map(str, raw[key])) for key in ("faults", "warnings"))
        return Report(str(raw["node"]), faults, warnings, dict(raw["facts"]), float(raw["time"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def read_reports(folder: Path, nodes: Sequence[str], began: float | None = None, skew_seconds: float = 0) -> dict[str, Report]:
    """The reports of these nodes, in their order; a node that left none has that as its fault, with NODE.log's last line.

    began: unix time, here, at which the check was started. With skew_seconds > 0 a node whose clock says that it answered before that,
    or later than now, by more than that much, has a fault too.
    """
    reports = {}
    for node in nodes:
        why = last_lines(folder / f"{node}.log") or ["it hangs, or cannot see this folder"]
        report = read_report(folder / f"{node}.json") or Report(node, (f"{NO_ANSWER}: {why[0]}",))
        if began is not None and skew_seconds > 0 and report.time:
            off = min(report.time - began, 0) or max(report.time - time.time(), 0)
            if abs(off) > skew_seconds:
                fault = f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}, at least: is it synchronised (chrony, NTP)?"
                report = Report(node, (*report.faults, fault), report.warnings, report.facts, report.time)
        reports[node] = report
    return reports


# --- on the node -----------------------------------------------------------------------------------------------------------------


def node_name() -> str:
    """The node's name as Slurm knows it; elsewhere the host's, without its domain."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def look(arguments: argparse.Namespace) -> Findings:
    """Run all checks at once: what they found, in their order, within arguments.seconds."""
    deadline = time.monotonic() + arguments.seconds
    checks: dict[str, Callable[[], Findings]] = {"memory": partial(memory, arguments.free_memory_gb)}
    if arguments.python:
        checks["the interpreter"] = partial(interpreter, arguments.python)
    if arguments.numa:
        checks["numactl"] = partial(numactl, arguments.numa)
    if arguments.expect_gpus:
        gpu = partial(
            graphics, arguments.expect_gpus, arguments.python if arguments.matmul else None, deadline - (1 - OF_GPUS) * arguments.seconds
        )
        checks |= {"links": links, "kernel log": kernel_log, "the GPUs": gpu}
    checks |= {f"folder {name}": partial(folder, name, arguments.free_disk_gb) for name in dict.fromkeys(("/tmp", *arguments.folder))}
    found: dict[str, Findings] = {}

    def run(name: str, check: Callable[[], Findings]) -> None:
        try:
            found[name] = check()
        except Exception as error:
            found[name] = Findings([f"the check of {name} failed: {type(error).__name__}: {error}"])

    threads = {name: threading.Thread(target=run, args=(name, check), daemon=True) for name, check in checks.items()}
    for thread in threads.values():
        thread.start()
    whole = Findings()
    for name, thread in threads.items():
        thread.join(max(deadline - time.monotonic(), 0.1))
        whole.add(found.get(name) or Findings([f"{name}: no answer in {arguments.seconds:.0f} s: it hangs"]))
    return whole


def memory(least_gb: float) -> Findings:
    """Free memory against the least that is wanted, in GB; /dev/shm, through which NCCL and data workers talk."""
    free, total, shm = hardware.memory_gb()
    found = Findings(facts={"free_memory_gb": free, "memory_gb": total, "cpus": len(os.sched_getaffinity(0)), "shm_gb": shm})
    if free < least_gb:
        found.faults.append(f"{free:.1f} GB of memory are free, of {total:.1f}; {least_gb:g} are wanted: what else runs there?")
    if shm is not None and shm < 1:
        found.warnings.append(f"/dev/shm has {shm:.2f} GB free: NCCL and data workers need more (container option --shm-size, or clean it)")
    return found


def folder(name: str, least_gb: float) -> Findings:
    """Whether a folder can be written and read back here, and has room."""
    try:
        free = hardware.probe_folder(Path(name))
    except OSError as error:
        return Findings([f"{name}: cannot be written here: {error.strerror or error} (is it mounted?)"])
    found = Findings(facts={f"free_gb {name}": free})
    if free < least_gb:
        found.faults.append(f"{name}: {free:.2f} GB free; {least_gb:g} are wanted")
    return found


def startable(python: str) -> bool:
    """Whether there is such a program here."""
    return shutil.which(python) is not None


def interpreter(python: str) -> Findings:
    """Whether the ranks' interpreter is here."""
    return Findings([] if startable(python) else [f"{python}: there is no such program here (is its file system mounted?)"])


def numactl(numa: str) -> Findings:
    """Whether the program is here with which torchrun binds ranks to CPUs."""
    remedy = "install it on the nodes, or set nodes.numa: none"
    return Findings([] if startable("numactl") else [f"numactl: nodes.numa = {numa} needs this program, and it is not on PATH: {remedy}"])


def links() -> Findings:
    """InfiniBand, RoCE and EFA ports by their state; one that is down is a warning: it may never have been wired."""
    ports = hardware.network_ports()
    down = [f"network port {name} is {state}" for name, state in ports.items() if state != "ACTIVE"]
    return Findings(warnings=down, facts={"ports": ports} if ports else {})


def kernel_log() -> Findings:
    """The driver's errors (Xid) in the kernel's log of the last hour, where it may be read: those that mean broken hardware are faults."""
    errors = hardware.recent_xids()
    if errors is None:
        return Findings()
    return Findings([e.text for e in errors if e.broken], [e.text for e in errors if not e.broken])


def graphics(expected: int, matmul: str | None, deadline: float) -> Findings:
    """The GPUs: how many, what nvidia-smi says of each, a product on each, and what holds down their clocks under it."""
    try:
        survey = hardware.survey(min(SMI_SECONDS, deadline - time.monotonic()))
    except hardware.SmiError as error:
        return Findings([str(error)])
    found = Findings([f"nvidia-smi: {line}" for line in survey.complaints])
    mine = hardware.chosen(survey.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if len(mine) < expected:
        found.faults.append(f"{len(mine)} GPUs are visible, the profile says {expected}")
    busy = [fault for gpu in mine for fault in gpu.busy()]
    patience = time.monotonic() + min(RELEASE_SECONDS, (deadline - time.monotonic()) / 4)
    while busy and time.monotonic() < patience:
        time.sleep(1)
        survey = hardware.survey(min(SMI_SECONDS, deadline - time.monotonic()))
        mine = hardware.chosen(survey.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        busy = [fault for gpu in mine for fault in gpu.busy()]
    found.faults += [*(fault for gpu in mine for fault in gpu.faults()), *busy]
    found.facts = {"gpus": [f"{gpu.name} {gpu.bus}" for gpu in mine], "driver": mine[0].driver if mine else None}
    if matmul and mine and startable(matmul):
        found.add(products(mine, matmul, deadline - time.monotonic()))
        if (left := deadline - time.monotonic()) > 1:
            hardware.throttle(mine, min(SMI_SECONDS, left))
    for gpu in mine:
        faults, warnings = gpu.throttling()
        found.add(Findings(faults, warnings))
    return found


def products(mine: Sequence[hardware.Gpu], python: str, seconds: float) -> Findings:
    """`launch.node.measure` on all GPUs at once, a process each: which fail, are wrong, hang, or are slow beside the others."""
    answers: dict[int, hardware.Answer] = {}

    def run(place: int, gpu: hardware.Gpu) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
        try:
            answers[place] = hardware.ask([python, "-m", "launch.node.measure", "product", "cuda:0"], seconds, environment)
        except OSError as error:
            answers[place] = hardware.Answer(127, "", f"{python}: {error.strerror}")

    threads = [threading.Thread(target=run, args=(place, gpu), daemon=True) for place, gpu in enumerate(mine)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, speeds = Findings(), {}
    for place, gpu in enumerate(mine):
        result = _result(answers[place])
        if fault := result.get("error") or (f"{result['wrong']} entries of a product are wrong" if result.get("wrong") else None):
            found.faults.append(f"GPU {gpu.index} ({gpu.bus}): {fault}")
        else:
            speeds[place] = float(result.get("tflops") or 0)
    median = sorted(speeds.values())[len(speeds) // 2] if speeds else 0
    for place, speed in speeds.items():
        if speed < SLOW * median:
            found.faults.append(
                f"GPU {mine[place].index} ({mine[place].bus}): {speed:.0f} TFLOP/s in bfloat16, its neighbours {median:.0f}"
            )
    found.facts["tflops"] = [speeds.get(place) for place in range(len(mine))]
    return found


def _result(answer: hardware.Answer) -> dict[str, Any]:
    """What `launch.node.measure` printed, or an error that says how it ended."""
    if answer.code is None:
        return {"error": "a product did not end in time: it hangs"}
    said = (answer.output.strip() or "null").splitlines()[-1]
    try:
        result = json.loads(said)
    except ValueError:
        result = None
    if isinstance(result, dict):
        return result
    return {"error": f"a product ended with {answer.code}: {hardware.last_line(answer.errors) or 'it says nothing'}"}


def main(argv: list[str] | None = None) -> int:
    """Look, write the report: 0. Without FOLDER print it: 1 where there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m launch.node.checks", description="Is this node fit for a run?", allow_abbrev=False)
    parser.add_argument("out", nargs="?", metavar="FOLDER", help="write FOLDER/NODE.json (default: print it)")
    parser.add_argument("--expect-gpus", type=int, default=0, metavar="N", help="GPUs that must be visible; 0: look at none")
    parser.add_argument("--python", metavar="PATH", help="the ranks' interpreter, which must be there")
    parser.add_argument("--numa", metavar="WAY", help="ranks are bound to CPUs so, which takes numactl")
    parser.add_argument("--matmul", action="store_true", help="multiply matrices on every GPU in that interpreter, which has torch")
    parser.add_argument("--free-memory-gb", type=float, default=0, metavar="GB", help="least free memory")
    parser.add_argument("--free-disk-gb", type=float, default=0, metavar="GB", help="least free space in each folder")
    parser.add_argument("--folder", action="append", default=[], metavar="PATH", help="a folder that must be writable; may be given often")
    parser.add_argument("--seconds", type=float, default=150, metavar="S", help="for all of it (default: %(default)s)")
    arguments = parser.parse_args(argv)
    found = look(arguments)
    report = {"node": node_name(), "ok": not found.faults, **asdict(found), "time": round(time.time(), 3)}
    if arguments.out is None:
        print(json.dumps(report, indent=1))
    else:
        write_json(Path(arguments.out) / f"{report['node']}.json", report)
    sys.stdout.flush()
    return 0 if arguments.out is not None or report["ok"] else 1


if __name__ == "__main__":
    os._exit(main())  # a thread that hangs in the kernel must not keep the process
