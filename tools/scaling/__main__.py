"""``python -m tools.scaling VERB STUDY.yaml``: from a question about models and compute to a fitted law, and to the run it recommends.

Exit codes: those of every command (``fem_common/README.md``). 1: also where runs failed or are missing.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from types import ModuleType
from typing import NoReturn

from fem_common.errors import CommandError, end
from fem_common.exits import Exit

# Verb -> the module that does it, imported only where it is called, and its purpose.
VERBS = {
    "plan": ("plan", "the runs of a study and their cost; refuses what would not answer its question"),
    "run": ("running", "train what is not done yet, through launch: a job array, or on this machine"),
    "collect": ("collecting", "one table of all runs' losses"),
    "fit": ("fitting", "scaling laws with their uncertainty, from the table"),
    "plot": ("plotting", "pictures and the report, from the table and the fits"),
    "recommend": ("recommending", "the run that the laws recommend for a compute budget, as a configuration"),
    "coord-check": ("coordinates", "whether activations keep their scale over the widths"),
}

SETTING = re.compile(r"[a-z]\w*(\.\w+)*=.*", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """argparse with its errors on one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with 2."""
        print(f"tools.scaling: error: {message} (see: {self.prog} --help)", file=sys.stderr)
        sys.exit(Exit.WRONG_INPUT)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line as a namespace whose ``main`` does the verb; a verb that has ``words`` takes section.key=value words anywhere."""
    description = "Scaling-law studies: plan, run, collect, fit, plot, recommend."
    parser = Parser(prog="python -m tools.scaling", description=description, allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, (file, purpose) in VERBS.items():
        if name not in argv[:1]:
            verbs.add_parser(name, help=purpose)
            continue
        module = importlib.import_module(f"tools.scaling.{file}")
        form = argparse.RawDescriptionHelpFormatter
        verb = verbs.add_parser(name, help=purpose, description=_description(module), allow_abbrev=False, formatter_class=form)
        module.add_arguments(verb)
        verb.set_defaults(main=module.main)
    words = [word for word in argv if SETTING.fullmatch(word)]
    arguments = parser.parse_args([word for word in argv if not SETTING.fullmatch(word)])
    if words and not hasattr(arguments, "words"):
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    arguments.words = words
    return arguments


def _description(module: ModuleType) -> str:
    """What a verb's docstring says after its name."""
    said = (module.__doc__ or "").partition("``: ")[2].replace("``", "")
    return said[:1].upper() + said[1:]


def main(argv: list[str] | None = None) -> int:
    """Do a verb: its exit code."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        return int(arguments.main(arguments))
    except (CommandError, OSError) as error:
        return end("tools.scaling", error)
    except KeyboardInterrupt:
        print("tools.scaling: interrupted; the same command goes on where it was", file=sys.stderr)
        return Exit.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
