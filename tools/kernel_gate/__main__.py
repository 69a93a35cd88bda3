"""`python -m tools.kernel_gate [kernels.<op>] [--write]`: compile the kernels for sm_90, sm_80 and sm_100 on any machine, and judge."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from pathlib import Path

from fem_common.cli import Parser, run
from fem_common.errors import UserError
from fem_common.exits import Exit
from kernels.implementations import OLDEST_TRITON, interpreted, triton_version
from tools.kernel_gate.gate import ARCHITECTURES, build_all, covering, in_rows, kernels_under, page

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 all is well, 1 a kernel is not, 2 the call cannot be carried out."""
    parser = Parser(prog="python -m tools.kernel_gate", description=__doc__)
    parser.add_argument("prefix", nargs="?", default="kernels", help="only modules under this one, as kernels.fem_attention")
    parser.add_argument("--sm", type=int, choices=ARCHITECTURES, help="this architecture alone")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} (needs all kernels and architectures)")
    parser.add_argument("--check", action="store_true", help=f"compare {PAGE.name} with what was built")
    parser.add_argument("--few", action="store_true", help="only so many builds that every form and type occurs, not every size")
    parser.add_argument("--documents", action="store_true", help="these few, for rows of documents of few tokens, no multiple of 16")
    asked = parser.parse_args(argv)
    return run("tools.kernel_gate", lambda: _judge(asked))


def _judge(asked: argparse.Namespace) -> int:
    found = triton_version()
    if found is None or found < OLDEST_TRITON:
        raise UserError(f"Triton {'.'.join(map(str, OLDEST_TRITON))} or newer is needed: pip install triton")
    if interpreted():
        raise UserError("TRITON_INTERPRET is set, and interpreted kernels do not compile: unset it")
    whole = asked.prefix == "kernels" and asked.sm is None and not (asked.few or asked.documents)
    if (asked.write or asked.check) and not whole:
        raise UserError("--write and --check are about all kernels and architectures; leave the others out")
    known = kernels_under(asked.prefix)
    if not known:
        raise UserError(f"no module under {asked.prefix!r} has kernels; kernels.<operation> does")
    from tools.kernel_gate.launches import recorded

    builds = [each for each in recorded() if (each.module, each.kernel) in known]
    start = time.monotonic()

    def told(done: int, of: int, name: str) -> None:
        left = (time.monotonic() - start) / done * (of - done)
        print(f"[{done}/{of}, {left:.0f} s left] {name}", flush=True)

    chosen = covering(builds, sizes=False) if asked.few or asked.documents else builds
    if asked.documents:
        chosen = [short for each in chosen if (short := in_rows(each)) is not None]
    built = build_all(chosen, ARCHITECTURES if asked.sm is None else (asked.sm,), told)
    for one in built:
        for report in one.reports.values():
            said = [f"{report.registers} registers", f"{report.shared} B shared"] if not report.failed else [f"failed: {report.failed}"]
            said += [f"{report.matrix} wgmma"] if one.build.matrix and report.matrix else []
            said += [f"{report.spilled} B spilled"] if report.spilled else []
            said += [f"ptxas {code}" for code in report.warnings]
            print(f"{one.name}: sm_{report.arch}: {', '.join(said)}")
    unseen = known - {(build.module, build.kernel) for build in builds}
    faults = [f"{module}: {kernel}: no layer and no operation's case launches it" for module, kernel in sorted(unseen)]
    faults += [f"{one.name}: {fault}" for one in built for fault in one.faults()]
    for fault in faults:
        print(f"kernel_gate: {fault}", file=sys.stderr)
    text = page(built, importlib.metadata.version("triton")) if whole else ""
    if asked.write and not faults:
        PAGE.write_text(text, encoding="utf-8")
    if asked.check and PAGE.read_text(encoding="utf-8") != text:
        print(f"kernel_gate: {PAGE.name} is not what is built now: run python -m tools.kernel_gate --write", file=sys.stderr)
        return Exit.FAULT
    return Exit.FAULT if faults else Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
