"""Load and check a cluster profile: the settings of a job that depend only on the cluster.

Each section of the profile is a frozen dataclass. A job stores the profile as plain values in
job.json, so no YAML is read inside a job.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from fem_common import config
from fem_common.errors import UserError
from fem_common.settings import setting, spec
from launch.cluster import profile_values
from launch.node import hardware
from launch.supervise.policy import Limits

EVENTS = ("started", "finished", "saved", "failed", "hang", "stopped", "cordoned")
SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "cluster"
# Slurm's signal before the time limit may be up to a minute early.
SIGNAL_EARLY_SECONDS = 60
SMI_SECONDS = 20.0  # limit for nvidia-smi


@dataclass(frozen=True)
class NodesProfile:
    """Configuration keys of the section ``nodes``: resources that a job takes on each node."""

    gpus: int | None = setting(
        0,
        (
            "GPUs of a node, all of which a job takes; 0: jobs without GPUs; null, only with "
            "scheduler: local: the number that nvidia-smi lists, at least 1."
        ),
        least=0,
    )
    cpus: int = setting(1, "CPUs of a node that a job takes, as Slurm counts them.", least=1)
    memory: str | None = setting(
        None,
        'Memory of a node that a job takes; "0": all; null: the partition\'s default.',
        check=profile_values.matches(r"\d+[KMGT]?", "0, 1800G or like"),
    )
    processes: int | None = setting(
        None, "Ranks per node; null: one per GPU, or one without GPUs.", least=1
    )
    gres: str | None = setting(
        None,
        (
            "sbatch's --gres, such as gpu:h100:8; null: gpu:<gpus>; none: no option, on clusters "
            "whose Slurm does not manage GPUs (no Gres)."
        ),
        check=profile_values.matches(r"[A-Za-z][A-Za-z0-9_.,:-]*", "gpu:8, gpu:h100:8 or none"),
    )
    exclusive: bool = setting(True, "Allow no other job on the nodes.")
    numa: str = setting(
        "none",
        "Bind each rank to the CPUs near its GPU: torchrun's --numa-binding. Try node first.",
        choices=("none", "node", "socket", "exclusive", "core-complex"),
    )


@dataclass(frozen=True)
class SlurmProfile:
    """Configuration keys of the section ``slurm``: options of sbatch and srun."""

    partition: str | None = setting(
        None,
        "Partition, or several with commas; null: the cluster's default.",
        check=profile_values.word,
    )
    account: str | None = setting(
        None, "Account; null: the user's default.", check=profile_values.word
    )
    qos: str | None = setting(
        None, "Quality of service; null: the default.", check=profile_values.word
    )
    time: str | None = setting(
        None,
        "Time limit of one submission; a run continues in the next one; null: the partition's.",
        check=profile_values.matches(profile_values.TIME, "24:00:00, 3-00:00:00 or minutes"),
    )
    constraint: str | None = setting(
        None,
        "Features that nodes must have.",
        check=profile_values.matches(
            r"[A-Za-z0-9_][\w&|*\[\]().,:+@=-]*", "features such as h100&ib"
        ),
    )
    exclude: tuple[str, ...] = setting((), "Nodes never to use.", check=profile_values.hosts)
    reservation: str | None = setting(None, "Reservation.", check=profile_values.word)
    signal_seconds: int = setting(
        300,
        (
            "Seconds before the time limit at which the run is signalled to save: more than a step "
            "and a checkpoint take."
        ),
        least=1,
    )
    options: tuple[str, ...] = setting(
        (),
        "More options of sbatch, one word each: --mail-type=FAIL.",
        check=profile_values.sbatch_option,
    )
    srun_options: tuple[str, ...] = setting(
        (),
        "More options of the srun that starts the ranks, one word each.",
        check=profile_values.option,
    )


@dataclass(frozen=True)
class ContainerProfile:
    """Configuration keys of the section ``container``, in which the ranks run.

    The supervisor runs outside the container.
    """

    runtime: str = setting(
        "none",
        "pyxis: srun's --container-image (enroot); apptainer: apptainer exec.",
        choices=("none", "pyxis", "apptainer"),
    )
    image: str | None = setting(
        None,
        "Image: a .sqsh or .sif file, or an address that the runtime knows.",
        check=profile_values.image,
    )
    mounts: tuple[str, ...] = setting(
        (),
        (
            "Folders of the node to mount inside, as /a:/b or /a:/b:ro; paths.shared are always "
            "mounted."
        ),
        check=profile_values.mount,
    )
    options: tuple[str, ...] = setting(
        (),
        (
            "More options of the runtime, one word each: --container-writable (pyxis), --nv "
            "(apptainer)."
        ),
        check=profile_values.option,
    )


@dataclass(frozen=True)
class SetupProfile:
    """Configuration keys of the section ``setup``: steps of the batch script.

    They run before the supervisor starts.
    """

    modules: tuple[str, ...] = setting(
        (), "Environment modules to load, in order.", check=profile_values.word
    )
    lines: tuple[str, ...] = setting(
        (),
        (
            "Lines of bash, inserted unchanged: the only text of a profile that the batch script "
            "executes."
        ),
        check=profile_values.bash,
    )


@dataclass(frozen=True)
class PathsProfile:
    """Configuration keys of the section ``paths``: folders and files of the cluster."""

    shared: tuple[str, ...] = setting(
        (),
        (
            "Folders that every node must be able to read and write: those of runs, data and the "
            "interpreter."
        ),
        check=profile_values.path,
    )
    cordon: str | None = setting(
        None,
        (
            "File with the nodes that no run may use, shared by all runs; null: runs/cordon.jsonl "
            "in the folder of the submission."
        ),
        check=profile_values.path,
    )


@dataclass(frozen=True)
class WatchdogProfile:
    """Configuration keys of the section ``watchdog``: times without progress that count as a hang.

    After a hang, the stacks of every rank are written and the run restarts.
    """

    start_minutes: float = setting(60.0, "Until the first step; 0: no limit.", least=0)
    step_minutes: float = setting(
        20.0, "Between steps, validations and checkpoints included; 0: no limit.", least=0
    )
    save_minutes: float = setting(
        10.0, "Between a signal to save and the end of the ranks; 0: no limit.", least=0
    )


@dataclass(frozen=True)
class HealthProfile:
    """Configuration keys of the section ``health``: conditions that a node must meet for a run.

    The conditions are checked before ranks start on the node.
    """

    check: bool = setting(True, "Check the nodes before every attempt; false: never.")
    matmul: bool = setting(
        True, "Multiply matrices on every GPU and compare with the known product."
    )
    free_memory_gb: float = setting(0.0, "Memory that must be free, in GB.", least=0)
    free_disk_gb: float = setting(
        1.0, "Free space that /tmp and the shared folders must have, in GB.", least=0
    )
    timeout_seconds: float = setting(
        180.0, "A node that does not answer within this time fails the check.", least=1
    )
    all_reduce_gb_per_second: float | None = setting(
        None, "doctor: the least bus bandwidth of an all-reduce over the nodes, in GB/s.", least=0
    )
    clock_skew_seconds: float = setting(
        2.0, "doctor: the largest difference between the clocks of two nodes, in s.", least=0
    )


@dataclass(frozen=True)
class NotifyProfile:
    """Configuration keys of the section ``notify``: a command that receives a job's events."""

    command: str | None = setting(
        None,
        (
            "Program, or line of sh, that gets each event as JSON on its standard input; no web "
            "address."
        ),
        check=profile_values.hook,
    )
    events: tuple[str, ...] = setting(EVENTS, "Events that start the command.", choices=EVENTS)


@dataclass(frozen=True)
class Profile:
    """Cluster profile: all settings of a job that depend on the cluster."""

    scheduler: str = setting(
        "slurm",
        "Scheduler of the jobs; local: this machine, by `launch local`.",
        choices=("slurm", "local"),
    )
    python: str | None = setting(
        None,
        "The ranks' interpreter, inside the container if one is set; null: the submitting one.",
        check=profile_values.program,
    )
    host_python: str | None = setting(
        None,
        (
            "The supervisor's interpreter, outside any container; null: `python`, or with a "
            "container the submitting one."
        ),
        check=profile_values.program,
    )
    nodes: NodesProfile = setting(NodesProfile, "Resources of a node that a job takes.")
    slurm: SlurmProfile = setting(SlurmProfile, "Options of sbatch and srun.")
    container: ContainerProfile = setting(ContainerProfile, "A container that the ranks run in.")
    setup: SetupProfile = setting(
        SetupProfile, "Steps of the batch script before the supervisor starts."
    )
    environment: dict[str, str] = setting(
        dict,
        "Variables of the ranks and of the supervisor; null removes a base's variable.",
        check=profile_values.variable,
    )
    paths: PathsProfile = setting(PathsProfile, "Folders.")
    logs: str | None = setting(
        None,
        "Folder for the output of Slurm and the supervisor; null: the run's launch folder.",
        check=profile_values.path,
    )
    restarts: Limits = setting(Limits, "Limits on restarts after failures.")
    watchdog: WatchdogProfile = setting(
        WatchdogProfile, "Times without progress after which a run counts as hung."
    )
    health: HealthProfile = setting(
        HealthProfile, "Conditions that a node must meet before ranks start on it."
    )
    notify: NotifyProfile = setting(NotifyProfile, "Notifications about a job's events.")

    @property
    def processes_per_node(self) -> int:
        """Number of ranks per node."""
        return self.nodes.processes or self.nodes.gpus or 1

    def interpreters(self, submitting: str) -> tuple[str, str]:
        """Return the paths of (the ranks' interpreter, the supervisor's interpreter).

        submitting: path of the interpreter that runs now, which is the default.
        """
        ranks = self.python or submitting
        return ranks, self.host_python or (
            submitting if self.container.runtime != "none" else ranks
        )

    def as_json(self) -> dict[str, Any]:
        """Return the complete profile as plain JSON values, which `from_json` reads."""
        values: dict[str, Any] = config.plain(self)
        return values


def load_profile(path: str | Path, overrides: Sequence[str] = ()) -> Profile:
    """Load a profile from a YAML file, apply overrides, and fill in variables and relative paths.

    path: a file, or the name of a shipped profile if no file of that name exists.
    overrides: settings such as ``slurm.partition=x``.

    Raises:
        UserError: the file cannot be read, a key is unknown, a value is refused, or values
            contradict each other.
    """
    if not Path(path).exists() and (SHIPPED / f"{path}.yaml").is_file():
        path = SHIPPED / f"{path}.yaml"
    elif not Path(path).exists() and "/" not in str(path):
        shipped = sorted(file.stem for file in SHIPPED.glob("*.yaml"))
        raise UserError(
            f"--cluster {path}: no such file or shipped profile; choose one of {', '.join(shipped)}"
        )
    profile = config.load(Profile, path, overrides, shipped=SHIPPED)
    if profile.nodes.gpus is None and profile.scheduler == "local":
        # As many as nvidia-smi lists for this process. If it lists none, use 1, so that the check
        # before the run reports the missing GPU.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = (
            min([hardware.listed(SMI_SECONDS), *([len(visible.split(","))] if visible else [])])
            or 1
        )
        profile = replace(profile, nodes=replace(profile.nodes, gpus=gpus))
    fault = next(_contradictions(profile), None)
    if fault:
        raise UserError(f"{path}: {fault}")
    filled = _filled_in(profile)
    assert isinstance(filled, Profile)
    return filled


def from_json(values: dict[str, Any]) -> Profile:
    """Return the profile from the values of `Profile.as_json`."""
    return config.from_plain(Profile, values)


def _contradictions(profile: Profile) -> Iterator[str]:
    """Yield a line for each contradiction between values."""
    nodes, container = profile.nodes, profile.container
    if nodes.gpus is None:
        yield (
            "nodes.gpus = null: give the number of GPUs per node; only this machine's (scheduler: "
            "local) can be counted"
        )
    slurm = profile.slurm
    if (
        slurm.time is not None
        and profile_values.seconds(slurm.time) <= slurm.signal_seconds + SIGNAL_EARLY_SECONDS
    ):
        yield (
            f"slurm.time = {slurm.time} must be more than slurm.signal_seconds = "
            f"{slurm.signal_seconds} and the {SIGNAL_EARLY_SECONDS}"
            " seconds that Slurm may be early: the run would be signalled to save right after each "
            "start"
        )
    if nodes.gpus and nodes.processes and nodes.processes > nodes.gpus:
        yield (
            f"nodes.processes = {nodes.processes} is more than nodes.gpus = {nodes.gpus}: each "
            "rank needs a GPU"
        )
    if nodes.numa != "none" and not nodes.gpus:
        yield (
            f"nodes.numa = {nodes.numa}: torchrun binds ranks to the CPUs near their GPU, and "
            "nodes.gpus is 0"
        )
    if (container.runtime == "none") != (container.image is None):
        yield (
            f"container.runtime = {container.runtime} and container.image = "
            f"{container.image or 'null'}: give both or neither"
        )
    if container.runtime != "none" and profile.scheduler == "local":
        yield (
            f"container.runtime = {container.runtime}: containers are for Slurm; locally, start "
            "the launcher inside one"
        )
    unmountable = [
        path
        for path in profile.paths.shared
        if container.runtime != "none" and re.search("[:,]", path)
    ]
    if unmountable:
        yield (
            f"paths.shared: {unmountable[0]!r}: a folder with a colon or comma in its name cannot "
            "be mounted into a container"
        )
    odd = [
        option
        for option in container.options
        if container.runtime == "pyxis" and not re.match(r"--(no-)?container-", option)
    ]
    if odd:
        yield (
            f"container.options: {odd[0]!r}: pyxis has --container-... and --no-container-...; "
            "others go into slurm.srun_options"
        )
    for name, value in profile.environment.items():
        wrong = profile_values.variable_fault(name, value)
        if wrong:
            yield wrong
    if profile.restarts.back_off_max_seconds < profile.restarts.back_off_seconds:
        yield "restarts.back_off_max_seconds is less than restarts.back_off_seconds"
    fault = _bash_fault(profile.setup.lines)
    if fault:
        yield f"setup.lines: {fault}"


def _bash_fault(lines: tuple[str, ...]) -> str | None:
    """Return bash's syntax error for a sequence of lines, or None if it has none.

    The result is also None if bash is not installed.
    """
    bash = shutil.which("bash")
    if not lines or bash is None:
        return None
    answer = subprocess.run(
        ["bash", "-n"],
        executable=bash,
        input="\n".join(lines).encode(),
        capture_output=True,
        check=False,
    ).stderr
    return " ".join(answer.decode("utf-8", "replace").split()) or None


def _filled_in(section: Any) -> Any:
    """Return a section with variables filled in and paths made absolute, in nested sections too."""
    changed = {}
    for item in fields(section):
        old, check = getattr(section, item.name), spec(item).check
        if is_dataclass(old):
            changed[item.name] = _filled_in(old)
        elif isinstance(old, tuple):
            changed[item.name] = tuple(profile_values.fill(check, entry) for entry in old)
        elif isinstance(old, str):
            changed[item.name] = profile_values.fill(check, old)
    return replace(section, **changed)
