r"""``sweep``: start many runs of one configuration, as a job array or on this machine.

    sweep CONFIG.yaml train.steps=2000 --cluster PROFILE --at-once 4 \
          --grid optimizer.lr=1e-4,3e-4 train.seed=1,2,3
    sweep CONFIG.yaml --cluster PROFILE --list runs.txt

Each line of the list is a run: its overrides, quoted as in a shell; # begins a comment. A run's
directory has its name: the text before a colon at the start of its line (`small:
model.num_layers=2`), else its overrides. The same command again starts the runs that are not
finished and not running; a longer list adds runs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fem_common.errors import UserError
from fem_common.files import read_lines
from launch.job.item_state import counted
from launch.job.plan import item_lines, locked, settle, write
from launch.job.request import Request, Wanted, absolute, new_job, pretrain, read_config, run_item
from launch.job.snapshot import ROOT
from launch.verbs import options
from launch.verbs.local import run_items
from launch.verbs.submit import request_of, submit

SWEEPS = Path("runs") / "sweeps"
LONGEST = 120  # characters of a run's name
AT_ONCE = 4  # configurations resolved in parallel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    options.add(parser, "words", nargs="+", help="the run, and settings that all runs have")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument(
        "--list", type=Path, metavar="FILE", help="file with one run per line: its settings"
    )
    ways.add_argument(
        "--grid", nargs="+", metavar="KEY=V1,V2", help="every combination of these values"
    )
    options.add(parser, "--cluster", *options.PLACE, *options.SLURM)


def main(arguments: argparse.Namespace) -> int:
    """Submit the unfinished runs, or run them on this machine.

    Return 0, or a local run's exit code.

    Raises:
        UserError: the list, the grid or a configuration is invalid.
    """
    runs = read_list(arguments.list) if arguments.list else named(grid(arguments.grid))
    request = request_of(arguments)
    requested = wanted_sweep(request, runs)
    if request.profile.scheduler == "slurm":
        return submit(requested, request)
    return _here(requested, request)


def read_list(path: Path) -> dict[str, tuple[str, ...]]:
    """Return run name -> overrides for the lines of a list file.

    Raises:
        UserError: a line is invalid or repeated, or the list is empty.
    """
    runs: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(read_lines(path), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {str(error).lower()}") from None
        given = words.pop(0)[:-1] if words and words[0].endswith(":") else None
        if given is not None and not (
            re.fullmatch(r"[A-Za-z0-9][\w.,=+-]*", given, re.ASCII) and len(given) <= LONGEST
        ):
            raise UserError(
                f"{path}:{number}: {given!r} is not a valid name of a folder: only letters, digits "
                f"and ._,=+-, {LONGEST} at most"
            )
        odd = next((word for word in words if not re.match(r"[A-Za-z_][\w.]*=", word)), None)
        if odd is not None:
            raise UserError(f"{path}:{number}: {odd!r} is not of the form section.key=value")
        if given is None and not words:
            continue
        same = next((name for name, others in runs.items() if others == tuple(words)), None)
        if same is not None:
            raise UserError(
                f"{path}:{number}: the same run as on an earlier line: {shlex.join(words)}"
            )
        name = run_name(words) if given is None else given
        if name in runs:
            raise UserError(f"{path}:{number}: an earlier line has the name {name}, too")
        runs[name] = tuple(words)
    if not runs:
        raise UserError(
            f"{path}: it contains no run; a line is the settings of a run, as: optimizer.lr=1e-4 "
            "train.seed=2"
        )
    return runs


def named(runs: Sequence[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return run name -> overrides, with names made from the overrides by `run_name`."""
    return {run_name(words): words for words in runs}


def grid(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of every combination of values; the last key's values change fastest.

    words: texts of the form ``key=v1,v2``. Commas inside brackets, braces and quotes separate no
    values: ``model.pattern=[a,b],[c]`` has two.

    Raises:
        UserError: a word is invalid or repeated.
    """
    axes: dict[str, list[str]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            raise UserError(f"--grid {word!r} is not of the form section.key=v1,v2")
        if key in axes:
            raise UserError(
                f"--grid {key} is given twice; write its values in one word: {key}=v1,v2"
            )
        axes[key] = split_values(values)
        repeated = next((value for value in axes[key] if axes[key].count(value) > 1), None)
        if repeated is not None or "" in axes[key]:
            raise UserError(
                f"--grid {word!r}: "
                + (f"{repeated} occurs twice" if repeated else "a value is empty")
            )
    return [
        tuple(f"{key}={value}" for key, value in zip(axes, chosen, strict=True))
        for chosen in itertools.product(*axes.values())
    ]


def split_values(text: str) -> list[str]:
    """Split a text at the commas outside of brackets, braces and quotes."""
    values = [""]
    depth = 0
    quote = ""
    for character in text:
        if character == "," and depth == 0 and not quote:
            values.append("")
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        values[-1] += character
    return values


def run_name(words: Sequence[str]) -> str:
    """Return a unique name for a run, made from its overrides. It also names the run's directory.

    Overrides that are too long or contain special characters are shortened, and a hash is added.
    """
    name = ",".join(words)
    plain = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", name)
    if plain == name and len(name) <= LONGEST:
        return name
    return (
        f"{plain[:LONGEST]}"
        f"-{hashlib.sha256(shlex.join(words).encode(errors='surrogateescape')).hexdigest()[:8]}"
    )


def wanted_sweep(request: Request, runs: Mapping[str, tuple[str, ...]]) -> Wanted:
    """Return the job of a sweep: one named item per run, each with its own configuration.

    Raises:
        UserError: a configuration is refused; the text names the run.
    """
    name = request.name or Path(request.words[0]).stem
    directory = absolute(request.directory or SWEEPS / name)
    world_size = request.nodes * (request.processes or request.profile.processes_per_node)
    items = [run_item(f"{directory}/{run}", run) for run in runs]
    overrides = list(runs.values())
    job = new_job(request, name, directory, items, array=True)

    def resolved(code: Path) -> Mapping[str, str]:
        """Return directory -> configuration (YAML text) of all runs.

        code: folder of the code that resolves the configurations.
        """

        def one(index: int) -> str:
            words = [
                *request.words,
                *overrides[index],
                f"name={json.dumps(f'{name}-{items[index].name}', ensure_ascii=False)}",
            ]
            try:
                return pretrain(words, world_size, "--resolve", code, items[index].directory)
            except UserError as error:
                raise UserError(f"{shlex.join(overrides[index])}: {error}") from None

        with ThreadPoolExecutor(AT_ONCE) as pool:
            configs = dict(
                zip(
                    (item.directory for item in items),
                    pool.map(one, range(len(items))),
                    strict=True,
                )
            )
        _check_mirrors(configs)
        return configs

    return Wanted(job, resolved(ROOT), resolved)


def _check_mirrors(configs: Mapping[str, str]) -> None:
    """Raise UserError if two runs have the same checkpoint.mirror.

    configs: a run's directory -> its resolved configuration.
    """
    owners = dict[str, str]()
    for directory, text in configs.items():
        mirror = read_config(text).get("checkpoint", {}).get("mirror")
        if mirror and owners.setdefault(mirror, directory) != directory:
            raise UserError(
                f"checkpoint.mirror = {mirror} is the same for several runs; write {{name}} in it, "
                "which differs for each"
            )


def _here(requested: Wanted, request: Request) -> int:
    """Run the sweep's unfinished runs on this machine and return the exit code."""
    if request.dependency or request.exclude or request.parsable:
        raise UserError(
            f"--dependency, --exclude and --parsable are for Slurm, and {request.profile_path} is "
            "a profile for this machine"
        )
    if request.nodes != 1:
        raise UserError(
            f"--nodes {request.nodes}: {request.profile_path} is a profile for this machine, which "
            "is one node"
        )
    if request.dry_run:
        print("\n".join(item_lines(settle(requested, update=request.update))))
        return 0
    with locked(requested.job.path):
        draft = settle(requested, update=request.update)
        job = draft.job
        if not draft.ready:
            print(f"{job.name}: nothing to do: {counted(draft.chosen)} ({job.directory})")
            return 0
        write(draft)
    return run_items(job, draft.ready, at_once=request.at_once or 1)
