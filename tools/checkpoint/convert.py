"""Verb ``convert``: write a checkpoint to RUN_DIR/checkpoints/step_NNNNNNNN for another engine or
optimizer.

Both engines write the same names with the distributed optimizer. Megatron's plain optimizer uses
other names (see ``optimizer_state``). In both cases the values of the tensors do not change, so the
files of tensors are hard-linked; only ``.metadata``, ``common.pt`` and the manifest are rewritten.
"""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from fem_common.config import plain as plain_values
from fem_common.errors import ConfigError, InUse, StorageError, convert_os_errors
from pretrain.checkpoint.folder import MANIFEST, WRITING, Found, find, publish_step
from pretrain.checkpoint.manager import WEIGHTS_ALONE, write_common
from pretrain.checkpoint.manifest import PICKLES
from pretrain.checkpoint.reader import read_common, read_metadata
from pretrain.config import EngineConfig, run_of
from pretrain.run_directory import claimed
from pretrain.validate import validate
from tools.checkpoint.optimizer_state import has_moments, renamed
from tools.checkpoint.paths import refuse_convert

SPLIT = "use_distributed_optimizer"
NO_STEP = "the optimizer had taken no step yet"


def convert(checkpoint: Path, engine: str, out: Path, *, plain_optimizer: bool) -> None:
    """Write a converted checkpoint into the run directory ``out``, and print the result.

    checkpoint: the folder of a step, or a run directory, whose newest checkpoint is used. engine:
    name of the new engine. plain_optimizer: write the state of Megatron's plain optimizer, which is
    not split over the ranks; else that of the distributed optimizer.

    Raises:
        ConfigError: the engine has no plain optimizer; no valid checkpoint; ``out`` contains a
        newer one or is the source's run directory. InUse: another process uses ``out``.
        StorageError: the file system failed.
    """
    if plain_optimizer and engine != "megatron":
        raise ConfigError(
            "--plain-optimizer exists only for --engine megatron; leave it out for --engine"
            f" {engine}"
        )
    plain = plain_optimizer
    with convert_os_errors():
        found = find(checkpoint)
        final = out / "checkpoints" / found.path.name
        refuse_convert(found, out)
        pickles, why_alone = _pickles(found, plain=plain)
        manifest = _manifest(found.manifest, engine, plain=plain, alone=bool(why_alone))
        with claimed(out) as ours:
            if not ours:
                raise InUse(
                    f"{out} is in use by another process; wait for it, stop it, or choose another"
                    " --out"
                )
            linked = _write(found, final, manifest, pickles)
    objection = None if why_alone else _objection(manifest, final)
    if objection:
        print(
            f"tools.checkpoint: note: other settings of the run must change, too: {objection}",
            file=sys.stderr,
        )
    how = "linked, no tensor was copied" if linked else "copied, they could not be linked"
    print(f"wrote {final}: files {how}")
    print(_last_line(found, manifest, out, why_alone))


def _pickles(found: Found, *, plain: bool) -> tuple[dict[str, Any], str]:
    """Return the pickles that change (file name -> content), and a reason.

    The reason states why only the weights of the result can be used; it is empty if a run can
    resume from the result.
    """
    if found.manifest.get("contents") == WEIGHTS_ALONE:
        return {}, "the source has no optimizer state"
    was_plain = not found.manifest["config"]["parallel"].get(SPLIT, True)
    if was_plain == plain:
        return {}, ""
    metadata = read_metadata(found.path / ".metadata")
    if was_plain and not has_moments(metadata):
        return {}, NO_STEP
    try:
        metadata, common = renamed(metadata, read_common(found.path), plain=plain)
    except ConfigError as error:
        raise ConfigError(f"checkpoint {found.path}: {error}") from None
    return dict(zip(PICKLES, (metadata, common), strict=True)), ""


def _manifest(source: dict[str, Any], engine: str, *, plain: bool, alone: bool) -> dict[str, Any]:
    """Return the manifest of the result: the source's with the new engine and optimizer.

    The list of files is missing; ``publish_step`` adds it.
    """
    config, split = source["config"], not plain
    settings = {**plain_values(EngineConfig()), **config.get("engine", {})}
    return {
        **{key: value for key, value in source.items() if key not in ("files", "sha256", "run")},
        "layout": {**source["layout"], SPLIT: split},
        "config": {
            **config,
            "engine": {**settings, "name": engine},
            "parallel": {**config["parallel"], SPLIT: split},
        },
        "converted": {"engine": settings["name"], SPLIT: config["parallel"].get(SPLIT, True)},
        **({"contents": WEIGHTS_ALONE} if alone else {}),
    }


def _write(found: Found, final: Path, manifest: dict[str, Any], pickles: dict[str, Any]) -> bool:
    """Write the files, then the manifest, and then rename the temporary folder to ``final``.

    Return True if every unchanged file was linked, False if one had to be copied.
    """
    temporary = final.parent / f"{WRITING}{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        kept = [
            found.path / name
            for name in found.manifest["files"]
            if name not in pickles and name != MANIFEST
        ]
        linked = [_linked(path, temporary / path.name) for path in kept]
        if pickles:
            metadata, common = (pickles[name] for name in PICKLES)
            (temporary / ".metadata").write_bytes(pickle.dumps(metadata))
            write_common(temporary, common)
        publish_step(temporary, final, manifest, keep_last=None)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return all(linked)


def _linked(source: Path, target: Path) -> bool:
    """Create a hard link to a file and return True, or copy the file and return False.

    A link requires that both paths are on one file system that supports links.
    """
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        return False
    return True


def _objection(manifest: dict[str, Any], step: Path) -> str | None:
    """Return the error message if the new engine or optimizer does not support the run's settings.

    None if it supports them.
    """
    try:
        validate(run_of(manifest["config"], step / MANIFEST), manifest["layout"]["world_size"])
    except (ConfigError, StorageError) as error:
        return str(error)
    return None


def _last_line(found: Found, manifest: dict[str, Any], out: Path, why_alone: str) -> str:
    """Return the final line of the output: whether a run can resume, and with which command."""
    config, world = manifest["config"], manifest["layout"]["world_size"]
    start = f"torchrun --nproc-per-node {world}" if world > 1 else "python"
    engine = (
        f"engine.name={config['engine']['name']}"
        f" parallel.{SPLIT}={str(config['parallel'][SPLIT]).lower()}"
    )
    if why_alone:
        model = found.path.parent / "model.yaml"  # written by an import
        given = f"model={shlex.quote(str(model))} " if model.is_file() else ""
        command = (
            f"{start} -m pretrain RUN.yaml {given}checkpoint.load={shlex.quote(str(out))} {engine}"
        )
        return f"weights only ({why_alone}); start from them: {command}"
    yaml = found.path.parent.parent / "config.yaml"
    run = shlex.quote(str(yaml)) if yaml.is_file() else "RUN.yaml"
    return (
        f"weights and optimizer state; resume: {start} -m pretrain {run}"
        f" run_dir={shlex.quote(str(out))} {engine}"
    )
