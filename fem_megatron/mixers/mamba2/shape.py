"""Shape of Mamba-2 (arXiv 2405.21060). The module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths
from fem_megatron.mixers.delta.shape import conv_init
from fem_megatron.shape import (
    ESTIMATE,
    FIXED,
    OUTPUT,
    WIDE,
    Kept,
    Packing,
    Shape,
    Training,
    Weight,
    Weights,
    keys_seen,
)

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig

CHUNK = 64  # tokens per chunk


@dataclass(frozen=True)
class Mamba2Config:
    """Sizes of Mamba-2; read only if ``model.mixer`` is mamba2."""

    inner_size: int | None = setting(
        None,
        "Width of the values; null: about 4 hidden_size^2 parameters, with the number of heads a "
        "multiple of 2 (from 12 heads of 4, from 32 of 8). The paper: 2 hidden_size.",
        least=1,
    )
    head_size: int = setting(
        64, "Channels of a head; the number of heads is inner_size / head_size.", least=1
    )
    state_size: int = setting(
        128, "N: channels of B and of C, which all heads share (the paper: 64 or 128).", least=1
    )
    conv_size: int = setting(4, "Taps of the short causal convolution.", least=1)


@dataclass(frozen=True)
class Mamba2Shape(Shape):
    """Shape of Mamba-2: S_t = exp(-A delta) S_(t-1) + delta B x^T,  y = S^T C + D x.

    The layer has about 3 inner W + 2 N W parameters, where W is hidden_size and N the number of
    channels of B and C. The paper's inner = 2 W gives 6 W^2.
    """

    layer_class = "fem_megatron.mixers.mamba2.layer:Mamba2"
    kept = Kept(67.0, 44.0)
    sliced = True

    hidden: int
    heads: int
    head: int
    state: int
    conv: int
    norm_eps: float

    @classmethod
    def of(cls, model: ModelConfig, layer: int) -> Mamba2Shape:
        """Return the shape for ``model``, equal in all layers.

        Raises ValueError if sizes do not fit or the model is not causal.
        """
        mamba, hidden = model.mamba2, model.hidden_size
        if not model.causal:
            raise ValueError(
                "model.causal: Mamba-2 reads from left to right only; use another mixer, or set "
                "true"
            )
        if mamba.inner_size is None:
            budget = (4 * hidden - 2 * mamba.state_size) / 3 / mamba.head_size
            step = 8
            if budget < 32:
                step = 4 if budget >= 12 else 2
            heads = step * max(1, round(budget / step))
        elif mamba.inner_size % mamba.head_size:
            raise ValueError(
                f"model.mamba2.inner_size={mamba.inner_size} is not a multiple of "
                f"model.mamba2.head_size={mamba.head_size}"
            )
        else:
            heads = mamba.inner_size // mamba.head_size
        return cls(
            hidden, heads, mamba.head_size, mamba.state_size, mamba.conv_size, model.norm_eps
        )

    @property
    def inner(self) -> int:
        """Channels of the values over all heads."""
        return self.heads * self.head

    def weights(self) -> Weights:
        """Return the weights as a dictionary from name to weight.

        They are norm, in_proj (head-major: values, then gate), steps, bc_proj, the convolutions,
        the offsets of decay rate and step size, skip (D), out_norm and out_proj.
        """
        per_head = {"log_rate": 0.0, "step_bias": 0.0, "skip": 1.0}
        return {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "in_proj.weight": Weight((2 * self.inner, self.hidden), split=0, maps=(self.head,)),
            "steps.weight": Weight((self.heads, self.hidden), split=0, maps=None),
            "bc_proj.weight": Weight(
                (2 * self.state, self.hidden), bare=True, mup=OUTPUT, maps=(self.state,)
            ),
            "conv": Weight(
                (self.inner, self.conv), split=0, init=conv_init(self.conv), mup=FIXED, maps=None
            ),
            "conv_bias": Weight((self.inner,), split=0, init=0.0),
            "bc_conv": Weight(
                (2 * self.state, self.conv), init=conv_init(self.conv), mup=FIXED, maps=None
            ),
            "bc_conv_bias": Weight((2 * self.state,), init=0.0),
            **{
                name: Weight((self.heads,), split=0, init=start) for name, start in per_head.items()
            },
            "out_norm.weight": Weight((self.inner,), split=0, init=1.0),
            "out_proj.weight": Weight((self.hidden, self.inner), split=1),
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of one token's forward pass by part.

        The scan is counted in its chunked form: scores and read within the chunk, and update and
        read of the state.
        """
        seen = keys_seen(min(length, CHUNK), whole_square)
        scan = 2.0 * seen * (self.state + self.head) + 4.0 * self.state * self.head
        return {"mixer projections": self.linear_flops(), "state space": self.heads * scan}

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of one sequence's decoding state.

        The state consists of a matrix [N, d] in fp32 for every head and the last inputs of the
        convolutions.
        """
        return (
            self.inner * self.state * max(4, element)
            + (self.conv - 1) * (self.inner + 2 * self.state) * element
        )

    def reads(self) -> set[str]:
        return {"mamba2"}

    def counts_padding(self) -> bool:
        return self.conv > 1

    def split_widths(self) -> dict[str, int]:
        return {"Mamba-2's heads, model.mamba2.inner_size / head_size": self.heads}

    def cut_widths(self) -> SplitWidths:
        return SplitWidths(
            scanned=self.split_widths()
            | {"B's and C's channels, 2 * model.mamba2.state_size": 2 * self.state}
        )

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the traffic of the convolutions and the scan between ranks that share a sequence.

        If ``kinds.states`` is set, ranks pass the scan's states and the last tokens of each chunk.
        Otherwise they exchange the convolutions' inputs and outputs, the values, the decays, the
        output, and B and C.
        """
        e, p, tensor = training.element, training.product, training.tensor_parallel
        if kinds.states:
            matrices = self.heads * training.wide * self.state * (self.head + 1)
            return Crossing(
                states=matrices / tensor
                + training.tokens_before(self.conv - 1) * e * (self.inner / tensor + 2 * self.state)
            )
        scan = self.heads * training.wide + 2 * p * self.inner
        return Crossing(
            (2 * e * self.inner + scan) / tensor + 2 * e * 2 * self.state, 2 * p * self.state
        )

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the bytes per token that autograd keeps: an estimate, but exact in bf16 on a GPU.

        The exact count has terms per inner channel and per channel of B and C, which the
        convolutions, the scan and the gated norm keep.
        """
        if not training.cuda or training.element == WIDE:
            return super().activation_bytes(training)
        inner, state = (20, 8) if training.again else (24, 12)
        entered = training.element * self.hidden / training.sequence_split
        return {
            ESTIMATE: entered + inner * self.inner / training.tensor_parallel + state * self.state
        }

    def packing(self) -> dict[str, Packing]:
        """Return the packing of in_proj.

        The scan reads x, so x corresponds to attention's values.
        """
        return {
            "in_proj.weight": Packing(self.heads, {"x": self.head, "gate": self.head}, {"x": "v"})
        }

    def summary(self) -> str:
        return f"{self.heads} heads of {self.head}, state {self.state}"
