"""``python -m pretrain CONFIG.yaml [section.key=value ...]``: check everything, then train, then say how it ended.

Exit codes: 0 the run is complete, or was stopped by a signal after a checkpoint; 1 it failed while training; 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import os
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
    parser.add_argument("--plan", action="store_true", help="print parameters, FLOPs, memory, tokens and layout, and stop")
    options = parser.parse_args(arguments)
    speaks = os.environ.get("RANK", "0") == "0"
    launched = os.environ.get("WORLD_SIZE")
    try:
        config = load_run(options.config, options.overrides)
        if options.plan:
            prepared = prepare(config, None, plan_only=True)
            print(render(make_plan(prepared.config, prepared.world_size, prepared.facts)))
            return 0
        prepared = prepare(config, int(launched or 1))
        return _train(prepared)
    except ConfigError as error:
        if speaks:
            print(f"pretrain: error: {error}", file=sys.stderr, flush=True)
        return 2


class _ListMixers(argparse.Action):
    """An option that prints and stops before CONFIG.yaml is asked for, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        print(table())
        parser.exit()


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
