"""Run ranks on the nodes of a Slurm allocation.

`srun` starts the ranks as a step, `scancel` signals the step, and `scontrol` requeues the job.
Uses only the standard library, because it runs inside jobs, from the snapshot.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fem_common.errors import reason
from fem_common.ports import server_port
from launch.cluster.slurm import (
    ANSWER_SECONDS,
    SlurmError,
    all_nodes,
    call,
    enough_nodes,
    hosts,
    job_fields,
    listed,
)
from launch.job import last_lines
from launch.node.checks import check_command, read_reports
from launch.supervise.classify import cancelled, is_away, taken
from launch.supervise.place import Attempt, Place, PlaceError, Unreachable, agent_command, started

# The command of each node's task. The agent ignores the signals meant for ranks (an ignored signal
# stays ignored over exec). torchrun reads its node's number from PET_NODE_RANK.
WRAPPER = 'trap "" USR1 USR2; export PET_NODE_RANK="$SLURM_NODEID"; exec "$@"'
END_SECONDS = 60.0  # how long to wait for a node that does not answer
STATES_DOWN = ("down", "drain", "fail", "error", "power", "reboot", "unk", "inval", "no_respond")


class SlurmPlace(Place):
    """Place whose nodes are the Slurm allocation in which this process was started."""

    can_requeue = True

    def __init__(self, environ: Mapping[str, str], exclude: Sequence[str] = ()) -> None:
        """Read the job's ids from the batch script's environment.

        exclude: nodes that the profile excludes.
        """
        raw = environ["SLURM_JOB_ID"]
        array = environ.get("SLURM_ARRAY_JOB_ID")
        task = environ.get("SLURM_ARRAY_TASK_ID")
        self._environ = dict(environ)
        # The plain number of an array's last task is also the number of the entire array, so
        # commands get ARRAY_TASK.
        self.job_id = self._job = f"{array}_{task}" if array and task is not None else raw
        self._number = int(raw)
        self.restart_count = int(environ.get("SLURM_RESTART_COUNT") or 0)
        self._own = tuple(exclude)
        self._guard: subprocess.Popen[bytes] | None = None

    def nodes(self) -> tuple[str, ...]:
        """Return the allocation's nodes, the head node first.

        Raises:
            PlaceError: Slurm does not answer, or the list is empty.
        """
        names = self._environ.get("SLURM_JOB_NODELIST") or self._environ.get("SLURM_NODELIST") or ""
        try:
            nodes = tuple(hosts([names]))
        except SlurmError as error:
            raise PlaceError(str(error)) from None
        if not nodes:
            raise PlaceError(f"scontrol knows no nodes in SLURM_JOB_NODELIST={names!r}")
        return nodes

    def start(self, attempt: Attempt) -> SlurmRunning:
        """Start the ranks as a Slurm step and return the running step.

        The agents (torchrun on each node) write to logs/agents_NODE.log, srun to logs/agents.log.

        Raises:
            PlaceError: no port is free, or srun cannot be started.
        """
        self._keep_guard(attempt)
        logs = attempt.folder / "logs"
        try:
            port = server_port(self._number + 13 * self.restart_count + attempt.number)
        except OSError as error:
            raise PlaceError(reason(error)) from None
        agent = agent_command(attempt, head=attempt.nodes[0], port=port, node_rank=None)
        outputs = [
            f"--output={_literal(logs)}/agents_%N.log",
            "--open-mode=append",
            "--kill-on-bad-exit=1",
        ]
        return self._step(attempt, f"launch-{attempt.number}", agent, outputs, logs / "agents.log")

    def check_nodes(self, attempt: Attempt) -> dict[str, list[str]]:
        """Run the pre-flight check on every node and return node -> faults.

        For a node that does not answer in time, the missing answer is the fault.

        Raises:
            PlaceError: srun could not run the check.
        """
        self._keep_guard(attempt)
        profile, folder = attempt.job.profile, attempt.folder / "health"
        health, began = attempt.job.section("health"), time.time()
        contained = attempt.job.section("container").get("runtime", "none") != "none"
        host_python = attempt.job.python if contained else sys.executable
        command = check_command(
            profile,
            folder,
            python=attempt.job.python,
            host_python=host_python,
            folders=[attempt.item.directory],
        )
        folder.mkdir(parents=True, exist_ok=True)
        outputs = [f"--output={_literal(folder)}/%N.log", "--kill-on-bad-exit=0"]
        step = self._step(attempt, f"check-{attempt.number}", command, outputs, folder / "srun.log")
        seconds = float(health.get("timeout_seconds") or 180.0)
        while step.poll() is None and time.time() - began < seconds:
            time.sleep(0.1)
        code = step.poll()
        if code is None:
            step.kill(10.0)
        reports = read_reports(folder, attempt.nodes)
        output = "".join(last_lines(folder / "srun.log"))
        if code and not any(report.time for report in reports.values()):
            # srun itself failed, so no node is to blame.
            silence = next(fault for report in reports.values() for fault in report.faults)
            raise PlaceError(
                f"the nodes cannot be checked: {f'srun: {output}' if output else silence}"
            )
        faults = {}
        for node, report in reports.items():
            faults[node] = list(report.faults)
            if output and not report.time:
                faults[node].append(f"srun: {output}")
        return faults

    def _step(
        self, attempt: Attempt, name: str, command: Sequence[str], options: Sequence[str], log: Path
    ) -> SlurmRunning:
        """Start a Slurm step with one task per node that runs the command. Return the step.

        name: name of the step. options: further options of srun. log: file for srun's output.
        """
        job, nodes = attempt.job, attempt.nodes
        taken = job.section("nodes")
        # --cpus-per-task determines all that the step gets of a node. If the job owns its nodes,
        # use all CPUs (192, even if the profile takes 96 cores).
        full = (
            re.findall(r"(?:^|,)(\d+)", self._environ.get("SLURM_JOB_CPUS_PER_NODE") or "")
            if taken.get("exclusive")
            else []
        )
        cpus = min(
            full,
            key=int,
            default=self._environ.get("SLURM_CPUS_PER_TASK") or str(taken.get("cpus") or 1),
        )
        srun = [*srun_words(nodes, name, cpus), *options]
        if int(self._environ.get("SLURM_JOB_NUM_NODES") or len(nodes)) != len(nodes):
            srun.append(f"--nodelist={','.join(nodes)}")
        own, prefix = container_parts(attempt)
        srun += [*own, *(job.section("slurm").get("srun_options") or ())]
        words = ["bash", "-c", WRAPPER, "launch", *prefix, *command]
        which: dict[str, str] = {
            key: self._environ[key]
            for key in ("SLURM_JOB_ID", "SLURM_CONF")
            if key in self._environ
        }
        try:
            process = started(
                [*srun, *words],
                log,
                env=dict(attempt.environment) | which,
                cwd=job.working_directory,
            )
        except OSError as error:
            raise PlaceError(f"srun cannot be started: {error.strerror or error}") from None
        return SlurmRunning(process, self._job, name, attempt)

    def down_nodes(self) -> dict[str, str]:
        """Return node -> reason of the allocated nodes that are down, failing or draining.

        Return {} if Slurm does not answer.
        """
        try:
            nodes = self.nodes()
            answer = call(
                "sinfo",
                "--noheader",
                "--Node",
                f"--nodes={','.join(nodes)}",
                "--format=%N|%T|%E",
                timeout=ANSWER_SECONDS,
            )
        except (SlurmError, PlaceError):
            return {}
        down = {}
        for line in answer.splitlines():
            node, _, rest = line.strip().partition("|")
            state, _, reason = rest.partition("|")
            # A line without a node is the second one of a reason. `*`: the node does not answer
            # Slurm.
            if node in nodes and (
                state.endswith("*") or any(word in state.lower() for word in STATES_DOWN)
            ):
                down[node] = state + (f": {reason}" if reason not in ("", "none") else "")
        return down

    def cancelled(self) -> bool:
        """Return True if a user cancelled this job: see `launch.supervise.classify.cancelled`.

        Return False if Slurm does not answer.
        """
        try:
            return cancelled(self._shown(), self.restart_count)
        except SlurmError:
            return False

    def taken(self) -> bool | None:
        """Return True if this job was preempted or requeued, or lost a node.

        See `launch.supervise.classify.taken` for False and None. Return None if Slurm does not
        answer.
        """
        try:
            return taken(self._shown(), self.restart_count)
        except SlurmError:
            return None

    def enough_without(self, exclude: Sequence[str]) -> bool:
        """Return True if enough suitable nodes are left without the nodes in ``exclude``.

        With too few nodes, Slurm would never start the job. Return False if Slurm does not answer.
        """
        try:
            return enough_nodes(all_nodes(), self._shown(), exclude)
        except SlurmError:
            return False

    def requeue(self, exclude: Sequence[str]) -> None:
        """Requeue this job without the nodes in ``exclude``, and end this process (SystemExit).

        Slurm changes a job's excluded nodes only while the job waits, so they are set after the
        requeue. Slurm kills this process KillWait seconds after the requeue, so SIGTERM must not
        end this process or scontrol before that.

        Raises:
            Unreachable: Slurm does not answer.
            PlaceError: Slurm refuses the requeue or does not carry it out.
        """
        before = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGTERM, signal.SIGUSR1)
        }
        try:
            try:
                call("scontrol", "requeue", self._job, timeout=ANSWER_SECONDS)
            except SlurmError as error:
                if is_away(str(error)):
                    raise Unreachable(f"Slurm does not answer: {error}") from None
                if "pending" not in str(error):  # pending: Slurm has already requeued it
                    raise PlaceError(f"Slurm refuses the requeue: {error}") from None
            if exclude:
                self._exclude(exclude)
            if not self._requeued():
                raise PlaceError("Slurm accepted the requeue, but did not requeue the job")
            sys.exit(0)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _requeued(self) -> bool:
        """Wait until Slurm counts another restart of the job. Return False if it does not in time.

        After that restart is counted, the end of this process does not end the job.
        """
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end:
            with suppress(SlurmError):
                if self._shown().get("Restarts", "0") != str(self.restart_count):
                    return True
            time.sleep(0.2)
        return False

    def _exclude(self, exclude: Sequence[str]) -> None:
        """Add nodes to the excluded nodes of the waiting job.

        If Slurm refuses, log the error; the job then waits without the exclusion. If too few nodes
        would be left, the job would never start (reason BadConstraints), so only the profile's
        nodes are excluded. If a site lists no nodes (PrivateData), the number of nodes that are
        left is unknown, and ``exclude`` is used unchecked.
        """
        try:
            nodes = all_nodes()
            # Slurm refuses the entire list if it contains one unknown name.
            known = {node.name for node in nodes} or None
            shown = self._shown()
            before = hosts(listed(shown, "ExcNodeList"))
            added = [node for node in exclude if known is None or node in known]
            wanted = list(dict.fromkeys([*before, *added]))
            if known is not None and not enough_nodes(nodes, shown, wanted):
                print(
                    (
                        f"launch: too few nodes are left without {','.join(wanted)}: only the "
                        "profile's nodes are excluded"
                    ),
                    flush=True,
                )
                wanted = [node for node in hosts(self._own) if node in known]
            call(
                "scontrol",
                "update",
                f"JobId={self._job}",
                f"ExcNodeList={','.join(wanted)}",
                timeout=ANSWER_SECONDS,
            )
        except SlurmError as error:
            print(f"launch: nodes {', '.join(exclude)} cannot be excluded: {error}", flush=True)

    def _shown(self) -> dict[str, str]:
        """Return the fields of ``scontrol show job``.

        Raises:
            SlurmError: scontrol fails.
        """
        return job_fields(self._job)

    def _keep_guard(self, attempt: Attempt) -> None:
        """Start the guard process (`launch.supervise.slurm_steps`) unless it already runs.

        The guard requeues the job if this supervisor is killed.
        """
        if self._guard is not None and self._guard.poll() is None:
            return
        words = [
            "launch.supervise.slurm_steps",
            "guard",
            attempt.item.directory,
            self._job,
            str(self.restart_count),
            str(os.getpid()),
        ]
        with suppress(OSError):
            self._guard = start_on_nodes(
                attempt.nodes[:1],
                "guard",
                words,
                attempt.item.launch / "guard.log",
            )


class SlurmRunning:
    """Ranks that run as a Slurm step. Implements `launch.supervise.place.Running`."""

    def __init__(
        self, srun: subprocess.Popen[bytes], job: str, name: str, attempt: Attempt
    ) -> None:
        self._srun = srun
        self._job = job
        self._name = name
        self._attempt = attempt
        # A signal's number -> the process that sends it, and its start (monotonic).
        self._telling: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self._over: float | None = None  # when srun ended (monotonic)
        self._gone = False

    def poll(self) -> int | None:
        """Return srun's exit code, or None while Slurm still lists the step.

        The code is 128 + n if signal n ended srun.
        """
        code = self._srun.poll()
        if code is None:
            return None
        now = time.monotonic()
        first, self._over = self._over is None, self._over or now
        if not self._gone:
            try:
                left = bool(self._steps())
            except SlurmError as error:
                # If Slurm does not answer, srun's own code shows that the step has ended.
                left = code < 0 and "Invalid job id" not in str(error)
            self._gone = now - self._over > END_SECONDS or not left
        if not self._gone:
            if first and code >= 0:  # slurmctld does not know the step's end yet
                time.sleep(0.2)
            else:
                self._scancel("KILL")
            return None
        return 128 - code if code < 0 else code

    def signal(self, number: int) -> None:
        """Start sending a signal to the keeper of every rank, without waiting.

        A keeper (`launch.node.rank`) is the parent process of a rank. A keeper that has not started
        yet does not get the signal, so the caller repeats the call.
        """
        if number in self._telling:
            telling, since = self._telling[number]
            code = telling.poll()
            if code is None and time.monotonic() - since < ANSWER_SECONDS:
                return
            telling.kill()
            telling.wait()
            del self._telling[number]
            # Slurm does not start another step, so every process of this step gets the signal.
            if code:
                self._scancel(signal.Signals(number).name.removeprefix("SIG"))
                return
        folder = self._attempt.folder
        words = ["launch.supervise.slurm_steps", "signal", str(self._attempt.folder), str(number)]
        with suppress(OSError):
            self._telling[number] = (
                start_on_nodes(self._attempt.nodes, "tell", words, folder / "logs" / "signals.log"),
                time.monotonic(),
            )

    def kill(self, seconds: float = END_SECONDS) -> None:
        """End every process of the step on all nodes with SIGKILL.

        Return once the processes have ended, or after ``seconds``.
        """
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            self._scancel("KILL")
            with suppress(subprocess.TimeoutExpired):
                self._srun.wait(2.0)
            if time.monotonic() > end - seconds * 0.75:
                self._srun.kill()

    def _scancel(self, name: str) -> None:
        with suppress(SlurmError):
            for step in self._steps():
                call("scancel", f"--signal={name}", step, timeout=ANSWER_SECONDS)

    def _steps(self) -> list[str]:
        """Return the step's id in a list, which is empty before the step exists and after its end.

        Raises:
            SlurmError: squeue fails.
        """
        answer = call(
            "squeue",
            "--steps",
            "--noheader",
            f"--jobs={self._job}",
            "--format=%i|%j",
            timeout=ANSWER_SECONDS,
        )
        rows = (line.strip().split("|", 1) for line in answer.splitlines() if "|" in line)
        return [
            step for step, name in rows if name == self._name and step.startswith(f"{self._job}.")
        ]


def start_on_nodes(
    nodes: Sequence[str], name: str, words: Sequence[str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a Python module once on each of the nodes, as a step that shares the ranks' resources.

    name: name of the step. words: the module and its arguments. log: file for its output.

    Raises:
        OSError: srun cannot be started.
    """
    where = [f"--nodelist={','.join(nodes)}", "--kill-on-bad-exit=0"]
    return started([*srun_words(nodes, name, "1"), *where, sys.executable, "-m", *words], log)


def srun_words(nodes: Sequence[str], name: str, cpus: str) -> list[str]:
    """Return the srun command for a step of one task per node, which may run next to other steps.

    name: name of the step. cpus: CPUs per task.

    Without --overlap and --mem=0, Slurm would delay or refuse the step.
    """
    number = len(nodes)
    words = [
        "srun",
        f"--job-name={name}",
        f"--nodes={number}",
        f"--ntasks={number}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
    ]
    return [*words, "--overlap", "--mem=0", "--mpi=none", "--export=ALL", "--input=none"]


def container_parts(attempt: Attempt) -> tuple[list[str], list[str]]:
    """Return (srun's options, words before the ranks' command) for the profile's container.

    pyxis needs the options, apptainer the words. Both lists are empty without a container. The
    folders of the job and the item and the profile's shared folders are mounted at the same paths,
    in addition to the profile's mounts. A variable that the image sets would override the job's
    value, so the important variables are set again inside the container.
    """
    job = attempt.job
    container = job.section("container")
    runtime, options = container.get("runtime", "none"), list(container.get("options") or ())
    if runtime == "none":
        return [], []
    own = (
        job.directory,
        attempt.item.directory,
        job.code,
        job.working_directory,
        *(job.section("paths").get("shared") or ()),
    )
    mounts = [*(container.get("mounts") or ()), *(f"{path}:{path}" for path in _outermost(own))]
    names = dict.fromkeys(
        ["PYTHONPATH", "PYTHONSAFEPATH", "LAUNCH_ATTEMPT", *job.section("environment")]
    )
    inside = [
        "env",
        *(f"{name}={attempt.environment[name]}" for name in names if name in attempt.environment),
    ]
    if runtime == "pyxis":
        image = [
            f"--container-image={container['image']}",
            f"--container-mounts={','.join(mounts)}",
        ]
        return [*image, f"--container-workdir={job.working_directory}", *options], inside
    gpus = ["--nv"] if job.section("nodes").get("gpus") else []
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return [], [
        "apptainer",
        "exec",
        *gpus,
        *binds,
        "--pwd",
        job.working_directory,
        *options,
        container["image"],
        *inside,
    ]


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths without duplicates and without paths below another path of the list."""
    unique = [path.rstrip("/") or "/" for path in dict.fromkeys(paths)]
    return [
        path
        for path in dict.fromkeys(unique)
        if not any(path != other and Path(path).is_relative_to(other) for other in unique)
    ]


def _literal(path: Path) -> str:
    """Escape a path for srun's file name patterns."""
    return str(path).replace("\\", "\\\\").replace("%", "%%")
