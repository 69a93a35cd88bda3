"""Functions that run Slurm's commands and parse their output. Uses only the standard library.

Every error is a SlurmError with a message of one line. The user's SBATCH_*, SQUEUE_* and SLURM_*
variables, which would change a command's meaning, are removed from the command's environment.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fem_common.errors import UserError

# Seconds that a command may take; slurmctld's own message time-out is 10.
TIMEOUT = 60.0
ANSWER_SECONDS = 20.0  # the same for queries while ranks run
# Variables that identify the Slurm cluster and the user. `clean_environment` does not remove them.
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
# Without these settings, Slurm's output omits partitions that are hidden or closed to the user's
# groups, with their jobs and nodes.
ALL = {"SQUEUE_ALL": "1", "SINFO_ALL": "1", "SCONTROL_ALL": "1"}
# Variables of Slurm and of torchrun (PET_).
OURS = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SQUEUE|SCANCEL|SCONTROL|SALLOC|SACCT|SINFO|PET)_")
# Variables that are set if the submitting shell is itself a rank of an MPI job (Hydra, MVAPICH,
# PALS, PMIx, Open MPI). Settings (PMIX_MCA_*, OMPI_MCA_*) do not match, except those that mpirun
# sets for its ranks.
OTHERS_RANK = re.compile(
    r"(PMI|HYDI|HYDRA_(PROXY|CONTROL)|MPISPAWN|MV2_COMM_WORLD|PALS)_|MPI_LOCAL(RANKID|NRANKS)$"
    r"|PMIX_(?!MCA_|INSTALL_PREFIX)"
    r"|OMPI_(COMM_WORLD|UNIVERSE|APP_CTX|NUM_APP|FIRST_RANKS|ARGV|COMMAND|FILE_LOCATION)"
    r"|OMPI_MCA_(ess|orte_(ess|hnp_uri|local_daemon|parent_uri|app_num"
    r"|num_nodes|(jobfam|top)_session))"
)
# States of jobs that use nodes or will use them.
ACTIVE = frozenset(
    "PENDING CONFIGURING RUNNING SUSPENDED STOPPED COMPLETING SIGNALING STAGE_OUT RESIZING "
    "REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD".split()
)
CHUNK = 200  # job ids per query: the length of a command line is limited


class SlurmError(UserError):
    """Slurm is missing, does not answer, or refuses. The message is one line with Slurm's text."""


@dataclass(frozen=True)
class QueueState:
    """State of a job, or of one task of a job array, as Slurm reports it."""

    state: str  # PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, ...
    # reason for waiting: Resources, Priority, Dependency, BeginTime, ...; "" if it does not wait
    reason: str = ""
    nodes: str = ""  # in Slurm's form: node[1-4]
    command: str = ""  # the batch script, or the sbatch command line that ends with it; "": unknown

    @property
    def active(self) -> bool:
        """True if the job is in the queue or uses nodes."""
        return self.state in ACTIVE

    def runs(self, script: Path) -> bool:
        """Return True if the job runs this batch script, or if its script is unknown.

        Slurm reuses job ids after MaxJobId jobs, so an old id may belong to another job.
        """
        return (
            not self.command
            or self.command == str(script)
            or self.command.endswith((f" {script}", f" {shlex.quote(str(script))}"))
        )


def clean_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment without the variables of Slurm, torchrun and other MPI jobs.

    These variables would change what Slurm's commands or the submitted job do. Variables in KEPT
    are not removed.

    environ: the environment to filter; None: that of this process.
    """
    environ = os.environ if environ is None else environ
    return {
        name: value
        for name, value in environ.items()
        if name in KEPT or not (OURS.match(name) or OTHERS_RANK.match(name))
    }


def call(*command: str, timeout: float = TIMEOUT) -> str:
    """Run a Slurm command and return its output.

    timeout: seconds to wait for the command.

    Raises:
        SlurmError: the command is not installed, does not answer in time, or fails.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=clean_environment() | ALL,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]}: not installed on this host; submit on a login node of the cluster, or "
            "start it with: python -m launch local"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]}: Slurm gave no answer in {timeout:g} seconds; is slurmctld up? "
            "(scontrol ping)"
        ) from None
    if done.returncode:
        raise SlurmError(
            f"{command[0]}: "
            f"{_words(done.stderr or done.stdout) or f'failed with {done.returncode}'}"
        )
    return done.stdout


def _words(text: str) -> str:
    """Return Slurm's error output as one line without prefixes and repeated lines.

    A hint is added for common errors.
    """
    lines = [re.sub(r"^(\w+: )?(fatal|error): ", "", line.strip()) for line in text.splitlines()]
    words = "; ".join(dict.fromkeys(line for line in lines if line))
    if re.search(
        r"Unable to contact slurm controller|Connection refused|Zero Bytes|Connection timed out",
        words,
    ):
        words += " (is this a login node, and slurmctld up? scontrol ping)"
    if "Invalid job array" in words:
        words += " (more tasks than the cluster's MaxArraySize? scontrol show config)"
    return words


def submit(script: Path, *options: str) -> str:
    """Submit a batch script and return the job's id. The job inherits this process's environment.

    Raises:
        SlurmError: sbatch fails.
    """
    answer = call("sbatch", "--parsable", *options, str(script))
    job_id = answer.strip().splitlines()[-1].split(";")[0] if answer.strip() else ""
    if not job_id.isdigit():
        raise SlurmError(f"sbatch: answered {answer.strip()!r} instead of a job id")
    return job_id


def queue(job_ids: Iterable[str], *, past: bool = True) -> dict[str, QueueState]:
    """Return job id -> state. For an array's id, also contain the key ``ID_TASK`` of every task.

    past: also query accounting, which stores ended jobs permanently. The controller deletes a job
    minutes after its end.

    An array's state is that of its first running task. If no task runs, it is the state of a
    waiting task. If no task waits either, it is the state of a task that did not complete,
    otherwise of the last task. Ids that Slurm does not store are missing from the result.

    Raises:
        SlurmError: squeue fails.
    """
    wanted = list(dict.fromkeys(job_ids))
    found: dict[str, QueueState] = {}
    for start in range(0, len(wanted), CHUNK):
        found |= _squeue(wanted[start : start + CHUNK])
    if past:
        arrays = {name.partition("_")[0] for name in found}
        found |= _sacct([job for job in wanted if job not in found and job not in arrays])
    # Tests for the task whose state an array's id gets, in order of priority.
    ways = (
        lambda task: task.active and task.state != "PENDING",
        lambda task: task.active,
        lambda task: task.state != "COMPLETED",
    )
    for job in wanted:
        tasks = [state for name, state in found.items() if name.startswith(f"{job}_")]
        if tasks and job not in found:
            found[job] = next((task for way in ways for task in tasks if way(task)), tasks[-1])
    return found


def _squeue(job_ids: Sequence[str]) -> dict[str, QueueState]:
    """Return the states of jobs that the controller stores, including recently ended ones."""
    try:
        answer = call(
            "squeue",
            "--noheader",
            "--array",
            "--states=all",
            f"--jobs={','.join(job_ids)}",
            f"--format={_FORMAT}",
        )
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        # Slurm reports this error only if the query has one id. If it has several, Slurm skips
        # unknown ids.
        return {}
    return _parse(answer)


_FORMAT = "%i|%T|%r|%N|%o"


def _parse(answer: str) -> dict[str, QueueState]:
    """Parse the rows of squeue in `_FORMAT`. Other lines, such as a site's notice, are skipped."""
    found = {}
    for line in answer.splitlines():
        if line.count("|") < _FORMAT.count("|"):
            continue
        name, state, reason, nodes, command = (field.strip() for field in line.split("|", 4))
        found[name] = QueueState(
            state,
            "" if reason in ("None", "(null)") else reason,
            nodes,
            "" if command == "(null)" else command,
        )
    return found


def _sacct(job_ids: Sequence[str]) -> dict[str, QueueState]:
    """Return the states of jobs in Slurm's accounting, or {} if accounting is not available."""
    if not job_ids or shutil.which("sacct") is None:
        return {}
    columns = "JobID,State,NodeList"
    question = (
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={','.join(job_ids)}",
    )
    try:
        answer = call(*question, f"--format={columns},SubmitLine")
    except SlurmError as error:
        if "Invalid field" not in str(error):
            return {}
        try:  # before Slurm 21.08
            answer = call(*question, f"--format={columns}")
        except SlurmError:
            return {}
    found = {}
    for line in answer.splitlines():
        if line.count("|") < columns.count(","):
            continue
        name, state, nodes, command = [*line.split("|", 3), ""][:4]
        found[name] = QueueState(
            state.partition(" ")[0], "", "" if nodes == "None assigned" else nodes, command.strip()
        )
    return found


def jobs_of(script: Path, name: str = "", noted: Collection[str] = ()) -> dict[str, QueueState]:
    """Return job id -> state of the active jobs and array tasks that run this batch script.

    Slurm may report no batch script, for instance if a site's sbatch passes it through a pipe. A
    job without a reported script is included if its name is ``name`` and its id is in ``noted``.

    Raises:
        SlurmError: a command fails.
    """
    rows = _parse(call("squeue", "--noheader", "--array", "--states=all", f"--format={_FORMAT}"))

    def is_ours(job: str, command: str) -> bool:
        if command:
            return command == str(script)
        return job.partition("_")[0] in noted and job_fields(job).get("JobName") == name

    return {job: row for job, row in rows.items() if row.active and is_ours(job, row.command)}


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs or array tasks, and skip those that have already ended.

    Raises:
        SlurmError: scancel fails.
    """
    for start in range(0, len(job_ids), CHUNK):
        try:
            call("scancel", *job_ids[start : start + CHUNK])
        except SlurmError as error:
            if not re.search(
                r"Invalid job id|already completing|already completed|already finished", str(error)
            ):
                raise


def signal_batch(job_ids: Sequence[str], name: str) -> None:
    """Send a signal to the batch scripts of running jobs, and not to the jobs' steps.

    name: the signal without SIG, such as ``USR1``. Jobs that ended meanwhile are skipped.

    Do not use it for a waiting task of an array: Slurm 22.05 may send the signal to another task.

    Raises:
        SlurmError: scancel fails.
    """
    for job in job_ids:
        try:
            call("scancel", "--batch", f"--signal={name}", job)
        except SlurmError:
            state = queue([job], past=False).get(job)
            if state is not None and state.state == "RUNNING":
                raise


@dataclass(frozen=True)
class Node:
    """A node in Slurm's configuration."""

    name: str
    state: str  # IDLE, ALLOCATED, MIXED+DRAIN, DOWN* ...
    reason: str  # first line only
    cpus: int
    memory: int  # MiB
    gres: str = ""  # gpu:h100:8(S:0-1),nvme:2
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """Number of the node's GPUs, of all types together."""
        return sum(count for name, _, count in amounts(self.gres) if name == "gpu")

    @property
    def in_service(self) -> bool:
        """True if the node accepts new jobs, now or after its running jobs end."""
        return not re.search(
            r"DOWN|DRAIN|FAIL|NOT_RESPONDING|MAINT|POWERING_DOWN|INVAL|UNKNOWN|\*", self.state
        )

    def fits(self, job: Mapping[str, str]) -> bool:
        """Return True if the node meets a job's requirements.

        These are the partitions, features, GRES, CPUs and memory. A requirement that cannot be
        parsed counts as met.

        job: the fields of scontrol.
        """
        partitions = job.get("Partition", "(null)").split(",")
        if partitions != ["(null)"] and not set(partitions) & set(self.partitions):
            return False
        features, cpus = job.get("Features", "(null)"), number(job.get("MinCPUsNode")) or 1
        if re.fullmatch(r"[\w.-]+(?:[&,][\w.-]+)*", features) and not set(
            re.split("[&,]", features)
        ) <= {*self.features}:
            return False
        memory = max(mebibytes(job.get("MinMemoryNode")), mebibytes(job.get("MinMemoryCPU")) * cpus)
        if self.cpus < cpus or self.memory < memory:
            return False
        mine = amounts(self.gres)
        for wanted, of_kind, count in amounts(job.get("TresPerNode", "")):
            has = sum(n for name, kind, n in mine if name == wanted and of_kind in ("", kind))
            if has < count:
                return False
        return True


_GRES = re.compile(
    r"(?:gres[:/])?(?P<name>\w+)(?::(?P<kind>(?=\w*[A-Za-z_])[\w.+-]+))?"
    r"(?:[:=](?P<count>\d+))?(?:\([^)]*\))?"
)
# Slurm's units of memory sizes, in MiB.
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "": 1.0}


def amounts(gres: str) -> list[tuple[str, str, int]]:
    """Parse Slurm's GRES text into a list of (name, type or "", count).

    Examples are ``gpu:h100:8(S:0-1),nvme:2`` and ``gres:gpu:8``. Parts in other forms are skipped.
    """
    found = (
        _GRES.fullmatch(part)
        for part in re.split(r",(?![^(]*\))", gres)
        if part not in ("", "(null)")
    )
    return [
        (part["name"], part["kind"] or "", int(part["count"] or 1))
        for part in found
        if part and part["name"] != "none"
    ]


def number(text: str | None) -> int:
    """Return the number at the start of a text, or 0 if the text does not begin with a digit."""
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else 0


def mebibytes(size: str | None) -> float:
    """Convert a Slurm memory size (1800G, 62.50G, 16000) to MiB.

    Return 0 if the size is missing (the partition's default applies), is 0 (all memory of a node),
    or cannot be parsed.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", size or "0")
    return float(match[1]) * _UNITS[match[2]] if match else 0.0


def all_nodes() -> list[Node]:
    """Return every node that Slurm lists.

    Return an empty list if the site hides nodes from users (PrivateData=nodes).

    Raises:
        SlurmError: scontrol fails.
    """
    try:
        answer = call("scontrol", "show", "nodes", "--oneliner")
    except SlurmError as error:
        if "permission denied" in str(error).lower():
            return []
        raise
    return [
        Node(
            name=record["NodeName"],
            state=record.get("State", "UNKNOWN"),
            reason=record.get("Reason", "").partition(" [")[0],
            cpus=number(record.get("CPUTot")),
            memory=number(record.get("RealMemory")),
            gres=record.get("Gres", ""),
            partitions=tuple(record.get("Partitions", "").split(",")),
            features=tuple(record.get("AvailableFeatures", "").split(",")),
        )
        for record in records(answer)
        if record.get("NodeName")  # other lines are the second line of a Reason
    ]


def enough_nodes(nodes: Sequence[Node], job: Mapping[str, str], exclude: Collection[str]) -> bool:
    """Return True if a job can still get its number of nodes without the nodes in ``exclude``.

    The remaining nodes must meet the job's requirements and belong to one of its partitions and, if
    the job has a reservation, to the reservation. Return False if ``exclude`` contains a node that
    the job requires (--nodelist). Slurm never starts a job with too few usable nodes
    (BadConstraints).

    job: the fields of scontrol.

    Raises:
        SlurmError: the job's node list cannot be read.
    """
    if {*hosts(listed(job, "ReqNodeList"))} & {*exclude}:
        return False
    reserved = set[str]()
    for name in listed(job, "Reservation"):
        with suppress(SlurmError):  # a reservation that cannot be read counts as met
            for record in records(
                call("scontrol", "show", "reservation", name, "--oneliner", timeout=ANSWER_SECONDS)
            ):
                reserved.update(hosts(listed(record, "Nodes")))
    left = [
        node
        for node in nodes
        if node.name not in exclude and (not reserved or node.name in reserved)
    ]
    wanted = number(job.get("NumNodes")) or 1
    for partition in job.get("Partition", "(null)").split(","):
        in_partition = {**job, "Partition": partition}
        if sum(node.fits(in_partition) for node in left) >= wanted:
            return True
    return False


def listed(record: Mapping[str, str], field: str) -> list[str]:
    """Split the value of a field at its commas.

    Return an empty list if the field is missing or empty.
    """
    text = record.get(field, "(null)")
    return [] if text in ("", "(null)") else text.split(",")


def hosts(lists: Sequence[str]) -> list[str]:
    """Expand node lists (node[01-04],node07) to node names, in order.

    Raises:
        SlurmError: scontrol fails.
    """
    return (
        call("scontrol", "show", "hostnames", ",".join(lists), timeout=ANSWER_SECONDS).split()
        if lists
        else []
    )


def job_fields(job: str) -> dict[str, str]:
    """Return the fields of ``scontrol show job`` as name -> value, or {} if it shows no job.

    Raises:
        SlurmError: scontrol fails.
    """
    shown = records(call("scontrol", "show", "--oneliner", "job", job, timeout=ANSWER_SECONDS))
    return next((record for record in shown if "JobId" in record), {})


def records(text: str) -> list[dict[str, str]]:
    """Parse scontrol's --oneliner output, one record per line."""
    return [fields(line) for line in text.splitlines() if "=" in line]


def fields(text: str, separator: str = " ") -> dict[str, str]:
    """Parse ``A=b C=d e`` into {A: b, C: d e}.

    separator: if it is a line break, each line is one field, and spaces around ``=`` are removed.
    """
    if separator == "\n":
        pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
        return {name.strip(): value.strip() for name, _, value in pairs}
    parts = re.split(r"(?:^|\s)([A-Za-z][\w:/]*)=", text.strip())
    # The first occurrence of a name counts: the users' free texts (Comment, Reason), which may
    # contain text of the form A=b, are after the fields that this package reads.
    return dict(
        reversed([*zip(parts[1::2], (value.strip() for value in parts[2::2]), strict=True)])
    )
