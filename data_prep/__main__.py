"""data_prep: ``python -m data_prep VERB``: the command line, and how an error reaches a person."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import NoReturn

from data_prep.errors import Ended, is_want_of_memory
from fem_common.errors import CommandError, Fault, end
from fem_common.exits import Exit
from fem_common.signals import taken

# Verb -> the module that does it, imported only where it is called, and its purpose.
VERBS = {
    "stdlib": ("verbs.stdlib", "gather the running Python's standard library as parquet"),
    "train-tokenizer": ("verbs.train_tokenizer", "train a BPE tokenizer"),
    "inspect": ("report.inspect", "look at inputs: schema, rows, a sample, what they will take"),
    "plan": ("verbs.plan", "cut inputs into units of work"),
    "run": ("verbs.run", "encode text into train/valid/test .bin/.idx"),
    "status": ("report.status", "how far a data folder is"),
    "merge": ("verbs.merge", "merge a job array's units into train/valid/test .bin/.idx"),
    "verify": ("verify", "check a data folder against its manifest"),
    "index": ("verbs.index", "build the sample indices that pretrain would build at its start"),
    "stats": ("report.stats", "documents, tokens, lengths and drops of a data folder, and a picture"),
    "blend": ("verbs.blend", "several data folders with weights, as the file that pretrain reads"),
}
# The signals that end a verb, and how it says so.
ENDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal hung up"}


class Parser(argparse.ArgumentParser):
    """argparse with its errors on one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with 2."""
        print(f"data_prep: error: {message} (see: {self.prog} --help)", file=sys.stderr)
        sys.exit(Exit.WRONG_INPUT)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line as a namespace whose ``main`` runs the verb."""
    parser = Parser(prog="python -m data_prep", description="Text in, Megatron .bin/.idx out.", allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, (file, purpose) in VERBS.items():
        if name not in argv[:1]:
            verbs.add_parser(name, help=purpose)
            continue
        module = importlib.import_module(f"data_prep.{file}")
        form = argparse.RawDescriptionHelpFormatter
        verb = verbs.add_parser(name, help=purpose, description=_description(module), allow_abbrev=False, formatter_class=form)
        module.add_arguments(verb)
        verb.set_defaults(main=module.main)
    return parser.parse_args(argv)


def _description(module: ModuleType) -> str:
    """What a verb's docstring says after its name."""
    said = (module.__doc__ or "").partition("``: ")[2].replace("``", "")
    return said[:1].upper() + said[1:]


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the verb as Ctrl-C does: what has to be closed or removed is."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise Ended(number)

    with taken((signal.SIGTERM, signal.SIGHUP), end):
        yield


def _tell_if_possible(line: str) -> None:
    """Print a line on stderr; where the terminal is gone, let nothing more be written to it: Python would end with 120 for that."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def main(argv: list[str] | None = None) -> int:
    """Run a verb: its exit code, with one line where it is not 0."""
    try:
        with _signals_as_interrupt():
            arguments = parse(sys.argv[1:] if argv is None else argv)
            return int(arguments.main(arguments))
    except CommandError as error:
        return end("data_prep", error)
    except Exception as error:
        if is_want_of_memory(error):
            return end("data_prep", Fault("not enough memory; what is finished is kept: the same command goes on where there is more"))
        if isinstance(error, OSError):
            return end("data_prep", error)
        raise
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT
        _tell_if_possible(f"data_prep: {ENDS[number]}; what is finished is kept: the same command goes on")
        return 128 + number


if __name__ == "__main__":
    sys.exit(main())
