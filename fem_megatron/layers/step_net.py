"""Hyper-SET's learned step sizes alpha_t, gamma_t of every token and channel (its appendix D.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu

from fem_megatron.layers.update import Layer, rms_norm
from fem_megatron.shapes.hyperset import HyperSetShape


class StepNet(Layer):
    """(alpha_t, gamma_t) = out(gelu(norm(time_out(gelu(time_in(sinusoidal(t)))) + x))).

    ``out`` starts at zero, so the first model is the identity. The paper's code zeroes the two layers on t as well, and their weights then
    never get a gradient; here they are drawn. All weights are held whole and act on a rank's slice of the tokens.
    """

    def __init__(self, shape: HyperSetShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor, iteration: int) -> tuple[Tensor, Tensor]:
        """x [..., D], x(0) or x(t), and t - 1, from 0 without end -> alpha, gamma [..., D]."""
        switches = self.shape.switches
        embedding = sinusoidal(iteration + 1, self.shape.time_size, x)
        if switches.time_mlp:
            embedding = self.time_out(gelu(self.time_in(embedding)))
        h = x + embedding
        if switches.step_norm:
            h = rms_norm(h, self.norm.weight, self.shape.norm_eps)
        alpha, gamma = self.out(gelu(h)).chunk(2, dim=-1)
        return alpha, gamma


def sinusoidal(t: int, size: int, like: Tensor) -> Tensor:
    """[sin(t w_i), cos(t w_i)] with w_i = 10000^(-i / (size/2 - 1)): [size], even, of ``like``'s type and device."""
    half = size // 2
    wide = torch.promote_types(like.dtype, torch.float32)
    frequencies = torch.exp(torch.arange(half, dtype=wide, device=like.device) * (-math.log(10000.0) / max(1, half - 1)))
    angles = t * frequencies
    return torch.cat((angles.sin(), angles.cos())).to(like.dtype)
