"""Compile and check the kernels for sm_90, sm_80 and sm_100 on any machine.

Usage: `python -m tools.kernel_gate [--only OP ...] [--write]`. With `--warm DIR` it fills a Triton
cache instead: every kernel that a machine with GPUs (sm_90, or --sm) requests, packed as DIR.tgz.
Unpack it on that machine at the same path, or at --at, and set TRITON_CACHE_DIR to this path.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from pathlib import Path, PurePosixPath

from fem_common.cli import Parser, run
from fem_common.errors import UserError
from fem_common.exits import Exit
from fem_common.text import nearest
from kernels.check import suites
from kernels.implementations import OLDEST_TRITON, interpreted, triton_version
from tools.bench.speed import implementations
from tools.kernel_gate.gate import (
    ARCHITECTURES,
    Progress,
    build_all,
    covering,
    in_rows,
    kernels_under,
    page,
    sections,
)

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def main(argv: list[str] | None = None) -> int:
    """Run the gate and return the exit code.

    0: success; 1: a kernel has a fault; 2: the call cannot be carried out.
    """
    parser = Parser(prog="python -m tools.kernel_gate", description=__doc__)
    parser.add_argument(
        "prefix",
        nargs="?",
        default="kernels",
        help="only modules under this one, for example kernels.fem_attention",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="OP",
        help="only the kernels of these operations, for example fem_attention",
    )
    parser.add_argument("--sm", type=int, choices=ARCHITECTURES, help="only this architecture")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write {PAGE.name} (needs all kernels and architectures)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"compare {PAGE.name} with the builds (needs all architectures)",
    )
    parser.add_argument(
        "--few",
        action="store_true",
        help="build every form and dtype once, not every size",
    )
    parser.add_argument(
        "--documents",
        action="store_true",
        help="as --few, for rows of short documents whose lengths are not multiples of 16",
    )
    parser.add_argument(
        "--warm",
        type=Path,
        metavar="DIR",
        help="fill a Triton cache for machines with GPUs, and pack it as DIR.tgz",
    )
    parser.add_argument(
        "--at",
        type=PurePosixPath,
        metavar="PATH",
        help="with --warm: the path of the cache on those machines (default: DIR)",
    )
    parser.add_argument(
        "--triton",
        type=Path,
        metavar="TARGET",
        help="with --warm: run there a Triton that pip installed for another Python (--target)",
    )
    args = parser.parse_args(argv)
    return run("tools.kernel_gate", lambda: _warm(args) if args.warm else _judge(args))


def _chosen(args: argparse.Namespace) -> set[tuple[str, str]]:
    """Return (module, name) of the kernels that the call selects.

    Raises UserError if Triton is missing, the arguments contradict each other, or they select no
    kernel.
    """
    found = triton_version()
    if found is None or found < OLDEST_TRITON:
        raise UserError(
            f"Triton {'.'.join(map(str, OLDEST_TRITON))} or newer is needed: pip install triton"
        )
    if interpreted():
        raise UserError("TRITON_INTERPRET is set, and interpreted kernels do not compile: unset it")
    rooms = {module.split(".")[1] for module, _ in kernels_under("kernels")}
    if args.warm:
        # Some operations launch only kernels of other operations.
        rooms |= {op for op in suites() if "triton" in implementations(op)}
    for op in args.only:
        if op not in rooms:
            near = nearest(op, rooms)
            meant = f"did you mean {near}?" if near else f"these have: {', '.join(sorted(rooms))}"
            raise UserError(f"--only {op}: no operation of this name has kernels; {meant}")
    if args.warm and (
        args.prefix != "kernels" or args.write or args.check or args.few or args.documents
    ):
        raise UserError("--warm goes with --only, --sm, --at and --triton alone")
    if not args.warm and (args.at or args.triton):
        raise UserError("--at and --triton are about the cache of --warm DIR")
    if args.at and not args.at.is_absolute():
        raise UserError(f"--at {args.at}: a path of another machine begins with /")
    if args.write and not _is_complete(args):
        raise UserError("--write is about all kernels and architectures; leave the others out")
    if args.check and (args.sm or args.few or args.documents):
        raise UserError(
            "--check is about all architectures and sizes; leave --sm, --few and --documents out"
        )
    chosen = {
        (module, name)
        for module, name in kernels_under(args.prefix)
        if not args.only or module.split(".")[1] in args.only
    }
    if not chosen:
        raise UserError(f"no module under {args.prefix!r} has kernels; kernels.<operation> does")
    return chosen


def _is_complete(args: argparse.Namespace) -> bool:
    """Return True if the call builds everything that docs/kernels.md contains."""
    return args.prefix == "kernels" and not (args.only or args.sm or args.few or args.documents)


def _same(recorded: str, found: str, complete: bool) -> bool:
    """Return True if the recorded text of docs/kernels.md agrees with the text of this build.

    If the last argument is False, only the modules that were built are compared.
    """
    was, is_now = sections(recorded), sections(found)
    return (
        recorded == found
        if complete
        else all(
            was.get(title) == part
            for title, part in is_now.items()
            if not title.startswith("Warnings")
        )
    )


def _progress() -> Progress:
    """Return a function that prints the progress and the remaining seconds."""
    start = time.monotonic()

    def show(done: int, of: int, name: str) -> None:
        left = (time.monotonic() - start) / done * (of - done)
        print(f"[{done}/{of}, {left:.0f} s left] {name}", flush=True)

    return show


def _warm(args: argparse.Namespace) -> int:
    _chosen(args)
    from tools.kernel_gate.launches import launched
    from tools.kernel_gate.warm import fill, key_of, pack

    key = key_of(args.triton) if args.triton else ""
    folder, arch = args.warm.absolute(), args.sm or ARCHITECTURES[0]
    folder.mkdir(parents=True, exist_ok=True)
    builds = launched(args.only)
    entries = fill(builds, arch, folder, key, _progress())
    for build, (_, fault) in zip(builds, entries, strict=True):
        if fault:
            print(
                f"kernel_gate: {build.module}: {build.kernel}, {build.label}: does not compile: "
                f"{fault}",
                file=sys.stderr,
            )
    made, at = {entry for entry, _ in entries if entry}, args.at or folder
    archive = pack(folder, made, at)
    size = archive.stat().st_size / 1e6
    print(
        f"{len(made)} kernels for sm_{arch}, {size:.1f} MB: {archive}, to be unpacked in {at}, "
        "which TRITON_CACHE_DIR names"
    )
    return Exit.FAULT if any(fault for _, fault in entries) else Exit.DONE


def _judge(args: argparse.Namespace) -> int:
    known, complete = _chosen(args), _is_complete(args)
    from tools.kernel_gate.launches import recorded

    builds = [each for each in recorded() if (each.module, each.kernel) in known]
    chosen = covering(builds, sizes=False) if args.few or args.documents else builds
    if args.documents:
        chosen = [short for each in chosen if (short := in_rows(each)) is not None]
    built = build_all(chosen, ARCHITECTURES if args.sm is None else (args.sm,), _progress())
    for one in built:
        for report in one.reports.values():
            properties = (
                [f"{report.registers} registers", f"{report.shared} B shared"]
                if not report.failed
                else [f"failed: {report.failed}"]
            )
            properties += [f"{report.matrix} wgmma"] if one.build.matrix and report.matrix else []
            properties += [f"{report.spilled} B spilled"] if report.spilled else []
            properties += [f"ptxas {code}" for code in report.warnings]
            print(f"{one.name}: sm_{report.arch}: {', '.join(properties)}")
    unseen = known - {(build.module, build.kernel) for build in builds}
    faults = [
        f"{module}: {kernel}: no layer and no operation's case launches it"
        for module, kernel in sorted(unseen)
    ]
    faults += [f"{one.name}: {fault}" for one in built for fault in one.faults()]
    for fault in faults:
        print(f"kernel_gate: {fault}", file=sys.stderr)
    text = page(built, importlib.metadata.version("triton")) if args.write or args.check else ""
    if args.write and not faults:
        PAGE.write_text(text, encoding="utf-8")
    if args.check and not _same(PAGE.read_text(encoding="utf-8"), text, complete):
        print(
            f"kernel_gate: {PAGE.name} is not what is built now: run python -m tools.kernel_gate "
            "--write",
            file=sys.stderr,
        )
        return Exit.FAULT
    return Exit.FAULT if faults else Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
