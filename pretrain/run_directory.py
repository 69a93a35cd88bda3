"""Create and read the run directory: its location, lock, id and descriptive files.

Rank 0 writes the files before the first step. They describe the run and allow its repetition.
"""

from __future__ import annotations

import json
import os
import platform as host
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fem_common.config import dump_yaml
from fem_common.errors import ConfigError, InUse
from fem_common.files import append_json_line, expand_home, locked, write_atomically
from fem_common.stores import folder_of
from fem_common.text import first_few
from pretrain import processes
from pretrain.config import RunConfig, load_run
from pretrain.report.history import ATTEMPTS

FORK = "fork.json"
# The run's id, and the absolute path of the run directory at the time of writing.
RUN_ID = "run_id.json"
PACKAGES = ("torch", "megatron-core", "numpy", "triton", "flash-attn", "transformers", "tokenizers")


def run_directory(config: RunConfig) -> Path:
    """Return the path of the run directory.

    It is run_dir with ``{mixer}`` replaced by the mixer's name, or runs/<name> if run_dir is empty.
    """
    if not config.run_dir:
        return Path("runs") / config.name
    return Path(
        config.run_dir.replace("{mixer}", "-".join(config.model.pattern or (config.model.mixer,)))
    )


def mirror_of(config: RunConfig) -> str | None:
    """Return checkpoint.mirror with the run's name filled in, or None if no mirror is set."""
    return config.checkpoint.mirror and config.checkpoint.mirror.replace("{name}", config.name)


def run_id(folder: Path) -> str | None:
    """Return the id of the run in a folder.

    Returns None if the folder has no id, or if it is a copy of a run directory that still exists.
    """
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        record = json.loads((folder / RUN_ID).read_text())
        original, found = Path(record["run_dir"]) / RUN_ID, str(record["run"])
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            if (
                not original.samefile(folder / RUN_ID)
                and json.loads(original.read_text())["run"] == found
            ):
                return None
        return found
    return None


def identify(folder: Path) -> str:
    """Return the id of the run in a folder; create one if it has none.

    The id is recorded in the folder.
    """
    found = run_id(folder) or uuid.uuid4().hex
    write_atomically(folder / RUN_ID, record_of(found, folder))
    return found


def record_of(run: str, folder: Path) -> str:
    """Return the content of the file RUN_ID: the id ``run`` and the path of its run directory."""
    return json.dumps({"run": run, "run_dir": str(folder.resolve())}) + "\n"


def load_given(given: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the run of a configuration file or of a run directory.

    For a run directory, load its config.yaml; its run_dir must be the given folder.

    Raises:
        ConfigError: see `load_run`; or the config.yaml of a run directory has another run_dir, for
            example after a move.
        ConfigErrors, StorageError: see `load_run`.
    """
    given = Path(expand_home(str(given)))
    named = any(text.partition("=")[0].strip() == "run_dir" for text in overrides)
    if given.is_dir():
        if not (given / "config.yaml").is_file():
            if runs := sorted(file.name for file in given.glob("*.yaml")):
                raise ConfigError(
                    f"{given} is a folder: name one of its files: {first_few(runs, 30)}"
                )
            raise ConfigError(f"{given} is not a run directory: it has no config.yaml")
        config = load_run(given / "config.yaml", overrides)
        if _same_folder(run_directory(config), given):
            return config
        if named:
            raise ConfigError(
                f"{given} and run_dir = {config.run_dir} are two run directories: give one, or "
                f"--fork {config.run_dir}"
            )
        return replace(config, run_dir=str(given))
    config = load_run(given, overrides)
    # launch/ contains the launcher's copy.
    here = given.parent.parent if given.parent.name == "launch" else given.parent
    place = run_directory(config)
    if (
        given.name == "config.yaml"
        and (here / "checkpoints").is_dir()
        and not named
        and not _same_folder(place, here)
    ):
        raise ConfigError(
            f"{given} is in the run directory {here.absolute()}, but its run_dir is "
            f"{place.absolute()}, where training would start from other checkpoints or none; to "
            f"continue the run here: pretrain {here}; to train elsewhere: run_dir=FOLDER"
        )
    return config


def _same_folder(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def newest_run(config: RunConfig, but: Path) -> Path | None:
    """Return the run directory with the newest checkpoint among runs of the same name and model.

    The search covers up to two levels below the parent folder that has the run's name. If no folder
    on the path has this name, it covers two levels below the direct parent. The folder ``but`` is
    excluded. Return None if no such run has a checkpoint.
    """
    own = run_directory(config)
    folder = next((folder for folder in own.parents if folder.name == config.name), own.parent)
    found = dict[Path, float]()
    for file in (*folder.glob("*/config.yaml"), *folder.glob("*/*/config.yaml")):
        saved = list[float]()
        for manifest in file.parent.glob("checkpoints/step_*/manifest.json"):
            with suppress(FileNotFoundError):  # the run deletes it meanwhile
                saved.append(manifest.stat().st_mtime)
        if saved and file.parent.resolve() != but.resolve():
            with suppress(ConfigError):  # written by another version
                other = load_run(file)
                vocabulary = config.model.vocab_size or other.model.vocab_size
                if (other.name, other.model) == (
                    config.name,
                    replace(config.model, vocab_size=vocabulary),
                ):
                    found[file.parent] = max(saved)
    return max(found, key=lambda run: found[run]) if found else None


def resolved(config: RunConfig) -> RunConfig:
    """Return the configuration with run_dir and checkpoint.mirror filled in.

    The result describes the same run, whatever the name and location of the file that contains it.
    """
    checkpoint = replace(config.checkpoint, mirror=mirror_of(config))
    return replace(config, run_dir=str(run_directory(config)), checkpoint=checkpoint)


def check_writable(folder: Path, mirror: str | None = None) -> None:
    """Raise ConfigError if the run directory or the mirror cannot be created or written.

    Only a mirror that is a folder is checked. The check creates no files or folders.
    """
    for key, place in (("run_dir", folder), ("checkpoint.mirror", mirror and folder_of(mirror))):
        if not place:
            continue
        there = place.absolute()
        while not os.path.lexists(there):
            there = there.parent
        if not os.path.isdir(there):
            raise ConfigError(f"{key} = {place}: {there} is not a folder; choose another {key}")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{key} = {place}: {there} is not writable; choose another {key}, or change its "
                "permissions"
            )


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Lock the run directory during the block and yield True if this process has it exclusively.

    Yield False if another process has the lock. The lock lasts until the process ends, because
    workers can outlive a killed launcher. On a file system without locks the result is always True.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / "lock"))
        except InUse:
            yield False
            return
        yield True


def describe(
    config: RunConfig,
    folder: Path,
    world_size: int,
    step: int,
    changed: Mapping[str, tuple[Any, Any]],
) -> None:
    """Write the files that describe the run into its directory.

    They are config.yaml, relaunch.sh and environment.json; and changes.diff, which contains the
    uncommitted changes of a git checkout, if it has any. Each attempt appends a line to
    ``attempts.jsonl``, which includes the ``step`` after which it begins and the ``changed`` keys
    (key -> old, new). The other files are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    revision, dirty, changes = _code()
    environment = {
        "git_revision": revision,
        "git_dirty": dirty,
        "python": sys.version.split()[0],
        "host": host.node(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    texts = {
        "config.yaml": dump_yaml(config),
        "relaunch.sh": relaunch_command(world_size) + "\n",
        "environment.json": json.dumps(environment, indent=1) + "\n",
        "changes.diff": changes,
    }
    for name, text in texts.items():
        if text:
            write_atomically(folder / name, text, synced=False)
        else:
            (folder / name).unlink(missing_ok=True)
    attempt = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "pid": os.getpid(),
        "world_size": world_size,
        "step": step,
    }
    append_json_line(folder / ATTEMPTS, {**attempt, **({"changed": changed} if changed else {})})


def record_fork(folder: Path, found: Path, step: int, order_begin: int, sha256: str) -> None:
    """Write fork.json, which records the checkpoint at which a fork begins.

    It contains the parent's run directory, the checkpoint, its step and the hash of its manifest.

    order_begin: number of samples consumed before the first sample of the fork's own data order; 0
    if the fork continues the parent's order.
    """
    in_a_run = found.parent.name == "checkpoints"
    parent = found.parent.parent if in_a_run else found.parent
    fork = {"step": step, "order_begin": order_begin, "manifest_sha256": sha256}
    record = {"parent": str(parent.resolve()), "checkpoint": str(found.resolve()), **fork}
    write_atomically(folder / FORK, json.dumps(record, indent=1) + "\n")


def read_fork(folder: Path) -> dict[str, Any] | None:
    """Return the content of fork.json, or None if the file does not exist.

    Raises ConfigError if the content is not a record of `record_fork`.
    """
    file = folder / FORK
    if not file.is_file():
        return None
    with suppress(ValueError, RecursionError):
        record = json.loads(file.read_text())
        texts, numbers = ("parent", "checkpoint", "manifest_sha256"), ("step", "order_begin")
        full = isinstance(record, dict) and all(isinstance(record.get(key), str) for key in texts)
        if full and all(
            type(record.get(key)) is int and 0 <= record[key] < 2**63 for key in numbers
        ):
            return dict(record)
    raise ConfigError(f"{file} is damaged: restore it, or choose another run_dir for a new fork")


def relaunch_command(world_size: int) -> str:
    """Return the exact shell command of this run, including ``cd`` to its working directory."""
    start = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', world_size)}"
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if nodes > 1:
        start += (
            f" --nnodes {nodes} --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port "
            "$MASTER_PORT"
        )
    alone = world_size == 1 or processes.forked
    program = f"{shlex.quote(sys.executable) if alone else start} -m pretrain"
    # Set if a launcher runs the code from another folder.
    paths = "".join(
        f"{name}={shlex.quote(os.environ[name])} "
        for name in ("PYTHONPATH", "PYTHONSAFEPATH")
        if os.environ.get(name)
    )
    return f"cd {shlex.quote(os.getcwd())} && {paths}{program} {shlex.join(sys.argv[1:])}"


def _code() -> tuple[str, bool, str]:
    """Return (git revision, True if modified, diff) of the running code.

    Values are empty if they are unknown. In a checkout, git provides them. In a launcher's
    snapshot, REVISION.json contains the first two; the diff is in another file and is returned
    empty.
    """
    root = Path(__file__).resolve().parents[1]
    snapshot = root / "REVISION.json"
    if snapshot.is_file():
        record = json.loads(snapshot.read_text())
        return record.get("revision") or "", bool(record.get("dirty")), ""
    changes = _git(root, "diff", "HEAD")
    return _git(root, "rev-parse", "HEAD"), bool(changes), changes


def _git(root: Path, *arguments: str) -> str:
    """Return the output of a git command in a folder, or "" outside a checkout."""
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
