"""Small language models of bytes with the mixers and MLPs of two papers.

CEM's attention, its MLP, and both are compared with Llama's (CEM, section 4), and second-order
attention with multi-head attention. The data are the source files of the running Python's
standard library. The papers' own sizes are runs of `pretrain` (``catalogue``).
"""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tools.papers.experiment import Claim, Experiment, Size
from tools.papers.network import Network, classifier, model_of
from tools.papers.training import Examples, Problem, classification

BYTES = 256
MODULES = 120
STRIDE = 7


def corpus() -> Tensor:
    """Return the largest single-file modules of the library in a fixed arbitrary order, as bytes,
    uint8 [n].
    """
    files = sorted(
        Path(sysconfig.get_path("stdlib")).glob("*.py"),
        key=lambda file: (-file.stat().st_size, file.name),
    )[:MODULES]
    content = b"\n".join(files[STRIDE * n % len(files)].read_bytes() for n in range(len(files)))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def windows(size: Size, seed: int) -> list[Examples]:
    """Return training, validation and test data: bytes [n, length], and the next byte of each.

    They are from the first eight tenths, the ninth tenth and the last tenth of the text.
    """
    text, made = corpus(), list[Examples]()
    tenth = len(text) // 10
    for part, (begin, end, count) in enumerate(
        ((0, 8, size.train), (8, 9, size.test), (9, 10, size.test))
    ):
        generator = Generator().manual_seed(5000 + (10 * seed if part == 0 else 0) + part)
        places = torch.randint(
            begin * tenth, end * tenth - size.length, (count,), generator=generator
        )
        cut = text[places[:, None] + torch.arange(size.length + 1)].long()
        made.append((cut[:, :-1], cut[:, 1:]))
    return made


def problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the problem: a causal model of bytes; loss in nats per byte."""
    torch.manual_seed(seed)
    network = Network(
        model_of(size, ROWS[row]), nn.Embedding(BYTES, size.width), classifier(size.width, BYTES)
    )
    task = classification(network, *windows(size, seed))

    def scores(output: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, int]]:
        return {"nats": (task.loss(output, inputs, targets) * targets.numel(), targets.numel())}

    return replace(task, scores=scores, score="nats")


def _cem(mixer: str, mlp: str, steps: int, **switches: Any) -> dict[str, Any]:
    parts = [name for name, part in (("attention", mixer), ("mlp", mlp)) if part == "cem"]
    return {
        "mixer": mixer,
        "mlp": mlp,
        "cem": {**{f"steps_{part}": steps for part in parts}, **switches},
    }


CEM: dict[str, dict[str, Any]] = {
    "Llama": {"mixer": "transformer"},
    "CEM attention T = 1": _cem("cem", "swiglu", 1),
    "CEM attention T = 2": _cem("cem", "swiglu", 2),
    "CEM MLP T = 1": _cem("transformer", "cem", 1),
    "CEM MLP T = 2": _cem("transformer", "cem", 2),
    "CEM T = 1": _cem("cem", "cem", 1),
    "CEM T = 2": _cem("cem", "cem", 2),
    "CEM T = 2, raw residual": _cem("cem", "cem", 2, residual="raw"),
    "FEM-SM": {"mixer": "fem_softmax"},
    "Energy Transformer": {
        "mixer": "energy_transformer",
        "energy_transformer": {"alpha": 1.0},
        "recurrence": 2,
    },
    "NRGPT": {"mixer": "nrgpt"},
}
SECOND: dict[str, dict[str, Any]] = {
    "MHA": {"mixer": "transformer"},
    "MHA2nd1st": {"mixer": "mha2nd1st"},
    "MHA2nd": {"mixer": "mha2nd"},
    "Att2nd1st": {"mixer": "mha2nd1st", "num_attention_heads": 1},
}
ROWS = CEM | SECOND
QUICK = Size(
    ("bytes",),
    (
        "Llama",
        "CEM attention T = 2",
        "CEM MLP T = 2",
        "CEM T = 1",
        "CEM T = 2",
        "FEM-SM",
        "Energy Transformer",
        "NRGPT",
    ),
    steps=300,
    batch=16,
    rates=(3e-3, 1e-2),
    train=8000,
    test=128,
    width=64,
    heads=4,
    layers=2,
    length=128,
    init_std=0.05,
    weight_decay=0.1,
)
FULL = replace(
    QUICK,
    rows=tuple(CEM),
    steps=20_000,
    batch=64,
    train=80_000,
    test=1024,
    width=256,
    heads=8,
    layers=6,
    length=512,
    seeds=5,
)
CEM_LANGUAGE = Experiment(
    name="cem-language",
    metric="nats",
    rows=CEM,
    sizes={"quick": QUICK, "full": FULL},
    problem=problem,
    falls=True,
    claims=(
        Claim("CEM attention T = 2", "Llama"),
        Claim("CEM T = 2", "Llama"),
        Claim("CEM T = 2", "CEM T = 1"),
        Claim("CEM MLP T = 2", "CEM MLP T = 1"),
        Claim("CEM T = 2", "CEM T = 2, raw residual"),
    ),
)
SECOND_LANGUAGE = Experiment(
    name="second-language",
    metric="nats",
    rows=SECOND,
    sizes={
        "quick": replace(QUICK, rows=("MHA", "MHA2nd1st", "Att2nd1st")),
        "full": replace(FULL, rows=tuple(SECOND)),
    },
    problem=problem,
    falls=True,
    claims=(Claim("MHA2nd1st", "MHA"), Claim("MHA2nd1st", "Att2nd1st")),
)
