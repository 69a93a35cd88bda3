"""Hyper-SET, section 5.3: reconstruct masked parts of an image, in this experiment pixels of
scikit-learn's digits.

The paper uses ImageNet-100 in the code of a VQ-GAN. The mask, its size and the loss follow its
appendix D.4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import fold, unfold

from tools.papers.experiment import Claim, Experiment, Size
from tools.papers.images import DIGITS, HYPERSET, divided
from tools.papers.images import QUICK as IMAGES
from tools.papers.network import Network, Positions, model_of
from tools.papers.training import Examples, Problem, measure

SIDE, PATCH, MOST, VIEWS = 8, 2, 0.4, 8
"""SIDE of an image and of a PATCH in pixels. MOST: share of masked patches in test data, and the
largest share in training. VIEWS: number of masked versions of each training image."""
PATCHES, PIXELS = (SIDE // PATCH) ** 2, PATCH**2
RANGE = 2.0  # pixels are from -1 to 1
FEWER = (0.1, 0.2, 0.3)
"""Further shares of masked patches in test data (tables 15 to 17)."""
WIDE = "Hyper-SET, M = 8 D, twice"


def _hyperset(multiplier: int, iterations: int) -> dict[str, Any]:
    """Return a row of table 14: the step sizes depend on x(0) and have no MLP of the iteration."""
    switches = HYPERSET["Hyper-SET"]["hyperset"] | {
        "step_condition": "origin",
        "time_mlp": False,
        "multiplier": multiplier,
    }
    return {"mixer": "hyperset", "hyperset": switches, "recurrence": iterations}


ROWS: dict[str, dict[str, Any]] = {
    "Transformer": {**HYPERSET["Transformer"], "recurrence": 6},
    "Hyper-SET": _hyperset(1, 6),
    WIDE: _hyperset(8, 12),
}


def hidden(count: int, generator: Generator, *, training: bool, share: float = MOST) -> Tensor:
    """Return a random mask [count, PATCHES] (bool) that is True for the patches to hide.

    In training the share is uniform up to ``share``, with at least one patch per image. In test
    data it is ``share``.
    """
    part = torch.rand(count, 1, generator=generator) if training else torch.ones(count, 1)
    number = (part * share * PATCHES).floor().clamp_min(1)
    return torch.rand(count, PATCHES, generator=generator).argsort(1).argsort(1) < number


def examples(images: Tensor, seed: int, *, training: bool, share: float = MOST) -> Examples:
    """Return inputs [n, PATCHES, PIXELS + 1], whose last number is 1 and the others 0 for a masked
    patch; and targets, all pixels. share: see `hidden`.
    """
    patches = unfold(images, PATCH, stride=PATCH).transpose(1, 2)
    if training:
        patches = patches.repeat(VIEWS, 1, 1)
    generator = Generator().manual_seed(seed)
    gone = hidden(len(patches), generator, training=training, share=share)[..., None]
    return torch.cat((patches.masked_fill(gone, 0.0), gone.to(patches)), -1), patches


class Seen(nn.Module):
    """Input layer for partly masked images.

    It applies a linear layer to visible patches and uses one learned token for masked patches.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(PIXELS, width)
        self.token = nn.Parameter(torch.empty(1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, PATCHES, PIXELS + 1] to [b, PATCHES, D]."""
        return torch.where(x[..., -1:] > 0, self.token, self.into(x[..., :-1]))


def scores(output: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, int]]:
    """Return {"psnr": (sum over images, number of images), "ssim": the same}; PSNR in decibels.

    They compare the true images with images whose masked patches are replaced by the output.
    """
    full = torch.where(inputs[..., -1:] > 0, output, targets).double()
    made, true = (
        fold(part.transpose(1, 2), SIDE, PATCH, stride=PATCH).flatten(1)
        for part in (full, targets.double())
    )
    error = (made - true).square().mean(1).clamp_min(1e-10)
    return {
        "psnr": ((10 * (RANGE**2 / error).log10()).sum(), len(made)),
        "ssim": (similarity(made, true).sum(), len(made)),
    }


def similarity(x: Tensor, y: Tensor) -> Tensor:
    """Return SSIM (Wang et al. 2004) of images [n, pixels] with range RANGE, in one window over the
    full image: [n].
    """
    first, second = (0.01 * RANGE) ** 2, (0.03 * RANGE) ** 2
    means = (x.mean(1), y.mean(1))
    spreads = (x.var(1, correction=0), y.var(1, correction=0))
    both = ((x - x.mean(1, keepdim=True)) * (y - y.mean(1, keepdim=True))).mean(1)
    light = (2 * means[0] * means[1] + first) / (means[0] ** 2 + means[1] ** 2 + first)
    return light * (2 * both + second) / (spreads[0] + spreads[1] + second)


def loss(output: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of the masked pixels."""
    gone = inputs[..., -1:]
    return ((output - targets).square() * gone).sum() / (gone.sum() * PIXELS)


def problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the problem: one shared layer, learned positions, bidirectional; a norm and a linear
    layer give the pixels of a patch.
    """
    parts = divided(case, size, seed)
    train, validation, test = (
        examples(images, 10 * seed + part, training=part == 0)
        for part, (images, _) in enumerate(parts)
    )
    torch.manual_seed(seed)
    head = nn.Sequential(nn.RMSNorm(size.width), nn.Linear(size.width, PIXELS))
    inputs = Positions(Seen(size.width), PATCHES, size.width)
    network = Network(model_of(size, {**ROWS[row], "causal": False, "rope": False}), inputs, head)
    task = Problem(network, train, validation, test, loss, scores, "psnr")
    requested = parts[2][0]

    def after() -> dict[str, Any]:
        found = {}
        for share in FEWER:
            fewer = examples(requested, 10 * seed + 2, training=False, share=share)
            found[name_of(share)] = measure(task, fewer)["psnr"]
        return found

    return replace(task, after=after)


def name_of(share: float) -> str:
    """Return the name of the PSNR with this share of masked patches."""
    return f"psnr_{share:.0%}".removesuffix("%")


def mean_image(case: str, size: Size) -> float:
    """Return the PSNR in decibels if masked parts are replaced by the mean training image of seed
    0.
    """
    (images, _), _, (requested, _) = divided(case, size, 0)
    inputs, targets = examples(requested, 2, training=False)
    mean = unfold(images.mean(0, keepdim=True), PATCH, stride=PATCH).transpose(1, 2)
    found, count = scores(mean.expand_as(targets), inputs, targets)["psnr"]
    return float(found) / count


EXPERIMENT = Experiment(
    name="masked-digits",
    metric="psnr",
    rows=ROWS,
    sizes={
        "quick": replace(
            IMAGES,
            cases=(DIGITS,),
            rows=tuple(ROWS),
            steps=400,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            l2=False,
            clip=3.0,
            constant=True,
            floor=0.0,
        )
    },
    problem=problem,
    also={
        "ssim": "Structural similarity (SSIM) in one window over the complete image:",
        **{
            name_of(share): f"PSNR with {share:.0%} of the patches masked (paper: {numbers}):"
            for share, numbers in zip(
                FEWER,
                ("17.69, 17.55, 17.67", "17.19, 16.99, 17.17", "16.62, 16.37, 16.59"),
                strict=True,
            )
        },
    },
    chance=mean_image,
    claims=(
        Claim("Transformer", "Hyper-SET"),
        Claim(WIDE, "Hyper-SET"),
        Claim(WIDE, "Transformer"),
    ),
)
