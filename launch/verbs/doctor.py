"""``doctor``: check this machine for training, or a profile against its cluster.

    doctor [--build] [--fix]                    this machine: packages, GPU, DeepSpeed's compiled
                                                operations, free space
    doctor --cluster PROFILE.yaml [--nodes 2]   a profile against its cluster, with a trial job of
                                                a few minutes on this many nodes
    doctor --cluster PROFILE.yaml --nodes 0     only the checks that need no job

Each check prints a line: ok, absent (this machine trains without it), warning or FAILED, and the
remedy. The exit code is 1 if a check FAILED.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fem_common.errors import UserError, reason
from fem_common.text import counted, first_few
from launch.cluster import checks, slurm, trial
from launch.cluster.checks import LISTED
from launch.cluster.profile import Profile, load_profile
from launch.cluster.trial import Outcome
from launch.job import attempts, launch_folder
from launch.job.render import render
from launch.job.request import work_directory
from launch.node.checks import Check, Report, read_reports
from launch.node.hardware import ask, last_line, probe_folder
from launch.supervise.journal import cordon_file, cordoned
from launch.verbs import options
from launch.verbs.local import supervisor_command

CLEAR = "\r\033[K"
PYTHON = (3, 11)
LOOK_SECONDS = 120.0  # limit for an interpreter on a cold file system
ASK = (
    "import sys, importlib.util as u; print(*sys.version_info[:3], u.find_spec('torch') is not "
    "None)"
)
REMEDY = {
    "bandwidth": (
        "NCCL_DEBUG=INFO in the profile's environment shows the network in use; set NCCL_IB_HCA, "
        "NCCL_SOCKET_IFNAME or EFA's plugin"
    ),
    "clock": "let the administrators synchronise it (chrony, NTP)",
    "shared": "paths.shared: folders of a file system that every node mounts",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "--cluster",
        metavar="PROFILE.yaml",
        help="the cluster's profile, in configs/cluster (default: check this machine)",
    )
    parser.add_argument(
        "--build",
        action="store_true",
        help="compile DeepSpeed's operations now, one to five minutes each",
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="remove the lock files of DeepSpeed compilations that were killed",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="nodes of the trial job; 0: no job (default: 2, or 1 if only one is in service)",
    )
    options.add(parser, "--set")
    parser.add_argument(
        "--wait",
        type=float,
        default=300,
        metavar="S",
        help="longest wait in the queue, in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="folder for the trial's files (default: the first of paths.shared, or runs)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print each check when it is made. Return 0, or 1 if one FAILED."""
    if arguments.nodes is not None and arguments.nodes < 0:
        raise UserError(f"--nodes {arguments.nodes}: must be 0 or more")
    tools = [f"--{name}" for name in ("build", "fix") if getattr(arguments, name)]
    if arguments.cluster and tools:
        raise UserError("--build and --fix apply to this machine; omit --cluster")
    examined = Examined(
        arguments.cluster, arguments.set, arguments.nodes, arguments.wait, arguments.directory
    )
    levels = Counter[str]()
    for check in examine(examined) if arguments.cluster else this_machine(tools):
        levels[check.level] += 1
        show(check)
    failed, warned = levels["FAILED"], levels["warning"]
    print(f"{failed} failed, {counted(warned, 'warning')}" if failed or warned else "all is well")
    return 1 if failed else 0


@dataclass(frozen=True)
class Examined:
    """A profile to check, and the settings of its trial job."""

    cluster: str  # the profile's file
    overrides: Sequence[str]  # settings that replace the profile's
    nodes: int | None  # nodes of the trial; 0: no trial; None: one or two
    wait: float  # longest wait in the queue, in seconds
    directory: str | None  # folder for the trial's files


def show(check: Check) -> None:
    """Print a check on one line, and its remedy on a second one.

    On a terminal, the line replaces the current line of progress.
    """
    print(f"{CLEAR if sys.stdout.isatty() else ''}{check.level:<8} {check.name:<14} {check.text}")
    if check.remedy:
        print(f"{'':<23} -> {check.remedy}")
    sys.stdout.flush()


def compiling(name: str, seconds: float) -> None:
    """Print for how long an operation has been compiling.

    On a terminal, one line is updated. Otherwise a line is printed every 30 seconds, if the
    function is called once a second.
    """
    live = sys.stdout.isatty()
    if live or round(seconds) % 30 == 0:
        line = f"{'...':<8} {name:<14} compiling or loading, {seconds:.0f} s"
        print(f"{CLEAR}{line}" if live else line, end="" if live else "\n", flush=True)


def this_machine(options: Sequence[str]) -> Iterator[Check]:
    """Run `python -m tools.machine` with options, and yield each check when it ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "tools.machine", *options], stdout=subprocess.PIPE, text=True
    ) as child:
        for line in child.stdout or ():
            record = json.loads(line)
            if isinstance(record, list):
                compiling(*record)
            else:
                yield Check(**record)
    if child.returncode:
        yield Check("FAILED", "machine", f"the checking process ended with {child.returncode}")


def examine(examined: Examined) -> Iterator[Check]:
    """Yield all checks of a profile in order. Later checks may take minutes.

    The trial job is not run if an earlier check FAILED.
    """
    try:
        profile = load_profile(examined.cluster, examined.overrides)
    except UserError as error:
        yield Check("FAILED", "profile", str(error))
        return
    yield Check("ok", "profile", f"{examined.cluster}: {described(profile)}")
    well = True
    for check in (
        *interpreters(profile),
        *shared_folders(profile),
        *queue_side(profile, examined.nodes),
    ):
        well = well and check.level != "FAILED"
        yield check
    if examined.nodes == 0:
        return
    if not well:
        yield Check("warning", "trial", "not run: first repair what FAILED")
        return
    try:
        yield from by_trial(profile, examined)
    except OSError as error:
        yield Check(
            "FAILED",
            "trial",
            reason(error),
            "--directory: a folder that this host and the nodes can write",
        )
    except UserError as error:
        yield Check("FAILED", "trial", str(error))


def described(profile: Profile) -> str:
    """Return a short description of a profile."""
    if profile.nodes.gpus:
        text = f"{profile.scheduler}, {counted(profile.nodes.gpus, 'GPU')} a node"
    else:
        ranks = counted(profile.processes_per_node, "process")
        text = f"{profile.scheduler}, {ranks} a node, no GPUs"
    runtime = profile.container.runtime
    return text if runtime == "none" else f"{text}, in a container ({runtime})"


def interpreters(profile: Profile) -> Iterator[Check]:
    """Check the ranks' interpreter, which needs torch, and the supervisor's interpreter.

    An interpreter inside a container is not checked, because the trial job checks it.
    """
    ranks, host = profile.interpreters(sys.executable)
    inside = profile.container.runtime != "none"
    if inside or host != ranks:
        yield interpreter("host_python", host, torch=False)
    if not inside:
        yield interpreter("python", ranks, torch=True)


def interpreter(key: str, path: str, *, torch: bool) -> Check:
    """Check that an interpreter of the profile starts on this host and is new enough.

    key: key of the profile. torch: also check that torch is installed.
    """
    failed = partial(Check, "FAILED", key)
    try:
        answer = ask([path, "-c", ASK], LOOK_SECONDS)
    except OSError as error:
        return failed(
            f"{path} cannot be started on this host: {error.strerror}",
            f"{key}: the path of an interpreter, null for this one",
        )
    if answer.code is None:
        return failed(f"{path} gave no answer in {LOOK_SECONDS:.0f} s: its file system hangs")
    if answer.code:
        return failed(f"{path} ended with {answer.code}: {last_line(answer.errors)}")
    *version, has_torch = answer.output.split()
    text = f"{path}: Python {'.'.join(version)}"
    if tuple(map(int, version)) < PYTHON:
        return failed(text, f"{key}: Python {'.'.join(map(str, PYTHON))} or newer")
    if torch and has_torch != "True":
        return failed(
            f"{text} has no torch", f"{key}: the environment that the project is installed in"
        )
    return Check("ok", key, text)


def shared_folders(profile: Profile) -> Iterator[Check]:
    """Check the shared folders on this host."""
    if not profile.paths.shared and profile.scheduler == "slurm":
        text = "paths.shared is empty: only the trial's own folder is checked"
        remedy = "paths.shared: where runs, data and the interpreter are"
        yield Check("warning", "shared folders", text, remedy)
    for name in profile.paths.shared:
        try:
            free = probe_folder(Path(name))
        except OSError as error:
            text = f"{name}: cannot be written on this host: {error.strerror or error}"
            yield Check("FAILED", "shared folder", text, REMEDY["shared"])
        else:
            yield Check("ok", "shared folder", f"{name}: {free:.0f} GB free")


def queue_side(profile: Profile, nodes_wanted: int | None) -> Iterator[Check]:
    """Yield the checks that query Slurm, and a warning if the cordon file excludes nodes.

    nodes_wanted: number of nodes that a job would take; None if not given.
    """
    if profile.scheduler != "slurm":
        return
    yield from checks.of_slurm(profile, nodes_wanted)
    file = cordon_file(profile.as_json(), work_directory())
    if away := cordoned(file):
        nodes = [f"{node} ({why})" for node, why in away.items()]
        yield Check(
            "warning",
            "cordon",
            f"{len(nodes)} nodes: {first_few(nodes, LISTED, '; ')}",
            f"delete their lines in {file} once they are repaired",
        )


def by_trial(profile: Profile, examined: Examined) -> Iterator[Check]:
    """Run the trial job and yield the checks of its result.

    The trial's files are removed if the trial ran and no check FAILED.
    """
    base = Path(examined.directory or next(iter(profile.paths.shared), "runs")).absolute()
    directory = base / f"doctor-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    launch_folder(directory).mkdir(parents=True)
    well = False
    try:
        nodes = trial_nodes(profile, examined.nodes)
        job = trial.make(profile, examined.cluster, nodes, directory)
        if profile.scheduler == "slurm":
            job.script.write_text(render(job), encoding="utf-8")
            taken = checks.would_take(job.script)
            yield taken
            if taken.level == "FAILED":
                return
            outcome = trial.on_slurm(job, examined.wait, progress)
        else:
            outcome = trial.here(job, *supervisor_command(job, 0), progress)
        found = list(findings(profile, outcome))
        well = all(check.level != "FAILED" for check in found)
        yield from found
    finally:
        if well:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            print(f"{'':<23} the trial's files: {directory}")


def progress(text: str) -> None:
    """Print the trial's present step on a terminal, in place of the previous one."""
    if sys.stderr.isatty():
        print(f"{CLEAR}... {text}", end="", file=sys.stderr, flush=True)


def trial_nodes(profile: Profile, wanted: int | None) -> int:
    """Return the number of nodes for the trial: 1 without Slurm, otherwise ``wanted``.

    wanted: the number given by the user. If it is None, return 2 if two suitable nodes are in
    service, and 1 if not.

    Raises:
        SlurmError: a Slurm command fails.
    """
    if profile.scheduler != "slurm":
        return 1
    if wanted is not None:
        return wanted
    names = set((profile.slurm.partition or "").split(",")) - {""}
    known = [node for node in slurm.all_nodes() if not names or names & set(node.partitions)]
    gpus, away = checks.requested_gpus(profile), slurm.hosts(profile.slurm.exclude)
    fit = [
        node for node in known if node.in_service and node.gpus >= gpus and node.name not in away
    ]
    return max(1, min(2, len(fit)))


def findings(profile: Profile, outcome: Outcome) -> Iterator[Check]:
    """Yield the checks of the trial's result.

    These are a check per node, and a check per measurement of all nodes together.
    """
    folders = attempts(outcome.directory)
    reports: dict[str, Report] = {}
    if folders and outcome.nodes:
        reports = read_reports(folders[-1] / "health", outcome.nodes)
    for report in reports.values():
        yield from report.checks()
    if outcome.result is None:
        unfit = any(not report.ok for report in reports.values())
        # The report of an unfit node already names the cause.
        tail = () if unfit else outcome.tail
        lines = "".join(f"\n{'':<23} | {line}" for line in tail)
        see = f"python -m launch logs --errors {shlex.quote(str(outcome.directory))}"
        yield Check("FAILED", "trial", f"{outcome.trouble}{lines}", "" if unfit else see)
        return
    yield Check("ok", "trial", f"ran on {', '.join(outcome.nodes)}")
    yield from (
        Check("FAILED", "shared folder", fault, REMEDY["shared"])
        for fault in outcome.result["shared"]
    )
    if not outcome.result["shared"]:
        yield Check(
            "ok", "shared folders", "every node writes into them and sees the first node's files"
        )
    yield of_bandwidth(profile, outcome.result)
    yield from of_clocks(profile, outcome.result["clocks"])


def of_bandwidth(profile: Profile, result: dict[str, Any]) -> Check:
    """Check that the all-reduce bandwidth is not below health.all_reduce_gb_per_second.

    result: contents of the trial's bandwidth.json.
    """
    if not result.get("sizes"):
        return Check("ok", "all-reduce", "not measured: the trial has one process")
    floor = profile.health.all_reduce_gb_per_second
    smallest, largest = result["sizes"][0], result["sizes"][-1]
    ranks = (
        f"{counted(result['world_size'], 'rank')} on {counted(len(result['clocks']), 'node')} over "
        f"{result['backend']}"
    )
    text = f"{ranks}: bus bandwidth {largest['bus']:.4g} GB/s"
    text += (
        f" (algorithm {largest['algorithm']:.4g}) at {largest['mib']} MiB; "
        f"{smallest['milliseconds']:.3g} ms for {smallest['mib']} MiB"
    )
    if floor is None:
        return Check(
            "ok", "all-reduce", f"{text}; no floor is set (health.all_reduce_gb_per_second)"
        )
    if largest["bus"] >= floor:
        return Check("ok", "all-reduce", f"{text}; floor {floor:g}")
    return Check(
        "FAILED", "all-reduce", f"{text}; below the floor of {floor:g}", REMEDY["bandwidth"]
    )


def of_clocks(profile: Profile, clocks: dict[str, float]) -> Iterator[Check]:
    """Check that the nodes' clocks differ by at most health.clock_skew_seconds.

    clocks: node -> seconds that its clock is ahead of that of the first node.
    """
    first, largest = next(iter(clocks)), max(map(abs, clocks.values()))
    if largest <= profile.health.clock_skew_seconds:
        yield Check("ok", "clocks", f"the nodes agree to within {largest * 1e3:.2g} ms")
        return
    for node, skew in clocks.items():
        if abs(skew) > profile.health.clock_skew_seconds:
            way = "ahead of" if skew > 0 else "behind"
            yield Check(
                "FAILED", "clock", f"{node} is {abs(skew):.1f} s {way} {first}", REMEDY["clock"]
            )
