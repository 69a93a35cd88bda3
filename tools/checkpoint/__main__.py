"""``python -m tools.checkpoint VERB``: parse the arguments and call the module of the verb."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fem_common.cli import Parser, run
from fem_common.errors import ConfigError

CHECKPOINT = "a run directory (its newest good checkpoint), or a step_NNNNNNNN"


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code; 1 also for a damaged checkpoint."""
    given = _parser().parse_args(arguments)
    return run(
        "tools.checkpoint", lambda: given.run(given) is False, kept="no checkpoint was written"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="tools.checkpoint",
        description="What a checkpoint holds, and whether it is whole; the same one for another engine; several as one.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser(
        "convert",
        help="write a checkpoint so that a run of another engine or optimizer resumes from it",
        description="Writes RUN_DIR/checkpoints/step_NNNNNNNN, from which a run of the named engine with the same model continues: "
        "weights, optimizer state, position in the data. Files of tensors are linked, or copied where that is not possible.",
    )
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=CHECKPOINT)
    verb.add_argument(
        "--engine",
        required=True,
        choices=["megatron", "deepspeed"],
        help="the engine that is to continue",
    )
    verb.add_argument(
        "--plain-optimizer",
        action="store_true",
        help="for Megatron's optimizer that is not split over ranks (parallel.use_distributed_optimizer=false)",
    )
    verb.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="RUN_DIR",
        help="run directory of the run that continues; not the source's",
    )
    verb.set_defaults(run=_convert)
    _add_merge(verbs)
    verb = verbs.add_parser(
        "show",
        help="what a checkpoint holds, and whether it is undamaged",
        description="Says what a checkpoint holds. Exit code 1: it is damaged.",
    )
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=CHECKPOINT)
    verb.set_defaults(run=_show)
    verb = verbs.add_parser(
        "verify",
        help="read every byte of a checkpoint, or of all of a run, and compare it with its checksums",
        description="Reads checkpoints whole and compares sizes, hashes and every tensor's checksum. Exit code 1: one is damaged.",
    )
    verb.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run directory (all its checkpoints), a step_NNNNNNNN, or a mirror's URL",
    )
    verb.set_defaults(run=_verify)
    verb = verbs.add_parser(
        "mirror",
        help="send a run's newest checkpoint to an object store or another file system",
        description="Sends the newest checkpoint that is not there, reads it back, and then names it there. What was sent already is not "
        "sent again. A run with checkpoint.mirror does so by itself.",
    )
    _add_places(verb)
    verb.add_argument(
        "--interval",
        type=_whole,
        default=1,
        metavar="STEPS",
        help="of which steps this divides; the last one always",
    )
    verb.add_argument(
        "--keep-last", type=_whole, metavar="N", help="checkpoints kept there (default: all)"
    )
    verb.add_argument("--follow", action="store_true", help="and each newer one, until stdin ends")
    verb.set_defaults(run=_mirror)
    verb = verbs.add_parser(
        "fetch",
        help="bring a mirror's newest good checkpoint into a run directory",
        description="Brings the newest checkpoint there that matches its hashes, where it is newer than all good ones of the run. A run "
        "directory without checkpoints takes over the mirror's run: a run with checkpoint.mirror does so by itself only at the same path.",
    )
    _add_places(verb)
    verb.add_argument(
        "--damaged",
        action="append",
        default=[],
        metavar="STEP",
        help="a step_NNNNNNNN of the run that is no good",
    )
    verb.add_argument(
        "--aside",
        action="store_true",
        help="leave in RUN_DIR/.fetched, for the run to check, what may be another run's",
    )
    verb.set_defaults(run=_fetch)
    return parser


def _add_merge(verbs: Any) -> None:
    verb = verbs.add_parser(
        "merge",
        help="write the average of checkpoints' weights",
        description="Writes DIR/step_NNNNNNNN with the average of checkpoints of one model, of any layouts and engines: weights alone, to "
        "evaluate, to export, and to start from with checkpoint.load.",
    )
    verb.add_argument("checkpoints", type=Path, nargs="*", metavar="CHECKPOINT", help=CHECKPOINT)
    verb.add_argument(
        "--last",
        type=_whole,
        metavar="N",
        help="the newest N good checkpoints of a run, instead of named ones",
    )
    verb.add_argument("--of", type=Path, metavar="RUN_DIR", help="whose")
    shares = verb.add_mutually_exclusive_group()
    shares.add_argument(
        "--weights",
        type=_share,
        nargs="+",
        metavar="SHARE",
        help="a share for each checkpoint, as named (default: equal)",
    )
    shares.add_argument(
        "--ema",
        type=_share,
        metavar="DECAY",
        help="an exponential window: of two neighbours the older one has DECAY times the share, below 1",
    )
    verb.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="a folder that is not there yet, or is empty",
    )
    verb.set_defaults(run=_merge)


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
        help="how long a fault is tried again (default: 600)",
    )


def _whole(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 1 on is wanted")
    return int(text)


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: a number above 0 is wanted")


# Each imports its module when it is called: torch and Megatron-core take seconds, which --help and a wrong argument need not wait.


def _convert(given: argparse.Namespace) -> None:
    if given.plain_optimizer and given.engine != "megatron":
        raise ConfigError(
            f"--plain-optimizer is one of Megatron's; leave it out for --engine {given.engine}"
        )
    from fem_megatron.megatron.platform import import_megatron

    import_megatron()
    from tools.checkpoint.convert import convert

    convert(given.checkpoint, given.engine, given.out, plain=given.plain_optimizer)


def _merge(given: argparse.Namespace) -> None:
    named, last, run = given.checkpoints, given.last, given.of
    if (last is None) != (run is None) or bool(named) == bool(last):
        raise ConfigError("name checkpoints, or --last N --of RUN_DIR")
    if given.weights and (last or len(given.weights) != len(named)):
        count = f"{last} of --last" if last else str(len(named))
        raise ConfigError(
            f"--weights has {len(given.weights)} shares for {count} checkpoints: name as many checkpoints as shares"
        )
    if given.ema and given.ema >= 1:
        raise ConfigError(f"--ema {given.ema:g}: a share of the next checkpoint's, below 1")
    from fem_megatron.megatron.platform import import_megatron

    import_megatron()
    from tools.checkpoint.merge import merge, newest

    merge(newest(run, last) if last else named, given.out, shares=given.weights, decay=given.ema)


def _show(given: argparse.Namespace) -> bool:
    from tools.checkpoint.show import show

    return show(given.checkpoint)


def _verify(given: argparse.Namespace) -> bool:
    if "://" in given.checkpoint:
        from tools.checkpoint.mirror import verify_mirror

        return verify_mirror(given.checkpoint)
    from tools.checkpoint.show import verify

    return verify(Path(given.checkpoint))


def _mirror(given: argparse.Namespace) -> None:
    from tools.checkpoint.mirror import Wanted, mirror

    mirror(
        given.run_dir,
        given.url,
        Wanted(given.interval, given.keep_last),
        follow=given.follow,
        patience=given.patience,
    )


def _fetch(given: argparse.Namespace) -> None:
    from tools.checkpoint.mirror import fetch

    fetch(
        given.run_dir, given.url, patience=given.patience, damaged=given.damaged, aside=given.aside
    )


if __name__ == "__main__":
    sys.exit(main())
