"""``python -m tools.checkpoint VERB``: parse the arguments and call the module of the verb."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fem_common.cli import Parser, run
from tools.checkpoint.paths import check

WITH_MEGATRON = ("convert", "merge")  # modules that import Megatron-core
CHECKPOINT = "a run directory (its newest valid checkpoint), or a step_NNNNNNNN"


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code; 1 also for a damaged checkpoint."""
    given = vars(_parser().parse_args(arguments))
    module, function = given.pop("function").split(":")

    def called() -> int:
        # torch and Megatron-core take seconds to import, which --help and wrong arguments avoid.
        if module in WITH_MEGATRON:
            check(given)
            from fem_megatron.megatron.upstream import import_megatron

            import_megatron()
        found = getattr(importlib.import_module(f"tools.checkpoint.{module}"), function)(**given)
        return 1 if found is False else 0

    return run("tools.checkpoint", called, kept="no checkpoint was written")


def _parser() -> Parser:
    """Return the parser. Long, because all verbs declare their options in it."""
    parser = Parser(
        prog="tools.checkpoint",
        description="Show, verify, convert, mirror, fetch and average checkpoints.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser(
        "convert",
        help=(
            "convert a checkpoint, so that a run with another engine or optimizer can resume"
            " from it"
        ),
        description=(
            "Write RUN_DIR/checkpoints/step_NNNNNNNN, from which a run of the same model with the"
            " named engine resumes: weights, optimizer state, position in the data. Tensor files"
            " are hard links, or copies if links are not possible."
        ),
    )
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=CHECKPOINT)
    verb.add_argument(
        "--engine",
        required=True,
        choices=["megatron", "deepspeed"],
        help="engine of the run that will resume",
    )
    verb.add_argument(
        "--plain-optimizer",
        action="store_true",
        help=(
            "write for Megatron's optimizer without sharding over ranks"
            " (parallel.use_distributed_optimizer=false)"
        ),
    )
    verb.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="RUN_DIR",
        help="run directory of the run that will resume; not the run directory of the source",
    )
    verb.set_defaults(function="convert:convert")
    _add_merge(verbs)
    verb = verbs.add_parser(
        "show",
        help="show the contents of a checkpoint, and whether it is damaged",
        description="Show the contents of a checkpoint. Exit code 1: it is damaged.",
    )
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=CHECKPOINT)
    verb.set_defaults(function="show:show")
    verb = verbs.add_parser(
        "verify",
        help=(
            "read every byte of a checkpoint, or of all checkpoints of a run, and compare it with"
            " the checksums"
        ),
        description=(
            "Read checkpoints completely and compare sizes, hashes and the checksum of every"
            " tensor. Exit code 1: one is damaged."
        ),
    )
    verb.add_argument(
        "place",
        metavar="CHECKPOINT",
        help="a run directory (all its checkpoints), a step_NNNNNNNN, or the URL of a mirror",
    )
    verb.set_defaults(function="show:verify")
    verb = verbs.add_parser(
        "mirror",
        help="send the newest checkpoint of a run to an object store or another file system",
        description=(
            "Send the newest checkpoint that the mirror lacks, read it back, and then mark it as"
            " the latest. Files that were sent are not sent again. A run with checkpoint.mirror"
            " does this automatically."
        ),
    )
    _add_places(verb)
    verb.add_argument(
        "--interval",
        type=_positive_integer,
        default=1,
        metavar="STEPS",
        help="send only checkpoints of steps divisible by N; the last one is always sent",
    )
    verb.add_argument(
        "--keep-last",
        type=_positive_integer,
        metavar="N",
        help="number of checkpoints kept in the mirror (default: all)",
    )
    verb.add_argument(
        "--follow", action="store_true", help="also send each newer checkpoint, until stdin ends"
    )
    verb.set_defaults(function="mirror:mirror")
    verb = verbs.add_parser(
        "fetch",
        help="copy the newest valid checkpoint of a mirror into a run directory",
        description=(
            "Copy the newest checkpoint of the mirror that matches its hashes, if it is newer than"
            " all valid ones of the run. A run directory without checkpoints takes over the run of"
            " the mirror; with checkpoint.mirror this is automatic only at the same path."
        ),
    )
    _add_places(verb)
    verb.add_argument(
        "--damaged",
        action="append",
        default=[],
        metavar="STEP",
        help="a step_NNNNNNNN of the run to treat as damaged",
    )
    verb.add_argument(
        "--aside",
        action="store_true",
        help=(
            "leave a checkpoint that may belong to another run in RUN_DIR/.fetched, where the run"
            " checks it"
        ),
    )
    verb.set_defaults(function="mirror:fetch")
    return parser


def _add_merge(verbs: Any) -> None:
    verb = verbs.add_parser(
        "merge",
        help="average the weights of several checkpoints",
        description=(
            "Write DIR/step_NNNNNNNN with the average of checkpoints of one model, of any layouts"
            " and engines: weights only, to evaluate, to export, or to start a training from with"
            " checkpoint.load."
        ),
    )
    verb.add_argument("checkpoints", type=Path, nargs="*", metavar="CHECKPOINT", help=CHECKPOINT)
    verb.add_argument(
        "--last",
        type=_positive_integer,
        metavar="N",
        help="average the newest N valid checkpoints of a run instead of named ones",
    )
    verb.add_argument("--of", type=Path, metavar="RUN_DIR", help="whose")
    shares = verb.add_mutually_exclusive_group()
    shares.add_argument(
        "--weights",
        type=_share,
        nargs="+",
        metavar="SHARE",
        help="one weight per checkpoint, in the order of the checkpoints (default: equal)",
    )
    shares.add_argument(
        "--ema",
        type=_share,
        metavar="DECAY",
        help=(
            "exponential window: each checkpoint has DECAY (below 1) times the weight of the next"
            " newer one"
        ),
    )
    verb.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="a folder that does not exist yet, or is empty",
    )
    verb.set_defaults(function="merge:merge")


def _add_places(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run directory")
    verb.add_argument(
        "url", metavar="URL", help="s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a folder"
    )
    verb.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="seconds for which a failing transfer is retried (default: 600)",
    )


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1 on")
    return int(text)


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")


if __name__ == "__main__":
    sys.exit(main())
