"""Verb ``index``: build the index cache of a run in advance, so that no GPU waits for it.

The verb runs ``python -m pretrain RUN.yaml [section.key=value ...] --index`` with the same Python
and passes its output through, because the trainer decides which samples a run reads and in which
order. Use the same settings as for the training. No GPU is required. The data must be visible under
the path that the training will use.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from importlib.util import find_spec

from fem_common.errors import UserError
from fem_common.signals import signal_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "config", metavar="RUN.yaml", help="a run of pretrain, such as configs/run/demo.yaml"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="the run's settings, as for python -m pretrain",
    )


def main(arguments: argparse.Namespace) -> int:
    """Build the run's index cache and return the exit code of ``pretrain``.

    Raises UserError if pretrain is not installed or was killed.
    """
    for module, package in (
        ("pretrain", "this project"),
        ("megatron", "megatron-core"),
        ("torch", "torch"),
    ):
        if find_spec(module) is None:
            raise UserError(
                f"index needs {package}, which {sys.executable} does not find; install it "
                "with: pip install -c constraints.txt -e . "
                "(or start from the project's folder)"
            )
    with subprocess.Popen(
        [sys.executable, "-m", "pretrain", arguments.config, *arguments.overrides, "--index"]
    ) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()  # pretrain removes its incomplete files
            raise
    if code < 0:
        reason = (
            "; it needs about 37 bytes of memory per document" if -code == signal.SIGKILL else ""
        )
        raise UserError(
            f"the index was not built: pretrain was ended by {signal_name(-code)}{reason}"
        )
    return code
