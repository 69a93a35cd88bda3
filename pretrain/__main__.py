"""``python -m pretrain CONFIG.yaml|RUN_DIR [section.key=value ...]``: check everything, train, and
report the end.

``--plan``, ``--resolve``, ``--check``, ``--index`` and ``--rehearse`` do not train. They print the
requirements of the run, print its complete configuration, check the data, build the index cache, or
simulate two steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fem_common.cli import Parser, run
from fem_common.config import ConfigErrors, dump_yaml
from fem_common.errors import MISTAKES, CommandError, ConfigError, UserError, end, reason
from fem_common.fem import command_line, next_steps
from fem_common.files import expand_home
from fem_megatron.catalogue import table
from pretrain import signals
from pretrain.config import RunConfig, load_run
from pretrain.plan.run_plan import Plan, make_plan, memory_excess, render
from pretrain.reference_page import section_text
from pretrain.run_directory import load_given, newest_run, read_fork, resolved, run_directory
from pretrain.training_stages import Part, facts_of, parts_of, render_stages
from pretrain.validate import Prepared, check_before_data, prepare

USAGE = """pretrain CONFIG.yaml|RUN_DIR [section.key=value ...] [--fork NEW_RUN]
                [--processes N | --plan | --rehearse] [--check] [--resolve | --index]
       pretrain --help [SECTION] | --list-mixers"""
EXAMPLES = """examples:
  print the requirements of the run without starting it:
    pretrain configs/run/demo.yaml --plan
  check the configuration and its data:
    pretrain configs/run/demo.yaml --check
  train with changed settings:
    pretrain configs/run/demo.yaml train.steps=100 model.fem.gate=false
  train on two processes of this machine; and the same under torchrun:
    pretrain configs/run/demo.yaml --processes 2 parallel.tensor_model_parallel_size=2
    torchrun --nproc-per-node 2 -m pretrain configs/run/demo.yaml \\
        parallel.tensor_model_parallel_size=2
  print memory and communication of a step on each kind of rank:
    pretrain configs/run/demo.yaml --rehearse --gpus 64 --device h100
  exit with code 2 if the memory is insufficient:
    pretrain configs/run/demo.yaml --plan --check log.device=H100
  continue in another folder with other settings:
    pretrain configs/run/demo.yaml --fork runs/fork train.steps=420
  print the keys of a section with types, defaults and meanings:
    pretrain --help optimizer
"""
PROCESSES = (
    "train on N ranks of this machine, which are forked after one import of the training code, so "
    "that they start sooner than under torchrun"
)
REHEARSED = ("h100", "h200", "cpu")
TORCHRUN = "TORCHELASTIC_ERROR_FILE"  # variable that torchrun sets for its ranks
RANK_0_SECONDS = 30.0  # in which torchrun ends the other ranks, if rank 0 reports the same mistake


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the command, and return the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    launched = os.environ.get("WORLD_SIZE")
    return _reported(lambda: _run(options, int(launched) if launched else None))


def _reported(command: Callable[[], int]) -> int:
    """Run the command, report its errors, and return the exit code."""
    return run("pretrain", lambda: _report_errors(command), kept="the same command starts again")


def _report_errors(command: Callable[[], int]) -> int:
    """Run the command, report errors to torchrun, and return the exit code.

    Input mistakes are raised only on local rank 0, so that each host prints them once; other ranks
    return the exit code.
    """
    # One rank of each host prints, because a mistake may concern only one host.
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        return command()
    except CommandError as error:
        silent = isinstance(error, UserError) and not speaks
        if silent and TORCHRUN in os.environ:
            # torchrun prints seven lines for each rank that failed, so only rank 0 fails.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
            time.sleep(RANK_0_SECONDS)
        _report_to_torchrun(str(error))
        # Every rank reports faults, because a fault may occur on a single rank.
        if silent:
            return error.code
        raise
    except OSError as error:
        _report_to_torchrun(reason(error))
        if isinstance(error, MISTAKES):
            raise RuntimeError(
                f"{reason(error)}: an earlier check should have rejected this path"
            ) from error
        raise


def _report_to_torchrun(message: str) -> None:
    """Write the error to torchrun's error file, if the environment names one.

    torchrun then prints this message instead of generic advice. With the form of its own error
    files it prints no warnings about the form.
    """
    if TORCHRUN in os.environ:
        text = f"pretrain: error: {message}"
        extra = {"py_callstack": f"\n{text}", "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(os.environ[TORCHRUN]).write_text(
                json.dumps({"message": {"message": text, "extraInfo": extra}})
            )


def _parser() -> Parser:
    sections = ", ".join(
        item.name for item in fields(RunConfig) if item.name not in ("name", "run_dir")
    )
    parser = Parser(
        prog="pretrain",
        usage=USAGE,
        description=(
            f"Pretrain a language model. The sections of a configuration: {sections}; "
            "docs/configuration.md describes every key."
        ),
        epilog=EXAMPLES,
        add_help=False,
    )
    parser.add_argument(
        "config",
        metavar="CONFIG.yaml",
        nargs="?",
        help=(
            "configuration of a run, such as configs/run/demo.yaml, or a run directory, to "
            "continue its run"
        ),
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's"
    )
    parser.add_argument(
        "--fork",
        type=Path,
        metavar="NEW_RUN",
        help=(
            "run directory of a new run that continues from the newest checkpoint of "
            "CONFIG.yaml's run, which is searched in and near its run_dir (CONFIG.yaml may also "
            "be a run directory or a step_NNNNNNNN folder): weights, moments and step; settings "
            "such as data, batch and schedule may differ"
        ),
    )
    parser.add_argument("--processes", type=int, metavar="N", help=PROCESSES)
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs="?",
        metavar="SECTION",
        help="print this, or the keys of SECTION, and stop",
    )
    parser.add_argument(
        "--list-mixers",
        action=_ListMixers,
        nargs=0,
        help="print the names that model.mixer may take, and stop",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print parameters, FLOPs, memory, tokens and layout, and stop",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the configuration and its data, and with --plan that its memory fits, and stop",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help=(
            "simulate two steps of the first, middle and last pipeline stage with meta tensors "
            "and the full world size, in this process; print memory, collectives, FLOPs and host "
            "reads of the second step, and stop; with --check: check that the memory fits"
        ),
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="with --rehearse: parallel.world_size=N"
    )
    parser.add_argument(
        "--device",
        choices=REHEARSED,
        help=("with --rehearse: the device (default: log.device, or h100)"),
    )
    parser.add_argument("--json", action="store_true", help="with --rehearse: print JSON")
    parser.add_argument(
        "--picture",
        metavar="FILE.png",
        type=Path,
        help="with --rehearse: draw the use of memory through the step",
    )
    stops = parser.add_mutually_exclusive_group()
    stops.add_argument(
        "--resolve",
        action="store_true",
        help="print the run's complete configuration as YAML, and stop",
    )
    stops.add_argument(
        "--index",
        action="store_true",
        help="build the run's index cache, in this process and without a GPU, and stop",
    )
    return parser


def _run(options: argparse.Namespace, launched: int | None) -> int:
    if options.config is None:
        raise ConfigError(
            "no CONFIG.yaml: name a run, such as configs/run/demo.yaml; pretrain --help has "
            "examples"
        )
    if (options.resolve or options.index) and (options.plan or options.check):
        raise ConfigError(
            f"{'--resolve' if options.resolve else '--index'} cannot be combined with --plan or "
            "--check"
        )
    alone = [
        name for name in ("resolve", "index", "plan") if options.rehearse and getattr(options, name)
    ]
    if alone:
        raise ConfigError(f"--rehearse and --{alone[0]} cannot be combined")
    for name in ("gpus", "device", "json", "picture"):
        if getattr(options, name) and not options.rehearse:
            raise ConfigError(f"--{name} requires --rehearse")
    if options.gpus is not None:
        options.overrides = [*options.overrides, f"parallel.world_size={options.gpus}"]
    stops = options.plan or options.resolve or options.check or options.index or options.rehearse
    if options.processes is not None and (options.processes < 1 or stops or launched):
        raise ConfigError(
            f"--processes {options.processes}: give the number of ranks to start, at least 1, "
            "without torchrun and without an option that does not train"
        )
    try:
        config = (
            load_given(options.config, options.overrides)
            if options.fork is None
            else _forked(options)
        )
    except ConfigErrors as error:
        if error.config is not None:
            prepare(
                error.config,
                None if stops else launched or options.processes or 1,
                plan_only=options.plan or options.resolve or options.rehearse,
                before=error.mistakes,
            )
        raise
    if options.resolve:
        check_before_data(config)
        print(dump_yaml(resolved(config)), end="")
    elif options.index:
        return _index(prepare(config, None), launched or 1)
    elif options.rehearse:
        _rehearse(options, prepare(config, None, plan_only=True))
    elif stops:
        _check(
            prepare(config, None, plan_only=not options.check),
            plan=options.plan,
            check=options.check,
        )
    elif options.processes is not None:
        return _fork(config, options.processes)
    else:
        return _train(config, launched or 1)
    return 0


def _forked(options: argparse.Namespace) -> RunConfig:
    """Return the configuration of a fork.

    The fork's run directory is the folder that --fork names. It continues the run of CONFIG.yaml,
    or the run in the given run directory.
    """
    given, new = Path(expand_home(options.config)), options.fork
    keys = {text.partition("=")[0] for text in options.overrides}
    folder = given
    if given.is_dir():
        if not (given / "config.yaml").is_file():  # a step_NNNNNNNN folder
            folder = given.parent.parent
        config, parent = load_run(folder / "config.yaml", options.overrides), given
    else:
        config = load_given(given, options.overrides)
        parent = run_directory(config)
    if (
        not given.is_dir()
        and "run_dir" not in keys
        and not any(parent.glob("checkpoints/step_*"))
        and (other := newest_run(config, new))
    ):
        if os.environ.get("RANK", "0") == "0":
            print(
                f"--fork: {parent} has no checkpoint; the newest run of {config.name} with this "
                f"model is {other}",
                file=sys.stderr,
            )
        parent = other
    if new.resolve() in (folder.resolve(), parent.resolve()):
        raise ConfigError(f"--fork {new} is the parent's run directory: choose another one")
    if any(new.glob("checkpoints/step_*")) and read_fork(new) is None:
        raise ConfigError(f"--fork {new} contains a run that is not a fork: choose another folder")
    mirror = config.checkpoint.mirror
    if mirror and "{name}" not in mirror and "checkpoint.mirror" not in keys:
        raise ConfigError(
            f"--fork {new} cannot use the parent's mirror: give checkpoint.mirror=URL, or "
            "checkpoint.mirror=null"
        )
    name = config.name if "name" in keys else new.resolve().name
    return replace(
        config, name=name, run_dir=str(new), checkpoint=replace(config.checkpoint, fork=str(parent))
    )


def _check(prepared: Prepared, *, plan: bool, check: bool) -> None:
    """Print the plan if ``plan``, and the result of the data check if ``check``.

    With the plan of packed data, a line about the cost of packing is printed; with that of masked
    data, one about the tokens that count in the loss.

    Raises ConfigError if both are requested and the memory does not fit.
    """
    config, facts = prepared.config, prepared.facts
    needs = _planned(prepared) if plan else None
    if needs and facts and config.data.packing != "stream" and not config.stages:
        from pretrain.data.packing import packing_line  # imported late: imports numpy

        print(packing_line(config.data, facts), flush=True)
    if needs and facts and facts.masks_line:
        print(facts.masks_line, flush=True)
    if not check or facts is None:
        return
    excess = memory_excess(needs) if needs else None
    if excess:
        raise ConfigError(excess)
    data = ", ".join(
        f"{count:,} tokens of {split}" for split, count in facts.tokens.items() if count
    )
    fits = (
        f"; it fits {config.log.device}"
        if config.log.device
        else "; its memory is not compared, because log.device is null"
    )
    print(
        f"{config.name}: the configuration and the data are right ({data}), run_dir "
        f"{run_directory(config)}{fits if needs else ''}"
    )


def _rehearse(options: argparse.Namespace, prepared: Prepared) -> None:
    """Rehearse the run's steps and print the result.

    For a run with stages, rehearse the stage with the largest planned peak memory.

    Raises ConfigError if the run cannot be rehearsed, or if --check is given and the memory does
    not fit.
    """
    from fem_megatron.megatron.upstream import import_megatron

    import_megatron()
    from pretrain.rehearsal import render, steps

    known = next(
        (name for name in REHEARSED if name in (prepared.config.log.device or "").lower()), "h100"
    )
    fullest, _ = max(_plans(prepared), key=lambda each: each[1].peak_memory)
    rehearsal = steps.rehearse(
        replace(fullest.config, stages=()), prepared.world_size, options.device or known
    )
    print(
        json.dumps(render.as_json(rehearsal), indent=1) if options.json else render.text(rehearsal),
        flush=True,
    )
    if options.picture:
        render.draw(rehearsal, options.picture)
    if options.check and rehearsal.excess:
        raise ConfigError(rehearsal.excess)


def _plans(prepared: Prepared) -> list[tuple[Part, Plan]]:
    """Return each stage with its plan; a run without stages counts as one stage."""
    facts = prepared.facts
    parts = parts_of(prepared.config)
    return [
        (
            part,
            make_plan(part.config, prepared.world_size, facts_of(part, facts) if facts else None),
        )
        for part in parts
    ]


def _planned(prepared: Prepared) -> Plan:
    """Print the plan and return it.

    For a run with stages, print and return the plan of the stage that needs most memory. One line
    for each stage is printed after it.
    """
    plans = _plans(prepared)
    part, needs = max(plans, key=lambda each: each[1].peak_memory)
    if part.name:
        print(
            f"stage {part.name}, which needs most memory\n{render(needs)}\n{render_stages(plans)}",
            flush=True,
        )
    else:
        print(render(needs), flush=True)
    return needs


class _Help(argparse.Action):
    """The --help option; with the name of a section it prints the keys of that section."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        option: str | None = None,
    ) -> None:
        if value is None:
            parser.print_help()
            parser.exit()
        try:
            print(section_text(value))
        except ConfigError as error:
            parser.exit(end("pretrain", error))
        parser.exit()


class _ListMixers(argparse.Action):
    """Option that prints the mixers and exits before CONFIG.yaml is required, like --help."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        print(table())
        parser.exit()


def _index(prepared: Prepared, launched: int) -> int:
    if launched > 1:
        raise ConfigError(
            f"--index runs in one process, but {launched} were started; run it without torchrun"
        )
    from fem_megatron.megatron.upstream import import_megatron

    import_megatron()
    from pretrain.run import build_index

    build_index(prepared)
    return 0


def _fork(config: RunConfig, count: int) -> int:
    """Check the run, import the training code, and train on ``count`` forked ranks."""
    prepare(config, count)
    if count > 1:  # as torchrun; libraries read it when they are imported
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from pretrain.processes import import_trainer, run_ranks

    import_trainer()

    def rank() -> int:
        code = _reported(lambda: _train(config, count))
        signals.ignore()
        return code

    return run_ranks(count, rank)


def _train(config: RunConfig, launched: int) -> int:
    with signals.noted() as received:
        prepared = prepare(config, launched)
        folder, first = run_directory(config), os.environ.get("RANK", "0") == "0"
        if first:  # the imports take seconds
            print(f"{config.name}: starting in run directory {folder}", flush=True)
        # Imported late, because planning and the checks above need no torch.
        from fem_megatron.megatron.upstream import import_megatron

        import_megatron()
        from pretrain.run import train

        outcome = train(prepared, received)
    if not first:
        return 0
    if outcome.stopped_by:
        then = (
            f"continues from {outcome.last_checkpoint}" if outcome.last_checkpoint else "starts it"
        )
        print(
            f"stopped by {outcome.stopped_by} after step {outcome.progress.step}; the same "
            f"command {then}",
            flush=True,
        )
    else:
        export = command_line("hf", "export", folder, folder / "hf")
        print(next_steps(command_line("curves", folder), export), flush=True)
    return 0


if __name__ == "__main__":
    # Makes the packages importable from a checkout without installation.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    code = main()
    signals.ignore()
    sys.exit(code)
