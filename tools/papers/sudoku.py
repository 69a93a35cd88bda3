"""Hyper-SET, section 5.1: Sudoku by one layer that is applied repeatedly, and its energies over the
iterations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fem_megatron.block import Block
from fem_megatron.megatron import platform
from fem_megatron.mixers.hyperset.layer import HyperSet
from fem_megatron.state import Context
from tools.papers.boards import boards
from tools.papers.catalogue import RUNS
from tools.papers.experiment import Claim, Experiment, Size
from tools.papers.network import Network, Positions, classifier, model_of
from tools.papers.parts import SharedAttention
from tools.papers.training import IGNORED, Examples, Problem, classification, measure

WATCHABLE = (HyperSet, SharedAttention)
CELLS, WATCHED = 81, 64  # cells of a board; boards whose energies are measured
ROWS: dict[str, dict[str, Any]] = {
    "Transformer": {"mixer": "transformer"},
    "Hyper-SET": {"mixer": "hyperset", "hyperset": {"attention": "bisoftmax", "step_norm": False}},
    "Hyper-SET, row softmax": {
        "mixer": "hyperset",
        "hyperset": {"attention": "softmax", "step_norm": False},
    },
    "Energy Transformer": {"mixer": "energy_transformer"},
}
ITERATIONS = {"8 iterations": 8, "24 iterations": 24}


def examples(count: int, seed: int) -> Examples:
    """Return boards (0: not given) and the missing digits, each [count, 81]."""
    board, solved = torch.from_numpy(boards(count, seed, RUNS / "sudoku")).long().unbind(1)
    return board, solved.masked_fill(board > 0, IGNORED)


@torch.no_grad()
def watch(network: nn.Module, block: Block, inputs: Tensor) -> dict[str, list[float]]:
    """Run the network once and return name -> value before each iteration of a block's mixer.

    ``inputs`` are tokens [b, s]. The values are means over the boards: both energies summed over
    the tokens (Hyper-SET), and the effective rank and mean angle of a head's tokens.
    """
    seen: dict[str, list[float]] = {}

    def record(layer: nn.Module, given: tuple[Tensor, Context]) -> None:
        assert isinstance(layer, WATCHABLE)
        x, context = given
        for name, value in layer.diagnose(
            x, context, torch.arange(len(x), device=x.device)
        ).items():
            seen.setdefault(name, []).append(
                float((value.sum(0) if name.endswith("energy") else value).mean())
            )

    handle = block.mixer.register_forward_pre_hook(record)
    network(inputs)
    handle.remove()
    return seen


def iterated(task: Problem, network: Network) -> Problem:
    """Return the problem with measurements added that run after training.

    They apply the network's layers twice as often as training does; the values by iteration are
    those of the only layer.
    """

    blocks = [block for block in network.blocks if isinstance(block, Block)]

    def after() -> dict[str, Any]:
        for block in blocks:
            block.recurrence *= 2
        found: dict[str, Any] = {
            f"twice_{name}": value for name, value in measure(task, task.test).items()
        }
        if len(blocks) == 1 and isinstance(blocks[0].mixer, WATCHABLE):
            inputs = next(iter(task.test[0].to(platform.device()).split(WATCHED)))
            found |= watch(network, blocks[0], inputs)
        for block in blocks:
            block.recurrence //= 2
        return found

    return replace(task, after=after)


def problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the training problem for one row and seed.

    Each cell is embedded as its digit (0 if not given) plus a learned position. The loss covers the
    cells that were not given. All seeds use the same boards.
    """
    made = [examples(count, part) for part, count in enumerate((size.train, size.test, size.test))]
    torch.manual_seed(seed)
    model = model_of(
        size, {**ROWS[row], "causal": False, "rope": False, "recurrence": ITERATIONS[case]}
    )
    network = Network(
        model,
        Positions(nn.Embedding(10, size.width), CELLS, size.width),
        classifier(size.width, 10),
    )
    task = classification(network, *made)

    def scores(output: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, int]]:
        right = (output.argmax(-1) == targets) | (targets == IGNORED)
        return {**task.scores(output, inputs, targets), "boards": (right.all(1).sum(), len(right))}

    return iterated(replace(task, scores=scores), network)


QUICK = Size(
    ("8 iterations",),
    ("Transformer", "Hyper-SET", "Energy Transformer"),
    steps=500,
    batch=16,
    rates=(3e-3, 1e-2),
    train=2000,
    test=256,
    width=64,
    heads=4,
    init_std=0.1,
    weight_decay=0.1,
    betas=(0.9, 0.95),
)
FULL = replace(
    QUICK,
    cases=("24 iterations",),
    rows=tuple(ROWS),
    steps=112_500,
    rates=(1e-4,),
    warmup=0.0,
    train=9000,
    test=1000,
    width=768,
    heads=12,
    init_std=0.02,
    seeds=5,
)
"""Tables 6 and 7; 200 epochs."""
EXPERIMENT = Experiment(
    name="sudoku",
    metric="accuracy",
    rows=ROWS,
    sizes={"quick": QUICK, "full": FULL},
    problem=problem,
    scale=100.0,
    also={
        "boards": "Completely solved boards, in percent:",
        "twice_accuracy": "Cells at twice the iterations of training, in percent:",
        "twice_boards": "Boards at twice the iterations of training, in percent:",
    },
    curves={
        "attention_energy": "attention energy",
        "feed_forward_energy": "feed-forward energy",
        "effective_rank": "effective rank",
        "mean_angle": "mean angle, radians",
    },
    claims=(Claim("Hyper-SET", "Transformer"),),
    chance=lambda case, size: 1 / 9,
)
