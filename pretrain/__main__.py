"""``python -m pretrain CONFIG.yaml [section.key=value ...]``: check everything, then train, then say how it ended.

``--plan``, ``--resolve``, ``--check`` and ``--index`` stop before: they print what the run needs, print its whole configuration, say
whether its data is there and fits, build its index cache.
Exit codes: those of every command (``fem_common/README.md``). 0: the run is complete, or was stopped by a signal after a checkpoint
(progress.json says which).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from fem_common.errors import MISTAKES, CommandError, ConfigError, UserError, end, reason
from fem_common.exits import Exit
from fem_megatron.catalogue import table
from pretrain import signals
from pretrain.config import RunConfig
from pretrain.loader import dump_yaml, load_run
from pretrain.plan import make_plan, render
from pretrain.run_directory import resolved
from pretrain.validate import Prepared, check_before_data, prepare


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, and either print the plan or train. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="pretrain", description="Pretrain a language model; see docs/configuration.md for every key.")
    parser.add_argument("config", metavar="CONFIG.yaml", help="a run, such as configs/run/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--list-mixers", action=_ListMixers, nargs=0, help="print the names that model.mixer may take, and stop")
    stops = parser.add_mutually_exclusive_group()
    stops.add_argument("--plan", action="store_true", help="print parameters, FLOPs, memory, tokens and layout, and stop")
    stops.add_argument("--resolve", action="store_true", help="print the run's whole configuration as YAML, and stop")
    stops.add_argument("--check", action="store_true", help="check the configuration and its data, and stop")
    stops.add_argument("--index", action="store_true", help="build the run's index cache, in this process and without a GPU, and stop")
    options = parser.parse_intermixed_args(arguments)
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # one on every host: what is wrong may be wrong on one of them alone
    launched = os.environ.get("WORLD_SIZE")
    try:
        config = load_run(options.config, options.overrides)
        if options.plan:
            prepared = prepare(config, None, plan_only=True)
            print(render(make_plan(prepared.config, prepared.world_size, prepared.facts)))
            return 0
        if options.resolve:
            check_before_data(config)
            print(dump_yaml(resolved(config)), end="")
            return 0
        if options.check:
            prepare(config, None)
            return 0
        if options.index:
            return _index(prepare(config, None), int(launched or 1))
        return _train(config, int(launched or 1))
    except CommandError as error:
        _tell_torchrun(str(error))
        # What is no mistake is told by every rank: it may have met one alone.
        return error.code if isinstance(error, UserError) and not speaks else end("pretrain", error)
    except OSError as error:
        if isinstance(error, MISTAKES):  # a wrong path of the user's is refused above; this one is a fault of ours
            raise
        _tell_torchrun(reason(error))
        return end("pretrain", error)
    except KeyboardInterrupt:  # nothing was to be saved
        print("pretrain: interrupted; the same command starts again", file=sys.stderr, flush=True)
        return Exit.INTERRUPTED


def _tell_torchrun(message: str) -> None:
    """Have torchrun end its own lines with this error, instead of with advice on how to see one."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": f"pretrain: error: {message}", "timestamp": str(int(time.time()))}))


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
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _train(config: RunConfig, launched: int) -> int:
    with signals.noted() as received:
        prepared = prepare(config, launched)
        # Imported here: planning and every refusal above need no torch.
        from fem_megatron.platform import quiet_libraries

        quiet_libraries()
        from pretrain.run import train

        outcome = train(prepared, received)
    if outcome.stopped_by and os.environ.get("RANK", "0") == "0":
        then = f"continues from {outcome.last_checkpoint}" if outcome.last_checkpoint else "starts it"
        print(f"stopped by {outcome.stopped_by} after step {outcome.progress.step}; the same command {then}", flush=True)
    return 0


if __name__ == "__main__":
    # Found from a checkout without installation, too.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    code = main()
    signals.ignore()
    sys.exit(code)
