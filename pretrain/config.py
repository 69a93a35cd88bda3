"""Dataclasses of a run's configuration, one per section, and functions that load it.

The fields have help texts and ranges. ``pretrain.validate`` checks conditions that involve several
fields. Long, because it defines every key of a run. The module does not import torch.
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
from fem_megatron.context_parallel.shape import SPLIT_KINDS

ABSENT = {
    r"moe(_.*)?|(.*_)?experts?(_.*)?|router_.*|ep(_size)?": (
        "mixtures of experts and expert parallelism are not supported"
    ),
    r"(.*_)?cp(_.*)?|ulysses(_.*)?|ring_attention(_.*)?": (
        "context parallelism is set by parallel.context_parallel_size"
    ),
    r"checkpoint\.(tiers?|levels?)": (
        "checkpoints are written to run_dir every checkpoint.interval steps, and to "
        "checkpoint.mirror every mirror_interval"
    ),
    r"checkpoint\.(folder|dir|directory|path|save|url)": (
        "checkpoints are in run_dir, and checkpoint.mirror=URL copies them to another place"
    ),
}
"""Patterns of keys that similar configurations have but this one lacks -> explanation."""


SPLITS = ("train", "valid", "test")


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
    test: tuple[Source, ...] = setting((), "Test blend, read only by evaluation tools.")
    seq_length: int = setting(4096, "Tokens per sequence.", least=1)
    packing: str = setting(
        "stream",
        "stream: documents follow one another and are cut at the ends of sequences; best_fit: "
        "documents that fit into a sequence are not cut, at the cost of some padding.",
        ("stream", "best_fit"),
    )
    documents: str = setting(
        "joined",
        "joined: tokens read the earlier documents of their sequence; separate: no mixer reads "
        "across the end of a document.",
        ("joined", "separate"),
    )
    reset_positions: bool | None = setting(
        None, "Restart positions at each document; null: true if documents are separate."
    )
    eod_loss: bool = setting(
        True, "Include the prediction of the token after a document's end in the loss."
    )
    tokenizer: str | None = setting(
        None,
        "Folder of the Hugging Face tokenizer; null: the one named in the data's manifest.json.",
        path=True,
    )
    index_cache: str | None = setting(
        None,
        "Folder of the index caches, with one subfolder per sample order; null: index_cache/ in "
        "run_dir.",
        path=True,
    )
    store_cache: str | None = setting(
        None, "Folder for files read from URLs; null: tokens/ in run_dir.", path=True
    )
    store_cache_gb: float = setting(
        50.0, "Largest size of the .bin data in store_cache, in 10^9 bytes.", least=0
    )

    def named_sources(self) -> Iterator[tuple[str, str, Source]]:
        """Yield (split, key of the prefix, source) for every source."""
        for split in SPLITS:
            for number, source in enumerate(getattr(self, split)):
                yield split, f"data.{split}.{number}.prefix", source


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout.

    The data-parallel size is the world size divided by the other parallel sizes.
    """

    world_size: int | None = setting(
        None,
        "Number of processes for which the run is planned; null: the number that the launcher "
        "started.",
        least=1,
    )
    tensor_model_parallel_size: int = setting(
        1, "TP: each rank has complete heads and a slice of the MLP and the vocabulary.", least=1
    )
    pipeline_model_parallel_size: int = setting(
        1, "PP: each rank has consecutive layers (1F1B schedule).", least=1
    )
    virtual_pipeline_model_parallel_size: int | None = setting(
        None, "Model chunks per pipeline rank (interleaved schedule); null: one."
    )
    context_parallel_size: int = setting(
        1,
        "CP: each rank has 1 / CP of the tokens of every sequence (docs/long_context.md).",
        least=1,
    )
    context_parallel_kind: str | None = setting(
        None,
        "How tokens of other CP ranks are read. all_to_all: heads are exchanged for tokens; "
        "all_gather: attention gathers keys and values; ring: softmax attention passes them "
        "around. null: attention uses all_to_all if it has enough heads. Scans pass states unless "
        "all_to_all is set.",
        SPLIT_KINDS,
    )
    sequence_parallel: bool = setting(
        False, "SP: norms and residuals are split along the sequence over the TP ranks."
    )
    use_distributed_optimizer: bool = setting(
        True, "ZeRO-1: optimizer state is split over the DP ranks."
    )
    overlap_grad_reduce: bool | None = setting(
        None,
        "Reduce gradients during the backward pass; null: true on a GPU with Megatron or ZeRO-3.",
    )
    overlap_param_gather: bool | None = setting(
        None,
        "Gather updated parameters during the next forward pass (distributed optimizer); null: "
        "true if the gradient reduction overlaps.",
    )
    collective_timeout_minutes: float = setting(
        30.0,
        "Minutes that a rank waits for other ranks before the run fails; must be longer than rank "
        "0 takes to write a checkpoint or build the index cache.",
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
        """Return a copy in which the overlap settings that are null have the default of the engine.

        With Megatron on a GPU, reductions overlap, and gathers overlap too if the distributed
        optimizer is used. With ZeRO-3 on a GPU, reductions overlap. ZeRO-1 and ZeRO-2 would need a
        second bucket for overlapping, and DeepSpeed's own default is off.
        """
        megatron = engine.name == "megatron"
        reduce = self.overlap_grad_reduce
        gather = self.overlap_param_gather
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
        None, "Elements reduced at a time; null: 5e8, at most the size of the model.", least=1
    )
    allgather_bucket_size: int | None = setting(
        None, "Stages 1 and 2: elements gathered at a time; null: reduce_bucket_size.", least=1
    )
    reduce_scatter: bool | None = setting(
        None, "Stages 1 and 2: reduce-scatter instead of all-reduce."
    )
    contiguous_gradients: bool | None = setting(
        None, "Copy gradients into one buffer as they are computed."
    )
    round_robin_gradients: bool | None = setting(
        None, "Stages 1 and 2 with offload: distribute the copies to the host over the ranks."
    )
    sub_group_size: int | None = setting(
        None, "Stage 3: elements that the optimizer updates at a time.", least=1
    )
    prefetch_bucket_size: int | None = setting(
        None, "Stage 3: elements gathered ahead of their use.", least=0
    )
    param_persistence_threshold: int | None = setting(
        None, "Stage 3: parameters with fewer elements are not split.", least=0
    )
    model_persistence_threshold: int | None = setting(
        None, "Stage 3: largest number of elements that are not split.", least=0
    )
    max_live_parameters: int | None = setting(
        None, "Stage 3: largest number of gathered elements on a rank.", least=0
    )
    max_reuse_distance: int | None = setting(
        None,
        "Stage 3: keep a gathered parameter if it is used again within this number of elements.",
        least=0,
    )
    pin_memory: bool | None = setting(None, "Offload into page-locked memory; null: true on a GPU.")
    communication_data_type: str | None = setting(
        None, "Data type of reduced gradients; null: fp32.", ("fp32", "bf16")
    )
    wall_clock_breakdown: bool = setting(False, "Print DeepSpeed's own timers on the console.")
    file: str | None = setting(
        None,
        "DeepSpeed configuration file (JSON) for keys that are not listed. If it contradicts the "
        "run's configuration, the run's value is used and a message is printed.",
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
        "deepspeed: 1: the optimizer state is split over the DP ranks; 2: the gradients too; 3: "
        "the parameters too; 0: no splitting (only in fp32).",
        (0, 1, 2, 3),
    )
    offload_optimizer: bool = setting(
        False, "deepspeed: keep and update the optimizer state on the CPU (DeepSpeedCPUAdam)."
    )
    offload_parameters: bool = setting(
        False, "deepspeed, stage 3: keep parameters on the CPU until they are used."
    )
    deepspeed: DeepSpeedConfig = setting(DeepSpeedConfig, "DeepSpeed's own keys.")


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch size, precision and memory options of training."""

    steps: int | None = setting(None, "Optimizer steps; or give train.tokens.", least=1)
    tokens: int | None = setting(
        None, "Tokens to consume, rounded up to whole steps; or give train.steps.", least=1
    )
    micro_batch_size: int = setting(1, "Sequences that a rank processes at once.", least=1)
    global_batch_size: int = setting(
        128,
        "Sequences per step over all ranks; gradients are accumulated over micro-batches.",
        least=1,
    )
    precision: str = setting(
        "bf16",
        "bf16: bf16 weights and activations, fp32 main weights and gradient accumulation; fp32.",
        ("bf16", "fp32"),
    )
    fp8: str = setting(
        "none",
        "tensorwise: linear maps of the layers multiply 8-bit floats, with each tensor scaled by "
        "a power of two (docs/engines.md); delayed: scaled by the largest magnitude of earlier "
        "steps. Requires a GPU of compute capability 8.9 or more; a CPU emulates it.",
        ("none", "tensorwise", "delayed"),
    )
    fp8_history: int = setting(
        1024,
        "fp8=delayed: number of steps over which the largest magnitude is taken; 1: only the last "
        "step.",
        least=1,
    )
    fp8_margin: int = setting(
        0,
        "fp8=delayed: a scale leaves headroom for magnitudes larger by a factor of 2^fp8_margin.",
        least=0,
        below=17,
    )
    recompute: str = setting(
        "none",
        "Activations that the backward pass recomputes instead of storing. selective: reads of "
        "other tokens, and MLPs; full: complete layers.",
        ("none", "selective", "full"),
    )
    cuda_graphs: bool = setting(
        False,
        "On a GPU: capture each layer's passes in the first step and replay them later, with one "
        "launch per pass (docs/engines.md).",
    )
    offload_activations: bool = setting(
        False,
        "Keep the layers' activations in host memory until the backward pass. Results are bitwise "
        "the same; the copies take time.",
    )
    z_loss: float = setting(
        0.0,
        "Weight of the auxiliary loss (log Z)^2, with Z the normaliser of the softmax over the "
        "vocabulary (PaLM: 1e-4). Reported losses do not include it.",
        least=0,
    )
    loss_chunk: int = setting(
        0,
        "Number of tokens whose logits and gradients a rank computes at once; 0: a complete "
        "micro-batch. The loss is the same up to rounding.",
        least=0,
    )
    seed: int = setting(
        42, "Seed of the initialisation and of the data order.", least=0, below=2**32
    )
    eval_interval: int = setting(1000, "Steps between validations; 0: only at the end.", least=0)
    eval_batches: int = setting(10, "Global batches per validation; always the same ones.", least=1)
    max_bad_steps: int = setting(
        10,
        "The run fails after this many consecutive steps with a non-finite loss or gradient or a "
        "skipped spike, and after more than this many rewinds from about the same step.",
        least=1,
    )
    on_spike: str = setting(
        "none",
        "Reaction to a spike, a step whose loss or gradient norm (its logarithm) is far above the "
        "running mean of earlier steps. skip: the step updates no weights; rewind: training "
        "returns to a checkpoint and skips the samples since then.",
        ("none", "skip", "rewind"),
    )
    spike_deviations: float = setting(
        6.0,
        "on_spike: number of running standard deviations above the mean from which a step is "
        "a spike.",
        above=0,
    )
    spike_rewind: int = setting(
        100,
        "on_spike=rewind: minimum number of steps to go back, to a checkpoint of "
        "checkpoint.interval; if no checkpoint is early enough, the spike is skipped.",
        least=1,
    )
    spike_window: int = setting(
        100,
        "on_spike: number of steps for the running mean and deviation; no spikes are reported "
        "before this many steps.",
        least=2,
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule.

    Weight decay does not apply to norms, biases and other vectors.
    """

    name: str = setting(
        "adamw",
        "adamw; muon: linear maps are updated by their orthogonalized momentum, separately for "
        "each head's q, k, v, ..., and scaled so that lr and weight_decay mean the same as for "
        "AdamW. AdamW updates all other parameters (embeddings, output layer, vectors, filters).",
        ("adamw", "muon"),
    )
    lr: float = setting(3e-4, "Peak learning rate.", above=0)
    min_lr: float = setting(0.0, "Learning rate at the end of the decay.", least=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay of the matrices.", least=0)
    beta1: float = setting(0.9, "Adam's first moment.", least=0, below=1)
    beta2: float = setting(0.95, "Adam's second moment.", least=0, below=1)
    eps: float = setting(1e-8, "Adam's epsilon.", above=0)
    momentum: float = setting(0.95, "muon: decay rate of its Nesterov momentum.", least=0, below=1)
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
        "Warm-up as a share of the steps; ignored if warmup_steps or warmup_tokens is given.",
        above=0,
        below=1,
    )
    decay_steps: int | None = setting(
        None,
        "wsd: steps of the final decay; or give decay_tokens; default: a tenth of the run.",
        least=1,
    )
    decay_tokens: int | None = setting(
        None, "wsd: tokens of the final decay; or give decay_steps.", least=1
    )
    from_step: int = setting(
        0,
        "Step after which the schedule begins with its warm-up, for a fork with its own schedule.",
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
        "Number of checkpoints to keep; older ones are deleted after a newer one is complete. "
        "During a series of non-finite steps, the newest checkpoint before the series is kept too.",
        least=1,
    )
    keep: tuple[int, ...] = setting(
        (),
        "Additional steps whose checkpoints are written and never deleted, for example as "
        "starting points of forks.",
        least=1,
    )
    async_save: bool = setting(False, "Write in a background process while training continues.")
    gb_per_second: float | None = setting(
        None,
        "Write rate of the storage for all ranks together, in 10^9 bytes per second; --plan uses "
        "it to estimate the duration of a save.",
        above=0,
    )
    mirror: str | None = setting(
        None,
        "Location for copies of the checkpoints, used only by this run: s3://BUCKET/FOLDER, "
        "gs://BUCKET/FOLDER or a folder; {name} is replaced by the run's name. A resume takes the "
        "newest good checkpoint of run directory and mirror.",
        path=True,
    )
    mirror_interval: int = setting(
        1,
        "Copy to the mirror the checkpoints whose step is a multiple of this number, and the "
        "last one.",
        least=1,
    )
    mirror_keep_last: int | None = setting(
        None, "Number of checkpoints to keep in the mirror; null: all.", least=1
    )
    max_unsaved_steps: int | None = setting(
        None,
        "Number of steps that may be unsaved if a checkpoint cannot be written (null: none), and "
        "that may be missing in the mirror (null: any number), before the run ends with exit code "
        "1.",
        least=1,
    )
    resume: str = setting(
        "auto",
        "auto: continue from the newest good checkpoint of the run directory; none: start from "
        "the beginning, which is an error if checkpoints exist.",
        ("auto", "none"),
    )
    load: str | None = setting(
        None,
        "Start from the weights of this checkpoint folder (weights only), if the run has no "
        "checkpoint.",
        path=True,
    )
    fork: str | None = setting(
        None,
        "Start from this checkpoint with its weights, moments and step, if the run has no "
        "checkpoint: a step_NNNNNNNN folder, or a run directory (its newest checkpoint). Data, "
        "batch, length and schedule may differ.",
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
    group: str | None = setting(None, "Group of the run.")
    tags: tuple[str, ...] = setting((), "Tags of the run.")
    job_type: str | None = setting(None, "Job type of the run.")


@dataclass(frozen=True)
class ProfileConfig:
    """Steps that torch's profiler traces into profile/ in the run directory.

    SIGUSR2 also makes a rank trace its next step.
    """

    steps: tuple[int, ...] = setting((), "Numbers of the steps to trace.", least=1)
    ranks: tuple[int, ...] = setting((0,), "Ranks that trace the steps.", least=0)
    memory: bool = setting(
        False,
        "Also write the history of the GPU allocator for each traced step, with Python stacks "
        "(pytorch.org/memory_viz); not available on a CPU.",
    )


@dataclass(frozen=True)
class LogConfig:
    """Console lines, loggers, diagnostics and profiles."""

    interval: int = setting(
        10, "Steps between console lines; JSON lines are written for every step.", least=1
    )
    tensorboard: bool = setting(False, "Write TensorBoard events to the run directory.")
    wandb: WandbConfig = setting(WandbConfig, "Weights & Biases.")
    diagnostics_interval: int = setting(
        100,
        "Steps between the diagnostics in ``diagnostics``, written to the same loggers as the "
        "loss; 0: never.",
        least=0,
    )
    diagnostics: tuple[str, ...] = setting(
        ("layers",),
        "layers: energies, entropies, largest logit and step norm of every layer, on 256 tokens; "
        "tensors: norms of the weight, gradient, update and moments of every parameter.",
        ("layers", "tensors"),
    )
    straggler_interval: int = setting(
        100,
        "Steps between comparisons of the ranks' times, which identify the slowest rank (see "
        "ranks.jsonl in pretrain/README.md); 0: never.",
        least=0,
    )
    straggler_ratio: float = setting(
        1.2,
        "Ratio of a rank's time to the median of the compared ranks from which the console "
        "reports it as slow.",
        least=1,
    )
    profile: ProfileConfig = setting(ProfileConfig, "Profiler traces.")
    device: str | None = setting(
        None,
        "Device whose peak FLOP/s is used for the MFU and whose memory is compared with a plan "
        "(pretrain.plan.devices.DEVICE_PEAK_TFLOPS); null: detected on CUDA, no MFU on a CPU, no "
        "memory comparison.",
    )


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation of checkpoints during training.

    ``tools.evaluate`` runs in a separate process of rank 0, and its scores are written to the
    loggers of the loss.
    """

    interval: int = setting(
        0,
        "Steps between evaluated checkpoints, a multiple of checkpoint.interval; one evaluation "
        "runs at a time, of the newest checkpoint due; 0: none.",
        least=0,
    )
    at_end: bool = setting(
        False,
        "Evaluate the last checkpoint too. The job keeps its machines until the evaluation is "
        "done; a separate job afterwards costs less (see launch).",
    )
    suite: str = setting("quick", "Name of a suite, or the path of its YAML file.", path=True)
    limit: int | None = setting(
        None,
        "Evaluate at most this many examples of each task, the first ones; null: all.",
        least=1,
    )
    device: str = setting(
        "cpu",
        "Device of the evaluation. cpu: a quarter of rank 0's CPUs, at the lowest priority; cuda: "
        "rank 0's GPU, which must have enough free memory.",
        ("cpu", "cuda"),
    )
    merge: int | None = setting(
        None,
        "Also evaluate the average of this number of newest checkpoints, once they exist; null: "
        "no average.",
        least=2,
    )
    timeout_minutes: float = setting(
        60.0, "Minutes after which an evaluation is terminated; training continues.", above=0
    )

    @property
    def wanted(self) -> bool:
        """True if any checkpoint is evaluated."""
        return bool(self.interval or self.at_end)


@dataclass(frozen=True)
class Stage:
    """One stage of the run. Settings that are omitted have the values of the run.

    If lr, min_lr, schedule, warmup_steps or decay_steps is set, the stage has its own learning-rate
    schedule, which begins at its first step.
    """

    name: str = setting(
        MISSING, "Name of the stage.", check=lambda text: None if text else "must not be empty"
    )
    steps: int | None = setting(None, "Optimizer steps of the stage; or give tokens.", least=1)
    tokens: int | None = setting(
        None, "Tokens of the stage, rounded up to whole steps; or give steps.", least=1
    )
    data: tuple[Source, ...] = setting((), "Training blend; empty: data.train.")
    seq_length: int | None = setting(None, "Overrides data.seq_length.", least=1)
    documents: str | None = setting(None, "Overrides data.documents.", ("joined", "separate"))
    micro_batch_size: int | None = setting(None, "Overrides train.micro_batch_size.", least=1)
    global_batch_size: int | None = setting(None, "Overrides train.global_batch_size.", least=1)
    lr: float | None = setting(None, "Overrides optimizer.lr.", above=0)
    min_lr: float | None = setting(None, "Overrides optimizer.min_lr.", least=0)
    schedule: str | None = setting(
        None, "Overrides optimizer.schedule.", ("cosine", "wsd", "linear", "constant")
    )
    warmup_steps: int | None = setting(
        None,
        "Overrides optimizer.warmup_steps; null: no warm-up in the stage's own schedule.",
        least=0,
    )
    decay_steps: int | None = setting(None, "Overrides optimizer.decay_steps.", least=1)


def _name_fault(text: str) -> str | None:
    if "/" in text or text in (".", ".."):
        return "must not be a path; use run_dir for the folder"
    return None


@dataclass(frozen=True)
class RunConfig:
    """Complete configuration of a run."""

    name: str = setting(
        "",
        "Name of the run; empty: the name of the file.",
        check=_name_fault,
    )
    run_dir: str | None = setting(
        None,
        "Run directory for checkpoints, logs and the resolved configuration; {mixer} is replaced "
        "by the name of the mixer or pattern; null: runs/<name>.",
        path=True,
    )
    model: ModelConfig = setting(ModelConfig, "The model.")
    data: DataConfig = setting(DataConfig, "The data.")
    parallel: ParallelConfig = setting(ParallelConfig, "The layout.")
    engine: EngineConfig = setting(EngineConfig, "Training engine.")
    train: TrainConfig = setting(TrainConfig, "Length, batch, precision.")
    optimizer: OptimizerConfig = setting(OptimizerConfig, "Optimizer and schedule.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
    stages: tuple[Stage, ...] = setting(
        (), "Stages, one after another, in place of train.steps and train.tokens; empty: no stages."
    )
    log: LogConfig = setting(LogConfig, "Logs.")
    evaluate: EvaluateConfig = setting(EvaluateConfig, "Evaluation while training.")


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration at ``path`` with ``section.key=value`` overrides.

    A section may be a mapping, or the name or path of a file (see ``parts`` of
    `fem_common.config.load`).

    Raises:
        ConfigError: the run's file is missing or unreadable.
        ConfigErrors: the configuration has mistakes.
        StorageError: a file system failed.
    """
    with _named_after(Path(path)) as named:
        return named(load(RunConfig, path, overrides, parts=True, absent=ABSENT))


def run_of(values: Mapping[Any, Any], path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration from ``values``, as `load_run` does for a file with this content.

    path: file that error messages name. The stem of its name is also the run's default name.
    """
    with _named_after(path) as named:
        return named(build(RunConfig, values, path, overrides, parts=True, absent=ABSENT))


@contextmanager
def _named_after(path: Path) -> Iterator[Callable[[RunConfig], RunConfig]]:
    """Yield a function that gives a run without a name the name of its file.

    A configuration attached to a ConfigErrors that the block raises is named in the same way.
    """

    def named(config: RunConfig) -> RunConfig:
        return config if config.name else replace(config, name=path.stem)

    try:
        yield named
    except ConfigErrors as errors:
        raise ConfigErrors(
            errors.mistakes, None if errors.config is None else named(errors.config)
        ) from None
