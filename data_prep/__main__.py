"""data_prep: ``python -m data_prep VERB``: the command line, and how an error reaches a person."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from data_prep import run, stdlib, train_tokenizer, verify
from data_prep.errors import UserError, describe_os_error

VERBS = {
    "stdlib": (stdlib, "gather the running Python's standard library as parquet"),
    "train-tokenizer": (train_tokenizer, "train a byte-level BPE tokenizer"),
    "run": (run, "encode parquet text into train/valid/test .bin/.idx"),
    "verify": (verify, "check a data folder against its manifest"),
}


class Parser(argparse.ArgumentParser):
    """argparse with its errors on one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with 2."""
        print(f"data_prep: error: {message} (see: python -m {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line as a namespace whose ``main`` runs the verb."""
    parser = Parser(prog="data_prep", description="Text in, Megatron .bin/.idx out.", allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, (module, purpose) in VERBS.items():
        verb = verbs.add_parser(
            name, help=purpose, description=module.__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(verb)
        verb.set_defaults(main=module.main)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run a verb: its exit code, 2 with one line for an error a user can mend, 130 when interrupted."""
    arguments = parse(argv)
    try:
        return int(arguments.main(arguments))
    except UserError as error:
        message = str(error)
    except OSError as error:
        message = describe_os_error(error)
    except KeyboardInterrupt:
        print("data_prep: interrupted; the same command starts again", file=sys.stderr)
        return 130
    print(f"data_prep: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
