"""``python -m pretrain CONFIG.yaml [section.key=value ...]``: check everything, then train, then say how it ended.

``--plan`` and ``--index`` stop before: the one prints what the run needs, the other builds its index cache.
Exit codes: 0 the run is complete, or was stopped by a signal after a checkpoint; 1 it failed while training; 2 the input is wrong;
130 ``--index`` was interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from fem_megatron.catalogue import table
from pretrain.loader import ConfigError, load_run
from pretrain.plan import make_plan, render
from pretrain.validate import Prepared, prepare


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, and either print the plan or train. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="pretrain", description="Pretrain a language model; see docs/configuration.md for every key.")
    parser.add_argument("config", metavar="CONFIG.yaml", help="a run, such as configs/run/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--list-mixers", action=_ListMixers, nargs=0, help="print the names that model.mixer may take, and stop")
    stops = parser.add_mutually_exclusive_group()
    stops.add_argument("--plan", action="store_true", help="print parameters, FLOPs, memory, tokens and layout, and stop")
    stops.add_argument("--index", action="store_true", help="build the run's index cache, in this process and without a GPU, and stop")
    options = parser.parse_intermixed_args(arguments)
    speaks = os.environ.get("RANK", "0") == "0"
    launched = os.environ.get("WORLD_SIZE")
    try:
        config = load_run(options.config, options.overrides)
        if options.plan:
            prepared = prepare(config, None, plan_only=True)
            print(render(make_plan(prepared.config, prepared.world_size, prepared.facts)))
            return 0
        if options.index:
            return _index(prepare(config, None), int(launched or 1))
        return _train(prepare(config, int(launched or 1)))
    except ConfigError as error:
        if speaks:
            print(f"pretrain: error: {error}", file=sys.stderr, flush=True)
        return 2


class _ListMixers(argparse.Action):
    """An option that prints and stops before CONFIG.yaml is asked for, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        print(table())
        parser.exit()


def _index(prepared: Prepared, launched: int) -> int:
    if launched > 1:
        raise ConfigError(f"--index works in one process, but {launched} were started; leave torchrun away")
    from fem_megatron.platform import quiet_libraries

    quiet_libraries()
    from pretrain.run import build_index

    # As an exception, so that what is half built is removed on the way out.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        build_index(prepared)
    except KeyboardInterrupt:
        print("pretrain: interrupted; the same command starts again", file=sys.stderr, flush=True)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _train(prepared: Prepared) -> int:
    # Imported here: planning and every refusal above need no torch.
    from fem_megatron.platform import quiet_libraries

    quiet_libraries()
    from pretrain.run import TooManyBadSteps, train

    try:
        outcome = train(prepared)
    except TooManyBadSteps as error:
        print(f"pretrain: error: {error}", file=sys.stderr, flush=True)
        return 1
    if outcome.stopped_by and os.environ.get("RANK", "0") == "0":
        print(
            f"stopped by {outcome.stopped_by} after step {outcome.progress.step}; the same command continues from {outcome.last_checkpoint}"
        )
    return 0


if __name__ == "__main__":
    # Found from a checkout without installation, too.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
