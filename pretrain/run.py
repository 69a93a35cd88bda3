"""Run one attempt of a training run: construct all components and train the remaining stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from megatron.core import parallel_state

from fem_common.errors import MISTAKES, CommandError, ConfigError, InUse, StorageError, reason
from fem_common.files import remove_leftovers, sha256
from fem_common.progress import print_above
from fem_common.text import si
from fem_megatron import catalogue
from fem_megatron.megatron import platform
from pretrain.checkpoint.folder import MANIFEST, Progress, newest_good
from pretrain.checkpoint.manager import Checkpoints
from pretrain.checkpoint.reader import DamagedCheckpoint
from pretrain.checkpoint.resume import FREE, TOLD
from pretrain.checkpoint.starting import Start, contents_of, find_start, fork_start
from pretrain.collectives import from_rank_0
from pretrain.config import RunConfig
from pretrain.data.datasets import Datasets, build_datasets
from pretrain.data.facts import Contents, check_contents, index_bytes
from pretrain.data.order import longest_order
from pretrain.data.packing import packing_line
from pretrain.data.store_reader import StoreReader
from pretrain.engines import Engine
from pretrain.engines.building import initialize_distributed, initialize_model_parallel
from pretrain.engines.deepspeed_ops import check_ops
from pretrain.plan.devices import peak_tflops
from pretrain.plan.run_plan import make_plan
from pretrain.report.evaluations import Evaluations, check_suite
from pretrain.report.loggers import (
    Callback,
    Console,
    Log,
    Watch,
    alert,
    logged_kernels,
    make_callbacks,
)
from pretrain.report.metrics import Meter
from pretrain.report.observer import Observer, together
from pretrain.report.profile import Profiler
from pretrain.report.progress_file import ProgressFile, read_progress
from pretrain.report.stragglers import Stragglers
from pretrain.report.tensor_norms import TensorNorms
from pretrain.run_directory import claimed, describe, identify, record_fork, run_directory
from pretrain.schedule import Schedule
from pretrain.signals import Received
from pretrain.trainer import Outcome, Trainer
from pretrain.training_stages import Part, facts_of, parts_of
from pretrain.validate import Prepared

# Bytes of .idx files above which a message announces their reading. It takes tenths of a second
# from a local disk, many seconds from a busy network disk.
_LONG_TO_READ = 10**8


def train(prepared: Prepared, received: Received) -> Outcome:
    """Run one attempt from the newest good checkpoint or from the start, and return its outcome.

    ``received``: list to which the signal handlers add stop signals.

    Raises:
        InUse: another process trains in the run directory.
        ConfigError: the configuration conflicts with the checkpoints.
        StorageError: a file system failed.
        TooManyBadSteps: the loss or gradient stayed non-finite.
    """
    _check_packages(prepared.config)
    initialize_distributed(prepared.config)
    try:
        run = Run(prepared, received)
        with ExitStack() as stack:
            stack.callback(run.reader.close)
            if not from_rank_0(lambda: stack.enter_context(claimed(run.folder))):
                raise InUse(
                    f"{run.folder} is in use by another process; wait for it, end it, or choose "
                    "another run_dir"
                )
            if run.first:  # the other ranks print only warnings, to stderr
                stack.enter_context(logged_kernels(run.log))
            with _record_failure(run.file):
                return run.attempt()
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def build_index(prepared: Prepared) -> None:
    """Build the index cache that :func:`train` uses (``--index``).

    One process suffices; it needs neither a model nor a GPU. The function prints the folder of the
    cache, the number of samples, and the time and memory used.

    Raises:
        ConfigError: the data does not match its manifest, or the location of the cache is wrong.
        StorageError: a file system failed.
    """
    started = time.monotonic()
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    try:
        run = Run(prepared, Received())
        last = from_rank_0(lambda: newest_good(run.folder / "checkpoints", {}, run.log))
        for part in run.parts:
            run.enter(part)
            data = run.data(run.samples_to_order(part.resumed(last.progress) if last else None))
            valid = f" and {len(data.valid):,} of validation" if data.valid is not None else ""
            run.log(
                f"index cache {data.cache}: "
                f"{'' if data.built else 'unchanged, '}{len(data.train):,} samples of "
                f"training{valid}, {run.config.data.seq_length} tokens each; "
                f"{time.monotonic() - started:.1f} s, {time.process_time():.1f} CPU s with the "
                f"start, {platform.peak_resident_bytes() / 2**30:.2f} GiB of memory at most"
            )
    finally:
        torch.distributed.destroy_process_group()


def make_engine(
    config: RunConfig, schedule: Schedule, log: Log = lambda text: None, *, draw: bool = True
) -> Engine:
    """Create the engine selected by ``engine.name``.

    The third argument prints the engine's messages. draw: initialize the weights; if False, the
    weights are NaN, because the caller loads a checkpoint afterwards.

    Raises:
        ValueError: a width is not divisible (see ``ModelConfig.blocks``).
        ConfigError: DeepSpeed rejects the settings, another package rejects the options of its
            layer, or the machine lacks a feature that the section train requires.
    """
    if config.train.fp8 != "none" and (missing := platform.lacks_fp8()):
        raise ConfigError(f"train.fp8 = {config.train.fp8} needs {missing}; set train.fp8=none")
    if config.train.cuda_graphs and (missing := platform.lacks_graphs()):
        raise ConfigError(f"train.cuda_graphs = true needs {missing}; set train.cuda_graphs=false")
    config = replace(
        config, parallel=config.parallel.settled(config.engine, cuda=platform.has_cuda())
    )
    try:
        if config.engine.name == "deepspeed":  # imported late: an optional package
            from pretrain.engines.deepspeed import DeepSpeedEngine

            return DeepSpeedEngine(config, schedule, log, draw=draw)
        from pretrain.engines.megatron import MegatronEngine

        return MegatronEngine(config, schedule, draw=draw)
    except ValueError as error:
        if any(block.mixer.external for block in config.model.blocks()):
            raise ConfigError(str(error)) from None
        raise


class Run:
    """Components of an attempt on this rank.

    All ranks must construct it and call its methods together. ``first`` is True on rank 0, which
    prints and writes files.
    """

    def __init__(self, prepared: Prepared, received: Received) -> None:
        assert prepared.facts is not None
        self.all_facts = prepared.facts
        self.received = received
        self.whole = prepared.config
        self.world_size, self.first = prepared.world_size, torch.distributed.get_rank() == 0
        self.folder, self.parts = run_directory(self.whole), parts_of(self.whole)
        self.file = ProgressFile(
            self.folder if self.first else None, self.parts[0].schedule(None), self.world_size
        )
        self.all_contents = self._read_contents()
        sources = {
            source.prefix: source for part in self.parts for source in part.config.data.train
        }
        self.reader = StoreReader(
            replace(self.whole, data=replace(self.whole.data, train=tuple(sources.values())))
        )
        self.enter(self.parts[0])

    def enter(self, part: Part) -> None:
        """Make ``part`` the current stage.

        This sets the configuration, the schedule, the facts about the data and the contents.
        """
        self.part = part
        self.config = part.config
        self.schedule = part.schedule(None)
        self.facts = facts_of(part, self.all_facts)
        self.contents = contents_of(self.parts, part, self.all_contents)

    def log(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.first:
            print_above(text)

    def attempt(self) -> Outcome:
        """Run all remaining stages and return the outcome. The run directory must be claimed.

        Each stage starts from a checkpoint of the previous one.
        """
        config, file = self.whole, self.file
        before = from_rank_0(lambda: read_progress(self.folder))
        if self.first:
            remove_leftovers(self.folder)
        file.write("starting")
        from_rank_0(lambda: check_suite(config.evaluate))
        initialize_model_parallel(config)
        checkpoints = Checkpoints(self.folder / "checkpoints", config, self.log)
        checkpoints.sweep()
        checkpoints.fetch()
        start = self._start(checkpoints)
        checkpoints.run_id = from_rank_0(lambda: identify(self.folder))
        file.write("starting")
        if self.first:
            describe(
                config,
                self.folder,
                self.world_size,
                start.progress.step,
                {change.key: (change.old, change.new) for change in start.changed},
            )
            if start.forked and start.found:
                progress, hashed = start.progress, sha256(start.found.path / MANIFEST)
                record_fork(
                    self.folder, start.found.path, progress.step, progress.order_begin, hashed
                )
        listed = [
            str(change)
            for change in start.changed
            if change.rule == TOLD or (start.forked and change.rule != FREE)
        ]
        if listed:
            heading = (
                "different from the parent" if start.forked else "changed since the last attempt"
            )
            self.log(f"{heading}: {', '.join(listed)}")
        step, steps = start.progress.step, self.schedule.last_step
        # After the last step, the state is "complete" only if the last validation is done.
        complete = before is not None and (before.get("state"), before.get("step")) == (
            "complete",
            step,
        )
        if start.own and (step > steps or (step == steps and complete)):
            return self._already_complete(checkpoints, start)
        try:
            outcome = self._stage(checkpoints, start)
            while outcome is None or (outcome.stopped_by is None and outcome.progress.step < steps):
                outcome = self._stage(checkpoints, self._start(checkpoints))
            if checkpoints.mirror:
                stopped = outcome.stopped_by is not None
                checkpoints.mirror.close(lambda: stopped or bool(self.received))
            return outcome
        finally:
            if checkpoints.mirror:
                checkpoints.mirror.end()

    def _stage(self, checkpoints: Checkpoints, start: Start) -> Outcome | None:
        """Train to the end of the current stage and return the outcome.

        Return None if the checkpoint is damaged and training must continue from an older start for
        which this engine is unsuitable: a start in another stage, or a start without a checkpoint,
        which needs an engine with initialized weights.
        """
        part = self.part
        fresh = start.found is None
        callbacks = list[Callback]()
        checkpoints.enter(self.config)
        if part.name:
            self.log(
                f"stage {part.name} ({part.number + 1} of {len(self.parts)}): steps "
                f"{part.begin_step + 1} to {part.end_step}"
            )
        engine = make_engine(self.config, self.schedule, self.log, draw=fresh)
        try:
            start = self._load(engine, checkpoints, start)
            if self.part is not part or (start.found is None) is not fresh:
                return None
            trainer = self._trainer(engine, checkpoints, start)
            callbacks = trainer.callbacks
            # A method of the trainer would keep a reference to the engine.
            checkpoints.alert = partial(alert, callbacks, "checkpoint not written")
            if checkpoints.mirror and checkpoints.mirror.process is None:
                checkpoints.mirror.start(start.progress.step)
            return trainer.run()
        except (CommandError, OSError) as error:
            alert(callbacks, "training failed", str(error))
            raise
        finally:
            engine.close()
            for callback in callbacks:
                callback.on_end()

    def samples_to_order(self, progress: Progress | None) -> int:
        """Return the number of samples for which the training order is generated.

        progress: the progress of the newest checkpoint; None if the run has no checkpoint.
        """
        if self.part.name:
            return self.part.samples
        if progress is None and self.config.checkpoint.fork:
            return fork_start(
                self.config, self.facts, self.contents, self.folder
            ).progress.order_samples
        end = self.part.schedule(progress).total_samples
        return max(progress.order_samples, end - progress.order_begin) if progress else end

    def data(self, samples: int) -> Datasets:
        """Return the datasets with a training order for the given number of samples."""
        assert self.config.model.vocab_size is not None
        lines = packing_line(self.config.data, self.facts), self.facts.masks_line
        for line in filter(None, lines if self.first else ()):
            self.log(line)
        needs = []
        if self.part.name:
            needs = [part.needs() for part in self.parts[: self.part.number + 1]]
        return build_datasets(
            self.config,
            vocab_size=self.config.model.vocab_size,
            eod_id=self.facts.eod_id or 0,
            contents=self.contents,
            train_samples=samples,
            default_cache=self.folder / "index_cache",
            log=self.log,
            reader=self.reader,
            needs=needs,
        )

    def _read_contents(self) -> Contents:
        """Return the identities of the data files' contents, which rank 0 reads for all ranks.

        The contents are compared with the manifests.
        """
        size = from_rank_0(lambda: index_bytes(self.all_facts))
        if size > _LONG_TO_READ:
            self.log(
                f"data: reading {size / 1e9:.1f} GB of .idx files to compare them with their "
                "manifests"
            )
        return from_rank_0(lambda: check_contents(self.all_facts))

    def _start(self, checkpoints: Checkpoints) -> Start:
        start, part = find_start(self.parts, self.all_facts, self.all_contents, checkpoints)
        self.enter(part)
        self.schedule = self.file.schedule = part.schedule(start.progress)
        self.file.at(start.progress.step, start.progress.consumed_samples, checkpoints.last)
        return start

    def _load(self, engine: Engine, checkpoints: Checkpoints, start: Start) -> Start:
        """Load the checkpoint of ``start`` and return the start that was used.

        If the tensors of the run's own checkpoint are damaged, continue with an older start.
        """
        while start.found is not None:
            try:
                checkpoints.load(engine, start.found, model_only=not (start.own or start.forked))
                if start.own or start.forked:
                    done = "resumed" if start.own else "forked"
                    at = f" at step {start.progress.step}"
                else:
                    done, at = "weights taken", ""
                self.log(f"{done} from {start.found.path}{at}")
                if start.forked and start.progress.order_begin == start.progress.consumed_samples:
                    self.log(
                        "its data differs from the parent's: the data order begins at its first "
                        "sample"
                    )
                break
            except DamagedCheckpoint as error:
                if not start.own:
                    raise
                checkpoints.pass_over(start.found, error)
            part, start = self.part, self._start(checkpoints)
            if self.part is not part:
                break
        return start

    def _trainer(self, engine: Engine, checkpoints: Checkpoints, start: Start) -> Trainer:
        """Create the trainer with all its components."""
        config, layout = self.config, self.config.parallel
        plan = from_rank_0(
            lambda: make_plan(config, self.world_size, self.facts, cuda=platform.has_cuda())
        )
        data = self.data(start.progress.order_samples)
        cut = f"CP {layout.context_parallel_size}, " if layout.context_parallel_size > 1 else ""
        self.log(
            f"{config.name}: {plan.total_parameters / 1e6:.2f}M parameters, "
            f"{self.schedule.steps - self.part.begin_step} steps of {self.schedule.step_tokens} "
            f"tokens on {self.world_size} x {platform.device_name()} (TP "
            f"{layout.tensor_model_parallel_size}, PP {layout.pipeline_model_parallel_size}, "
            f"{cut}DP {plan.data_parallel}, {config.train.precision})"
        )
        if plan.part_lengths is not None:
            self.log(
                f"training FLOPs per token: {si(plan.train_flops)}FLOP by the documents' lengths, "
                f"used for TFLOP/s and MFU; dense, over full sequences: {si(plan.dense_flops)}FLOP"
            )
        meter = Meter(
            step_tokens=self.schedule.step_tokens,
            flops_per_token=plan.train_flops,
            dense_flops=None if plan.part_lengths is None else plan.dense_flops,
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
            content_keys=self.contents.keys,
            watch=self._watch(engine),
            profiler=Profiler(config.log.profile, self.folder, self.received),
            stragglers=Stragglers(
                config.log.straggler_interval, config.log.straggler_ratio, self.file.folder
            ),
            progress_file=self.file,
            redraw=lambda samples: self.data(
                longest_order(config, self.facts, data.train_samples, samples)
            ),
            received=self.received,
        )

    def _watch(self, engine: Engine) -> Watch:
        """Return a context manager that computes the diagnostics of log.diagnostics around a step.

        Layer diagnostics are disabled under ZeRO-3, because a layer's weights are released before
        they can be read, and with context parallelism, because no rank has all tokens of a
        sequence.
        """
        config, log = self.config, self.config.log
        layers, tensors = (
            log.diagnostics_interval if name in log.diagnostics else 0
            for name in ("layers", "tensors")
        )
        obstacles = []
        if config.parallel.context_parallel_size > 1:
            obstacles.append("parallel.context_parallel_size > 1")
        if config.engine.name == "deepspeed" and config.engine.zero_stage == 3:
            obstacles.append("engine.zero_stage = 3")
        if layers and obstacles:
            self.log(f"{obstacles[0]}: no layer diagnostics (log.diagnostics)")
            layers = 0
        return together(Observer(engine.models, layers), TensorNorms(engine, tensors))

    def _callbacks(self, checkpoints: Checkpoints, step: int) -> list[Callback]:
        loggers = make_callbacks(self.whole, self.folder, self.schedule.last_step)
        if not self.config.evaluate.wanted:
            return loggers
        return [self._evaluations(checkpoints, loggers, step), *loggers]

    def _evaluations(
        self, checkpoints: Checkpoints, loggers: list[Callback], step: int
    ) -> Evaluations:
        return Evaluations(
            self.config.evaluate,
            self.folder,
            self.schedule.last_step,
            checkpoints,
            loggers,
            self.received,
            step,
        )

    def _already_complete(self, checkpoints: Checkpoints, start: Start) -> Outcome:
        """Report that all steps of the run are done, and return the outcome.

        If a signal interrupted the evaluation at the end of training, the evaluation is completed
        first.
        """
        step = start.progress.step
        self.log(
            f"{self.config.name} is complete at step {step}; raise train.steps or train.tokens to "
            "continue it, or start another run with another run_dir"
        )
        self.file.write("complete")
        if self.first and self.config.evaluate.wanted:
            late = self._evaluations(
                checkpoints, [Console(self.config.log.interval, self.schedule.last_step)], step
            )
            if late.running is not None:  # open loggers only for an evaluation
                late.loggers = make_callbacks(self.whole, self.folder, self.schedule.last_step)
                for callback in (late, *late.loggers):
                    callback.on_end()
        return Outcome(start.progress, None, start.found.path if start.found else None)


def _check_packages(config: RunConfig) -> None:
    """Check that required packages and the GPU exist, and that kernel overrides are valid names.

    Raises:
        ConfigError: a requirement is not met.
    """
    try:
        platform.check_kernel_overrides()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.engine.name == "deepspeed":
        if find_spec("deepspeed") is None:
            raise ConfigError(
                "engine.name = deepspeed needs a package that is not installed: pip install -c "
                "constraints.txt -e .[deepspeed]"
            )
        # DeepSpeed compiles its operations when they are first used. Check that this will work.
        obstacle = check_ops(config.engine.offload_optimizer)
        if obstacle:
            raise ConfigError(f"engine.name = deepspeed: {obstacle}")
    for name in dict.fromkeys(catalogue.mixer_names(config.model)):
        package = catalogue.describe(name).package
        if package is not None and not platform.has_cuda():
            raise ConfigError(
                f"model.mixer: {name} needs a GPU, and there is none; deltanet, gated_deltanet "
                "and mamba2 run without one"
            )
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"model.mixer: {name} needs a package that is not installed: pip install -c "
                "constraints.txt -e .[gpu]"
            )


@contextmanager
def _record_failure(file: ProgressFile) -> Iterator[None]:
    """Write an exception that ends the attempt to progress.json, and raise it again.

    Raises:
        StorageError: a file system failed; it replaces the OSError.
    """
    try:
        yield
    except BaseException as error:
        reported: BaseException = error
        if isinstance(error, OSError) and not isinstance(error, (*MISTAKES, BrokenPipeError)):
            reported = StorageError(reason(error))
        kind = "" if isinstance(reported, CommandError) else f"{type(reported).__name__}: "
        with suppress(OSError):
            file.write("failed", message=f"{kind}{reported}")
        if reported is not error:
            raise reported from None
        raise
