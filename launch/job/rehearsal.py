"""Rehearse a submission's runs to find out before the queue whether they fit into GPU memory.

pretrain rehearses a run in a separate process: it computes the memory that each rank needs. A run
that needs more than its GPU has is refused. The result is appended to runs/rehearsed.jsonl in the
working directory. Its key is a hash of everything that the result depends on: the settings that
shape a step, the code, the packages and the GPU. So each layout is rehearsed only once.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from fem_common.errors import UserError
from fem_common.files import sha256_json
from fem_common.text import duration, gib
from launch.cluster.profile import Profile, from_json
from launch.job.job import append_json, read_json_lines
from launch.job.plan import Draft
from launch.job.request import pretrain_text, read_config
from launch.job.snapshot import ROOT, code_folder, source_files

RECORD = Path("runs") / "rehearsed.jsonl"
ROOMS = ("fem_common", "fem_megatron", "kernels", "pretrain")  # packages that a rehearsal runs
SKIP = "--no-rehearse submits it anyway"
# Settings that affect no tensor's size: runs that differ only in these are rehearsed once. All
# other settings are compared.
INERT = {
    "": ("name", "run_dir", "checkpoint", "log", "evaluate"),
    "train": ("steps", "tokens", "seed", "eval_interval", "eval_batches", "max_bad_steps"),
    "optimizer": (
        *("lr", "min_lr", "beta1", "beta2", "eps", "schedule", "from_step"),
        *("warmup_steps", "warmup_tokens", "warmup_fraction", "decay_steps", "decay_tokens"),
    ),
}


def rehearse(draft: Draft, report: Callable[[str], None], *, data: bool) -> None:
    """Rehearse each layout of the runs that would start, and report one line of text per layout.

    The callback gets the lines. Return at once if the profile has no GPUs.

    data: the data of the runs exists. False if an earlier job has to create it first.

    A run that cannot be rehearsed is checked against the memory in pretrain's plan, which requires
    the data. Its line gives the reason.

    Raises:
        UserError: a rank needs more memory than its GPU has.
    """
    job, profile = draft.job, from_json(draft.job.profile)
    if not profile.nodes.gpus or not draft.starting:
        return
    code = code_folder(job.path) if draft.code else ROOT
    known = {line.get("layout"): line for line in read_json_lines(_record(draft))}
    environment, done = _environment(code), set[str]()
    for text in draft.starting:
        config = read_config(text)
        device = device_of(config, profile, job.profile_path)
        layout = sha256_json([shape_of(config), job.world_size, device, environment])[:16]
        if layout in done:
            continue
        done.add(layout)
        what, before = f"{config['name']} on {job.world_size} x {device}", known.get(layout)
        if before is None:
            if sys.stderr.isatty():
                print(f"rehearsing {what}; --no-rehearse skips this", file=sys.stderr, flush=True)
            try:
                found = _rehearsed(text, job.world_size, device, code)
            except UserError as error:
                report(_by_the_plan(text, draft, device, code, str(error), data=data))
                continue
            append_json(
                _record(draft),
                {"layout": layout, "what": what, "time": round(time.time(), 3), **found},
            )
        else:
            found = before
        if found["excess"]:
            raise UserError(f"{config['name']}: {found['excess']}; {SKIP}")
        took = "rehearsed before" if before else f"rehearsed in {duration(found['seconds'])}"
        report(
            f"{took}: {what}: {gib(found['bytes'])} at the peak of rank {found['rank']}, the "
            "fullest"
        )


def _record(draft: Draft) -> Path:
    return Path(draft.job.working_directory) / RECORD


def device_of(config: Mapping[str, Any], profile: Profile, path: str) -> str | None:
    """Return the GPU type to rehearse for, "h100" or "h200", or None if the settings name neither.

    The type is read from log.device if set, otherwise from the profile's gres, constraint,
    partition, file name or base.

    path: file of the profile.
    """
    named = (config.get("log") or {}).get("device")
    slurm = profile.slurm
    words = (
        [named]
        if named
        else [profile.nodes.gres, slurm.constraint, slurm.partition, Path(path).stem, _base(path)]
    )
    found = re.search(r"(?<![a-z])h[12]00(?!\d)", " ".join(filter(None, words)).lower())
    return found[0] if found else None


def _base(path: str) -> str:
    """Return the ``base`` of a profile's file, such as slurm_h100_ib, or "" if it has none."""
    return (
        str(yaml.safe_load(Path(path).read_text(encoding="utf-8")).get("base") or "")
        if Path(path).is_file()
        else ""
    )


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved configuration without the settings in `INERT`.

    These settings do not change the result of a rehearsal.
    """
    shape = {section: value for section, value in config.items() if section not in INERT[""]}
    for section in ("train", "optimizer"):
        shape[section] = {
            key: value
            for key, value in (config.get(section) or {}).items()
            if key not in INERT[section]
        }
    return shape


def _environment(code: Path) -> str:
    """Return a hash of the code that a rehearsal runs and of the installed packages."""
    digest = hashlib.sha256(
        "\n".join(sorted(f"{each.name} {each.version}" for each in distributions())).encode()
    )
    for name in source_files(code)[0]:
        if name.partition("/")[0] in ROOMS:
            digest.update(f"{name}\0".encode() + (code / name).read_bytes())
    return digest.hexdigest()


def _rehearsed(text: str, world_size: int, device: str | None, code: Path) -> dict[str, Any]:
    """Return the result of pretrain's rehearsal (`fullest`) and its duration in "seconds".

    text: the run's configuration as YAML. device: "h100" or "h200". code: folder of the code to
    run.

    Raises:
        UserError: ``device`` is None, or pretrain fails.
    """
    if device is None:
        raise UserError("neither log.device nor the profile names an H100 or H200")
    began = time.monotonic()
    printed = pretrain_text(text, world_size, "--json", "--rehearse", "--device", device, code=code)
    return {**fullest(json.loads(printed)), "seconds": round(time.monotonic() - began, 1)}


def fullest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"rank", "bytes", "excess"} of the rank with the highest memory peak.

    The argument is the parsed output of ``pretrain --rehearse --json``. "excess" is pretrain's
    error text if the bytes do not fit into the GPU, otherwise None.
    """
    most = max(record["ranks"], key=lambda rank: rank["peak"]["bytes"])
    return {"rank": most["rank"], "bytes": most["peak"]["bytes"], "excess": record["excess"]}


def _by_the_plan(
    text: str, draft: Draft, device: str | None, code: Path, why: str, *, data: bool
) -> str:
    """Check a run that cannot be rehearsed against pretrain's plan, and return a line of text.

    why: reason for which the run cannot be rehearsed. data: True if the run's data exists; without
    data no check is made.

    Raises:
        UserError: the planned memory does not fit into the GPU.
    """
    config, not_rehearsed = read_config(text), f"not rehearsed: {why}"
    device = (config.get("log") or {}).get("device") or device
    if device is None or not data:
        return f"{not_rehearsed}; its memory is not compared either"
    try:
        pretrain_text(
            text,
            draft.job.world_size,
            "--check",
            "--plan",
            f"log.device={json.dumps(device)}",
            code=code,
        )
    except UserError as error:
        raise UserError(f"{config['name']}: {error}; {SKIP}") from None
    return f"{not_rehearsed}; by its plan {config['name']} fits {device}"
