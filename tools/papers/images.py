"""Images in patches: Hyper-SET's section 5.2 with the variants of its table 3, and FEM in DeiT (its
table 3).

The quick form uses scikit-learn's digits, 8 x 8 in grey; CIFAR and ImageNet-100 are read from files
or from the Hub.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import unfold

from fem_common.errors import UserError
from tools.papers import pictures
from tools.papers.catalogue import DATA
from tools.papers.experiment import Claim, Experiment, Size, published
from tools.papers.network import Last, Network, Positions, fem, model_of
from tools.papers.parts import SharedAttention
from tools.papers.sudoku import iterated
from tools.papers.training import Examples, Problem, classification

DIGITS, FILES = "digits", "ImageNet-100"
CASES = {
    DIGITS: (8, 1, 10, 2),
    "CIFAR-10": (32, 3, 10, 8),
    "CIFAR-100": (32, 3, 100, 8),
    FILES: (224, 3, 100, 16),
}
"""Case -> side, channels, classes, side of a patch."""


def images(case: str) -> tuple[Tensor, Tensor, int | None]:
    """Return (images, classes, start) of a case.

    ``images`` is float32 [n, channels, side, side] from -1 to 1, ``classes`` is [n]. ``start`` is
    the index of the first test image, or None if the data set defines no test part. Raises
    UserError if a package or the data is missing.
    """
    if case == DIGITS:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UserError(f"{case}: {error}; pip install -e .[eval]") from None
        pixels, classes = load_digits(return_X_y=True)
        full = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
        return full, torch.tensor(classes), None
    side, channels, kinds, _ = CASES[case]
    parts = pictures.dataset(
        DATA / case.lower(), "uoft-cs/" + case.lower().replace("-", ""), ("fine_label", "label")
    )
    found = []
    labels: list[int] = []
    for part in parts:
        decoded = [np.asarray(image.convert("RGB")) for image in part["image"]]
        found.append(torch.from_numpy(np.stack(decoded)))
        labels += part["label"]
    classes = torch.tensor(labels)
    full = torch.cat(found)
    if full.shape[1:] != (side, side, channels):
        raise UserError(
            f"{case}: the images have shape {' x '.join(map(str, full.shape[1:]))}; expected"
            f" {side} x {side} x {channels}"
        )
    pictures.check_classes(case, classes, kinds)
    return full.permute(0, 3, 1, 2) / 127.5 - 1, classes, len(found[0])


def divided(case: str, size: Size, seed: int) -> list[Examples]:
    """Return training, validation and test data; parts that the data set does not define depend on
    ``seed``.
    """
    if case == FILES:
        return _divided_files(size, seed)
    full, classes, first = images(case)
    order = torch.randperm(first or len(full), generator=Generator().manual_seed(4000 + seed))
    test = torch.arange(first, len(full)) if first else order[: size.test]
    rest = order if first else order[size.test :]
    training, validation = rest[size.test :][: size.train], rest[: size.test]
    return [(full[part], classes[part]) for part in (training, validation, test)]


def _divided_files(size: Size, seed: int) -> list[Any]:
    """Return training and validation data from train, test data from val."""
    side, _, classes, _ = CASES[FILES]
    (full, numbers), (test, requested) = pictures.found(
        DATA / FILES.lower(), side, classes, "clane9/imagenet-100"
    )
    order = torch.randperm(len(full), generator=Generator().manual_seed(4000 + seed))
    parts = (order[size.test :][: size.train or None], order[: size.test])
    return [*((full.part(part), numbers[part]) for part in parts), (test, requested)]


class Patches(nn.Module):
    """Square patches of an image through a linear layer, row by row."""

    def __init__(self, channels: int, side: int, width: int) -> None:
        super().__init__()
        self.side, self.into = side, nn.Linear(channels * side**2, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, channels, n side, m side] to [b, n m, D]."""
        made: Tensor = self.into(unfold(x, self.side, stride=self.side).transpose(1, 2))
        return made


def problem(
    case: str, row: dict[str, Any], size: Size, seed: int, *, learned: bool = True
) -> tuple[Problem, Network]:
    """Return the problem: patches followed by a learned token from which the class is read; learned
    or sinusoidal positions. Bidirectional.
    """
    side, channels, classes, patch = CASES[case]
    torch.manual_seed(seed)
    model = model_of(size, {**row, "causal": False})
    width = model.hidden_size
    inputs = Positions(
        Patches(channels, patch, width),
        (side // patch) ** 2,
        width,
        1,
        sines=0.0 if learned else 1.0,
    )
    head = nn.Sequential(Last(width), nn.Linear(width, classes))
    network = Network(model, inputs, head, row.get("parts"))
    return classification(network, *divided(case, size, seed)), network


def iterated_problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the problem with shared layers: one, or the row's number (None: no shared layers).

    The depth is 6 with learned positions for digits, else 12 with sinusoids, as in the paper.
    """
    depth = 6 if case == DIGITS else 12
    given = {**HYPERSET[row], "rope": False}
    given["num_layers"] = given.get("num_layers", 1) or depth
    given["recurrence"] = depth // given["num_layers"]
    if size.width == SMALL:
        given |= {"hidden_size": width_of(row), "num_attention_heads": width_of(row) // 64}
    return iterated(*problem(case, given, size, seed, learned=case == DIGITS))


def stacked_problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the problem in DeiT's form: separate layers, learned positions."""
    return problem(case, STACKED[row], size, seed)[0]


def _hyperset(**switches: Any) -> dict[str, Any]:
    return {
        "mixer": "hyperset",
        "hyperset": {
            "attention": "bisoftmax",
            "multiplier": 1,
            "step_condition": "current",
            "step_norm": False,
            **switches,
        },
    }


TRANSFORMER: dict[str, Any] = {"mixer": "transformer"}
LAYERS = (2, 3)  # separate layers; the product of layers and iterations is the same
FIXED = {"step_size": "fixed", "step_condition": "origin", "step_norm": True}
"""Fixed step sizes; the other two are the defaults, because nothing reads them."""
RANKS = (4, 8, 16, 32)  # of the adapters, table 4
HYPERSET: dict[str, dict[str, Any]] = {
    "Transformer": TRANSFORMER,
    "Hyper-SET": _hyperset(),
    "sigmoid attention": _hyperset(attention="sigmoid"),
    "linear attention": _hyperset(attention="linear"),
    "softmax FF": _hyperset(feed_forward="softmax"),
    "gated FF": _hyperset(feed_forward="gated"),
    "steps 0.5": _hyperset(**FIXED, alpha=0.5, gamma=0.5),
    "steps 0.1": _hyperset(**FIXED, alpha=0.1, gamma=0.1),
    "Energy Transformer": {"mixer": "energy_transformer"},
    "shared QKV": {**TRANSFORMER, "parts": {"mixer": SharedAttention}},
    "shared QKVO": {**TRANSFORMER, "parts": {"mixer": partial(SharedAttention, tied=1)}},
    "shared QKVO, reversed": {**TRANSFORMER, "parts": {"mixer": partial(SharedAttention, tied=-1)}},
    **{f"LoRA of rank {rank}": _hyperset(lora_rank=rank) for rank in RANKS},
    **{
        f"{name}, {layers} layers": {**row, "num_layers": layers}
        for name, row in (("Transformer", TRANSFORMER), ("Hyper-SET", _hyperset()))
        for layers in LAYERS
    },
    "Transformer, no sharing": {**TRANSFORMER, "num_layers": None},
    "Hyper-SET, small": _hyperset(),
    "Transformer, wide": TRANSFORMER,
    "Energy Transformer, wide": {"mixer": "energy_transformer"},
    "Hyper-SET, wide": _hyperset(),
}
"""The rows of tables 1, 3, 4 and 20, of figure 4 and of appendix F.3. ``parts``: see `Network`."""
SMALL, SCALED = 384, 512
"""Widths of the paper's configurations (table 12); a head has 64 channels."""


def width_of(row: str) -> int:
    """Return the paper's width of a row of HYPERSET (tables 1, 3, 4 and 20; figure 4)."""
    if row.endswith("wide"):
        return 1536 if row.startswith("Hyper-SET") else 1152
    others = ("Transformer", "Energy", "shared", "Hyper-SET, small")
    return SMALL if row.startswith(others) else SCALED


STACKED: dict[str, dict[str, Any]] = {
    "softmax": {"mixer": "transformer"},
    "FEM-SM": {"mixer": "fem_softmax"},
    "GLA": fem("gla", ""),
    "FEM-GLA": {"mixer": "fem_gla"},
}
PLAIN = Size(
    (DIGITS,),
    tuple(STACKED),
    steps=300,
    batch=64,
    rates=(3e-3, 1e-2),
    train=1200,
    test=290,
    width=64,
    heads=4,
    layers=2,
    init_std=0.1,
    weight_decay=5e-5,
)
QUICK = replace(
    PLAIN,
    rows=(*tuple(HYPERSET)[:9], "shared QKV", "shared QKVO", "shared QKVO, reversed"),
    layers=1,
    clip=None,
    l2=True,
    floor=1e-5,
)
CIFAR = replace(
    QUICK,
    cases=("CIFAR-10", "CIFAR-100"),
    rows=tuple(HYPERSET),
    steps=78_125,
    batch=128,
    rates=(1e-3,),
    train=45_000,
    test=5000,
    width=SMALL,
    heads=6,
    init_std=0.02,
    warmup=0.025,
    seeds=5,
)
"""Table 8: 200 epochs of 50,000 images, of which 5,000 are for validation."""
HYPERSET_IMAGES = Experiment(
    name="hyperset-images",
    metric="accuracy",
    rows=HYPERSET,
    sizes={"quick": QUICK, "full": CIFAR},
    problem=iterated_problem,
    scale=100.0,
    also={"twice_accuracy": "At twice the iterations of training:"},
    curves={
        "attention_energy": "attention energy",
        "feed_forward_energy": "feed-forward energy",
        "effective_rank": "effective rank",
        "mean_angle": "mean angle, radians",
    },
    published=published("hyperset-images"),
    claims=(
        *(Claim("Hyper-SET", row) for row in tuple(HYPERSET)[:9] if row != "Hyper-SET"),
        Claim("Hyper-SET", "Hyper-SET, small"),
        *(Claim(f"LoRA of rank {rank}", "Hyper-SET") for rank in RANKS),
        *(Claim(f"Hyper-SET, {layers} layers", "Hyper-SET") for layers in LAYERS),
        Claim("Hyper-SET, wide", "Transformer, wide"),
    ),
    chance=lambda case, size: 1 / CASES[case][2],
)
ROWS_100 = (
    "Transformer",
    "Energy Transformer",
    "Hyper-SET, small",
    "Hyper-SET",
    *(f"LoRA of rank {rank}" for rank in RANKS),
)
IMAGENET_100 = replace(
    HYPERSET_IMAGES,
    name="imagenet-100",
    rows={row: HYPERSET[row] for row in ROWS_100},
    # 200 epochs of 121,689 images: 126,689 less 5,000 for validation.
    sizes={
        "full": replace(
            CIFAR,
            cases=(FILES,),
            rows=ROWS_100,
            steps=95_070,
            batch=256,
            train=0,
            test=5000,
            seeds=1,
        )
    },
    published=published("imagenet-100"),
    claims=(
        Claim("Hyper-SET", "Transformer"),
        *(Claim(f"LoRA of rank {rank}", "Hyper-SET") for rank in RANKS),
    ),
)
FEM_IMAGES = Experiment(
    name="fem-images",
    metric="accuracy",
    rows=STACKED,
    sizes={
        "quick": PLAIN,
        "full": replace(
            PLAIN,
            cases=("CIFAR-10", "CIFAR-100"),
            steps=78_125,
            batch=128,
            rates=(3e-4, 1e-3),
            train=45_000,
            test=5000,
            width=192,
            heads=3,
            layers=12,
            init_std=0.02,
            weight_decay=0.05,
            warmup=0.025,
            seeds=5,
        ),
    },
    problem=stacked_problem,
    scale=100.0,
    claims=(Claim("FEM-SM", "softmax"), Claim("FEM-GLA", "GLA")),
    chance=lambda case, size: 1 / CASES[case][2],
)
