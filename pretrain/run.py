"""Builds what a run needs, each part from the ones above it, and hands it to the loop: groups, data, engine, checkpoints, trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from fem_common.errors import MISTAKES, CommandError, ConfigError, InUse, StorageError, reason
from fem_megatron import catalogue
from fem_megatron.megatron import platform
from pretrain.checkpoint.reader import DamagedCheckpoint, Found, Progress, find, newest_good
from pretrain.checkpoint.resume import TOLD, Change, changes, check, check_model
from pretrain.checkpoint.store import WEIGHTS_ALONE, Checkpoints
from pretrain.config import RunConfig
from pretrain.data.datasets import Datasets, build_datasets
from pretrain.data.facts import Contents, DataFacts, check_contents, index_bytes
from pretrain.engines import Engine
from pretrain.engines.building import initialize_model_parallel, make_engine
from pretrain.engines.deepspeed_ops import check_ops
from pretrain.plan.run_plan import flops_per_token, make_plan, peak_tflops
from pretrain.ranks import from_rank_0
from pretrain.report.evaluations import Evaluations, check_suite
from pretrain.report.loggers import Callback, Console, kernels_told, make_callbacks
from pretrain.report.metrics import Meter
from pretrain.report.observer import Observer
from pretrain.report.progress_file import ProgressFile, read_progress
from pretrain.report.stragglers import Stragglers
from pretrain.run_directory import claimed, describe, run_directory
from pretrain.schedule import Schedule
from pretrain.trainer import Outcome, Trainer
from pretrain.validate import Prepared

_LONG_TO_READ = 10**8  # bytes; tenths of a second from a local disk, many seconds from a busy network's


def train(prepared: Prepared, received: list[int]) -> Outcome:
    """One attempt of the run, from its newest good checkpoint or from the start; ``received`` has the stop signals as they come.

    Raises:
        InUse: another process trains in the run directory.
        ConfigError: what only the checkpoints can tell is wrong with the configuration.
        StorageError: a file system failed.
        TooManyBadSteps: the loss or gradient stayed non-finite.
    """
    config, facts = prepared.config, prepared.facts
    assert facts is not None
    _check_packages(config)
    platform.initialize_distributed(config.parallel.collective_timeout_minutes)
    folder, first = run_directory(config), torch.distributed.get_rank() == 0
    try:
        contents = _contents(facts, _speaker(first))
        with ExitStack() as stack:
            if not from_rank_0(lambda: stack.enter_context(claimed(folder))):
                raise InUse(f"{folder} is in use by another process; wait for it, end it, or choose another run_dir")
            file = ProgressFile(folder if first else None, Schedule.of(config), prepared.world_size)
            if first:  # elsewhere warnings alone come through, to stderr
                stack.enter_context(kernels_told(_speaker(first)))
            with _failure_told(file):
                return _attempt(config, facts, contents, file, received)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def build_index(prepared: Prepared) -> None:
    """What ``--index`` does: the index cache that :func:`train` will look for, built in this process alone, without a model or a GPU.

    Prints the cache's folder, the samples, and what it cost.

    Raises:
        ConfigError: the data is not what its manifest says, or the cache's place is wrong.
        StorageError: a file system failed.
    """
    config, facts = prepared.config, prepared.facts
    assert facts is not None
    started, say, folder = time.monotonic(), _speaker(True), run_directory(config)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        contents = _contents(facts, say)
        last = from_rank_0(lambda: newest_good(folder / "checkpoints", {}, say))
        samples = max(Schedule.of(config).total_samples, last.progress.order_samples if last else 0)
        data = _data(config, facts, contents, samples, folder, say)
    finally:
        torch.distributed.destroy_process_group()
    valid = f" and {len(data.valid):,} of validation" if data.valid is not None else ""
    say(
        f"index cache {data.cache}: {'' if data.built else 'unchanged, '}{len(data.train):,} samples of training{valid}, "
        f"{config.data.seq_length} tokens each; {time.monotonic() - started:.1f} s, {time.process_time():.1f} CPU s with the start, "
        f"{platform.peak_resident_bytes() / 2**30:.2f} GiB of memory at most"
    )


def _contents(facts: DataFacts, say: Callable[[str], None]) -> Contents:
    """What the data holds, read and compared with the manifests by one rank; collective."""
    size = from_rank_0(lambda: index_bytes(facts))
    if size > _LONG_TO_READ:
        say(f"data: reading {size / 1e9:.1f} GB of .idx files to compare them with their manifests")
    return from_rank_0(lambda: check_contents(facts))


def _check_packages(config: RunConfig) -> None:
    """A mixer that another package computes needs that package, and a GPU; an override of the kernels' choice must name what exists."""
    try:
        platform.check_kernel_overrides()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.engine.name == "deepspeed":
        _check_deepspeed(config)
    for name in dict.fromkeys(catalogue.mixer_names(config.model)):
        package = catalogue.describe(name).package
        if package is not None and not platform.has_cuda():
            raise ConfigError(f"model.mixer: {name} needs a GPU, and there is none; deltanet, gated_deltanet and mamba2 run without")
        if package is not None and find_spec(package) is None:
            raise ConfigError(f"model.mixer: {name} needs a package that is not installed: pip install -c constraints.txt -e .[gpu]")


def _check_deepspeed(config: RunConfig) -> None:
    """It must be installed, and what it compiles for itself must be possible to compile."""
    if find_spec("deepspeed") is None:
        raise ConfigError("engine.name = deepspeed needs a package that is not installed: pip install -c constraints.txt -e .[deepspeed]")
    obstacle = check_ops(config.engine.offload_optimizer)
    if obstacle:
        raise ConfigError(f"engine.name = deepspeed: {obstacle}")


@contextmanager
def _failure_told(file: ProgressFile) -> Iterator[None]:
    """Writes what ends the attempt early to progress.json on its way out.

    Raises:
        StorageError: a file system failed, under whatever the run writes.
    """
    try:
        yield
    except BaseException as error:
        told: BaseException = error
        if isinstance(error, OSError) and not isinstance(error, (*MISTAKES, BrokenPipeError)):
            told = StorageError(reason(error))
        kind = "" if isinstance(told, CommandError) else f"{type(told).__name__}: "
        with suppress(OSError):
            file.tell("failed", message=f"{kind}{told}")
        if told is not error:
            raise told from None
        raise


def _attempt(config: RunConfig, facts: DataFacts, contents: Contents, file: ProgressFile, received: list[int]) -> Outcome:
    folder, schedule, first = run_directory(config), file.schedule, torch.distributed.get_rank() == 0
    say = _speaker(first)
    before = from_rank_0(lambda: read_progress(folder))
    file.tell("starting")
    from_rank_0(lambda: check_suite(config.evaluate))
    initialize_model_parallel(config)
    checkpoints = Checkpoints(folder / "checkpoints", config, say)
    checkpoints.sweep()
    found, own, progress, changed = _start(config, facts, contents, schedule, checkpoints)
    file.at(progress.step, progress.consumed_samples, checkpoints.last)
    file.tell("starting")
    if first:
        describe(config, folder, file.world_size, {change.key: (change.old, change.new) for change in changed})
    told = ", ".join(str(change) for change in changed if change.rule == TOLD)
    if told:
        say(f"changed since the last attempt: {told}")
    ended = progress.step > schedule.steps or (progress.step == schedule.steps and _complete_at(before, progress.step))
    if own is not None and ended:
        say(
            f"{config.name} is complete at step {progress.step}; raise train.steps or train.tokens to continue it, or start another run "
            "with another run_dir"
        )
        file.tell("complete")
        if first:
            _evaluate_late(config, schedule, checkpoints, received, progress.step)
        return Outcome(progress, None, own.path)
    engine, callbacks = _engine(config, schedule, say), list[Callback]()
    try:
        while found is not None:
            try:
                checkpoints.load(engine, found, model_only=own is None)
                say(f"{'resumed' if own else 'weights taken'} from {found.path}" + (f" at step {progress.step}" if own else ""))
                break
            except DamagedCheckpoint as error:
                if own is None:
                    raise
                checkpoints.pass_over(own, error)
            found, own, progress, _ = _start(config, facts, contents, schedule, checkpoints)
            file.at(progress.step, progress.consumed_samples, checkpoints.last)
        trainer = _trainer(config, facts, contents, file, checkpoints, engine, progress, received)
        callbacks = trainer.callbacks
        return trainer.run()
    finally:
        engine.close()
        for callback in callbacks:
            callback.on_end()


def _start(
    config: RunConfig, facts: DataFacts, contents: Contents, schedule: Schedule, checkpoints: Checkpoints
) -> tuple[Found | None, Found | None, Progress, list[Change]]:
    """(the checkpoint to read, the same if it is the run's own, the position it is at, what the configuration has changed since)."""
    found = _starting_point(config, checkpoints)
    if found is None or found.path.parent != checkpoints.folder:
        if found is not None:
            check_model(found.path, found.manifest["config"], config)
        return found, None, Progress(0, 0, schedule.total_samples), []
    changed = changes(found.manifest["config"], config)
    _check_resumable(found, changed, config, facts, contents, schedule)
    progress = replace(found.progress, order_samples=max(found.progress.order_samples, schedule.total_samples))
    return found, found, progress, changed


def _complete_at(before: dict[str, Any] | None, step: int) -> bool:
    """Whether progress.json says that an attempt ended the run at ``step``, its last validation done."""
    return before is not None and (before.get("state"), before.get("step")) == ("complete", step)


def _trainer(
    config: RunConfig,
    facts: DataFacts,
    contents: Contents,
    file: ProgressFile,
    checkpoints: Checkpoints,
    engine: Engine,
    progress: Progress,
    received: list[int],
) -> Trainer:
    """The loop with all its parts."""
    schedule, world_size, first = file.schedule, file.world_size, file.folder is not None
    folder, say = run_directory(config), _speaker(first)
    plan = make_plan(config, world_size, facts, cuda=platform.has_cuda())
    data = _data(config, facts, contents, progress.order_samples, folder, say)
    say(
        f"{config.name}: {plan.total_parameters / 1e6:.2f}M parameters, {schedule.steps} steps of {schedule.step_tokens} tokens on "
        f"{world_size} x {platform.device_name()} (TP {config.parallel.tensor_model_parallel_size}, "
        f"PP {config.parallel.pipeline_model_parallel_size}, DP {plan.data_parallel}, {config.train.precision})"
    )
    return Trainer(
        config=config,
        schedule=schedule,
        engine=engine,
        data=data,
        checkpoints=checkpoints,
        callbacks=_callbacks(config, schedule, checkpoints, received, progress.step) if first else [],
        meter=Meter(
            step_tokens=schedule.step_tokens,
            flops_per_token=flops_per_token(config),
            world_size=world_size,
            peak_tflops=peak_tflops(config.log.device or platform.device_name()),
        ),
        progress=progress,
        content_key=contents.key,
        watch=Observer(engine.models, _diagnostics_interval(config, say)),
        stragglers=Stragglers(config.log.straggler_interval, config.log.straggler_ratio, file.folder),
        progress_file=file,
        received=received,
    )


def _engine(config: RunConfig, schedule: Schedule, say: Callable[[str], None]) -> Engine:
    """Its weights are fresh."""
    try:
        return make_engine(config, schedule, say)
    except ValueError as error:
        if any(block.mixer.external for block in config.model.blocks()):  # what another package says of its layer's options
            raise ConfigError(str(error)) from None
        raise


def _diagnostics_interval(config: RunConfig, say: Callable[[str], None]) -> int:
    """Under ZeRO-3 a layer's weights are gone again when it could be looked at."""
    engine, interval = config.engine, config.log.diagnostics_interval
    if interval and engine.name == "deepspeed" and engine.zero_stage == 3:
        say("engine.zero_stage = 3: no layer diagnostics (log.diagnostics_interval)")
        return 0
    return interval


def _callbacks(config: RunConfig, schedule: Schedule, checkpoints: Checkpoints, received: list[int], step: int) -> list[Callback]:
    folder, wanted = run_directory(config), config.evaluate
    loggers = make_callbacks(config, folder, schedule.steps)
    if not (wanted.interval or wanted.at_end):
        return loggers
    return [Evaluations(wanted, folder, schedule.steps, checkpoints, loggers, received, step), *loggers]


def _evaluate_late(config: RunConfig, schedule: Schedule, checkpoints: Checkpoints, received: list[int], step: int) -> None:
    """Of a complete run: the evaluation that is due and that a signal ended while the end of training waited for it."""
    if not (config.evaluate.interval or config.evaluate.at_end):
        return
    console = Console(config.log.interval, schedule.steps)
    late = Evaluations(config.evaluate, run_directory(config), schedule.steps, checkpoints, [console], received, step)
    if late.running is not None:  # else no logger opens anything
        late.loggers = make_callbacks(config, run_directory(config), schedule.steps)
        for callback in (late, *late.loggers):
            callback.on_end()


def _starting_point(config: RunConfig, checkpoints: Checkpoints) -> Found | None:
    """The run's own newest checkpoint, else the one that ``checkpoint.load`` names, else nothing."""
    own = checkpoints.newest()
    if own is not None:
        if config.checkpoint.resume == "none":
            raise ConfigError(
                f"checkpoint.resume = none, but {own.path} exists; set checkpoint.resume=auto to continue, or another run_dir to start anew"
            )
        if own.manifest.get("contents") == WEIGHTS_ALONE:
            raise ConfigError(
                f"{own.path} holds weights alone, no optimizer's state to resume from: start from them with checkpoint.load={own.path} in "
                "another run_dir"
            )
        return own
    load = config.checkpoint.load
    return from_rank_0(lambda: find(Path(load))) if load else None


def _check_resumable(
    found: Found, changed: list[Change], config: RunConfig, facts: DataFacts, contents: Contents, schedule: Schedule
) -> None:
    if found.manifest["data"] != contents.key:
        raise ConfigError(
            f"checkpoint {found.path} was trained on other data than data.train and data.valid name now; restore the data, or start a new "
            f"run (another run_dir) from its weights with checkpoint.load={found.path}"
        )
    check(found.path, changed, config)
    progress = found.progress
    if schedule.total_samples <= progress.order_samples:
        return
    room = {source.prefix: source.tokens for source in facts.sources if source.split == "train"}
    weights = {source.prefix: source.weight for source in config.data.train}
    for prefix, tokens in room.items():
        share = weights[prefix] / sum(weights.values())
        if schedule.total_samples * schedule.sample_tokens * share > tokens:
            raise ConfigError(
                f"the run is now {schedule.total_samples} samples long, but its data order was drawn for {progress.order_samples} and "
                f"{prefix} would be read more than once: samples already seen would come again out of order; keep the run within "
                f"{progress.order_samples} samples, or start a new run from checkpoint.load={found.path}"
            )


def _data(config: RunConfig, facts: DataFacts, contents: Contents, samples: int, folder: Path, say: Callable[[str], None]) -> Datasets:
    assert config.model.vocab_size is not None
    return build_datasets(
        config,
        vocab_size=config.model.vocab_size,
        eod_id=facts.eod_id or 0,
        contents=contents,
        train_samples=samples,
        default_cache=folder / "index_cache",
        say=say,
    )


def _speaker(first: bool) -> Callable[[str], None]:
    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    return say
