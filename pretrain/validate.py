"""Check a configuration with conditions that involve several fields or the data.

Every mistake is one line that begins with its key and names the value and the nearest valid value;
all mistakes are reported together. The module reads no YAML, starts no process and does not import
torch. Long, because it is a list of short checks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fem_common import secrets
from fem_common.config import ConfigErrors, Mistake, noted
from fem_common.errors import ConfigError, convert_os_errors
from fem_common.stores import is_url, refusal
from fem_common.text import nearest
from fem_megatron.catalogue import describe, mixer_names
from fem_megatron.config import ModelConfig
from pretrain.config import OptimizerConfig, RunConfig
from pretrain.data.facts import DataFacts, any_on_disk, fill_from_data
from pretrain.engines.deepspeed_settings import check_engine
from pretrain.plan.context_parallel import check_split
from pretrain.plan.devices import DEVICE_PEAK_TFLOPS, peak_tflops
from pretrain.plan.fp8 import check_fp8
from pretrain.plan.graphs import check_graphs
from pretrain.run_directory import check_writable, mirror_of, run_directory
from pretrain.schedule import Schedule
from pretrain.spikes import check_spikes
from pretrain.training_stages import check_stages, check_stages_data, parts_of

# Used for a stage without its own schedule; the schedule of the run is checked once for all stages.
_CONSTANT = OptimizerConfig(schedule="constant")


@dataclass(frozen=True)
class Prepared:
    """A configuration that has passed all checks.

    config: the configuration, with null values filled in from the data. facts: the facts about the
    data, None if no data is on disk.
    """

    config: RunConfig
    world_size: int
    facts: DataFacts | None


def prepare(
    config: RunConfig,
    launched: int | None,
    *,
    plan_only: bool = False,
    before: Sequence[Mistake] = (),
) -> Prepared:
    """Run every check and return the prepared run; the most basic mistakes are listed first.

    launched: the launcher's world size. It is None if no processes were launched (a plan); the
    configuration then decides. plan_only: only plan; a model with a given vocabulary size then
    needs no data on disk. before: mistakes found while the configuration was read; they are
    reported with the rest.

    Raises:
        ConfigErrors: all mistakes found.
        StorageError: a file system failed.
    """
    world_size = planned_world_size(config) if launched is None else launched
    mistakes, facts = [*before, *_mistakes(config, world_size, before)], None
    # Only rank 0 writes to the run directory.
    if (
        not plan_only
        and os.environ.get("RANK", "0") == "0"
        and not _wrong(mistakes, "run_dir name model")
    ):
        with noted(mistakes, "run_dir"):
            check_writable(run_directory(config), mirror_of(config))
    without_data = (
        plan_only and (config.model.vocab_size is not None or before) and not any_on_disk(config)
    )
    if not without_data and not _wrong(mistakes, "data model"):
        with noted(mistakes, "data"), convert_os_errors():
            facts = check_stages_data(config)
    if mistakes:
        raise ConfigErrors(mistakes)
    if facts is None:
        return Prepared(config, world_size, None)
    config = fill_from_data(config, facts)
    validate(config, world_size)
    return Prepared(config, world_size, facts)


def check_before_data(config: RunConfig) -> None:
    """Run the checks of a plan for a run whose data may not exist yet.

    If the vocabulary size is unknown because the data is missing, only the checks that need no data
    are run.

    Raises:
        ConfigErrors, StorageError: see `prepare`.
    """
    if config.model.vocab_size is None and not any_on_disk(config):
        validate(config, planned_world_size(config))
    else:
        prepare(config, None, plan_only=True)


def planned_world_size(config: RunConfig) -> int:
    """Return the number of processes for which the run is planned.

    It is parallel.world_size or, if null, the minimum that model parallelism requires.
    """
    layout = config.parallel
    return layout.world_size or max(1, layout.model_parallel)


def validate(config: RunConfig, world_size: int, *, but: Collection[str] = ()) -> None:
    """Check the configuration against ``world_size`` processes without reading files.

    but: sections that are not final. Checks that read one of these sections are skipped; for a run
    with stages, all checks are skipped.

    Raises:
        ConfigErrors: every mistake, with the nearest valid value.
    """
    if but and config.stages:
        return
    if mistakes := _mistakes(config, world_size, but=but):
        raise ConfigErrors(mistakes)


def _staged_mistakes(
    config: RunConfig, world_size: int, before: Sequence[Mistake]
) -> list[Mistake]:
    """Return the mistakes of a run with stages.

    If the list of stages has mistakes, return only these. Otherwise return the mistakes of each
    stage; mistakes in a schedule that the stages share are reported once.
    """
    if (wrong := list(check_stages(config))) or before:
        return [("stages", ConfigError(text)) for text in wrong]
    mistakes, parts = list[Mistake](), parts_of(config)
    full = replace(config, stages=(), train=replace(config.train, steps=parts[0].run[0]))
    for text in [] if all(part.own_rates for part in parts) else _check_lengths(full, world_size):
        mistakes.append(("optimizer", ConfigError(text)))
    for part in parts:
        optimizer = part.config.optimizer if part.own_rates else _CONSTANT
        found = _mistakes(replace(part.config, stages=(), optimizer=optimizer), world_size)
        mistakes += [
            (name, ConfigError(f"stages.{part.number} ({part.name}): {error}"))
            for name, error in found
        ]
    return mistakes


def _mistakes(
    config: RunConfig, world_size: int, before: Sequence[Mistake] = (), but: Collection[str] = ()
) -> list[Mistake]:
    """Return the mistakes found by all checks.

    A check is skipped if one of its sections already has a mistake, because it would only report
    consequences of that mistake. before: mistakes found earlier. but: sections that are not final;
    their checks are skipped.
    """
    if config.stages:
        return _staged_mistakes(config, world_size, before)
    mistakes: list[Mistake] = []
    for check, sections in _CHECKS:
        if _wrong([*before, *mistakes], sections) or not {*but}.isdisjoint(sections.split()):
            continue
        with noted(mistakes, sections.partition(" ")[0]):
            for text in check(config, world_size):
                mistakes.append((text.partition(".")[0], ConfigError(text)))
    return mistakes


def _wrong(mistakes: Sequence[Mistake], sections: str) -> bool:
    """Return True if a mistake is in one of ``sections`` or in an unknown section.

    sections: names separated by spaces.
    """
    return bool({section for section, _ in mistakes} & {"", *sections.split()})


def _check_device(config: RunConfig, world_size: int) -> Iterator[str]:
    device = config.log.device
    if device is not None and peak_tflops(device) is None:
        known = list(DEVICE_PEAK_TFLOPS)
        yield (
            f"log.device = '{device}' has no known peak; the nearest: "
            f"{nearest(device, known, 0.0)} (of {', '.join(known)})"
        )


def _check_profile(config: RunConfig, world_size: int) -> Iterator[str]:
    for rank in config.log.profile.ranks:
        if rank >= world_size:
            yield f"log.profile.ranks has rank {rank}, but the run has ranks 0 to {world_size - 1}"


def _check_model(config: RunConfig, world_size: int) -> Iterator[str]:
    model = config.model
    heads, width = model.num_attention_heads, model.hidden_size
    try:
        model.blocks()
    except ValueError as error:
        near = _closest(
            _divisors(width), heads, lambda count: _fits(replace(model, num_attention_heads=count))
        )
        yield (
            f"{error}; the nearest number of heads that does: {near}"
            if near and "num_attention_heads" in str(error)
            else str(error)
        )
        return
    if not model.causal:
        yield (
            "model.causal = false: the model could read the tokens that it is trained to predict; "
            "set model.causal=true"
        )
    if model.mtp_depth >= config.data.seq_length:
        yield (
            f"model.mtp_depth = {model.mtp_depth} predicts beyond the {config.data.seq_length} "
            "tokens of data.seq_length; set it to 1 or 2"
        )


def _fits(model: ModelConfig) -> bool:
    try:
        return bool(model.blocks())
    except ValueError:
        return False


def _check_mixer_limits(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a mistake for each mixer whose longest sequence or tensor parallelism is exceeded."""
    model, length = config.model, config.data.seq_length
    tensor = config.parallel.tensor_model_parallel_size
    for name, block in dict(zip(mixer_names(model), model.blocks(), strict=True)).items():
        longest = block.mixer.max_length()
        if longest is not None and length > longest:
            yield (
                f"data.seq_length = {length}: {name} takes no more than {longest} tokens; set "
                f"data.seq_length={longest}"
            )
        if tensor > 1 and "TP" not in describe(name).layouts.split():
            yield (
                f"parallel.tensor_model_parallel_size = {tensor}: {name} cannot be split; set it "
                "to 1"
            )


def _check_layout(config: RunConfig, world_size: int) -> Iterator[str]:
    layout = config.parallel
    needed = layout.model_parallel
    if layout.world_size is not None and layout.world_size != world_size:
        yield (
            f"parallel.world_size = {layout.world_size}, but {_started(world_size)}; start it "
            f"with: torchrun --nproc-per-node {layout.world_size} -m pretrain ..., or set "
            f"parallel.world_size={world_size}"
        )
    elif world_size % needed:
        wanted = _multiple(world_size, needed)
        cut = (
            f" x parallel.context_parallel_size = {layout.context_parallel_size}"
            if layout.context_parallel_size > 1
            else ""
        )
        yield (
            f"parallel.tensor_model_parallel_size = {layout.tensor_model_parallel_size} x "
            f"parallel.pipeline_model_parallel_size = {layout.pipeline_model_parallel_size}{cut} "
            f"needs a multiple of {needed} processes, but {_started(world_size)}; the nearest: "
            f"torchrun --nproc-per-node {wanted} -m pretrain ..."
        )
    if layout.overlap_param_gather and (
        not layout.use_distributed_optimizer or layout.overlap_grad_reduce is False
    ):
        missing = (
            "use_distributed_optimizer"
            if not layout.use_distributed_optimizer
            else "overlap_grad_reduce"
        )
        yield f"parallel.overlap_param_gather = true needs parallel.{missing}=true"


def _started(world_size: int) -> str:
    return f"{world_size} process{' was' if world_size == 1 else 'es were'} started"


def _tensor_parallel_fault(config: RunConfig, size: int) -> str | None:
    """Return an error text for the first width that ``size`` TP ranks do not divide, or None."""
    model = config.model
    widths = {"model.num_attention_heads": model.num_attention_heads}
    for block, _ in model.kinds:
        for name, width in block.split_widths().items():
            if width % size or name not in widths:
                widths[name] = width
    if model.vocab_size is not None:
        widths["the padded vocabulary, a multiple of model.make_vocab_size_divisible_by"] = (
            model.padded_vocab_size()
        )
    if config.parallel.sequence_parallel and size > 1:
        widths["data.seq_length (split by parallel.sequence_parallel)"] = config.data.seq_length
    return next((f"{name} = {width}" for name, width in widths.items() if width % size), None)


def _check_tensor_parallel(config: RunConfig, world_size: int) -> Iterator[str]:
    layout, size = config.parallel, config.parallel.tensor_model_parallel_size
    if layout.sequence_parallel and size == 1:
        yield (
            "parallel.sequence_parallel = true needs parallel.tensor_model_parallel_size of 2 or "
            "more; set parallel.sequence_parallel=false"
        )
    fault = _tensor_parallel_fault(config, size)
    if fault:
        possible = _possible(world_size, size, layout.model_parallel // size)
        heads = _divisors(config.model.num_attention_heads)
        near = _closest(
            heads, size, lambda count: possible(count) and not _tensor_parallel_fault(config, count)
        )
        yield (
            f"parallel.tensor_model_parallel_size = {size} does not divide {fault}; the nearest "
            f"that divides all: {near}"
        )


def _possible(world_size: int, size: int, other: int) -> Callable[[int], bool]:
    """Return a predicate that is true for parallel sizes that may replace ``size``.

    A size is valid if its product with ``other`` divides ``world_size``. If ``size`` itself is not
    valid, every size passes.
    """
    fits = world_size % (size * other) == 0
    return lambda count: not fits or world_size % (count * other) == 0


def _check_pipeline(config: RunConfig, world_size: int) -> Iterator[str]:
    layout, layers = config.parallel, config.model.num_layers
    stages = layout.pipeline_model_parallel_size
    chunks = layout.virtual_pipeline_model_parallel_size
    if layers % stages:
        near = _closest(
            _divisors(layers),
            stages,
            _possible(world_size, stages, layout.model_parallel // stages),
        )
        key = f"parallel.pipeline_model_parallel_size = {stages}"
        yield f"{key} does not divide model.num_layers = {layers}; the nearest that does: {near}"
        return
    if chunks is None:
        return
    key = f"parallel.virtual_pipeline_model_parallel_size = {chunks}"
    if stages == 1 or chunks < 2:
        what = (
            "needs parallel.pipeline_model_parallel_size of 2 or more"
            if stages == 1
            else "must be 2 or more chunks"
        )
        yield f"{key} {what}; leave it null for one chunk a rank"
    elif layers % (stages * chunks):
        near = _closest(_divisors(layers // stages), chunks, lambda count: count > 1)
        hint = f"the nearest that does: {near}" if near else "leave it null"
        yield (
            f"{key} x parallel.pipeline_model_parallel_size = {stages} does not divide "
            f"model.num_layers = {layers}; {hint}"
        )


def _check_batches(config: RunConfig, world_size: int) -> Iterator[str]:
    layout = config.parallel
    batch = config.train.global_batch_size
    micro = config.train.micro_batch_size
    stages = layout.pipeline_model_parallel_size
    data_parallel = world_size // layout.model_parallel
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    together = micro * data_parallel
    if batch % together:
        yield (
            f"train.global_batch_size = {batch} is not a multiple of train.micro_batch_size = "
            f"{micro} x {data_parallel} data-parallel ranks; the nearest that is: "
            f"{_multiple(batch, together)}"
        )
        return
    count = batch // together
    if interleaved and count % stages:
        near = _multiple(count, stages) * together
        yield (
            f"train.global_batch_size = {batch} makes {count} micro-batches a step, and the "
            "interleaved schedule needs a multiple of parallel.pipeline_model_parallel_size = "
            f"{stages}; the nearest global batch: {near}"
        )


def _check_lengths(config: RunConfig, world_size: int) -> Iterator[str]:
    train, optimizer = config.train, config.optimizer
    one_length = (train.steps is None) != (train.tokens is None)
    if not one_length:
        state = "both are given" if train.steps is not None else "neither is given"
        yield (
            f"train.steps and train.tokens set the length of the run, and {state}: give one (and "
            "null for the other)"
        )
    given = [
        name
        for name in ("warmup_steps", "warmup_tokens", "decay_steps", "decay_tokens")
        if getattr(optimizer, name) is not None
    ]
    doubled = [
        name for name in ("warmup", "decay") if {f"{name}_steps", f"{name}_tokens"} <= set(given)
    ]
    for name in doubled:
        yield (
            f"optimizer.{name}_steps and optimizer.{name}_tokens are both given: keep one (and "
            "null for the other)"
        )
    idle = next(
        (name for name in given if name.startswith("decay") and optimizer.schedule != "wsd"), None
    )
    if idle:
        yield (
            f"optimizer.{idle} is given, but optimizer.schedule = {optimizer.schedule} decays "
            f"over the whole run; set optimizer.schedule=wsd, or optimizer.{idle}=null"
        )
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"optimizer.min_lr = {optimizer.min_lr} is above optimizer.lr = {optimizer.lr}; at "
            f"most {optimizer.lr}"
        )
    if not one_length or doubled or idle:
        return
    schedule = Schedule.of(config)
    remaining_steps = schedule.steps - optimizer.from_step
    if remaining_steps < 1:
        yield (
            f"optimizer.from_step = {optimizer.from_step} leaves no step of a run of "
            f"{schedule.steps}; at most {schedule.steps - 1}"
        )
        return
    warmup = schedule.warmup_samples // schedule.batch_samples
    decay = schedule.decay_samples // schedule.batch_samples
    if warmup >= remaining_steps and warmup:
        yield _too_long("warmup", warmup, remaining_steps - 1, optimizer.warmup_tokens, schedule)
    if optimizer.schedule == "wsd" and warmup + decay > remaining_steps:
        yield _too_long("decay", decay, remaining_steps - warmup, optimizer.decay_tokens, schedule)


def _too_long(
    name: str, steps: int, remaining_steps: int, tokens: int | None, schedule: Schedule
) -> str:
    given, largest = (
        (steps, remaining_steps)
        if tokens is None
        else (tokens, remaining_steps * schedule.step_tokens)
    )
    key = f"optimizer.{name}_{'steps' if tokens is None else 'tokens'}"
    return (
        f"{key} = {given} does not fit: {steps} steps of {name} in a run of {schedule.steps} "
        f"steps; the largest that fits: {largest}"
    )


def _multiple(wanted: int, of: int) -> int:
    """Return the positive multiple of ``of`` nearest to ``wanted``."""
    return max(1, round(wanted / of)) * of


def _divisors(number: int) -> list[int]:
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def _closest(candidates: Iterable[int], wanted: int, holds: Callable[[int], bool]) -> int | None:
    """Return the candidate nearest to ``wanted`` for which ``holds`` returns True, or None.

    If two candidates are equally near, the smaller one is returned.
    """
    return min(
        (value for value in candidates if holds(value)),
        key=lambda value: (abs(value - wanted), value),
        default=None,
    )


def _check_evaluation(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a mistake for each evaluation setting that does not fit the checkpoint settings."""
    every, saved = config.evaluate.interval, config.checkpoint.interval
    if every and not saved:
        yield (
            f"evaluate.interval = {every}, but checkpoint.interval = 0: no checkpoint to "
            f"evaluate; set checkpoint.interval={every}"
        )
    elif every and every % saved:
        yield (
            f"evaluate.interval = {every} is not a multiple of checkpoint.interval = {saved}; the "
            f"nearest: {_multiple(every, saved)}"
        )
    merged, kept = config.evaluate.merge, config.checkpoint.keep_last
    if merged and merged > kept:
        yield (
            f"evaluate.merge = {merged} checkpoints, but checkpoint.keep_last = {kept} are kept; "
            f"set checkpoint.keep_last={merged}"
        )
    if not config.evaluate.suite:
        yield "evaluate.suite is empty: name a suite, such as quick, or the path of its YAML"


def _check_fork(config: RunConfig, world_size: int) -> Iterator[str]:
    if config.checkpoint.fork is not None and config.checkpoint.load is not None:
        yield (
            f"checkpoint.fork = {config.checkpoint.fork} and checkpoint.load are both given: keep "
            "one (load takes only the weights)"
        )


def _check_mirror(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield mistakes of the mirror: it needs another location and consistent intervals."""
    given = config.checkpoint
    distance, most = max(given.interval, given.mirror_interval), given.max_unsaved_steps
    mirror = mirror_of(config)
    if mirror is None:
        if given.mirror_keep_last is not None:
            keep = f"checkpoint.mirror_keep_last = {given.mirror_keep_last}"
            yield f"{keep} requires a mirror; set one, as in checkpoint.mirror=s3://BUCKET/FOLDER"
    elif wrong := refusal(mirror, run_directory(config)):
        yield f"checkpoint.mirror {wrong}"
    elif most is not None and most < distance:
        yield (
            f"checkpoint.max_unsaved_steps = {most} ends every run: the mirror's checkpoints are "
            f"{distance} steps apart; at least {distance}"
        )
    elif given.interval and given.mirror_interval > 1 and given.mirror_interval % given.interval:
        yield (
            f"checkpoint.mirror_interval = {given.mirror_interval} is not a multiple of "
            f"checkpoint.interval = {given.interval}; the nearest: "
            f"{_multiple(given.mirror_interval, given.interval)}"
        )


def _check_urls(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a mistake for each URL that contains a password or is not allowed for its key.

    URLs of data sources must name a pair in a folder. Keys of other paths accept no URL.
    """
    mirror = "it must be a folder; checkpoint.mirror=URL copies checkpoints to a store"
    cache = "it must be a folder, which caches files read from stores"
    fetch = "copy it to a folder first: python -m tools.checkpoint fetch FOLDER URL"
    for key, place, way in (
        ("run_dir", config.run_dir, mirror),
        ("data.store_cache", config.data.store_cache, cache),
        ("checkpoint.load", config.checkpoint.load, fetch),
        ("checkpoint.fork", config.checkpoint.fork, fetch),
    ):
        if place and is_url(place):
            yield f"{key} = {secrets.hide(place, secrets.values({'url': place}))} is a URL: {way}"
    for _, key, source in config.data.named_sources():
        kind, mark, place = source.prefix.partition("://")
        if secrets.hides_a_password(source.prefix):
            yield (
                f"{key} contains a password, which would be written to files; set credentials "
                "in the environment"
            )
        elif mark and not all(place.rpartition("/")[::2]):
            yield (
                f"{key} = {source.prefix} does not name a .bin/.idx pair in a folder; as in "
                f"{kind}://BUCKET/FOLDER/train"
            )


# Each check with the sections that it reads.
_CHECKS: tuple[tuple[Callable[[RunConfig, int], Iterator[str]], str], ...] = (
    (_check_device, "log"),
    (_check_profile, "log"),
    (check_spikes, "train checkpoint"),
    (check_engine, "engine parallel train model optimizer"),
    (_check_model, "model"),
    (_check_mixer_limits, "model data parallel"),
    (_check_tensor_parallel, "parallel model data"),
    (check_split, "parallel model data"),
    (check_fp8, "train parallel model data"),
    (check_graphs, "train engine parallel model data"),
    (_check_pipeline, "parallel model"),
    (_check_layout, "parallel"),
    (_check_batches, "train parallel"),
    (_check_lengths, "train optimizer data"),
    (_check_evaluation, "evaluate checkpoint"),
    (_check_fork, "checkpoint"),
    (_check_mirror, "checkpoint run_dir name model"),
    (_check_urls, "data checkpoint run_dir"),
)
