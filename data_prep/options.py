"""Command-line options that several verbs share, and the check of their values."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from typing import Any

from fem_common.errors import UserError


def add_input_arguments(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    """Add the inputs and ``--subset``. ``nargs`` is ``*`` if the inputs may be omitted."""
    what = "parquet, Arrow, JSONL (also .gz, .zst) or .txt file, folder, glob, or hf://datasets/ORG/NAME"
    parser.add_argument("inputs", nargs=nargs, metavar="INPUT", help=what)
    subset = "of a dataset on the Hub, such as sample-10BT"
    parser.add_argument("--subset", metavar="NAME", help=subset)


def add_encoder_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--encoder``, the ``wanted`` of encoders.choose."""
    kinds = ("auto", "gigatoken", "hf")
    what = "default: gigatoken where it is exact"
    parser.add_argument("--encoder", choices=kinds, default="auto", help=what)


def values_of(cls: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that are fields of the dataclass ``cls``, by name."""
    names = {item.name for item in fields(cls)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def check_least(option: str, value: int | None, least: int = 1) -> None:
    """Raise UserError if a number is below ``least``. None, an absent option, is valid."""
    if value is not None and value < least:
        raise UserError(f"--{option} is {value}; it must be at least {least}")


def worker_count(workers: int | None) -> int:
    """Return the number of worker processes: ``--workers``, or one per core. Raises UserError."""
    check_least("workers", workers)
    return workers or len(os.sched_getaffinity(0))
