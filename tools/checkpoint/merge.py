"""Verb ``merge``: write the average of the weights of several checkpoints to DIR/step_NNNNNNNN.

Each tensor is read from every checkpoint, summed in float64 and rounded once, to the dtype that the
newest checkpoint stores. Only one tensor is in memory at a time. Layouts and engines of the
checkpoints may differ, because names and shapes in a checkpoint are those of the model. The result
contains no optimizer state. Source: Li et al. 2025, "Model Merging in Pre-training of Large
Language Models" (arXiv 2505.12082).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fem_common.errors import ConfigError, convert_os_errors
from pretrain.checkpoint.folder import HASHES, MANIFEST, Found, find, flaw, hash_of, newest_first
from pretrain.checkpoint.manifest import RNG_DEVICE
from pretrain.checkpoint.reader import Weights
from pretrain.checkpoint.resume import FREE, TOLD, changes, shown
from pretrain.checkpoint.writer import write_weights
from pretrain.config import run_of
from tools.checkpoint.paths import refuse_merge


def newest(run: Path, count: int, last: Path | None = None) -> list[Path]:
    """Return the newest ``count`` undamaged checkpoints of a run directory, oldest first.

    Damaged checkpoints are skipped with a note on stderr. last: the newest checkpoint to consider,
    a folder in ``run``; None: no limit.

    Raises:
        ConfigError: the run has fewer than ``count``.
        StorageError: the file system failed.
    """
    good = list[Path]()
    with convert_os_errors():
        for path in newest_first(run / "checkpoints") or newest_first(run):
            if len(good) == count:
                break
            if last is not None and path.name > last.name:
                continue
            wrong = flaw(path)
            if wrong:
                print(
                    f"tools.checkpoint: note: checkpoint {path} is damaged ({wrong}); passing"
                    " over it",
                    file=sys.stderr,
                )
            else:
                good.insert(0, path)
    if len(good) < count:
        there = f"{run} has {len(good)} valid checkpoints{f' up to {last.name}' if last else ''}"
        raise ConfigError(
            f"cannot average {count} checkpoints: {there}; checkpoint.keep_last sets how many a run"
            " keeps"
        )
    return good


def merge(
    checkpoints: Sequence[Path],
    out: Path,
    *,
    last: int | None,
    of: Path | None,
    weights: Sequence[float] | None,
    ema: float | None,
) -> None:
    """Write the average of checkpoints (see `average`) and print what was written.

    last, of: average the newest ``last`` checkpoints of the run ``of`` instead of ``checkpoints``.
    weights: the weight of each checkpoint. None: with ``ema``, each checkpoint has ``ema`` times
    the weight of the next one in the list; without it, all weights are equal.

    Raises:
        ConfigError: the arguments contradict each other; see `newest` and `average`.
    """
    if (last is None) != (of is None) or bool(checkpoints) == bool(last):
        raise ConfigError("name checkpoints, or --last N --of RUN_DIR")
    if weights and (last or len(weights) != len(checkpoints)):
        count = f"{last} of --last" if last else str(len(checkpoints))
        raise ConfigError(
            f"--weights has {len(weights)} numbers for {count} checkpoints: give one number per"
            " checkpoint"
        )
    if ema and ema >= 1:
        raise ConfigError(f"--ema {ema:g}: expected a number below 1")
    if last and of:
        checkpoints = newest(of, last)
    decay = ema or 1.0
    shares = weights or [decay**age for age in reversed(range(len(checkpoints)))]
    with convert_os_errors():
        steps = [find(path).path for path in checkpoints]
    step = average(steps, out, shares)
    total = sum(shares)
    print(
        f"wrote {step}: the average of {len(steps)} checkpoints, weights only;"
        f" checkpoint.load={out} starts from them"
    )
    for path, share in zip(steps, shares, strict=True):
        print(f"  {share / total:7.2%}  {path}")


def average(checkpoints: Sequence[Path], out: Path, shares: Sequence[float] = ()) -> Path:
    """Write the average of the weights of several checkpoints, and return the folder of its step.

    checkpoints: folders of steps, or run directories, whose newest checkpoint is used. out: the
    folder in which the folder of the step is created. shares: the weight of each checkpoint; empty:
    equal weights.

    Raises:
        ConfigError: a checkpoint is not valid; they are not of one model; ``out`` is not empty.
        DamagedCheckpoint: a tensor does not match its checksum.
        StorageError: the file system failed.
    """
    shares = shares or [1.0] * len(checkpoints)
    with convert_os_errors():
        refuse_merge(out)
        found = [find(path) for path in checkpoints]
        sources = [Weights(each.path) for each in found]
        newest = max(range(len(found)), key=lambda n: found[n].progress.step)
        for each, source in zip(found, sources, strict=True):
            _check_alike(found[newest], sources[newest], each, source)
        return write_weights(
            out,
            averages(sources, shares, sources[newest].dtypes),
            _manifest(found, shares, found[newest]),
        )


def averages(
    sources: Sequence[Weights], shares: Sequence[float], dtypes: dict[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weighted mean over the sources) for every tensor in ``dtypes``.

    dtypes: name -> dtype of the result. Only one tensor and its float64 sum are in memory.
    """
    for name, dtype in dtypes.items():
        total = torch.zeros(sources[0].shapes[name], dtype=torch.float64)
        for source, share in zip(sources, shares, strict=True):
            total += source.read([name])[name].double() * share
        yield name, (total / sum(shares)).to(dtype)


def _check_alike(first: Found, weights: Weights, other: Found, others: Weights) -> None:
    """Raise ConfigError unless both checkpoints have the same model settings and tensor shapes."""
    config = run_of(first.manifest["config"], first.path / MANIFEST)
    kept = [
        change
        for change in changes(other.manifest["config"], config)
        if change.key.startswith("model.")
    ]
    differ = [
        f"{change.key} is {shown(change.old)} there, {shown(change.new)} here"
        for change in kept
        if change.rule not in (FREE, TOLD)
    ]
    differ += [
        f"{name} has a different shape"
        for name, shape in weights.shapes.items()
        if others.shapes.get(name, shape) != shape
    ]
    differ += [
        f"{name} is in only one of them"
        for name in sorted(weights.shapes.keys() ^ others.shapes.keys())
    ]
    if differ:
        raise ConfigError(
            f"checkpoint {other.path} is of a different model than {first.path}: {differ[0]}"
        )


def _manifest(found: Sequence[Found], shares: Sequence[float], newest: Found) -> dict[str, Any]:
    """Return the manifest of the average: the newest source's, plus a list of all sources.

    Validation losses are removed, because they were measured with other weights.
    """
    merged = [
        {
            "checkpoint": str(each.path.resolve()),
            "step": each.progress.step,
            "share": share / sum(shares),
            "manifest": hash_of(each.path / MANIFEST),
        }
        for each, share in zip(found, shares, strict=True)
    ]
    gone = ("files", "sha256", HASHES, "heldout_loss", "converted", RNG_DEVICE)
    return {
        **{key: value for key, value in newest.manifest.items() if key not in gone},
        "merged": merged,
    }
