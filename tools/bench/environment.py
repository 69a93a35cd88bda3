"""What a benchmark's numbers belong to: the machine and the versions, and how tables and JSON are written. Nothing is timed here."""

from __future__ import annotations

import argparse
import json
import os
import platform as host
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fem_megatron.megatron import platform

# What a benchmark may find installed beside torch, and uses then.
PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flash-linear-attention", "megatron-core", "transformer-engine", "matplotlib")


def facts() -> dict[str, Any]:
    """Date, device and its memory, versions of Python, torch, CUDA and of the packages that are there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": date.today().isoformat(),
        "device": platform.device_name() if platform.has_cuda() else f"CPU ({host.machine()}, {os.cpu_count()} cores)",
        "memory_bytes": platform.device_memory_bytes(),
        "threads": torch.get_num_threads(),
        "python": host.python_version(),
        "torch": torch.__version__,
        "toolkit": platform.toolkit(),
        "packages": found,
    }


def sentence(machine: dict[str, Any]) -> str:
    """The facts as one line of text."""
    parts = [machine["date"], machine["device"], f"Python {machine['python']}", f"torch {machine['torch']}"]
    parts.append(machine["toolkit"] or f"{machine['threads']} threads")
    return ", ".join([*parts, *(f"{name} {number}" for name, number in machine["packages"].items() if name != "matplotlib")])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, its columns aligned so that it reads in a console, too."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """--json PATH, which every benchmark takes."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file, too")


def write_json(path: Path | None, content: Any) -> None:
    """Write ``content``, making the folders above; None: nothing is asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
