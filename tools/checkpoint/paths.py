"""Check the paths of ``convert`` and ``merge``.

The module does not import torch, so that a wrong path is reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError
from pretrain.checkpoint.folder import Found, find, newest_first


def check(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a path among the arguments of a verb is wrong."""
    if "checkpoint" in given:
        refuse_convert(find(given["checkpoint"]), given["out"])
        return
    for path in filter(None, (given["of"], *given["checkpoints"])):
        find(path)
    refuse_merge(given["out"])


def refuse_merge(out: Path) -> None:
    """Raise ConfigError if ``out`` has content."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} already exists; choose another folder")


def refuse_convert(found: Found, out: Path) -> None:
    """Raise ConfigError if the checkpoint cannot be written to ``out``."""
    step, place = found.path.resolve(), out.resolve()
    in_a_run = step.parent.name == "checkpoints"
    run_dir = step.parent.parent if in_a_run else step.parent
    if place == run_dir or place.is_relative_to(run_dir if in_a_run else step):
        raise ConfigError(
            f"--out {out} is in the run directory of {found.path}, whose run must not find the"
            " converted checkpoint: choose another one"
        )
    for there in newest_first(out / "checkpoints"):
        number = int(there.name.removeprefix("step_"))
        if number >= found.progress.step:
            older = "newer than" if number > found.progress.step else "at the same step as"
            raise ConfigError(
                f"{there} is {older} {found.path}, and a run in this directory would resume from"
                " it: choose another --out"
            )
