"""One attempt of a run, from top to bottom: each part is built from those above it, and the loop is handed what it needs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec

import torch
from megatron.core import parallel_state

from fem_common.errors import MISTAKES, CommandError, ConfigError, InUse, StorageError, reason
from fem_common.files import remove_leftovers
from fem_common.text import si
from fem_megatron import catalogue
from fem_megatron.megatron import platform
from pretrain.checkpoint.folder import newest_good
from pretrain.checkpoint.reader import DamagedCheckpoint
from pretrain.checkpoint.resume import TOLD
from pretrain.checkpoint.starting import Start, find_start
from pretrain.checkpoint.store import Checkpoints
from pretrain.config import RunConfig
from pretrain.data.datasets import Datasets, build_datasets
from pretrain.data.facts import Contents, check_contents, index_bytes
from pretrain.data.packing import told
from pretrain.data.store_reader import StoreReader
from pretrain.engines import Engine
from pretrain.engines.building import initialize_model_parallel
from pretrain.engines.deepspeed_ops import check_ops
from pretrain.plan.devices import peak_tflops
from pretrain.plan.run_plan import make_plan
from pretrain.ranks import from_rank_0
from pretrain.report.evaluations import Evaluations, check_suite
from pretrain.report.loggers import Callback, Console, Say, kernels_told, make_callbacks
from pretrain.report.metrics import Meter
from pretrain.report.observer import Observer
from pretrain.report.profile import Profiler
from pretrain.report.progress_file import ProgressFile, read_progress
from pretrain.report.stragglers import Stragglers
from pretrain.run_directory import claimed, describe, run_directory
from pretrain.schedule import Schedule
from pretrain.signals import Received
from pretrain.trainer import Outcome, Trainer
from pretrain.validate import Prepared

_LONG_TO_READ = 10**8  # bytes; tenths of a second from a local disk, many seconds from a busy network's


def train(prepared: Prepared, received: Received) -> Outcome:
    """One attempt of the run, from its newest good checkpoint or from the start; ``received`` has the stop signals as they come.

    Raises:
        InUse: another process trains in the run directory.
        ConfigError: what only the checkpoints can tell is wrong with the configuration.
        StorageError: a file system failed.
        TooManyBadSteps: the loss or gradient stayed non-finite.
    """
    _check_packages(prepared.config)
    platform.initialize_distributed(prepared.config.parallel.collective_timeout_minutes)
    try:
        run = Run(prepared, received)
        with ExitStack() as stack:
            stack.callback(run.reader.close)
            if not from_rank_0(lambda: stack.enter_context(claimed(run.folder))):
                raise InUse(f"{run.folder} is in use by another process; wait for it, end it, or choose another run_dir")
            if run.first:  # elsewhere warnings alone come through, to stderr
                stack.enter_context(kernels_told(run.say))
            with _failure_told(run.file):
                return run.attempt()
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
    started = time.monotonic()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        run = Run(prepared, Received())
        last = from_rank_0(lambda: newest_good(run.folder / "checkpoints", {}, run.say))
        data = run.data(max(run.schedule.total_samples, last.progress.order_samples if last else 0))
    finally:
        torch.distributed.destroy_process_group()
    valid = f" and {len(data.valid):,} of validation" if data.valid is not None else ""
    run.say(
        f"index cache {data.cache}: {'' if data.built else 'unchanged, '}{len(data.train):,} samples of training{valid}, "
        f"{run.config.data.seq_length} tokens each; {time.monotonic() - started:.1f} s, {time.process_time():.1f} CPU s with the start, "
        f"{platform.peak_resident_bytes() / 2**30:.2f} GiB of memory at most"
    )


def make_engine(config: RunConfig, schedule: Schedule, say: Say = lambda text: None) -> Engine:
    """The engine that ``engine.name`` names, its weights fresh. What it has to tell goes to ``say``.

    Raises:
        ValueError: a width does not divide (see ``ModelConfig.blocks``).
        ConfigError: DeepSpeed does not take its settings, or another package its layer's options.
    """
    try:
        if config.engine.name == "deepspeed":  # not installed everywhere
            from pretrain.engines.deepspeed import DeepSpeedEngine

            return DeepSpeedEngine(config, schedule, say)
        from pretrain.engines.megatron import MegatronEngine

        return MegatronEngine(config, schedule)
    except ValueError as error:
        if any(block.mixer.external for block in config.model.blocks()):
            raise ConfigError(str(error)) from None
        raise


class Run:
    """What all parts of an attempt are built from, on this rank; collective. ``first``: this rank prints and writes."""

    def __init__(self, prepared: Prepared, received: Received) -> None:
        assert prepared.facts is not None
        self.config, self.facts, self.received = prepared.config, prepared.facts, received
        self.world_size, self.first = prepared.world_size, torch.distributed.get_rank() == 0
        self.folder, self.schedule = run_directory(self.config), Schedule.of(self.config)
        self.file = ProgressFile(self.folder if self.first else None, self.schedule, self.world_size)
        self.contents, self.reader = self._read_contents(), StoreReader(self.config)

    def say(self, text: str) -> None:
        """Prints on rank 0."""
        if self.first:
            print(text, flush=True)

    def attempt(self) -> Outcome:
        """Everything after the run directory is this process's own."""
        config, file = self.config, self.file
        before = from_rank_0(lambda: read_progress(self.folder))
        if self.first:
            remove_leftovers(self.folder)
        file.tell("starting")
        from_rank_0(lambda: check_suite(config.evaluate))
        initialize_model_parallel(config)
        checkpoints = Checkpoints(self.folder / "checkpoints", config, self.say)
        checkpoints.sweep()
        checkpoints.fetch()
        start = self._start(checkpoints)
        file.tell("starting")
        if self.first:
            describe(config, self.folder, self.world_size, {change.key: (change.old, change.new) for change in start.changed})
        told = ", ".join(str(change) for change in start.changed if change.rule == TOLD)
        if told:
            self.say(f"changed since the last attempt: {told}")
        step, steps = start.progress.step, self.schedule.steps
        complete = before is not None and (before.get("state"), before.get("step")) == ("complete", step)  # its last validation done
        if start.own and (step > steps or (step == steps and complete)):
            return self._nothing_left(checkpoints, start)
        engine, callbacks = make_engine(config, self.schedule, self.say), list[Callback]()
        try:
            start = self._load(engine, checkpoints, start)
            trainer = self._trainer(engine, checkpoints, start)
            callbacks = trainer.callbacks
            if checkpoints.mirror:
                checkpoints.mirror.start(start.progress.step)
            outcome = trainer.run()
            if checkpoints.mirror:
                checkpoints.mirror.close(stopped=outcome.stopped_by is not None)
            return outcome
        finally:
            if checkpoints.mirror:
                checkpoints.mirror.end()
            engine.close()
            for callback in callbacks:
                callback.on_end()

    def data(self, samples: int) -> Datasets:
        """The datasets, their order drawn for so many training samples."""
        assert self.config.model.vocab_size is not None
        if self.first and (line := told(self.config.data, self.facts)):
            self.say(line)
        return build_datasets(
            self.config,
            vocab_size=self.config.model.vocab_size,
            eod_id=self.facts.eod_id or 0,
            contents=self.contents,
            train_samples=samples,
            default_cache=self.folder / "index_cache",
            say=self.say,
            reader=self.reader,
        )

    def _read_contents(self) -> Contents:
        """What the data holds, read and compared with the manifests by one rank."""
        size = from_rank_0(lambda: index_bytes(self.facts))
        if size > _LONG_TO_READ:
            self.say(f"data: reading {size / 1e9:.1f} GB of .idx files to compare them with their manifests")
        return from_rank_0(lambda: check_contents(self.facts))

    def _start(self, checkpoints: Checkpoints) -> Start:
        start = find_start(self.config, self.facts, self.contents, checkpoints)
        self.file.at(start.progress.step, start.progress.consumed_samples, checkpoints.last)
        return start

    def _load(self, engine: Engine, checkpoints: Checkpoints, start: Start) -> Start:
        """Reads the start's checkpoint, or where its tensors are damaged an older one of the run's; what was read."""
        while start.found is not None:
            try:
                checkpoints.load(engine, start.found, model_only=not start.own)
                at = f" at step {start.progress.step}" if start.own else ""
                self.say(f"{'resumed' if start.own else 'weights taken'} from {start.found.path}{at}")
                break
            except DamagedCheckpoint as error:
                if not start.own:
                    raise
                checkpoints.pass_over(start.found, error)
            start = self._start(checkpoints)
        return start

    def _trainer(self, engine: Engine, checkpoints: Checkpoints, start: Start) -> Trainer:
        """The loop with all its parts."""
        config, layout = self.config, self.config.parallel
        plan = from_rank_0(lambda: make_plan(config, self.world_size, self.facts, cuda=platform.has_cuda()))
        data = self.data(start.progress.order_samples)
        self.say(
            f"{config.name}: {plan.total_parameters / 1e6:.2f}M parameters, {self.schedule.steps} steps of {self.schedule.step_tokens} "
            f"tokens on {self.world_size} x {platform.device_name()} (TP {layout.tensor_model_parallel_size}, "
            f"PP {layout.pipeline_model_parallel_size}, DP {plan.data_parallel}, {config.train.precision})"
        )
        if plan.pieces is not None:
            self.say(
                f"training FLOPs per token: {si(plan.train_flops)}FLOP by the documents' lengths, which TFLOP/s and MFU count; dense, over "
                f"whole sequences: {si(plan.dense_flops)}FLOP"
            )
        meter = Meter(
            step_tokens=self.schedule.step_tokens,
            flops_per_token=plan.train_flops,
            dense_flops=None if plan.pieces is None else plan.dense_flops,
            world_size=self.world_size,
            peak_tflops=peak_tflops(config.log.device or platform.device_name()),
        )
        return Trainer(
            config=config,
            schedule=self.schedule,
            engine=engine,
            data=data,
            checkpoints=checkpoints,
            callbacks=self._callbacks(checkpoints, start.progress.step) if self.first else [],
            meter=meter,
            progress=start.progress,
            content_key=self.contents.key,
            watch=Observer(engine.models, self._diagnostics_interval()),
            profiler=Profiler(config.log.profile, self.folder, self.received),
            stragglers=Stragglers(config.log.straggler_interval, config.log.straggler_ratio, self.file.folder),
            progress_file=self.file,
            received=self.received,
        )

    def _diagnostics_interval(self) -> int:
        """Under ZeRO-3 a layer's weights are gone again when it could be looked at."""
        engine, interval = self.config.engine, self.config.log.diagnostics_interval
        if interval and engine.name == "deepspeed" and engine.zero_stage == 3:
            self.say("engine.zero_stage = 3: no layer diagnostics (log.diagnostics_interval)")
            return 0
        return interval

    def _callbacks(self, checkpoints: Checkpoints, step: int) -> list[Callback]:
        loggers = make_callbacks(self.config, self.folder, self.schedule.steps)
        return [self._evaluations(checkpoints, loggers, step), *loggers] if self.config.evaluate.wanted else loggers

    def _evaluations(self, checkpoints: Checkpoints, loggers: list[Callback], step: int) -> Evaluations:
        return Evaluations(self.config.evaluate, self.folder, self.schedule.steps, checkpoints, loggers, self.received, step)

    def _nothing_left(self, checkpoints: Checkpoints, start: Start) -> Outcome:
        """The run is complete; what may be left is an evaluation that a signal ended while the end of training waited for it."""
        step = start.progress.step
        self.say(
            f"{self.config.name} is complete at step {step}; raise train.steps or train.tokens to continue it, or start another run "
            "with another run_dir"
        )
        self.file.tell("complete")
        if self.first and self.config.evaluate.wanted:
            late = self._evaluations(checkpoints, [Console(self.config.log.interval, self.schedule.steps)], step)
            if late.running is not None:  # else no logger opens anything
                late.loggers = make_callbacks(self.config, self.folder, self.schedule.steps)
                for callback in (late, *late.loggers):
                    callback.on_end()
        return Outcome(start.progress, None, start.found.path if start.found else None)


def _check_packages(config: RunConfig) -> None:
    """A mixer that another package computes needs that package, and a GPU; an override of the kernels' choice must name what exists."""
    try:
        platform.check_kernel_overrides()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.engine.name == "deepspeed":
        if find_spec("deepspeed") is None:
            raise ConfigError(
                "engine.name = deepspeed needs a package that is not installed: pip install -c constraints.txt -e .[deepspeed]"
            )
        obstacle = check_ops(config.engine.offload_optimizer)  # it compiles for itself, which must be possible
        if obstacle:
            raise ConfigError(f"engine.name = deepspeed: {obstacle}")
    for name in dict.fromkeys(catalogue.mixer_names(config.model)):
        package = catalogue.describe(name).package
        if package is not None and not platform.has_cuda():
            raise ConfigError(f"model.mixer: {name} needs a GPU, and there is none; deltanet, gated_deltanet and mamba2 run without")
        if package is not None and find_spec(package) is None:
            raise ConfigError(f"model.mixer: {name} needs a package that is not installed: pip install -c constraints.txt -e .[gpu]")


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
