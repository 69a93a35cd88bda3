"""``python -m tools.machine [--build] [--fix]``: check this machine for training.

Each check is one JSON line on stdout. `launch doctor` starts this command with the ranks'
interpreter and prints the lines, because `launch` imports no package that needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict

from fem_common.exits import Exit
from tools.machine.checks import examine


def main(argv: list[str] | None = None) -> int:
    """Print each check when it ends, and the progress of compilations to stderr. Return 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.machine", allow_abbrev=False)
    parser.add_argument("--build", action="store_true", help="compile DeepSpeed's operations now")
    parser.add_argument(
        "--fix",
        action="store_true",
        help="remove the lock files of DeepSpeed compilations that were killed",
    )
    given = parser.parse_args(argv)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # redirect the output of libraries to stderr
    for check in examine(
        given.build,
        given.fix,
        lambda name, seconds: print(json.dumps([name, seconds]), file=out, flush=True),
    ):
        print(json.dumps(asdict(check)), file=out, flush=True)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(Exit.INTERRUPTED)
