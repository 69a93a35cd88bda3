"""``python -m launch.node.checks FOLDER WANTED``: check that this node is fit for a run.

The check runs on every node before an attempt, from the snapshot. WANTED is JSON with the
requirements. The check writes FOLDER/NODE.json: {"node", "ok", "faults", "warnings", "facts",
"time"}. Each single check runs in its own thread with a time limit: a driver or a file system that
hangs is reported as a fault and blocks no other check.

`check_command` makes the command line from a profile. `read_reports` reads the reports and names
the nodes that did not answer. Uses only the standard library; nvidia-smi and a matrix product run
in separate processes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launch.job import last_lines, read_json, write_json
from launch.node import hardware

REMEDY = "report it to the administrators, and meanwhile add it to slurm.exclude"
NO_ANSWER = "did not answer the health check"
# limit for nvidia-smi; without its persistence mode each call takes seconds
SMI_SECONDS = 60.0
# how long the memory of ranks that just ended may still be in use
RELEASE_SECONDS = 20.0
SLOW = 0.5  # fraction of the node's median speed: a slower GPU is a fault
# fraction of health.timeout_seconds for the checks; the rest is for starting them
SHARE = 0.85
# fraction of that time for the GPU checks, so that findings are reported if a later part hangs
OF_GPUS = 0.85


@dataclass(frozen=True)
class Check:
    """A line of `launch doctor`: a result and, if needed, the remedy."""

    level: str  # ok | absent: missing, and training does not need it | warning | FAILED
    name: str
    text: str
    remedy: str = ""


@dataclass
class Report:
    """Findings of one check, or of all checks of a node.

    A node with a fault is unfit for a run; a node with only warnings is fit.
    """

    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    node: str = ""
    time: float = 0.0  # unix time by the node's clock, when written

    @property
    def ok(self) -> bool:
        """True if the node is fit."""
        return not self.faults

    def add(self, other: Report) -> None:
        """Add the findings of another report to this one."""
        self.faults += other.faults
        self.warnings += other.warnings
        self.facts |= other.facts

    def checks(self) -> Iterator[Check]:
        """Yield the findings as lines of `launch doctor`."""
        name = f"node {self.node}"
        yield from (Check("FAILED", name, fault, REMEDY) for fault in self.faults)
        yield from (Check("warning", name, warning) for warning in self.warnings)
        if self.ok:
            yield Check("ok", name, ", ".join(self._facts()))

    def _facts(self) -> Iterator[str]:
        """Yield the node's main facts in words."""
        known = self.facts
        if gpus := known.get("gpus"):
            yield f"{len(gpus)} x {gpus[0].rpartition(' ')[0]}, driver {known.get('driver')}"
        speeds = [speed for speed in known.get("tflops") or () if speed]
        if speeds:
            yield f"{min(speeds):.0f} to {max(speeds):.0f} TFLOP/s in bfloat16"
        if "free_memory_gb" in known:
            yield (
                f"{known['cpus']} CPUs, {known['free_memory_gb']:.0f} of {known['memory_gb']:.0f} "
                "GB of memory free"
            )
        if ports := known.get("ports"):
            yield (
                f"{sum(state == 'ACTIVE' for state in ports.values())} of {len(ports)} network "
                "ports active"
            )


def check_command(
    profile: Mapping[str, Any],
    out: Path | str,
    *,
    python: str | None = None,
    host_python: str = sys.executable,
    folders: Sequence[str] = (),
) -> list[str]:
    """Return the command that checks a node. It is the same on all nodes and runs once on each.

    The command writes its report to out/NODE.json and exits with 0. It takes at most
    health.timeout_seconds; after that, the caller ends it and calls `read_reports`. PYTHONPATH must
    contain `launch`.

    profile: `Profile.as_json()`.
    python: the ranks' interpreter, for the matrix product (None: no product).
    host_python: the interpreter of the check itself.
    folders: folders that the node must be able to write, in addition to the profile's paths.shared.
    """
    health, nodes, paths, container = (
        profile.get(section) or {} for section in ("health", "nodes", "paths", "container")
    )
    in_container = container.get("runtime", "none") != "none"
    written = ["/tmp", *(paths.get("shared") or ()), *map(str, folders)]
    wanted = {
        "seconds": SHARE * float(health.get("timeout_seconds") or 180),
        "free_memory_gb": health.get("free_memory_gb") or 0,
        "free_disk_gb": health.get("free_disk_gb") or 0,
        "gpus": nodes.get("gpus") or 0,
        "python": python,
        "matmul": python if health.get("matmul", True) else None,
        "numa": "none" if in_container else nodes.get("numa", "none"),
        "folders": list(dict.fromkeys(written)),
    }
    return [host_python, "-m", "launch.node.checks", str(out), json.dumps(wanted)]


def read_report(path: Path) -> Report | None:
    """Return a node's report, or None if it is missing or incomplete."""
    raw = read_json(path)
    try:
        faults, warnings = (list(map(str, raw[key])) for key in ("faults", "warnings"))
        return Report(faults, warnings, dict(raw["facts"]), str(raw["node"]), float(raw["time"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def read_reports(folder: Path, nodes: Sequence[str]) -> dict[str, Report]:
    """Return node -> report for these nodes, in order.

    For a node without a report, the fault is that it did not answer, with the last line of
    NODE.log.
    """
    reports: dict[str, Report] = {}
    for node in nodes:
        why = last_lines(folder / f"{node}.log") or ["it hangs, or cannot see this folder"]
        reports[node] = read_report(folder / f"{node}.json") or Report(
            [f"{NO_ANSWER}: {why[0]}"], node=node
        )
    return reports


def node_name() -> str:
    """Return the node's Slurm name, or the host's name without its domain."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def run_checks(wanted: Mapping[str, Any]) -> Report:
    """Run all checks in parallel and return their findings, within wanted["seconds"].

    wanted: the requirements, as `check_command` writes them.
    """
    seconds = wanted["seconds"]
    python = wanted["python"]
    numa = wanted["numa"]
    deadline = time.monotonic() + seconds
    checks: dict[str, Callable[[], Report]] = {"memory": partial(memory, wanted["free_memory_gb"])}
    if python:
        checks["the interpreter"] = partial(
            program, python, "no such program on this node (is its file system mounted?)"
        )
    if numa != "none":
        fault = (
            f"nodes.numa = {numa} needs this program, which is not on PATH: install it on the "
            "nodes, or set nodes.numa: none"
        )
        checks["numactl"] = partial(program, "numactl", fault)
    if wanted["gpus"]:
        gpu = partial(
            graphics, wanted["gpus"], wanted["matmul"], deadline - (1 - OF_GPUS) * seconds
        )
        checks |= {"links": links, "kernel log": kernel_log, "the GPUs": gpu}
    checks |= {
        f"folder {name}": partial(folder, name, wanted["free_disk_gb"])
        for name in wanted["folders"]
    }
    found: dict[str, Report] = {}

    def run(name: str, check: Callable[[], Report]) -> None:
        try:
            found[name] = check()
        except Exception as error:
            found[name] = Report([f"the check of {name} failed: {type(error).__name__}: {error}"])

    threads = {
        name: threading.Thread(target=run, args=(name, check), daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    whole = Report()
    for name, thread in threads.items():
        thread.join(max(deadline - time.monotonic(), 0.1))
        whole.add(found.get(name) or Report([f"{name}: no answer in {seconds:.0f} s: it hangs"]))
    return whole


def memory(least_gb: float) -> Report:
    """Check that enough memory is free, and report the free space of /dev/shm.

    least_gb: required free memory in GB. NCCL and data workers use /dev/shm.
    """
    free, total, shm = hardware.memory_gb()
    found = Report(
        facts={
            "free_memory_gb": free,
            "memory_gb": total,
            "cpus": len(os.sched_getaffinity(0)),
            "shm_gb": shm,
        }
    )
    if free < least_gb:
        found.faults.append(
            f"{free:.1f} GB of memory are free, of {total:.1f}; {least_gb:g} are required: does "
            "another process use it?"
        )
    if shm is not None and shm < 1:
        found.warnings.append(
            f"/dev/shm has {shm:.2f} GB free: NCCL and data workers need more (container option "
            "--shm-size, or clean it)"
        )
    return found


def folder(name: str, least_gb: float) -> Report:
    """Check that a folder can be written and read back on this node, and has enough free space."""
    try:
        free = hardware.probe_folder(Path(name))
    except OSError as error:
        return Report(
            [f"{name}: cannot be written on this node: {error.strerror or error} (is it mounted?)"]
        )
    found = Report(facts={f"free_gb {name}": free})
    if free < least_gb:
        found.faults.append(f"{name}: {free:.2f} GB free; {least_gb:g} are required")
    return found


def program(name: str, fault: str) -> Report:
    """Check that a program exists on this node. ``fault`` is the error text if it does not."""
    return Report([] if shutil.which(name) else [f"{name}: {fault}"])


def links() -> Report:
    """Report the states of InfiniBand, RoCE and EFA ports.

    A port that is down is only a warning, because it may be unused.
    """
    ports = hardware.network_ports()
    down = [f"network port {name} is {state}" for name, state in ports.items() if state != "ACTIVE"]
    return Report(warnings=down, facts={"ports": ports} if ports else {})


def kernel_log() -> Report:
    """Report the NVIDIA driver's errors (Xid) of the last hour, if the kernel's log can be read.

    Errors that mean broken hardware are faults, other errors are warnings.
    """
    found = Report()
    for number, text in hardware.recent_xids():
        (found.faults if number in hardware.BROKEN else found.warnings).append(text)
    return found


def graphics(expected: int, matmul: str | None, deadline: float) -> Report:
    """Check the GPUs of this node and return the findings.

    Check the number of GPUs, nvidia-smi's report of each GPU, a matrix product on each, and reduced
    clocks after the product.

    matmul: interpreter for the product; None: no product. deadline: monotonic time of the end.
    """
    patience = None
    while True:
        try:
            gpus, complaints = hardware.survey(min(SMI_SECONDS, deadline - time.monotonic()))
        except hardware.SmiError as error:
            return Report([str(error)])
        mine = hardware.chosen(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        busy = [fault for gpu in mine for fault in gpu.busy()]
        patience = patience or time.monotonic() + min(
            RELEASE_SECONDS, (deadline - time.monotonic()) / 4
        )
        if not busy or time.monotonic() >= patience:
            break
        time.sleep(1)
    found = Report([f"nvidia-smi: {line}" for line in complaints])
    if len(mine) < expected:
        found.faults.append(f"{len(mine)} GPUs are visible, the profile says {expected}")
    found.faults += [*(fault for gpu in mine for fault in gpu.faults()), *busy]
    found.facts = {
        "gpus": [f"{gpu.name} {gpu.bus}" for gpu in mine],
        "driver": mine[0].driver if mine else None,
    }
    if matmul and mine and shutil.which(matmul):
        found.add(products(mine, matmul, deadline - time.monotonic()))
        if (left := deadline - time.monotonic()) > 1:
            hardware.throttle(mine, min(SMI_SECONDS, left))
    for gpu in mine:
        faults, warnings = gpu.throttling()
        found.add(Report(faults, warnings))
    return found


def products(mine: Sequence[hardware.Gpu], python: str, seconds: float) -> Report:
    """Run a matrix product on all GPUs in parallel, in one process of `launch.node.measure` each.

    Report the GPUs that fail, hang, give a wrong result, or are much slower than the median.
    """
    command = [python, "-m", "launch.node.measure", "product", "cuda:0"]

    def run(gpu: hardware.Gpu) -> dict[str, Any]:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
        try:
            return _result(hardware.ask(command, seconds, environment))
        except OSError as error:
            return _result(hardware.Answer(127, "", f"{python}: {error.strerror}"))

    with ThreadPoolExecutor(len(mine)) as pool:
        results = list(pool.map(run, mine))
    speeds = [None if _wrong(result) else float(result.get("tflops") or 0) for result in results]
    sound = sorted(speed for speed in speeds if speed is not None)
    median = sound[len(sound) // 2] if sound else 0
    found = Report(facts={"tflops": speeds})
    for gpu, result, speed in zip(mine, results, speeds, strict=True):
        fault = _wrong(result)
        if speed is not None and speed < SLOW * median:
            fault = f"{speed:.0f} TFLOP/s in bfloat16, the node's median is {median:.0f}"
        if fault:
            found.faults.append(f"{gpu.title}: {fault}")
    return found


def _wrong(result: dict[str, Any]) -> str | None:
    """Return why a product does not count, or None if it is right."""
    wrong = result.get("wrong")
    return result.get("error") or (f"{wrong} entries of a product are wrong" if wrong else None)


def _result(answer: hardware.Answer) -> dict[str, Any]:
    """Return the parsed output of `launch.node.measure`, or {"error": text} if it has none."""
    if answer.code is None:
        return {"error": "a product did not end in time: it hangs"}
    last_line = (answer.output.strip() or "null").splitlines()[-1]
    try:
        result = json.loads(last_line)
    except ValueError:
        result = None
    if isinstance(result, dict):
        return result
    last_line = hardware.last_line(answer.errors) or "no output"
    return {"error": f"a product ended with {answer.code}: {last_line}"}


def main() -> int:
    """Run the checks and write the report. Return 0."""
    out, wanted = sys.argv[1:]
    found, name = run_checks(json.loads(wanted)), node_name()
    write_json(
        Path(out) / f"{name}.json",
        {**asdict(found), "node": name, "ok": found.ok, "time": round(time.time(), 3)},
    )
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    os._exit(main())  # a thread that hangs in the kernel must not block the exit
