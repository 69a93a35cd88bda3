"""Verbs ``show`` and ``verify``: print the contents of a checkpoint, and check whether it is
undamaged.

``show`` reads only the manifest and the index of tensors. ``verify`` reads all files and compares
sizes, hashes and checksums. No model is built.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError, convert_os_errors
from fem_common.text import gib
from pretrain.checkpoint.folder import (
    HASHES,
    MANIFEST,
    TENSORS,
    Found,
    damage,
    damaged_files,
    find,
    flaw,
    hash_mismatches,
    hashes_of,
    newest_first,
)
from tools.checkpoint.mirror import verify_mirror

WORD_SECONDS = 10.0  # between two lines that report the progress


def show(checkpoint: Path) -> bool:
    """Print the contents of a checkpoint, and return True if it is undamaged.

    checkpoint: the folder of a step, or a run directory, whose newest undamaged checkpoint is
    shown.

    Raises:
        ConfigError: no checkpoint exists, or its manifest cannot be read.
        StorageError: the file system failed.
    """
    with convert_os_errors():
        found, wrong = _found(checkpoint)
        lines = _lines(found, wrong)
    for title, text in lines:
        print(f"{title:<11} {text}")
    return wrong is None


def _found(checkpoint: Path) -> tuple[Found, str | None]:
    try:
        return find(checkpoint), None
    except ConfigError:
        wrong = damage(checkpoint)
        if wrong is None or wrong.startswith(MANIFEST):
            raise
        return Found(checkpoint, json.loads((checkpoint / MANIFEST).read_text())), wrong


def _lines(found: Found, wrong: str | None) -> list[tuple[str, str]]:
    manifest = found.manifest
    config = manifest["config"]
    progress = found.progress
    files = manifest["files"]
    length = config["data"]["seq_length"]
    weights, optimizer = _sizes(found.path)
    skipped = f", {progress.skipped_steps} of them skipped" if progress.skipped_steps else ""
    contents = "complete training state: a run can resume from it"
    if manifest.get("contents"):
        contents = f"{manifest['contents']} only, for checkpoint.load"
    undamaged = "yes: all file sizes and the hashes of all pickles match"
    if wrong is not None:
        undamaged = f"no: {wrong}"
    return [
        ("checkpoint", str(found.path)),
        ("step", f"{progress.step:,}{skipped}"),
        (
            "tokens",
            (
                f"{progress.consumed_samples * length:,} in {progress.consumed_samples:,} sequences"
                f" of {length:,}"
            ),
        ),
        ("model", f"{config['model'].get('pattern') or config['model']['mixer']}"),
        ("engine", _engine(manifest)),
        ("layout", _layout(manifest["layout"])),
        ("precision", manifest["config"]["train"]["precision"]),
        ("weights", weights),
        ("optimizer", optimizer),
        ("contents", contents),
        ("files", f"{len(files)} of {gib(sum(files.values()))}"),
        ("undamaged", undamaged),
    ]


def _engine(manifest: dict[str, Any]) -> str:
    config = manifest["config"]
    split = config["parallel"].get("use_distributed_optimizer", True)
    now = _named(config.get("engine", {}).get("name", "megatron"), split)
    converted = manifest.get("converted")
    if not converted:
        return now
    before = _named(converted["engine"], converted["use_distributed_optimizer"])
    return f"{now}, converted from {before}"


def _named(engine: str, split: bool) -> str:
    return engine if split else f"{engine} with its plain optimizer"


def _layout(layout: dict[str, Any]) -> str:
    world = layout["world_size"]
    tensor = layout["tensor_model_parallel_size"]
    pipeline = layout["pipeline_model_parallel_size"]
    context = layout.get("context_parallel_size", 1)
    words = f"{world} process{'es' if world > 1 else ''} = TP {tensor} x PP {pipeline}"
    if context > 1:
        words += f" x CP {context}"
    words += f" x DP {world // (tensor * pipeline * context)}"
    if layout["sequence_parallel"]:
        words += ", sequence parallel"
    return words


def _sizes(step: Path) -> tuple[str, str]:
    """Return two texts for the user: the sizes of the weights and of the optimizer state."""
    # Imported late: torch takes seconds that a wrong path need not wait for.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from pretrain.checkpoint.reader import read_metadata

    try:
        stored = read_metadata(step / ".metadata").state_dict_metadata
    except ConfigError as error:
        return str(error), "unknown"
    texts = []
    for wanted in (False, True):
        tensors = [
            tensor
            for name, tensor in stored.items()
            if isinstance(tensor, TensorStorageMetadata)
            and name.startswith("optimizer.") == wanted
            and not name.startswith(("rng.", "fp8."))
        ]
        if not tensors:
            texts.append("none")
            continue
        numbers = sum(math.prod(tensor.size) for tensor in tensors)
        size = sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors)
        dtypes = {str(tensor.properties.dtype).removeprefix("torch.") for tensor in tensors}
        types = ", ".join(sorted(dtypes))
        texts.append(f"{gib(size)}: {len(tensors)} tensors, {numbers:,} numbers, {types}")
    return texts[0], texts[1]


def verify(place: str) -> bool:
    """Check checkpoints or the weights of an exported model, and print the result.

    place: the folder of a step, a directory below which all checkpoints are checked, the folder of
    an exported model, or the URL of a mirror. Return True if all are undamaged.

    Raises:
        ConfigError: no checkpoint exists.
        StorageError: the file system failed.
    """
    if "://" in place:
        return verify_mirror(place)
    checkpoint = Path(place)
    with convert_os_errors():
        if any(checkpoint.glob(f"*.{HASHES}")):
            return _verified(checkpoint, lambda advance: list(hash_mismatches(checkpoint, advance)))
        steps = [checkpoint] if (checkpoint / MANIFEST).exists() else newest_first(checkpoint)
        steps = steps or [step for folder in _below(checkpoint) for step in newest_first(folder)]
        if not steps:
            raise ConfigError(
                f"{checkpoint}: no checkpoint found; expected a folder step_NNNNNNNN or a run"
                " directory with checkpoints"
            )
        results = [_verified(step, partial(_faults, step)) for step in steps]
        return all(results)


def _below(folder: Path) -> list[Path]:
    """Return every folder named ``checkpoints`` below ``folder``, sorted.

    Folders that a running job removes during the search, and unreadable folders, are ignored.
    """

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | PermissionError):
            raise error

    return sorted(
        Path(place, "checkpoints")
        for place, names, _ in os.walk(folder, onerror=failed)
        if "checkpoints" in names
    )


def _verified(folder: Path, check: Callable[[Callable[[int], None]], list[str]]) -> bool:
    """Check one folder with ``check``, print progress and result, and return True without faults.

    check: function that takes a callback for the number of bytes read and returns the faults.
    """
    files = [path for path in folder.iterdir() if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    read = 0
    last_report = time.monotonic()

    def advance(count: int) -> None:
        nonlocal read, last_report
        read += count
        if time.monotonic() - last_report > WORD_SECONDS:
            last_report = time.monotonic()
            print(
                f"{folder}: {read / 2**30:.1f} of {total / 2**30:.1f} GiB",
                file=sys.stderr,
                flush=True,
            )

    faults = check(advance)
    for fault in faults:
        print(f"{folder}: damaged: {fault}")
    if not faults:
        print(f"{folder}: undamaged, {len(files)} files of {total / 2**20:,.1f} MiB", flush=True)
    return not faults


def _faults(step: Path, advance: Callable[[int], None]) -> list[str]:
    """Return one text for each damaged tensor of a checkpoint; an empty list if it is undamaged.

    If files but no tensors are damaged, the list has one text for each damaged file. advance:
    callback for the number of bytes read.
    """
    wrong = flaw(step)
    if wrong:
        return [wrong]
    hashed, files = hashes_of(step), dict(damaged_files(step, advance))
    tensors = [
        name
        for name in json.loads((step / MANIFEST).read_text())["files"]
        if name.endswith(TENSORS)
    ]
    if not files and all(name in hashed for name in tensors):
        return []
    from pretrain.checkpoint.reader import damaged_tensors

    return list(damaged_tensors(step, advance)) or list(files.values())
