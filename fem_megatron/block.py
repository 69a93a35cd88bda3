"""A block (one layer): the mixer, then the MLP, applied one or more times.

All repetitions use the same weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fem_megatron.mtp import MtpShape
from fem_megatron.parallel import Parallel, add_weights
from fem_megatron.shape import BlockShape, SwiGluShape, located
from fem_megatron.state import Context
from fem_megatron.update import Layer, Update, normed, rms_norm


class Block(nn.Module):
    """One layer: x <- mlp(mixer(x)), repeated ``recurrence`` times with the same weights.

    The loop Transformer and Hyper-SET repeat their layers in this way. With ``shape.repeated``
    "mixer" or "mlp", only this part is repeated, and the other one is applied once. Every iteration
    attends to the tokens again, so each iteration has a separate decoding state. To run more
    iterations than in training, set ``recurrence`` on the model's blocks.
    """

    def __init__(self, shape: BlockShape, parallel: Parallel) -> None:
        super().__init__()
        self.recurrence, self.repeated = shape.recurrence, shape.repeated
        self.mixer: Update = located(shape.mixer.layer_class)(shape.mixer, parallel)
        self.mlp: Update | None = (
            None if shape.mlp is None else located(shape.mlp.layer_class)(shape.mlp, parallel)
        )
        # Stored on the block, because a peft module that replaces an update has none of its
        # attributes.
        self.hidden = shape.mixer.hidden
        self.streams = [part.stream for part in (shape.mixer, shape.mlp) if part is not None]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return x after all iterations.

        x: [s (/ tensor-parallel size under sequence parallelism), b, channels]. The first D
        channels are the token's. If any layer of the model carries more values per token
        (velocities), their channels follow. Layers that use only the token channels return the
        remaining ones unchanged.
        """
        context = replace(context, origin=x[..., : self.hidden], memory={})
        for iteration in range(self.recurrence):
            here = replace(
                context if self.recurrence == 1 else context.within(str(iteration)),
                iteration=iteration,
            )
            if iteration == 0 or self.repeated != "mlp":
                x = _updated(self.mixer, self.streams[0], x, here.within("mixer"))
            if self.mlp is not None and (
                iteration == self.recurrence - 1 or self.repeated != "mixer"
            ):
                x = here.again(partial(_updated, self.mlp, self.streams[1]), x, here.within("mlp"))
        return x


def _updated(update: Update, stream: int, x: Tensor, context: Context) -> Tensor:
    """Return x with its first ``stream`` channels updated and the remaining ones unchanged."""
    if x.shape[-1] == stream:
        made: Tensor = update(x, context)
        return made
    return torch.cat((update(x[..., :stream], context), x[..., stream:]), dim=-1)


class SwiGlu(Update):
    """Layer of the SwiGLU MLP: x + down(silu(gate(h)) * up(h)), h = RMSNorm(x).

    Tensor parallel: the inner channels are split over the ranks.
    """

    def __init__(self, shape: SwiGluShape, parallel: Parallel) -> None:
        self.eps = shape.norm_eps
        super().__init__(shape, parallel)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = normed(x, self.norm(), self.eps)
        return x + self.step(h, context)

    def step(self, h: Tensor, context: Context) -> Tensor:
        """Return the MLP's output for the normalised input h, sliced over the sequence like h."""
        packed = self.parallel.project(h, self.gate_up)
        return self.parallel.leave(self.down(self.parallel.swiglu(packed)))


class PredictionModule(Layer):
    """Module of multi-token prediction, see `fem_megatron.mtp`.

    Tensor parallel: the columns of the projection are split over the ranks.

    block: the module's block, called with the stream and the further arguments of `forward`.
    """

    def __init__(self, shape: MtpShape, block: nn.Module, parallel: Parallel) -> None:
        super().__init__()
        self.parallel, self.eps = parallel, shape.norm_eps
        self.block = block
        add_weights(self, shape.own_weights(), parallel)

    def forward(self, hidden: Tensor, embedded: Tensor, *given: Any) -> Tensor:
        """Return the next hidden states h^k, in the shape of ``hidden``.

        hidden: h^(k-1), [s (/ tensor-parallel size under sequence parallelism), b, D].
        embedded: embeddings of the tokens k places ahead, [same, same, channels of the stream].
        """
        width = hidden.shape[-1]
        token = rms_norm(embedded[..., :width], self.token_norm(), self.eps)
        both = torch.cat((rms_norm(hidden, self.hidden_norm(), self.eps), token), dim=-1)
        columns = self.parallel.enter(both).chunk(self.parallel.size, dim=-1)[self.parallel.rank]
        x = self.parallel.leave(self.projection(columns.contiguous()))
        made = self.block(torch.cat((x, embedded[..., width:]), dim=-1), *given)
        stream: Tensor = made[0] if isinstance(made, tuple) else made
        return rms_norm(stream[..., :width], self.norm(), self.eps)
