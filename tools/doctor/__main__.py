"""``python -m tools.doctor [--build] [--fix]``: a line a check. Exit code 1 where something is wrong."""

from __future__ import annotations

import argparse
import sys

from fem_common.errors import end
from fem_common.exits import Exit
from tools.doctor.checks import Check, examine


def show(check: Check) -> None:
    """A check as a line, over what `progress` left there."""
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{clear}{check.level:<6}  {check.name:<18}  {check.text}{f': {check.remedy}' if check.remedy else ''}", flush=True)


def progress(name: str, seconds: float) -> None:
    """How long an op has been compiling: one line that changes on a terminal, a line twice a minute elsewhere."""
    if sys.stdout.isatty():
        print(f"\r\033[K...     {name:<18}  compiling or loading, {seconds:.0f} s", end="", flush=True)
    elif round(seconds) % 30 == 0:
        print(f"...     {name:<18}  compiling or loading, {seconds:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Prints the checks as they are made; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.doctor", description="What this machine has for training, and what to do about the rest.")
    parser.add_argument("--build", action="store_true", help="compile DeepSpeed's operations now, one to five minutes each")
    parser.add_argument("--fix", action="store_true", help="remove the lock files of DeepSpeed compilations that were killed")
    given = parser.parse_args(arguments)
    wrong = 0
    try:
        for check in examine(given.build, given.fix, progress):
            wrong += check.level == "wrong"
            show(check)
    except OSError as error:
        return end("tools.doctor", error)
    except KeyboardInterrupt:
        print("\ntools.doctor: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    print(f"{wrong} of these {'is' if wrong == 1 else 'are'} wrong" if wrong else "nothing is wrong")
    return Exit.FAULT if wrong else Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
