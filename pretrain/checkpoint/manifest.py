"""Check the keys, types and ranges of a checkpoint's manifest before the manifest is used.

A manifest that is valid JSON may still be wrong: edited, damaged, or written by a newer version of
this code. The module does not import torch.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

from pretrain.config import RunConfig

FORMAT = 1
# Manifest key: the kind of device that a checkpoint's random states belong to, cpu or cuda.
RNG_DEVICE = "rng_device"
# Manifest key: package -> version, of the packages that decide the bits of a step.
VERSIONS = "versions"
PICKLES = (".metadata", "common.pt")
_KEYS = {"progress": dict, "data": str, "config": dict, "files": dict, "sha256": dict}
_OPTIONAL = {
    "layout": dict,
    "inherited": dict,
    "xxh3": dict,
    "contents": str,
    "training_data": str,
    "run": str,
    RNG_DEVICE: str,
    VERSIONS: dict,
}


class NewerVersion(str):
    """Error text for a checkpoint that a newer version of this code wrote.

    The checkpoint may be good, so this version never uses, renames or deletes it.
    """


def fault(manifest: Any, progress: type, inherited: type, step: int | None) -> str | None:
    """Return a description of the first fault in a manifest, or None if it is valid.

    The result is a `NewerVersion` if a newer version of this code wrote the manifest.

    progress, inherited: the dataclasses of the manifest's sections of these names. step: the step
    in the name of the manifest's folder, None if the folder has another name.
    """
    if not isinstance(manifest, dict):
        return "is not a mapping"
    form, records = manifest.get("format", FORMAT), {"progress": progress, "inherited": inherited}
    if type(form) is int and form > FORMAT:
        return NewerVersion(f"has format {form}, this version reads {FORMAT}")
    full = "format" in manifest  # written by a run, with the layout and all sections
    for key, kind in (_KEYS | _OPTIONAL).items():
        if key not in manifest and (key in _KEYS or (full and key == "layout")):
            return f"has no {key}"
        if key in manifest and not isinstance(manifest[key], kind):
            return f"has a wrong {key}"
    for name, cls in records.items():
        if unknown := sorted(manifest.get(name, {}).keys() - {item.name for item in fields(cls)}):
            return NewerVersion(f"has the unknown key {name}.{unknown[0]}")
    if type(form) is not int or form != FORMAT:
        return f"has format {form!r}, not {FORMAT}"
    if wrong := record_fault(progress, manifest["progress"], "progress") or _config_fault(
        manifest["config"], full=full
    ):
        return wrong
    if "inherited" in manifest and (
        wrong := record_fault(inherited, manifest["inherited"], "inherited", partial=True)
    ):
        return wrong
    if step is not None and manifest["progress"]["step"] != step:
        return f"is for step {manifest['progress']['step']}, its folder for step {step}"
    return _files_fault(manifest)


def record_fault(
    cls: type, values: Mapping[str, Any], name: str, *, partial: bool = False
) -> str | None:
    """Return a description of the first fault in the JSON values of a dataclass, or None.

    Integers must be 0 or more.

    name: name of the record in the text. partial: True if keys may be missing.
    """
    hints = _hints(cls)
    for item in fields(cls):
        if item.name in values:
            if not _fits(values[item.name], hints[item.name]):
                return f"has a wrong {name}.{item.name}"
        elif not partial and item.default is MISSING and item.default_factory is MISSING:
            return f"has no {name}.{item.name}"
    return None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fits(value: Any, kind: Any) -> bool:
    """Return True if a JSON value has the type ``kind``. A tuple is represented by a JSON list."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, each) for each in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return (
            isinstance(value, list)
            and len(value) == len(arguments)
            and all(map(_fits, value, arguments))
        )
    if origin in (tuple, list):
        return isinstance(value, list) and all(_fits(entry, arguments[0]) for entry in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(entry, arguments[1]) for entry in value.values()
        )
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    if kind is float:
        return type(value) in (int, float)
    return isinstance(value, kind)


def _config_fault(config: Mapping[str, Any], *, full: bool) -> str | None:
    """Return a description of the first fault in a manifest's configuration, or None.

    Only sections, and values that this code reads directly from the manifest, are checked. The last
    argument is True for the manifest of a run, which has all sections.
    """
    required = ["model", "data"]
    if full:
        required += ["train", "parallel"]
    for key in required:
        if key not in config:
            return f"has no config.{key}"
    if wrong := _section_fault(RunConfig, config, "config"):
        return wrong
    if not _fits(length := config["data"].get("seq_length"), int) or length == 0:
        return "has a wrong config.data.seq_length"
    return None if isinstance(config.get("name", ""), str) else "has a wrong config.name"


def _section_fault(cls: type, values: Mapping[str, Any], name: str) -> str | None:
    """Return an error text if a section is not a mapping or a single value is a mapping, else None.

    Unknown keys may have any value.
    """
    hints = _hints(cls)
    for key, value in values.items():
        kind = hints.get(key, Any)
        mapping = is_dataclass(kind) or typing.get_origin(kind) is dict
        if kind is not Any and isinstance(value, dict) is not mapping:
            return f"has a wrong {name}.{key}"
        if is_dataclass(kind) and (
            wrong := _section_fault(typing.cast(type, kind), value, f"{name}.{key}")
        ):
            return wrong
    return None


def _files_fault(manifest: Mapping[str, Any]) -> str | None:
    """Return a description of the first fault in the manifest's file sizes and hashes, or None."""
    files = manifest["files"]
    if not all(_fits(size, int) for size in files.values()):
        return "has a wrong size in files"
    for name in PICKLES:
        if name in files and name not in manifest["sha256"]:
            return f"has no hash of {name}"
    for key in ("sha256", "xxh3"):
        hashes = manifest.get(key, {})
        if (
            not all(isinstance(value, str) for value in hashes.values())
            or not hashes.keys() <= files.keys()
        ):
            return f"has a wrong {key}"
    return None
