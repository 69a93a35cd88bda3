"""Configuration of a run: one dataclass per section, each field with help text and range, and the
YAML reader. No torch.

``pretrain.validate`` checks conditions that involve several fields. Long, because it defines every
key of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from fem_common.config import ConfigErrors, build, load
from fem_common.settings import setting
from fem_megatron.config import ModelConfig
from fem_megatron.cut_shape import CUT_KINDS

ABSENT = {
    r"moe(_.*)?|(.*_)?experts?(_.*)?|router_.*|ep(_size)?": "mixtures of experts and expert parallelism are not here",
    r"(.*_)?cp(_.*)?|ulysses(_.*)?|ring_attention(_.*)?": "a sequence is cut by parallel.context_parallel_size",
    r"checkpoint\.(tiers?|levels?)": "there are two: run_dir every checkpoint.interval steps, checkpoint.mirror every mirror_interval",
    r"checkpoint\.(folder|dir|directory|path|save|url)": "they lie in run_dir, and checkpoint.mirror=URL sends them elsewhere, too",
}
"""What others' configurations have and this one does not: a pattern of their keys -> what to say."""


@dataclass(frozen=True)
class Source:
    """One tokenized source of a blend: a Megatron .bin/.idx pair."""

    prefix: str = setting(
        MISSING,
        "Path or URL (s3://...) of the pair, without .bin/.idx.",
        check=lambda text: None if text else "give the path of a .bin/.idx pair without its ending",
        path=True,
    )
    weight: float = setting(
        1.0, "Share of the blend; weights are normalised to sum to one.", above=0
    )


@dataclass(frozen=True)
class DataConfig:
    """Data sources and how documents are packed into sequences."""

    train: tuple[Source, ...] = setting((), "Training blend.")
    valid: tuple[Source, ...] = setting((), "Validation blend; empty: no validation.")
    test: tuple[Source, ...] = setting((), "Test blend, read by evaluation tools alone.")
    seq_length: int = setting(4096, "Tokens a sequence.", least=1)
    packing: str = setting(
        "stream",
        "stream: one document after another; best_fit: none that fits a sequence is cut, for some padding.",
        ("stream", "best_fit"),
    )
    documents: str = setting(
        "joined",
        "joined: a document reads those before it in its sequence; separate: no mixer reads across an end.",
        ("joined", "separate"),
    )
    reset_positions: bool | None = setting(
        None, "Positions begin anew with a document; null: where documents are separate."
    )
    eod_loss: bool = setting(True, "What follows a document's end counts in the loss.")
    tokenizer: str | None = setting(
        None,
        "Folder of the Hugging Face tokenizer; null: the one named in the data's manifest.json.",
        path=True,
    )
    index_cache: str | None = setting(
        None,
        "Folder of the index caches, a folder an order of samples; null: index_cache/ in run_dir.",
        path=True,
    )
    store_cache: str | None = setting(
        None, "Folder of URLs' files; null: tokens/ in run_dir.", path=True
    )
    store_cache_gb: float = setting(50.0, "10^9 bytes kept of their .bin at most.", least=0)


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout. The data-parallel size is the world size divided by the other parallel
    sizes.
    """

    world_size: int | None = setting(
        None, "Processes the run is planned for; null: as many as the launcher started.", least=1
    )
    tensor_model_parallel_size: int = setting(
        1, "TP: each rank holds whole heads and a slice of the MLP and the vocabulary.", least=1
    )
    pipeline_model_parallel_size: int = setting(
        1, "PP: each rank holds consecutive layers (1F1B schedule).", least=1
    )
    virtual_pipeline_model_parallel_size: int | None = setting(
        None, "Model chunks a pipeline rank holds (interleaved schedule); null: one."
    )
    context_parallel_size: int = setting(
        1, "CP: each rank holds 1 / CP of every sequence's tokens (docs/long_context.md).", least=1
    )
    context_parallel_kind: str | None = setting(
        None,
        "How tokens of other CP ranks are read: all_to_all exchanges heads for tokens; all_gather: attention gathers keys and values; "
        "ring: softmax attention sends them round. null: attention as all_to_all where there are heads enough. Scans pass states unless "
        "all_to_all is asked for.",
        CUT_KINDS,
    )
    sequence_parallel: bool = setting(
        False, "SP: norms and residuals are split along the sequence over the TP ranks."
    )
    use_distributed_optimizer: bool = setting(
        True, "ZeRO-1: optimizer state is split over the DP ranks."
    )
    overlap_grad_reduce: bool | None = setting(
        None,
        "Reduce gradients while the backward pass still runs; null: on a GPU with Megatron and at ZeRO-3.",
    )
    overlap_param_gather: bool | None = setting(
        None,
        "Gather updated parameters while the next forward pass starts, by the distributed optimizer; null: where gradients overlap.",
    )
    collective_timeout_minutes: float = setting(
        30.0,
        "Minutes a rank waits for the others until the run fails; more than rank 0 takes to write a checkpoint or build the index cache.",
        above=0,
    )

    @property
    def model_parallel(self) -> int:
        """Number of ranks that compute one micro-batch together."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def settled(self, engine: EngineConfig, *, cuda: bool) -> ParallelConfig:
        """Return a copy in which the overlap settings that are null have a value.

        Overlap is chosen for Megatron and for ZeRO-3 on a GPU. ZeRO-1 and ZeRO-2 would need a
        second bucket for it, and DeepSpeed's own default is off.
        """
        megatron, reduce, gather = (
            engine.name == "megatron",
            self.overlap_grad_reduce,
            self.overlap_param_gather,
        )
        if reduce is None:
            reduce = bool(gather) or (cuda and (megatron or engine.zero_stage == 3))
        if gather is None:
            gather = megatron and cuda and reduce and self.use_distributed_optimizer
        return replace(self, overlap_grad_reduce=reduce, overlap_param_gather=gather)


@dataclass(frozen=True)
class DeepSpeedConfig:
    """DeepSpeed's own settings under DeepSpeed's names; null means DeepSpeed's default.

    Settings that other sections of the run determine cannot be set in this section.
    """

    reduce_bucket_size: int | None = setting(
        None, "Elements reduced at a time; null: 5e8, and no more than the model has.", least=1
    )
    allgather_bucket_size: int | None = setting(
        None, "Stages 1 and 2: elements gathered at a time; null: as reduce_bucket_size.", least=1
    )
    reduce_scatter: bool | None = setting(
        None, "Stages 1 and 2: reduce-scatter instead of all-reduce."
    )
    contiguous_gradients: bool | None = setting(
        None, "Copy gradients into one buffer as they come."
    )
    round_robin_gradients: bool | None = setting(
        None, "Stages 1 and 2 with offload: spread the copies to the host over the ranks."
    )
    sub_group_size: int | None = setting(
        None, "Stage 3: elements that the optimizer updates at a time.", least=1
    )
    prefetch_bucket_size: int | None = setting(
        None, "Stage 3: elements gathered ahead of their use.", least=0
    )
    param_persistence_threshold: int | None = setting(
        None, "Stage 3: parameters with fewer elements stay whole on every rank.", least=0
    )
    model_persistence_threshold: int | None = setting(
        None, "Stage 3: elements that may stay whole at most.", least=0
    )
    max_live_parameters: int | None = setting(
        None, "Stage 3: gathered elements that a rank holds at most.", least=0
    )
    max_reuse_distance: int | None = setting(
        None, "Stage 3: a parameter used again within so many elements is kept.", least=0
    )
    pin_memory: bool | None = setting(
        None, "Offload into page-locked memory; null: where there is a GPU."
    )
    communication_data_type: str | None = setting(
        None, "Type of reduced gradients; null: fp32.", ("fp32", "bf16")
    )
    wall_clock_breakdown: bool = setting(False, "DeepSpeed's own timers on the console.")
    file: str | None = setting(
        None,
        "A DeepSpeed configuration (JSON) for keys that are not here; where it contradicts the run, the run wins and says so.",
        path=True,
    )


@dataclass(frozen=True)
class EngineConfig:
    """Training engine, which manages gradients, optimizer and schedule.

    Data, learning rates, logs and checkpoints are the same with both engines.
    """

    name: str = setting(
        "megatron",
        "megatron: Megatron-core's DDP, optimizer and pipelines; deepspeed: ZeRO.",
        ("megatron", "deepspeed"),
    )
    zero_stage: int = setting(
        1,
        "deepspeed: what is split over the DP ranks: 1 the optimizer, 2 gradients too, 3 parameters too; 0 nothing (fp32 alone).",
        (0, 1, 2, 3),
    )
    offload_optimizer: bool = setting(
        False, "deepspeed: optimizer state and its update on the CPU (DeepSpeedCPUAdam)."
    )
    offload_parameters: bool = setting(
        False, "deepspeed, stage 3: parameters on the CPU until they are used."
    )
    deepspeed: DeepSpeedConfig = setting(DeepSpeedConfig, "DeepSpeed's own keys.")


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch size, precision and memory options of training."""

    steps: int | None = setting(None, "Optimizer steps; or give train.tokens.", least=1)
    tokens: int | None = setting(
        None, "Tokens to consume, rounded up to whole steps; or give train.steps.", least=1
    )
    micro_batch_size: int = setting(1, "Sequences a rank handles at once.", least=1)
    global_batch_size: int = setting(
        128, "Sequences a step over all ranks; the rest is gradient accumulation.", least=1
    )
    precision: str = setting(
        "bf16",
        "bf16: bf16 weights and activations, fp32 main weights and gradient accumulation; fp32.",
        ("bf16", "fp32"),
    )
    fp8: str = setting(
        "none",
        "tensorwise: linear maps of the layers multiply 8-bit floats, each tensor scaled by a power of two (docs/engines.md); delayed: by "
        "its largest magnitude in the steps before. On a GPU of compute capability 8.9 or more; a CPU emulates it.",
        ("none", "tensorwise", "delayed"),
    )
    fp8_history: int = setting(
        1024,
        "fp8=delayed: of how many steps the largest magnitude counts; 1: the last one's.",
        least=1,
    )
    fp8_margin: int = setting(
        0,
        "fp8=delayed: a scale has room for magnitudes 2^fp8_margin times as large.",
        least=0,
        below=17,
    )
    recompute: str = setting(
        "none",
        "What the backward pass computes again instead of keeping it. selective: what reads other tokens, and MLPs; full: each layer.",
        ("none", "selective", "full"),
    )
    cuda_graphs: bool = setting(
        False,
        "On a GPU: each layer's passes are captured in the first step, and replayed. The host launches one thing a pass (docs/engines.md).",
    )
    offload_activations: bool = setting(
        False,
        "What the backward pass needs of the layers' forward passes waits in the host's memory: no bit changes, and the copies take time.",
    )
    z_loss: float = setting(
        0.0,
        "Weight of (log Z)^2, Z the softmax's normaliser over the vocabulary, in what is descended (PaLM: 1e-4); not in the losses told.",
        least=0,
    )
    loss_chunk: int = setting(
        0,
        "Tokens whose logits a rank holds at once: so many after another, with their part of the gradients; 0: all of a micro-batch. The "
        "loss is the same but for rounding.",
        least=0,
    )
    seed: int = setting(
        42, "Seed of the initialisation and of the data order.", least=0, below=2**32
    )
    eval_interval: int = setting(1000, "Steps between validations; 0: only at the end.", least=0)
    eval_batches: int = setting(
        10, "Global batches a validation reads; always the same ones.", least=1
    )
    max_bad_steps: int = setting(
        10,
        "After this many steps in a row with a non-finite loss or gradient, or that were skipped as spikes, the run fails; so it does "
        "after more rewinds from about the same step.",
        least=1,
    )
    on_spike: str = setting(
        "none",
        "A spike is a step whose loss or gradient norm (its logarithm) is far above the running mean of those before it. skip: it updates "
        "nothing; rewind: training goes back to a checkpoint, and passes over the samples since.",
        ("none", "skip", "rewind"),
    )
    spike_deviations: float = setting(
        6.0, "on_spike: how many running standard deviations above the mean are a spike.", above=0
    )
    spike_rewind: int = setting(
        100,
        "on_spike=rewind: steps to go back at least, to a checkpoint of checkpoint.interval; where none is so early a spike is skipped.",
        least=1,
    )
    spike_window: int = setting(
        100,
        "on_spike: steps over which mean and deviation run; the first so many are never spikes.",
        least=2,
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule. Weight decay does not apply to norms, biases and other
    vectors.
    """

    name: str = setting(
        "adamw",
        "adamw; muon: linear maps are updated by their momentum made orthogonal, each head's q, k, v, ... by itself, and scaled so that lr "
        "and weight_decay are AdamW's, which updates all else (embeddings, output layer, vectors, filters).",
        ("adamw", "muon"),
    )
    lr: float = setting(3e-4, "Peak learning rate.", above=0)
    min_lr: float = setting(0.0, "Learning rate at the end of the decay.", least=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay of the matrices.", least=0)
    beta1: float = setting(0.9, "Adam's first moment.", least=0, below=1)
    beta2: float = setting(0.95, "Adam's second moment.", least=0, below=1)
    eps: float = setting(1e-8, "Adam's epsilon.", above=0)
    momentum: float = setting(0.95, "muon: decay of its momentum (Nesterov's).", least=0, below=1)
    clip_grad: float = setting(1.0, "Largest global gradient norm; 0: no clipping.", least=0)
    schedule: str = setting(
        "cosine", "Shape of the decay after warm-up.", ("cosine", "wsd", "linear", "constant")
    )
    warmup_steps: int | None = setting(
        None, "Steps of linear warm-up; or give warmup_tokens.", least=0
    )
    warmup_tokens: int | None = setting(
        None, "Tokens of linear warm-up; or give warmup_steps.", least=0
    )
    warmup_fraction: float | None = setting(
        None,
        "Warm-up as a share of the steps; warmup_steps and warmup_tokens go before it.",
        above=0,
        below=1,
    )
    decay_steps: int | None = setting(
        None,
        "wsd: steps of the final decay; or give decay_tokens; default a tenth of the run.",
        least=1,
    )
    decay_tokens: int | None = setting(
        None, "wsd: tokens of the final decay; or give decay_steps.", least=1
    )
    from_step: int = setting(
        0,
        "Step after which the schedule begins, warm-up first: where a fork has a schedule of its own.",
        least=0,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: when they are written, how many are kept, where they are copied, and where
    training starts.
    """

    interval: int = setting(
        1000,
        "Steps between checkpoints; 0: only at the end and when a signal stops the run.",
        least=0,
    )
    keep_last: int = setting(
        3,
        "Checkpoints kept; older ones are deleted after a newer one is complete. Amid steps that are not finite the newest from before "
        "them is kept besides.",
        least=1,
    )
    keep: tuple[int, ...] = setting(
        (),
        "Steps whose checkpoints are written besides and stay in the run directory, as those where forks begin.",
        least=1,
    )
    async_save: bool = setting(False, "Write in a background process while training goes on.")
    gb_per_second: float | None = setting(
        None,
        "What the storage takes from all ranks, in 10^9 bytes a second: --plan tells a save's seconds.",
        above=0,
    )
    mirror: str | None = setting(
        None,
        "Where checkpoints are sent besides: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or a folder, of this run alone; {name} stands for its "
        "name. A resume takes the newest good one.",
        path=True,
    )
    mirror_interval: int = setting(
        1, "Of the checkpoints those are sent whose step this divides, and the last one.", least=1
    )
    mirror_keep_last: int | None = setting(
        None, "Checkpoints kept in the mirror; null: all.", least=1
    )
    max_unsaved_steps: int | None = setting(
        None,
        "Steps that may be unsaved where a checkpoint cannot be written (null: none), and that the mirror may lack (null: any), before "
        "the run ends with 1.",
        least=1,
    )
    resume: str = setting(
        "auto",
        "auto: continue from the newest good checkpoint of the run directory; none: start anew, refused where checkpoints exist.",
        ("auto", "none"),
    )
    load: str | None = setting(
        None,
        "Start from the weights of this checkpoint folder (model only) when the run has none of its own.",
        path=True,
    )
    fork: str | None = setting(
        None,
        "Start where this checkpoint is, with its weights, moments and step, when the run has none of its own: a step_NNNNNNNN, or a run "
        "directory (its newest). Data, batch, length and schedule may be others.",
        path=True,
    )


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases settings.

    Logging is offline if wandb has no credentials for its server (WANDB_BASE_URL) and WANDB_MODE is
    not set.
    """

    enabled: bool = setting(False, "Log to Weights & Biases.")
    project: str = setting("pretrain", "Project name.")
    entity: str | None = setting(
        None, "Team or user that owns the project; null: the account's default."
    )
    group: str | None = setting(None, "Group that the run is shown in.")
    tags: tuple[str, ...] = setting((), "Tags of the run.")
    job_type: str | None = setting(None, "Job type of the run.")


@dataclass(frozen=True)
class ProfileConfig:
    """Steps that torch's profiler traces into profile/ in the run directory.

    SIGUSR2 also makes a rank trace its next step.
    """

    steps: tuple[int, ...] = setting((), "The steps' numbers.", least=1)
    ranks: tuple[int, ...] = setting((0,), "The ranks that trace them.", least=0)
    memory: bool = setting(
        False,
        "Write also the GPU allocator's history of each traced step, with Python stacks (pytorch.org/memory_viz); on a CPU there is none.",
    )


@dataclass(frozen=True)
class LogConfig:
    """Console lines, loggers, diagnostics and profiles."""

    interval: int = setting(
        10, "Steps between lines on the console; JSON lines are written for every step.", least=1
    )
    tensorboard: bool = setting(False, "Write TensorBoard events to the run directory.")
    wandb: WandbConfig = setting(WandbConfig, "Weights & Biases.")
    diagnostics_interval: int = setting(
        100,
        "Steps between looks at what ``diagnostics`` names; to the loss's loggers; 0: never.",
        least=0,
    )
    diagnostics: tuple[str, ...] = setting(
        ("layers",),
        "layers: every layer's energies, entropies, largest logit and step norm, on 256 tokens; tensors: the norms of every parameter's "
        "weight, gradient, update and moments.",
        ("layers", "tensors"),
    )
    straggler_interval: int = setting(
        100,
        "Steps between comparisons of the ranks' times, which name the slowest rank; see ranks.jsonl in pretrain/README.md; 0: never.",
        least=0,
    )
    straggler_ratio: float = setting(
        1.2,
        "How many times slower than the others a rank is when it is told on the console.",
        least=1,
    )
    profile: ProfileConfig = setting(ProfileConfig, "Traces.")
    device: str | None = setting(
        None,
        "Device whose peak FLOP/s the MFU refers to, and whose memory a plan is compared with (pretrain.plan.devices.DEVICE_PEAK_TFLOPS); "
        "null: found out on CUDA, no MFU on CPU; no comparison.",
    )


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation of checkpoints during training.

    ``tools.evaluate`` runs in a separate process of rank 0, and its scores are written to the
    loggers of the loss.
    """

    interval: int = setting(
        0,
        "Steps between the checkpoints that are evaluated, a multiple of checkpoint.interval; one at a time, the newest due. 0: none.",
        least=0,
    )
    at_end: bool = setting(
        False,
        "Evaluate the last checkpoint too; the job keeps its machines until that is done (a job of its own after it costs less: launch).",
    )
    suite: str = setting("quick", "Name of a suite, or the path of its YAML.", path=True)
    limit: int | None = setting(
        None, "The first so many examples of each task alone; null: all.", least=1
    )
    device: str = setting(
        "cpu",
        "Where it runs. cpu: a quarter of rank 0's CPUs, at the lowest priority. cuda: rank 0's GPU, whose memory it shares: leave room.",
        ("cpu", "cuda"),
    )
    merge: int | None = setting(
        None,
        "Evaluate also the average of so many checkpoints, the newest ones up to it, once there are so many; null: not.",
        least=2,
    )
    timeout_minutes: float = setting(
        60.0, "An evaluation that takes longer is ended; training goes on.", above=0
    )

    @property
    def wanted(self) -> bool:
        """True if any checkpoint is evaluated."""
        return bool(self.interval or self.at_end)


@dataclass(frozen=True)
class Stage:
    """One stage of the run; settings that it omits are the run's.

    If any of the last five keys is set, the stage has its own learning-rate schedule, which begins
    at its first step.
    """

    name: str = setting(
        MISSING, "Name of the stage.", check=lambda text: None if text else "must not be empty"
    )
    steps: int | None = setting(None, "Optimizer steps of the stage; or give tokens.", least=1)
    tokens: int | None = setting(
        None, "Tokens of the stage, rounded up to whole steps; or give steps.", least=1
    )
    data: tuple[Source, ...] = setting((), "Training blend; empty: data.train.")
    seq_length: int | None = setting(None, "As data.seq_length.", least=1)
    documents: str | None = setting(None, "As data.documents.", ("joined", "separate"))
    micro_batch_size: int | None = setting(None, "As train.micro_batch_size.", least=1)
    global_batch_size: int | None = setting(None, "As train.global_batch_size.", least=1)
    lr: float | None = setting(None, "As optimizer.lr.", above=0)
    min_lr: float | None = setting(None, "As optimizer.min_lr.", least=0)
    schedule: str | None = setting(
        None, "As optimizer.schedule.", ("cosine", "wsd", "linear", "constant")
    )
    warmup_steps: int | None = setting(
        None, "As optimizer.warmup_steps; null: none in a schedule of its own.", least=0
    )
    decay_steps: int | None = setting(None, "As optimizer.decay_steps.", least=1)


@dataclass(frozen=True)
class RunConfig:
    """Complete configuration of a run."""

    name: str = setting(
        "",
        "Name of the run; empty: the file's.",
        check=lambda text: (
            "must not be a path; use run_dir for the folder"
            if "/" in text or text in (".", "..")
            else None
        ),
    )
    run_dir: str | None = setting(
        None,
        "Run directory: checkpoints, logs, resolved configuration; {mixer} in it stands for the mixer's name or the pattern's; "
        "null: runs/<name>.",
        path=True,
    )
    model: ModelConfig = setting(ModelConfig, "The model.")
    data: DataConfig = setting(DataConfig, "The data.")
    parallel: ParallelConfig = setting(ParallelConfig, "The layout.")
    engine: EngineConfig = setting(EngineConfig, "Who owns gradients, optimizer and schedule.")
    train: TrainConfig = setting(TrainConfig, "Length, batch, precision.")
    optimizer: OptimizerConfig = setting(OptimizerConfig, "Optimizer and schedule.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
    stages: tuple[Stage, ...] = setting(
        (), "Stages, one after another, in place of train.steps and train.tokens; empty: one."
    )
    log: LogConfig = setting(LogConfig, "Logs.")
    evaluate: EvaluateConfig = setting(EvaluateConfig, "Evaluation while training.")


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the run at ``path`` with ``section.key=value`` overrides; sections may be parts
    (`fem_common.config.load`).

    Raises:
        ConfigError: the run's file is missing or unreadable. ConfigErrors: the configuration has
        mistakes. StorageError: a file system failed.
    """
    with _named_after(Path(path)) as named:
        return named(load(RunConfig, path, overrides, parts=True, absent=ABSENT))


def run_of(values: Mapping[Any, Any], path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run from ``values``, as `load_run` does for a file with that content; errors name
    ``path``.
    """
    with _named_after(path) as named:
        return named(build(RunConfig, values, path, overrides, parts=True, absent=ABSENT))


@contextmanager
def _named_after(path: Path) -> Iterator[Callable[[RunConfig], RunConfig]]:
    """Provide a function that names an unnamed run after its file.

    A configuration attached to ConfigErrors is named in the same way.
    """

    def named(config: RunConfig) -> RunConfig:
        return config if config.name else replace(config, name=path.stem)

    try:
        yield named
    except ConfigErrors as errors:
        raise ConfigErrors(
            errors.mistakes, None if errors.config is None else named(errors.config)
        ) from None
