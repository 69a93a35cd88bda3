"""Translate a command line into a `Job`: a training run or a command.

pretrain resolves the configuration of a training run in a separate process. This module writes no
files and does not import pretrain: it handles a run's settings as YAML text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fem_common import secrets
from fem_common.errors import UserError
from fem_common.exits import Exit
from launch.cluster.profile import Profile
from launch.cluster.slurm import clean_environment
from launch.job.job import Item, Job, launch_folder
from launch.job.snapshot import ROOT, code_folder

COMMANDS = Path("runs") / "jobs"  # default folder of commands' directories
# Limit for pretrain to resolve or check a configuration: imports from a cold file system are slow.
PRETRAIN_SECONDS = 600.0


@dataclass(frozen=True)
class Request:
    """Settings of a verb that starts a run or a command, from its command line."""

    words: tuple[str, ...]  # CONFIG.yaml and its overrides, or MODULE and its arguments
    is_command: bool  # the words are MODULE and its arguments
    profile: Profile
    profile_path: str
    nodes: int = 1
    processes: int | None = None  # ranks per node; None: the profile's for a run, 1 for a command
    name: str | None = None
    directory: str | None = None
    tasks: int | None = None  # of a command: number of tasks of a job array
    update: bool = False  # replace the settings and the code of an existing job
    at_once: int | None = None  # array tasks that may run at a time; None: no limit
    # Only for Slurm:
    dependency: Sequence[str] = ()  # jobs to wait for
    exclude: Sequence[str] = ()  # nodes not to use, in addition to the profile's
    no_rehearse: bool = False  # start runs without a rehearsal
    dry_run: bool = False  # print the plan and write no files
    parsable: bool = False  # print only the job's id


@dataclass(frozen=True)
class Wanted:
    """A requested job, before it is compared with an existing job in its directory."""

    job: Job
    # An item's directory -> its run's complete configuration as YAML; empty for commands.
    configs: Mapping[str, str]
    # Resolves the configurations with the code in another folder.
    resolve_with: Callable[[Path], Mapping[str, str]]


def wanted(request: Request) -> Wanted:
    """Return the job for a request, without reading the files in the job's directory.

    Raises:
        UserError: the request is invalid. If pretrain refuses the configuration, the error text is
            pretrain's.
    """
    if request.nodes < 1 or (request.processes is not None and request.processes < 1):
        raise UserError("--nodes and --processes must be at least 1")
    # The words are written into the job's files. A variable with the path of a secret is no secret.
    for name, value in os.environ.items():
        found = (
            secrets.values({name: value})
            if secrets.is_secret(name) and not os.path.exists(value)
            else ()
        )
        if any(secret in word for word in request.words for secret in found):
            raise UserError(
                f"a word of the command contains the value of ${name}, and would be written to "
                f"files; jobs inherit ${name} anyway"
            )
    return _command(request) if request.is_command else _run(request)


def work_directory() -> str:
    """Return the working directory by the path that the user typed, with its symbolic links.

    Other hosts may be able to reach the directory only through these links.
    """
    named = os.environ.get("PWD", "")
    return (
        named
        if os.path.isabs(named) and os.path.isdir(named) and os.path.samefile(named, ".")
        else os.getcwd()
    )


def absolute(path: str | Path) -> str:
    """Return a path as an absolute path from the user's working directory.

    The result has no ``..`` and no trailing slash, and ~ is expanded.
    """
    return os.path.normpath(os.path.join(work_directory(), os.path.expanduser(path)))


def pretrain(
    words: Sequence[str],
    world_size: int,
    stop: str,
    code: Path = ROOT,
    directory: str | None = None,
) -> str:
    """Run ``python -m pretrain`` with an option that stops before training, and return its output.

    words: CONFIG.yaml and overrides. stop: the option, such as --resolve. code: folder of the code
    to run. directory: value for run_dir; None: as configured.

    Raises:
        UserError: pretrain fails (with its error text) or does not end within `PRETRAIN_SECONDS`.
    """
    ours = [f"parallel.world_size={world_size}"]
    if directory is not None:
        ours.append(f"run_dir={json.dumps(directory, ensure_ascii=False)}")
    command = [sys.executable, "-m", "pretrain", *words, *ours, stop]
    environment = {
        name: value
        for name, value in clean_environment().items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=PRETRAIN_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"pretrain did not finish reading {words[0]} in {PRETRAIN_SECONDS:g} seconds; does a "
            "file system hang?"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        output = [
            line.removeprefix("pretrain: error: ")
            for line in lines
            if line.startswith("pretrain: error: ")
        ]
        last = "; ".join(output) or lines[-1]
        raise UserError(
            last
            if done.returncode == Exit.WRONG_INPUT
            else f"python -m pretrain {words[0]} {stop} failed with {done.returncode}: {last}"
        )
    return done.stdout


def pretrain_text(text: str, world_size: int, stop: str, *words: str, code: Path = ROOT) -> str:
    """Run `pretrain` on a resolved configuration that is given as text, and return its output.

    text: the configuration as YAML. stop: option that stops before training. words: further options
    and overrides. code: folder of the code to run.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        return pretrain([file.name, *words], world_size, stop, code)


def data_fault(configs: Iterable[str], world_size: int) -> str | None:
    """Return an error text (one line) if data of the runs is missing or unsuitable, otherwise None.

    configs: resolved configurations as YAML texts. Those with the same data section are checked
    once.
    """
    different = {
        json.dumps(read_config(text).get("data"), sort_keys=True): text for text in configs
    }
    for text in different.values():
        try:
            pretrain_text(text, world_size, "--check")
        except UserError as error:
            return str(error)
    return None


def read_config(text: str) -> dict[str, Any]:
    """Parse a resolved configuration into plain values.

    Raises:
        UserError: the text has no name or no run_dir.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    values = yaml.load(text, Loader=loader)
    if not isinstance(values, dict) or not values.get("run_dir") or not values.get("name"):
        raise UserError(
            "pretrain --resolve printed no configuration with name and run_dir; is all code of the "
            "same version?"
        )
    return values


def run_item(directory: str, name: str) -> Item:
    """Return the item that trains a run in a directory."""
    return Item(
        directory, ("-m", "pretrain", str(launch_folder(Path(directory)) / "config.yaml")), name
    )


def new_job(request: Request, name: str, directory: str, items: Sequence[Item], array: bool) -> Job:
    """Return a job of training runs or of commands, according to ``request``.

    array: the items are the tasks of a Slurm job array.

    torchrun starts several processes, and also a run's single process if it must be bound to the
    CPUs of its GPU.
    """
    profile, run = request.profile, not request.is_command
    processes = request.processes or (profile.processes_per_node if run else 1)
    return Job(
        name=request.name or name,
        kind="run" if run else "command",
        directory=directory,
        working_directory=work_directory(),
        code=str(code_folder(Path(directory))),
        python=profile.interpreters(sys.executable)[0],
        nodes=request.nodes,
        processes_per_node=processes,
        torchrun=request.nodes * processes > 1 or (run and profile.nodes.numa != "none"),
        items=tuple(items),
        profile=profile.as_json(),
        profile_path=absolute(request.profile_path),
        array=array,
    )


def _run(request: Request) -> Wanted:
    """Return the job of a training run, whose configuration pretrain resolves."""
    if request.tasks is not None:
        raise UserError(
            "--tasks is for a command after --; many runs of one configuration: python -m launch "
            "sweep"
        )
    if not request.words:
        raise UserError(
            "nothing to do: give CONFIG.yaml, or a command after --, as: -- data_prep run --out DIR"
        )
    world_size = request.nodes * (request.processes or request.profile.processes_per_node)
    requested = None if request.directory is None else absolute(request.directory)

    def resolved(code: Path) -> str:
        return pretrain(request.words, world_size, "--resolve", code, requested)

    text = resolved(ROOT)
    values = read_config(text)
    directory, name = absolute(values["run_dir"]), request.name or str(values["name"])
    job = new_job(request, name, directory, [run_item(directory, name)], array=False)
    return Wanted(job, {directory: text}, lambda code: {directory: resolved(code)})


def _command(request: Request) -> Wanted:
    """Return the job of a command, with one item per task."""
    if not request.words:
        raise UserError("no command after --; give one, as: -- data_prep merge DIR")
    module, *arguments = request.words
    _check_module(module)
    name = request.name or command_name(request.words)
    directory = absolute(request.directory or COMMANDS / name)
    argv, tasks = ("-m", module, *arguments), request.tasks
    if tasks is None:
        items = [Item(directory, argv, name)]
    elif tasks < 1:
        raise UserError(f"--tasks is {tasks}; it must be at least 1")
    else:
        # Slurm would set these from the submitted tasks. If only a part is submitted again, its
        # commands must still see the complete array.
        array_variables = {
            f"SLURM_ARRAY_TASK_{key}": str(value)
            for key, value in (("COUNT", tasks), ("MIN", 0), ("MAX", tasks - 1), ("STEP", 1))
        }
        environments = [
            {**array_variables, "SLURM_ARRAY_TASK_ID": str(index)} for index in range(tasks)
        ]
        items = [
            Item(f"{directory}/tasks/{i:04}", argv, f"{name}[{i}]", environments[i])
            for i in range(tasks)
        ]
    job = new_job(request, name, directory, items, tasks is not None)
    return Wanted(job, {}, lambda code: {})


def command_name(words: Sequence[str]) -> str:
    """Return a name for a command, such as data_prep-merge-1a2b3c4d.

    The name consists of the module, the verb if the first argument is one, and a hash of all words
    and the working directory. So the same command gets the same directory again.
    """
    verb = next((word for word in words[1:2] if re.fullmatch(r"[a-z][a-z0-9-]*", word)), None)
    name = "-".join(filter(None, [words[0].removeprefix("tools.").replace(".", "-"), verb]))
    words_hash = hashlib.sha256(
        "\0".join([work_directory(), *words]).encode(errors="surrogateescape")
    ).hexdigest()
    return f"{name}-{words_hash[:8]}"


def _check_module(module: str) -> None:
    """Raise UserError unless ``module`` is pretrain, data_prep or an existing module of tools."""
    parts = module.split(".")
    allowed = module in ("pretrain", "data_prep") or (parts[0] == "tools" and len(parts) > 1)
    path = ROOT.joinpath(*parts)
    if not allowed or not all(part.isidentifier() for part in parts):
        raise UserError(
            f"{module}: not a command of this project; give pretrain, data_prep or a module of "
            "tools, as: -- tools.hf export RUN OUT"
        )
    if not (path / "__main__.py").is_file() and not path.with_suffix(".py").is_file():
        raise UserError(f"{module}: no such command in {ROOT}")
