"""What a submission would start is rehearsed first, for a GPU that pretrain can rehearse: what cannot hold is refused before the queue.

pretrain rehearses, in a process of its own. What it found is a line of runs/rehearsed.jsonl where one submits, by all that it depends on:
the settings that shape a step, the code, the packages, the GPU. So the same layout is rehearsed once.
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
from fem_common.text import duration, gib
from launch.cluster.profile import Profile
from launch.job import append_json, read_json_lines
from launch.job.plan import Draft
from launch.job.request import pretrain_text, read_config
from launch.job.snapshot import ROOT, code_folder, source_files

RECORD = Path("runs") / "rehearsed.jsonl"
ROOMS = ("fem_common", "fem_megatron", "kernels", "pretrain")  # whose code a rehearsal runs
SKIP = "--no-rehearse submits it all the same"
# Settings that no tensor's size depends on: runs that differ in these alone are rehearsed once. What is not named here is compared.
INERT = {
    "": ("name", "run_dir", "checkpoint", "log", "evaluate"),
    "train": ("steps", "tokens", "seed", "eval_interval", "eval_batches", "max_bad_steps"),
    "optimizer": (
        *("lr", "min_lr", "beta1", "beta2", "eps", "schedule", "from_step"),
        *("warmup_steps", "warmup_tokens", "warmup_fraction", "decay_steps", "decay_tokens"),
    ),
}


def rehearse(draft: Draft, profile: Profile, say: Callable[[str], None], *, data: bool) -> None:
    """Rehearse each layout of the runs that would start, a line to ``say`` for each; where there are no GPUs, nothing.

    What cannot be rehearsed is compared by pretrain's plan, which wants the data to be there (``data``), and said.

    Raises:
        UserError: a rank needs more memory than its GPU has.
    """
    job = draft.job
    if not profile.nodes.gpus or not draft.starting:
        return
    code = code_folder(Path(job.directory)) if draft.code else ROOT
    known = {line.get("layout"): line for line in read_json_lines(_record(draft))}
    environment, done = _environment(code), set[str]()
    for text in draft.starting:
        config = read_config(text)
        device = device_of(config, profile, job.profile_path)
        layout = _hash([shape_of(config), job.world_size, device, environment])
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
                say(_by_the_plan(text, draft, device, code, str(error), data=data))
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
        say(
            f"{took}: {what}: {gib(found['bytes'])} at the peak of rank {found['rank']}, the fullest"
        )


def _record(draft: Draft) -> Path:
    return Path(draft.job.working_directory) / RECORD


def device_of(config: Mapping[str, Any], profile: Profile, path: str) -> str | None:
    """The GPU that pretrain can rehearse, h100 or h200: as log.device names it, else the profile by what it asks for or its own name."""
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
    """What a profile's file is written over: slurm_h100_ib."""
    return (
        str(yaml.safe_load(Path(path).read_text(encoding="utf-8")).get("base") or "")
        if Path(path).is_file()
        else ""
    )


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration without `INERT`."""
    shape = {section: value for section, value in config.items() if section not in INERT[""]}
    for section in ("train", "optimizer"):
        shape[section] = {
            key: value
            for key, value in (config.get(section) or {}).items()
            if key not in INERT[section]
        }
    return shape


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _environment(code: Path) -> str:
    """A hash of the code that rehearses and of the packages that are installed."""
    digest = hashlib.sha256(
        "\n".join(sorted(f"{each.name} {each.version}" for each in distributions())).encode()
    )
    for name in source_files(code)[0]:
        if name.partition("/")[0] in ROOMS:
            digest.update(f"{name}\0".encode() + (code / name).read_bytes())
    return digest.hexdigest()


def _rehearsed(text: str, world_size: int, device: str | None, code: Path) -> dict[str, Any]:
    """What pretrain's rehearsal says. Raises UserError where there is none."""
    if device is None:
        raise UserError("neither log.device nor the profile names an H100 or H200")
    began = time.monotonic()
    printed = pretrain_text(text, world_size, "--json", "--rehearse", "--device", device, code=code)
    return {**fullest(json.loads(printed)), "seconds": round(time.monotonic() - began, 1)}


def fullest(told: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``pretrain --rehearse --json``: the fullest rank, its bytes, and what is wrong where they do not fit (else None)."""
    most = max(told["ranks"], key=lambda rank: rank["peak"]["bytes"])
    return {"rank": most["rank"], "bytes": most["peak"]["bytes"], "excess": told["excess"]}


def _by_the_plan(
    text: str, draft: Draft, device: str | None, code: Path, why: str, *, data: bool
) -> str:
    """What is known of a run that cannot be rehearsed. Raises UserError where its plan does not fit."""
    config, not_rehearsed = read_config(text), f"not rehearsed: {why}"
    device = (config.get("log") or {}).get("device") or device
    if device is None or not data:
        return f"{not_rehearsed}; nor is its memory compared"
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
