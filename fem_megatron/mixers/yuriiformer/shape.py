"""Shapes of YuriiFormer: attention and MLP as Nesterov steps on tokens and their velocities.

The module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fem_megatron.mixers.attention.shape import AttentionShape
from fem_megatron.shape import Shape, SwiGluShape, Training, Weight, Weights

SHARE, GAIN = 0.9, 1.0  # initial values of mu and beta, and of gamma


class AcceleratedShape(Shape):
    """Shape of a step with momentum: [x | v] -> [x' | v'], each with ``hidden`` channels."""

    @property
    def stream(self) -> int:
        return 2 * self.hidden

    def weights(self) -> Weights:
        """Return the step's weights; velocity_norm; mu, beta and gamma, one number each.

        mu and beta are stored before the sigmoid, gamma before the softplus.
        """
        share, gain = math.log(SHARE / (1 - SHARE)), math.log(math.expm1(GAIN))
        starts = {"mu": share, "beta": share, "gamma": gain}
        return {
            **super().weights(),  # type: ignore[safe-super]
            "velocity_norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            **{name: Weight((1,), init=start, per_token=True) for name, start in starts.items()},
        }

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the bytes of the step without momentum, plus those of the velocity.

        The velocity's part is the stream and the step, and on a CPU also the sum that becomes the
        velocity, for the tokens of a rank's slice.
        """
        tensors = 3 if training.cuda else 4
        return super().activation_bytes(training) | {
            "velocity": tensors * training.element * self.hidden / training.sequence_split
        }


@dataclass(frozen=True)
class AcceleratedAttentionShape(AcceleratedShape, AttentionShape):
    """Shape of attention's step with momentum."""

    layer_class = "fem_megatron.mixers.yuriiformer.layer:AcceleratedAttention"


@dataclass(frozen=True)
class AcceleratedSwiGluShape(AcceleratedShape, SwiGluShape):
    """Shape of the SwiGLU MLP's step with momentum."""

    layer_class = "fem_megatron.mixers.yuriiformer.layer:AcceleratedSwiGlu"
