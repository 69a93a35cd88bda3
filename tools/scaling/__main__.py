"""``python -m tools.scaling VERB STUDY.yaml``: from a question about models and compute to a fitted law, and to the run it recommends.

Exit codes: 0 done; 1 a file system or a run failed; 2 the input is wrong, and nothing was written; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from types import ModuleType
from typing import NoReturn

from fem_common.errors import ConfigError, StorageError, told

# Verb -> the module that does it, imported only where it is called, and its purpose.
VERBS = {
    "plan": ("planning", "the runs of a study and their cost; refuses what would not answer its question"),
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
        sys.exit(2)


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
    except (ConfigError, StorageError) as error:
        return _told(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: leave without a word at exit either
        return 0
    except OSError as error:
        return _told(told(error))
    except KeyboardInterrupt:
        print("tools.scaling: interrupted; the same command goes on where it was", file=sys.stderr)
        return 130


def _told(error: ConfigError | StorageError) -> int:
    print(f"tools.scaling: error: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
