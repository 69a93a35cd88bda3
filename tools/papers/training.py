"""Small trainer for data that is not text: AdamW, warm-up and cosine, and scores on validation and
test data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fem_megatron.megatron import platform
from tools.papers.experiment import Size

Examples = tuple[Tensor, Tensor]
"""Inputs and targets, the examples first."""
EVALUATED = 256  # examples per batch of an evaluation
LOOKS = 15
"""Number of evaluations during a training, each of which can stop it if the score is sufficient."""
IGNORED = -100
"""Target of a position that is not scored."""


@dataclass(frozen=True)
class Problem:
    """A network, its data and its scores.

    loss: function (output, inputs, targets) -> loss. scores: function of the same arguments ->
    {name: (sum over the examples, number of summed values)}. score: name of the score that is used
    for validation. enough: value of this score at which a trial ends early. root: a score is the
    square root of its mean. after: function that returns further measurements of the trained
    network.
    """

    network: nn.Module
    train: Examples
    validation: Examples
    test: Examples
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    scores: Callable[[Tensor, Tensor, Tensor], dict[str, tuple[Tensor, int]]]
    score: str
    enough: float = math.inf
    root: bool = False
    after: Callable[[], dict[str, Any]] = dict


def classification(
    network: nn.Module, train: Examples, validation: Examples, test: Examples
) -> Problem:
    """Return a problem with cross-entropy; accuracy is the share of correct answers over targets
    that are not ignored.
    """

    def scores(output: Tensor, _: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, int]]:
        requested = targets != IGNORED
        return {"accuracy": ((output.argmax(-1) == targets)[requested].sum(), int(requested.sum()))}

    def loss(output: Tensor, _: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)

    return Problem(network, train, validation, test, loss, scores, "accuracy")


def regression(
    network: nn.Module, train: Examples, validation: Examples, test: Examples
) -> Problem:
    """Return a problem with mean squared error; rmse is its root over all examples."""

    def scores(output: Tensor, _: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, int]]:
        return {"rmse": ((output - targets).double().square().sum(), targets.numel())}

    return Problem(
        network,
        train,
        validation,
        test,
        lambda output, _, targets: mse_loss(output, targets),
        scores,
        "rmse",
        root=True,
    )


def train(problem: Problem, size: Size, rate: float, seed: int) -> dict[str, Any]:
    """Train the network of a problem, measure it and return the record of a trial.

    Returns:
        Number of parameters and steps, last loss, seconds, the problem's scores on test data and,
        with the prefix ``train_``, on training data, and ``validation``, the score on validation
        data. If the loss was not finite, ``loss`` and ``validation`` are None, without scores.
    """
    began, where = time.monotonic(), platform.device()
    network = problem.network.to(where)
    kind = torch.optim.Adam if size.l2 else torch.optim.AdamW
    optimizer = kind(groups(network, size.weight_decay), lr=rate, betas=size.betas)
    order = torch.Generator().manual_seed(seed)
    inputs, targets = (full.to(where) for full in problem.train)
    batch = min(size.batch, len(inputs))
    if size.epochs:
        size = replace(size, steps=size.epochs * (len(inputs) // batch))
    places = torch.empty(0, dtype=torch.int64)  # of the rest of the epoch
    last = math.nan
    epoch, late = max(1, len(inputs) // batch), list[dict[str, float]]()
    network.train()
    for step in range(size.steps):
        if len(places) < batch:
            places = torch.randperm(len(inputs), generator=order)
        here, places = places[:batch].to(where), places[batch:]
        for group in optimizer.param_groups:
            group["lr"] = size.floor + (rate - size.floor) * schedule(step, size)
        given = inputs[here]
        loss = problem.loss(network(given), given, targets[here])
        last = float(loss.detach())
        if not math.isfinite(last):
            break
        optimizer.zero_grad()
        loss.backward()
        if size.clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), size.clip)
        optimizer.step()
        if (left := size.steps - 1 - step) % epoch == 0 and 0 < left // epoch < size.averaged:
            late.append(measure(problem, problem.test))
            network.train()
        if problem.enough < math.inf and (step + 1) % max(1, size.steps // LOOKS) == 0:
            if measure(problem, problem.validation)[problem.score] >= problem.enough:
                break
            network.train()
    parameters = sum(weight.numel() for weight in network.parameters())
    record: dict[str, Any] = {"parameters": parameters, "loss": last, "steps": step + 1}
    if math.isfinite(last):
        tested = len(problem.test[0])
        few = measure(problem, (inputs[:tested], targets[:tested]))
        record |= {f"train_{name}": value for name, value in few.items()}
        late.append(measure(problem, problem.test))
        record |= {name: fmean(scores[name] for scores in late) for name in late[0]}
        record["validation"] = measure(problem, problem.validation)[problem.score]
        record |= problem.after()
    else:
        record |= {"loss": None, "validation": None}
    return record | {"seconds": round(time.monotonic() - began, 1)}


def schedule(step: int, size: Size) -> float:
    """Return the share of the peak learning rate at a step, counted from 0.

    1 is the peak and 0 the floor.
    """
    warm = max(1, round(size.warmup * size.steps))
    if step < warm:
        return (step + 1) / warm
    if size.constant:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, size.steps - warm)))


def groups(network: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, with and without weight decay.

    Weights of pretraining's layers decay as ``Weight.decayed`` defines. Weights of this tool's
    modules decay if they are matrices.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for weight in network.parameters():
        spec = getattr(weight, "spec", None)
        decays = weight.ndim > 1 if spec is None else spec.decayed
        if decays:
            decayed.append(weight)
        else:
            free.append(weight)
    return [{"params": decayed, "weight_decay": decay}, {"params": free, "weight_decay": 0.0}]


@torch.no_grad()
def measure(problem: Problem, examples: Examples) -> dict[str, float]:
    """Return the problem's scores over all these examples."""
    problem.network.eval()
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    where = platform.device()
    parts = [full.to(where).split(EVALUATED) for full in examples]
    for inputs, targets in zip(*parts, strict=True):
        found = problem.scores(problem.network(inputs), inputs, targets)
        for name, (value, count) in found.items():
            sums[name] = sums.get(name, 0.0) + float(value)
            counts[name] = counts.get(name, 0) + count
    means = {name: value / max(1, counts[name]) for name, value in sums.items()}
    return {name: math.sqrt(value) for name, value in means.items()} if problem.root else means
