"""Place a run on ranks: the sizes that follow from its layout and from the kind of its devices.

The module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fem_megatron.catalogue import mixer_names
from fem_megatron.config import ModelConfig
from fem_megatron.shape import BlockShape, Training
from pretrain.config import RunConfig


def blocks_by_mixer(model: ModelConfig) -> dict[str, BlockShape]:
    """Return mixer -> block, each mixer of the model once."""
    return dict(zip(mixer_names(model), model.blocks(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A run on a number of data-parallel ranks.

    cuda: True for GPUs; False for CPUs, which run unfused operations and keep more memory.
    """

    config: RunConfig
    data_parallel: int
    cuda: bool

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step on each data-parallel rank."""
        train = self.config.train
        return train.global_batch_size // (train.micro_batch_size * self.data_parallel)

    @property
    def replicas(self) -> int:
        """Number of ranks that contain the same weights.

        Gradients are summed over these ranks, and they may share the optimizer state.
        """
        return self.data_parallel * self.config.parallel.context_parallel_size

    @property
    def splits_optimizer(self) -> bool:
        """True if the replicas share the optimizer state, so that each has a part of it."""
        engine = self.config.engine
        if engine.name == "deepspeed":
            return engine.zero_stage > 0
        return self.config.parallel.use_distributed_optimizer

    def optimizer_part(self, elements: int) -> int:
        """Return the number of these elements whose optimizer state one rank has."""
        return -(-elements // self.replicas) if self.splits_optimizer else elements

    @property
    def micro_batch_tokens(self) -> int:
        """Number of tokens of a micro-batch on one context-parallel rank."""
        config = self.config
        length = config.data.seq_length // config.parallel.context_parallel_size
        return config.train.micro_batch_size * length

    @property
    def element(self) -> int:
        """Bytes per element in the training precision."""
        return 2 if self.config.train.precision == "bf16" else 4

    @property
    def training(self) -> Training:
        """Settings in the form that the methods of shapes require."""
        layout, train = self.config.parallel, self.config.train
        tensor = layout.tensor_model_parallel_size
        return Training(
            element=self.element,
            tensor_parallel=tensor,
            sequence_split=tensor if layout.sequence_parallel else 1,
            micro_batch=train.micro_batch_size,
            length=self.config.data.seq_length,
            cuda=self.cuda,
            again=train.recompute == "selective",
            ranks=layout.context_parallel_size,
            fp8=train.fp8 != "none",
        )

    @property
    def stream_bytes(self) -> float:
        """Bytes per token of the residual stream on one rank."""
        return self.element * self.config.model.stream_size / self.training.sequence_split

    @property
    def offloads_activations(self) -> bool:
        """True if activations are offloaded from a GPU to the host.

        On a CPU, device and host memory are the same.
        """
        return self.config.train.offload_activations and self.cuda
