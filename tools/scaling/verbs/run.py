"""``run``: train the unfinished runs of a study through `python -m launch sweep`: a Slurm array, or
several at once on this machine.

    run STUDY.yaml [--cluster PROFILE.yaml] [--at-once K] [--nodes N] [--dry-run]

The same command skips finished runs and continues stopped ones from their checkpoints. Ctrl-C saves
and ends; failed runs are listed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fem_common.config import read_values
from fem_common.errors import ConfigError, StorageError, convert_os_errors
from fem_common.signals import PDEATHSIG, prctl, taken
from fem_common.text import counted, duration
from pretrain.config import load_run
from pretrain.data.facts import check_data
from tools.scaling.planned_runs import PlannedRun, plan_study
from tools.scaling.study import Study, load_study

ROOT = Path(__file__).resolve().parents[3]
PROFILES = ROOT / "configs" / "cluster"
TELL_SECONDS = 30.0
SOME = 0.01  # share of the FLOPs after which the remaining time is estimated
POLL_SECONDS = 0.5
STATUS_SECONDS = 120.0
INTERRUPTED = 130
# States of runs that launch does not restart by itself.
FAILED = ("stopped", "lost", "cancelled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments; all but the study are passed to launch."""
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="the study")
    parser.add_argument(
        "--cluster",
        default=str(PROFILES / "local_cpu.yaml"),
        metavar="PROFILE.yaml",
        help="cluster profile (default: the CPUs of this machine)",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        metavar="K",
        help="number of runs at the same time (default: cluster.at_once of the study)",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="nodes per run, over which its processes are distributed (default: 1)",
    )
    parser.add_argument("--time", metavar="LIMIT", help="Slurm: time limit of one submission")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the profile"
    )
    parser.add_argument(
        "--dependency",
        action="append",
        default=[],
        metavar="JOB",
        help="Slurm: start after a job has succeeded",
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="NODES", help="Slurm: nodes not to use"
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="continue runs with the current settings and code even if they began with others",
    )
    parser.add_argument(
        "--no-rehearse",
        action="store_true",
        help="Slurm: start without a rehearsal of new layouts",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the commands without starting or writing anything",
    )


def main(arguments: argparse.Namespace) -> int:
    """Plan, then train the unfinished runs. Return launch's exit code: 1 if a run failed, 130 if a
    signal ended it. Raises ConfigError.
    """
    study = load_study(arguments.study)
    runs = plan_study(study)
    local = is_local(Path(arguments.cluster))
    if local:  # report missing data once instead of in each run
        try:
            with convert_os_errors():
                check_data(load_run(study.base, runs[0].settings))
        except ConfigError as error:
            raise ConfigError(f"{study.path}: {error}") from None
    command, environment = launch_command(study, arguments), _environment()
    if arguments.dry_run:
        return _start(study, runs, command, environment, local)[0]
    if local:
        # Divide the cores of this machine between the runs: spinning threads of two runs on one
        # core slow both runs down.
        processes = (arguments.at_once or study.cluster.at_once) * study.cluster.processes
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    flops = sum(run.own_flops for run in runs)
    print(
        f"{study.name}: {counted(len(runs), 'run')}, {flops:.3g} FLOPs, in {study.directory}",
        flush=True,
    )
    code, came = _start(study, runs, command, environment, local)
    return _end(study, runs, code, came, local)


def _start(
    study: Study,
    runs: Sequence[PlannedRun],
    command: Sequence[str],
    environment: dict[str, str],
    local: bool,
) -> tuple[int, bool]:
    """Pass the runs to launch, forks after their trunks. Return (its first nonzero exit code,
    whether a signal arrived).
    """
    progress = Progress(study, runs)
    code = 0
    came = False
    dry_run = "--dry-run" in command
    for forks in (False, True):
        some = [run for run in runs if bool(run.trunk) == forks]
        after: list[str] = []
        if forks and some and not dry_run:
            if local:
                rows = standings(study) or {}
                some = [run for run in some if rows.get(run.trunk, {}).get("state") == "finished"]
            else:
                for trunk in dict.fromkeys(run.trunk for run in some):
                    after += ["--dependency", f"{study.directory}/{trunk}"]
        if not some or came or (code and not local):
            break
        with tempfile.NamedTemporaryFile(
            "w", suffix=".txt", prefix="study-", encoding="utf-8"
        ) as file:
            with convert_os_errors():
                file.write(run_list(some))
                file.flush()
            words = [*command, "--list", file.name, *after]
            if dry_run:
                ended = subprocess.run(words, env=environment).returncode
            else:
                ended, came = _follow(words, environment, progress)
        code = code or ended
    return code, came


def run_list(runs: Sequence[PlannedRun]) -> str:
    """Return the runs as a list for `launch sweep`: one line per run with its name and settings."""
    return "".join(f"{run.name}: {shlex.join(run.settings)}\n" for run in runs)


def launch_command(study: Study, arguments: argparse.Namespace) -> list[str]:
    """Return the `python -m launch sweep` command for a study, without the list of runs.

    Raises ConfigError if the processes cannot be distributed over the nodes.
    """
    processes, nodes = study.cluster.processes, arguments.nodes
    if nodes < 1 or processes % nodes:
        raise ConfigError(
            f"--nodes {nodes}: cluster.processes = {processes} of {study.path} cannot be"
            " distributed over them evenly"
        )
    at_once = study.cluster.at_once if arguments.at_once is None else arguments.at_once
    if at_once < 1:
        raise ConfigError(f"--at-once {at_once}: must be at least 1")
    words = [sys.executable, "-m", "launch", "sweep", study.base]
    words += ["--cluster", arguments.cluster, "--name", study.name, "--directory", study.directory]
    words += ["--at-once", str(at_once), "--nodes", str(nodes)]
    words += ["--processes", str(processes // nodes)]
    words += ["--time", arguments.time] if arguments.time else []
    for option in ("set", "dependency", "exclude"):
        for value in getattr(arguments, option):
            words += [f"--{option}", value]
    for option in ("update", "no-rehearse", "dry-run"):
        if getattr(arguments, option.replace("-", "_")):
            words.append(f"--{option}")
    return words


def is_local(profile: Path) -> bool:
    """Return True if a cluster profile, or one of its bases, describes this machine. Raises
    ConfigError.
    """
    if not profile.exists() and (PROFILES / f"{profile}.yaml").is_file():
        profile = PROFILES / f"{profile}.yaml"
    for _ in range(len(list(PROFILES.glob("*.yaml"))) + 1):
        values = read_values(profile)
        if "scheduler" in values or not isinstance(values.get("base"), str):
            return values.get("scheduler") == "local"
        base = values["base"]
        is_path = "/" in base or base.endswith(".yaml")
        profile = profile.parent / base if is_path else PROFILES / f"{base}.yaml"
    return False


def _environment() -> dict[str, str]:
    """Return the user's environment with the checkout on the module path."""
    folders = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


# --- progress of launch ---------------------------------------------------------------------------


@dataclass
class Progress:
    """Progress of a study's runs, from the state that launch reports, and the estimated remaining
    time.

    The estimate uses the average rate since the start of this command.
    """

    study: Study
    runs: Sequence[PlannedRun]
    began: float = field(default_factory=time.monotonic)
    at_first: float | None = None  # share of the FLOPs done at the start of this command

    def line(self, rows: dict[str, dict[str, Any]]) -> str:
        """Return one line from the states of the runs."""
        done = 0
        flops = []
        for run in self.runs:
            row = rows.get(run.name, {})
            part = 1.0
            if row.get("state") == "finished":
                done += 1
            else:
                steps = max(0, (row.get("step") or 0) - run.begin_step)
                part = min(1.0, steps / (run.steps - run.begin_step))
            flops.append(run.own_flops * part)
        share = sum(flops) / sum(run.own_flops for run in self.runs)
        if self.at_first is None:
            self.at_first = share
        elapsed = time.monotonic() - self.began
        gained = share - self.at_first
        left = f"; {duration(elapsed / gained * (1 - share))} left" if gained > SOME else ""
        work = [
            f"{row['name']} {row['step']}/{row['steps']}"
            for row in rows.values()
            if row["active"] and row["step"] is not None
        ]
        now = f"; now {', '.join(work)}" if work else ""
        return (
            f"{self.study.name}: {done} of {len(self.runs)} runs done, {share:.0%} of the"
            f" FLOPs{left}{now}"
        )


def standings(study: Study) -> dict[str, dict[str, Any]] | None:
    """Return run -> state from `launch status`; None if launch does not know the study (yet)."""
    command = [sys.executable, "-m", "launch", "status", study.directory, "--json"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=_environment(),
            timeout=STATUS_SECONDS,
            start_new_session=True,
        )
        rows = json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return None if rows is None else {row["name"]: row for row in rows}


def _tied(parent: int) -> None:
    """Make launch receive SIGTERM when its parent dies; called between fork and exec."""
    prctl(PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _follow(
    command: Sequence[str], environment: dict[str, str], progress: Progress
) -> tuple[int, bool]:
    """Run launch and report progress. Return (launch's exit code, True if a signal arrived).

    launch runs in a separate session, and each signal to this process is forwarded to it once. In
    the same process group launch would receive a signal twice, and the second one ends it at once.
    """
    came: list[int] = []
    handed = 0
    reported = time.monotonic()

    def take(number: int, _: FrameType | None) -> None:
        came.append(number)

    # The handlers are installed first, so that signals during the start of launch are not lost.
    with taken((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), take):
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=partial(_tied, os.getpid())
        )
        while process.poll() is None:
            for number in came[handed:]:
                process.send_signal(number)
                handed += 1
            time.sleep(POLL_SECONDS)
            if time.monotonic() - reported >= TELL_SECONDS and not came:
                rows = standings(progress.study)
                reported = time.monotonic()
                if rows is not None:
                    print(progress.line(rows), flush=True)
    return process.returncode, bool(came)


def _end(study: Study, runs: Sequence[PlannedRun], code: int, came: bool, local: bool) -> int:
    """Report finished and failed runs; return the exit code."""
    rows = standings(study)
    if rows is None:
        if code:  # launch has printed the reason
            return code
        raise StorageError(
            f"{study.directory}: launch reports no state of the runs; see: python -m launch status"
            f" {study.directory}"
        )
    done = sum(rows.get(run.name, {}).get("state") == "finished" for run in runs)
    failed = []
    for run in runs:
        row = rows.get(run.name)
        if row is not None and row["state"] in FAILED and row["message"]:
            failed.append((run.name, row))
    if came:
        print(
            f"{study.name}: stopped; {done} of {len(runs)} runs are done; the same command"
            " continues",
            flush=True,
        )
        return INTERRUPTED
    for name, row in failed:
        place = shlex.quote(f"{study.directory}/{name}")
        print(
            f"failed: {name}: {row['message']}; see: python -m launch logs --errors {place}",
            file=sys.stderr,
        )
    if failed:
        again = f"python -m launch requeue RUN, then: python -m tools.scaling run {study.path}"
        print(
            f"{len(failed)} of {len(runs)} runs failed; restart a run with: {again}",
            file=sys.stderr,
        )
    else:
        next_one = "the same command continues"
        if not local:
            next_one = f"watch: python -m launch status --items {study.directory}"
        elif done == len(runs):
            next_one = f"next: python -m tools.scaling collect {study.path}"
        print(f"{study.name}: {done} of {len(runs)} runs are done; {next_one}")
    incomplete = local and done < len(runs)
    return code or (1 if failed or incomplete else 0)
