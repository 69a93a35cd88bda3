"""Numerical differences between two tensors, the weights of two models, two forward passes, and two
tokenizers. No input or output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fem_common.text import first_few
from fem_megatron.config import ModelConfig

from .folder import UNREAD
from .stock import to_stock, why_not_stock
from .weight_conversion import Made, Tensors, to_fem

LOGITS = "logits"
TOP = {"embed_tokens": "embedding", "norm": "final norm", "lm_head": LOGITS}
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.(.*))?$")

Trace = dict[str, Tensor]
"""Place in the model -> its output on the CPU, without dimensions of size one; in the order of
computation.
"""


def place(path: str) -> str:
    """Convert ``model.layers.3.mixer.in_proj`` to ``layer 3, mixer.in_proj``; outside the layers
    return the module's name or the common term for it.
    """
    found = _LAYER.search(path)
    if found is None:
        leaf = path.rpartition(".")[2]
        return TOP.get(leaf, leaf)
    return f"layer {found[1]}, {found[2]}" if found[2] else f"layer {found[1]}"


def place_of_weight(name: str) -> str:
    """Return the place of the module that owns a parameter."""
    return place(re.sub(r"\.(weight|bias)$", "", name))


def layer_of(where: str) -> float:
    """Return the layer number of a place; -1 before the layers, infinity after them."""
    found = re.match(r"layer (\d+)", where)
    if found:
        return int(found[1])
    return float("inf") if where in ("final norm", LOGITS) else -1


@torch.no_grad()
def trace(model: Any, ids: list[int]) -> Trace:
    """Run one sequence forward and return the outputs of all modules. Repeated calls of a module
    have separate entries, ``layer 0, mixer, time 2``.
    """
    seen: Trace = {}

    def keep(where: str, value: Any) -> None:
        tensor = _tensor(value)
        if tensor is None or not tensor.is_floating_point():
            return
        times = 2
        name = where
        while name in seen:
            name, times = f"{where}, time {times}", times + 1
        seen[name] = tensor.detach().squeeze().to("cpu", copy=True)

    handles = []
    for path, module in model.named_modules():
        if not path or path == model.base_model_prefix or isinstance(module, nn.ModuleList):
            continue
        where = place(path)
        handles.append(
            module.register_forward_hook(lambda _, __, value, where=where: keep(where, value))
        )
    try:
        answer = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    seen.pop(LOGITS, None)  # replaced by the logits that the model returns, as the last entry
    return {**seen, LOGITS: answer.logits[0].detach().to("cpu", copy=True)}


def _tensor(value: Any) -> Tensor | None:
    """Return the tensor that a module returns, the first one of several."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list):
        return next((found for found in map(_tensor, value) if found is not None), None)
    return None


# Configuration keys of the training, without influence on the computed values.
NOT_COMPUTED = (
    "make_vocab_size_divisible_by",
    "init_std",
    "initializer_range",
    "attention_backend",
)
CHUNK = 1 << 22  # numbers compared in one step: 32 MB in float64


@dataclass(frozen=True)
class Difference:
    """Difference of two tensors at one place. absolute: the largest |a - b|; infinite if only one
    is non-finite or shapes differ. scale: the largest finite |a| or |b|. note: the shapes, if they
    differ.
    """

    where: str
    absolute: float
    scale: float
    note: str = ""

    @property
    def relative(self) -> float:
        """Ratio absolute / scale."""
        return 0.0 if self.absolute == 0 else self.absolute / self.scale if self.scale else math.inf

    def worse(self, other: Difference) -> Difference:
        """Return the larger value of each number, for two differences of one place."""
        return replace(
            self,
            absolute=max(self.absolute, other.absolute),
            scale=max(self.scale, other.scale),
            note=self.note or other.note,
        )


def difference(where: str, a: Tensor, b: Tensor) -> Difference:
    """Return the difference of two tensors; NaN equals NaN."""
    if a.shape != b.shape:
        return Difference(where, math.inf, 1.0, f"shapes {tuple(a.shape)} and {tuple(b.shape)}")
    absolute = scale = 0.0
    for left, right in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
        one, two = left.double(), right.double()
        apart = torch.where(
            (one == two) | (one.isnan() & two.isnan()), 0.0, (one - two).abs()
        ).nan_to_num(math.inf)
        absolute = max(absolute, apart.max().item() if apart.numel() else 0.0)
        for side in (one, two):
            finite = side[side.isfinite()]
            scale = max(scale, finite.abs().max().item() if finite.numel() else 0.0)
    return Difference(where, absolute, scale)


# --- weights --------------------------------------------------------------------------------------


def exported(weights: Tensors, model: ModelConfig) -> Tensors:
    """Return the tensors of a checkpoint with the names and shapes of its export."""
    return Made(weights, to_stock(model) if why_not_stock(model) is None else to_fem(model))


@dataclass(frozen=True)
class Weights:
    """Comparison of two models' weights. differences: of every common tensor. only_a, only_b: names
    that one model lacks.
    """

    differences: list[Difference]
    only_a: list[str]
    only_b: list[str]

    @property
    def equal(self) -> bool:
        """True if all common tensors are numerically equal."""
        return all(found.absolute == 0 for found in self.differences)

    def beyond(self, tolerance: float) -> list[Difference]:
        """Return differences larger than ``tolerance`` times the largest number of the tensor, in
        the order of the layers.
        """
        far = [found for found in self.differences if found.relative > tolerance]
        return sorted(far, key=lambda found: layer_of(place_of_weight(found.where)))


def compare_weights(a: Tensors, b: Tensors, *, tied: bool) -> Weights:
    """Compare two models tensor by tensor. ``tied``: an output layer that only one of them stores
    equals the embedding of the other.
    """
    shared = [name for name in a.shapes if name in b.shapes]
    alone = (
        [name for name in one.shapes if name not in other.shapes] for one, other in ((a, b), (b, a))
    )
    only_a, only_b = (
        [name for name in names if not (tied and name == "lm_head.weight")] for names in alone
    )
    return Weights(
        [difference(name, *(one.read([name])[name] for one in (a, b))) for name in shared],
        only_a,
        only_b,
    )


# --- activations and logits -----------------------------------------------------------------------


def compare_traces(a: Trace, b: Trace) -> Iterator[Difference]:
    """Yield the difference at every common place, in the order of ``a``; logits are compared over
    the entries that both vocabularies have.
    """
    for where, value in a.items():
        if where in b:
            other = b[where]
            if where == LOGITS:
                entries = min(value.shape[-1], other.shape[-1])
                value, other = value[..., :entries], other[..., :entries]
                # Two models with non-finite logits do not count as equal.
                if not (value.isfinite().all() and other.isfinite().all()):
                    yield Difference(where, math.inf, 1.0, "not all numbers are finite")
                    continue
            yield difference(where, value, other)


@dataclass(frozen=True)
class Predictions:
    """Comparison of next-token distributions. agree: tokens with the same most likely successor.
    kl: sum of KL(a || b) in nats.
    """

    tokens: int = 0
    agree: int = 0
    kl: float = 0.0
    largest_kl: float = 0.0

    def and_of(self, a: Tensor, b: Tensor) -> Predictions:
        """Return the sums with those of logits a and b [t, vocabulary] added."""
        entries = min(a.shape[-1], b.shape[-1])
        one, two = (logits[..., :entries].double().log_softmax(-1) for logits in (a, b))
        kl = (one.exp() * (one - two)).nan_to_num(0.0).sum(-1).clamp_min(0.0)
        agree = int((one.argmax(-1) == two.argmax(-1)).sum())
        largest = max(self.largest_kl, kl.max().item())
        return Predictions(
            self.tokens + len(kl), self.agree + agree, self.kl + kl.sum().item(), largest
        )


# --- settings and tokenizers ----------------------------------------------------------------------


def flat(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one with dotted keys, without keys that do not affect the
    computation.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif (prefix or key not in UNREAD) and key not in NOT_COMPUTED:
            found[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return found


def compare_settings(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> both values for each difference; None for a key that one side lacks."""
    one, two = flat(a), flat(b)
    return {
        key: (one.get(key), two.get(key))
        for key in sorted({*one, *two})
        if one.get(key) != two.get(key)
    }


def compare_tokenizers(a: Any | None, b: Any | None, texts: list[str]) -> str | None:
    """Return the difference of two tokenizers as text; None if they are equal or one is unknown."""
    if a is None or b is None:
        return None
    one, two = a.get_vocab(), b.get_vocab()
    if one != two:
        apart = sorted({token for token in {*one, *two} if one.get(token) != two.get(token)})
        return (
            f"{len(one)} and {len(two)} entries, {len(apart)} of them differ, such as {apart[0]!r}"
        )
    for text in texts:
        if a(text)["input_ids"] != b(text)["input_ids"]:
            return f"the same entries, but other ids for {text[:40]!r}"
    return None


@dataclass(frozen=True)
class First:
    """First place at which two models differ. weights: differing weights of its layer; None: not
    compared. computed: the differing output, or None.

    before: the largest relative difference of earlier outputs.
    """

    where: str
    weights: list[Difference] | None
    computed: Difference | None
    before: float

    def __str__(self) -> str:
        parts = []
        if self.weights:
            largest = max(self.weights, key=lambda found: found.absolute)
            names = first_few([found.where for found in self.weights], 2)
            parts.append(
                f"{number(largest.absolute)} in weights"
                f" ({names}{', ' + largest.note if largest.note else ''})"
            )
        if self.computed is not None:
            parts.append(
                f"{number(self.computed.absolute)} in its output"
                + (f" ({self.computed.note})" if self.computed.note else "")
            )
        blame = (
            ""
            if self.weights != []
            else "; its weights agree, so configuration, code or rounding differs"
        )
        return (
            f"{self.where}: first difference, {', '.join(parts)}; everything before agrees to"
            f" {number(self.before)}{blame}"
        )


@dataclass(frozen=True)
class Findings:
    """Result of a comparison of two models. differences: place -> the largest over all prompts, in
    the order of computation.

    weights: None if no names are equal. skipped: prompts that the second model does not accept.
    """

    sides: tuple[Path, Path]
    about: tuple[str, ...]
    settings: dict[str, tuple[Any, Any]]
    tokenizers: str | None
    lacking_tokenizer: list[Path]
    vocabularies: tuple[int, int]
    weights: Weights | None
    differences: dict[str, Difference]
    predictions: Predictions
    prompts: int
    skipped: int
    tolerance: float
    tolerance_from: str

    @property
    def logits(self) -> Difference:
        """Difference of the logits over all prompts."""
        return self.differences.get(
            LOGITS, Difference(LOGITS, math.inf, 1.0, "no prompt that both models accept")
        )

    @property
    def faults(self) -> list[str]:
        """Return the reasons why the models are not equal, one line each."""
        faults, logits = [], self.logits
        allowed = self.tolerance * max(1.0, logits.scale)
        if self.vocabularies[0] != self.vocabularies[1]:
            faults.append(
                f"the vocabularies have {self.vocabularies[0]} and {self.vocabularies[1]} entries"
            )
        if self.tokenizers:
            faults.append(f"the tokenizers differ: {self.tokenizers}")
        if not logits.absolute <= allowed:
            faults.append(
                f"logits differ by {number(logits.absolute)}, more than"
                f" {number(allowed)}{': ' + logits.note if logits.note else ''}"
            )
        far = self.weights.beyond(self.tolerance) if self.weights else []
        if far:
            faults.append(
                f"{len(far)} tensors of weights differ by more than {number(self.tolerance)} of"
                " their largest number"
            )
        return faults

    @property
    def equal(self) -> bool:
        """True if the models are equal within the tolerance."""
        return not self.faults

    @property
    def bitwise(self) -> bool:
        """True if all weights and all outputs are equal bit for bit."""
        return (
            self.equal
            and (self.weights is None or self.weights.equal)
            and all(d.absolute == 0 for d in self.differences.values())
        )

    def first(self) -> First | None:
        """Return the first place whose weights or outputs differ by more than the tolerance."""
        far = self.weights.beyond(self.tolerance) if self.weights else []
        order = list(self.differences.values())
        cut = next(
            (index for index, found in enumerate(order) if found.relative > self.tolerance), None
        )
        before = max((found.relative for found in order[:cut]), default=0.0)
        computed = None if cut is None else order[cut]
        if computed is None and not far:
            return None
        layer = min(
            [layer_of(place_of_weight(found.where)) for found in far[:1]]
            + ([] if computed is None else [layer_of(computed.where)])
        )
        here = [found for found in far if layer_of(place_of_weight(found.where)) == layer]
        if computed is not None and layer_of(computed.where) != layer:
            computed = None
        places = [place_of_weight(found.where) for found in here]
        where = (
            computed.where
            if computed is not None and (computed.where in places or not places)
            else places[0]
        )
        return First(where, here if self.weights else None, computed, before)

    def layers(self) -> Iterator[tuple[str, Difference]]:
        """Yield (row, its largest difference): embedding, every layer with its parts, final norm,
        logits.
        """
        rows: dict[str, Difference] = {}
        for found in self.differences.values():
            row = found.where.partition(", ")[0]
            if row not in rows or found.relative > rows[row].relative:
                rows[row] = found
        yield from rows.items()


def number(value: float) -> str:
    """Format with two digits: 0, 0.12, 1.3e-07, inf."""
    return f"{value:.2g}"
