"""``python -m launch VERB``: the command line, and how an error reaches a person."""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType
from typing import NoReturn

from fem_common.errors import CommandError, end
from fem_common.exits import Exit

# Verb -> the module that does it, imported only where it is called, and its purpose.
VERBS = {
    "submit": ("submit", "submit a run, or any command of ours, to Slurm"),
    "local": ("local", "the same on this machine, with the same restarts"),
    "sweep": ("sweep", "many runs of one configuration as a job array"),
    "status": ("status", "how runs stand, one line a run"),
    "logs": ("logs", "what the ranks said; --errors: which failed first, and why"),
    "cancel": ("cancel", "end a run; --save: after a checkpoint"),
    "requeue": ("requeue", "continue a run that ended, or save and restart one that runs"),
    "doctor": ("doctor", "check a cluster profile against the cluster"),
}


class Parser(argparse.ArgumentParser):
    """argparse with its errors on one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with 2."""
        print(f"launch: error: {message} (see: {self.prog} --help)", file=sys.stderr)
        sys.exit(Exit.WRONG_INPUT)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line as a namespace whose ``main`` runs the verb; words after ``--`` are its ``rest``."""
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = Parser(prog="python -m launch", description="Jobs on Slurm or this machine that keep going.", allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, (file, purpose) in VERBS.items():
        if name not in own[:1]:
            verbs.add_parser(name, help=purpose)
            continue
        module = importlib.import_module(f"launch.verbs.{file}")
        form = argparse.RawDescriptionHelpFormatter
        verb = verbs.add_parser(name, help=purpose, description=_description(module), allow_abbrev=False, formatter_class=form)
        module.add_arguments(verb)
        verb.set_defaults(main=module.main, rest=rest)
    arguments, more = parser.parse_known_args(own)
    words: list[str] | None = getattr(arguments, "words", None)
    odd = [word for word in more if words is None or word.startswith("-")]
    if odd:
        parser.error(f"unrecognized arguments: {' '.join(odd)}")
    if words is not None:
        words += more  # those that stand after options
    return arguments


def _description(module: ModuleType) -> str:
    """What a verb's docstring says after its name."""
    said = (module.__doc__ or "").partition("``: ")[2].replace("``", "")
    return said[:1].upper() + said[1:]


def main(argv: list[str] | None = None) -> int:
    """Run a verb: its exit code, with one line where it is not 0."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        return int(arguments.main(arguments))
    except (CommandError, OSError) as error:
        return end("launch", error)
    except KeyboardInterrupt:
        print("launch: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
