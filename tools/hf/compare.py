"""Compare tensors, weights, outputs, settings and tokenizers of two models numerically.

The functions work in memory; ``verify`` reads the models and prints the results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fem_common.nested import leaves
from fem_common.text import first_few

from .folder import UNREAD
from .weight_conversion import Tensors

LOGITS, MTP = "logits", "mtp_modules."
TOP = {"embed_tokens": "embedding", "norm": "final norm", "lm_head": LOGITS}
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.(.*))?$")

Trace = dict[str, Tensor]
"""Place in the model -> its output on the CPU, without dimensions of size one; in the order of
computation.
"""


def place(path: str) -> str:
    """Return a module path as text for a reader.

    ``model.layers.3.mixer.in_proj`` becomes ``layer 3, mixer.in_proj``. Outside the layers the
    result is the common term for the module if TOP contains one, else its name.
    """
    if path.startswith(MTP):
        return path
    found = _LAYER.search(path)
    if found is None:
        leaf = path.rpartition(".")[2]
        return TOP.get(leaf, leaf)
    return f"layer {found[1]}, {found[2]}" if found[2] else f"layer {found[1]}"


def place_of_weight(name: str) -> str:
    """Return the ``place`` of the module that contains the parameter ``name``."""
    return place(re.sub(r"\.(weight|bias)$", "", name))


def layer_of(where: str) -> float:
    """Return the layer number in a place (see ``place``).

    The result is infinity for the final norm and the logits, -1 for all other modules outside
    layers.
    """
    found = re.match(r"layer (\d+)", where)
    if found:
        return int(found[1])
    return math.inf if where in ("final norm", LOGITS) or where.startswith(MTP) else -1


@torch.no_grad()
def trace(model: Any, ids: list[int]) -> Trace:
    """Run the model on one sequence and return place -> output of every module, on the CPU.

    If a module runs several times, its second output is at ``layer 0, mixer, time 2``, and so on.
    The last entry contains the logits [t, vocabulary].
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

    def keep_output(path: str) -> Callable[[nn.Module, Any, Any], None]:
        where = place(path)
        return lambda module, inputs, output: keep(where, output)

    handles = []
    for path, module in model.named_modules():
        if not path or path == model.base_model_prefix or isinstance(module, nn.ModuleList):
            continue
        handles.append(module.register_forward_hook(keep_output(path)))
    try:
        answer = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    seen.pop(LOGITS, None)  # replaced by the logits that the model returns, as the last entry
    return {**seen, LOGITS: answer.logits[0].detach().to("cpu", copy=True)}


def _tensor(value: Any) -> Tensor | None:
    """Return the first tensor in a module's output (tensor, tuple or list); None without one."""
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
    "mtp_loss_weight",
)
CHUNK = 1 << 22  # numbers compared in one step: 32 MB in float64


@dataclass(frozen=True)
class Difference:
    """Difference of two tensors a and b at one place (see ``place``) or of one weight.

    absolute: the largest |a - b|; infinite if the shapes differ or only one number is non-finite.
    scale: the largest finite |a| or |b|. note: the two shapes if they differ, else empty.
    """

    where: str
    absolute: float
    scale: float
    note: str = ""

    @property
    def relative(self) -> float:
        """The ratio absolute / scale; infinite if only scale is 0."""
        if self.absolute == 0:
            return 0.0
        return self.absolute / self.scale if self.scale else math.inf

    def worse(self, other: Difference) -> Difference:
        """Return the larger absolute difference and the larger scale of two differences at one
        place.
        """
        return replace(
            self,
            absolute=max(self.absolute, other.absolute),
            scale=max(self.scale, other.scale),
            note=self.note or other.note,
        )


def difference(where: str, a: Tensor, b: Tensor) -> Difference:
    """Return the Difference of tensors a and b; two NaN at the same position are equal."""
    if a.shape != b.shape:
        return Difference(where, math.inf, 1.0, f"shapes {tuple(a.shape)} and {tuple(b.shape)}")
    absolute = scale = 0.0
    for left, right in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
        one, two = left.double(), right.double()
        error = torch.where(
            (one == two) | (one.isnan() & two.isnan()), 0.0, (one - two).abs()
        ).nan_to_num(math.inf)
        absolute = max(absolute, error.max().item() if error.numel() else 0.0)
        for side in (one, two):
            finite = side[side.isfinite()]
            scale = max(scale, finite.abs().max().item() if finite.numel() else 0.0)
    return Difference(where, absolute, scale)


# --- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Comparison of two models' weights.

    differences: one entry for each tensor name that both models have. only_a, only_b: names that
    only one model has.
    """

    differences: list[Difference]
    only_a: list[str]
    only_b: list[str]

    @property
    def equal(self) -> bool:
        """True if all common tensors are numerically equal."""
        return all(found.absolute == 0 for found in self.differences)

    def beyond(self, tolerance: float) -> list[Difference]:
        """Return the differences larger than ``tolerance`` times the largest element of their
        tensor.

        They are sorted by layer.
        """
        far = [found for found in self.differences if found.relative > tolerance]
        return sorted(far, key=lambda found: layer_of(place_of_weight(found.where)))


def compare_weights(a: Tensors, b: Tensors, *, tied: bool) -> Weights:
    """Compare two models tensor by tensor.

    tied: output layer and embedding are one tensor in at least one of the models, so a missing
    ``lm_head.weight`` is not reported.
    """
    differences = [
        difference(name, a.read([name])[name], b.read([name])[name])
        for name in a.shapes
        if name in b.shapes
    ]
    ignored = {"lm_head.weight"} if tied else set()
    only_a = [name for name in a.shapes if name not in b.shapes and name not in ignored]
    only_b = [name for name in b.shapes if name not in a.shapes and name not in ignored]
    return Weights(differences, only_a, only_b)


# --- activations and logits -----------------------------------------------------------------------


def compare_traces(a: Trace, b: Trace) -> Iterator[Difference]:
    """Yield the difference at each place that both traces contain, in the order of ``a``.

    If the vocabularies differ in size, only the logits of the common ids are compared.
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
    """Comparison of next-token distributions of two models, summed over tokens.

    agree: number of tokens for which both models predict the same most likely next token. kl: sum
    of KL(a || b) in nats; largest_kl: its largest value at one token.
    """

    tokens: int = 0
    agree: int = 0
    kl: float = 0.0
    largest_kl: float = 0.0

    def and_of(self, a: Tensor, b: Tensor) -> Predictions:
        """Return these sums plus those of one more sequence with logits a and b [t, vocabulary]."""
        entries = min(a.shape[-1], b.shape[-1])
        one, two = (logits[..., :entries].double().log_softmax(-1) for logits in (a, b))
        kl = (one.exp() * (one - two)).nan_to_num(0.0).sum(-1).clamp_min(0.0)
        agree = int((one.argmax(-1) == two.argmax(-1)).sum())
        largest = max(self.largest_kl, kl.max().item())
        return Predictions(
            self.tokens + len(kl), self.agree + agree, self.kl + kl.sum().item(), largest
        )


# --- settings and tokenizers ----------------------------------------------------------------------


def flat(values: dict[Any, Any]) -> dict[str, Any]:
    """Return nested dictionaries as one dictionary with dotted keys.

    Keys that do not affect the computation are left out.
    """
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in leaves(values)
        if value != {} and key not in UNREAD and key.rpartition(".")[2] not in NOT_COMPUTED
    }


def compare_settings(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> (value in a, value in b) for all settings that differ.

    The value of a missing key is None.
    """
    one, two = flat(a), flat(b)
    return {
        key: (one.get(key), two.get(key))
        for key in sorted({*one, *two})
        if one.get(key) != two.get(key)
    }


def compare_tokenizers(a: Any | None, b: Any | None, texts: list[str]) -> str | None:
    """Return how two tokenizers differ, as text; None if they are equal or one of them is None.

    Vocabularies and the ids of ``texts`` are compared.
    """
    if a is None or b is None:
        return None
    one, two = a.get_vocab(), b.get_vocab()
    if one != two:
        differing = sorted({token for token in {*one, *two} if one.get(token) != two.get(token)})
        return (
            f"{len(one)} and {len(two)} entries, {len(differing)} of them differ, such as "
            f"{differing[0]!r}"
        )
    for text in texts:
        if a(text)["input_ids"] != b(text)["input_ids"]:
            return f"the same entries, but other ids for {text[:40]!r}"
    return None


@dataclass(frozen=True)
class First:
    """First place at which two models differ.

    weights: differing weights of that layer; None if weights were not compared. computed: the
    difference of the output at that place; None if no output of that layer differs.

    before: the largest relative difference of all earlier outputs.
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
            note = f", {largest.note}" if largest.note else ""
            parts.append(f"{number(largest.absolute)} in weights ({names}{note})")
        if self.computed is not None:
            note = f" ({self.computed.note})" if self.computed.note else ""
            parts.append(f"{number(self.computed.absolute)} in its output{note}")
        blame = ""
        if self.weights == []:
            blame = "; its weights agree, so configuration, code or rounding differs"
        return (
            f"{self.where}: first difference, {', '.join(parts)}; everything before agrees to"
            f" {number(self.before)}{blame}"
        )


@dataclass(frozen=True)
class Findings:
    """Result of a comparison of two models.

    about: a description of each model. differences: place -> the largest difference over all
    prompts, in the order of computation. weights: None if no weights could be compared. skipped:
    number of prompts that the second model does not accept. tolerance_from: the origin of
    ``tolerance``, for the report.
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
        """The largest difference of the logits over all prompts; infinite if no prompt was
        compared.
        """
        return self.differences.get(
            LOGITS, Difference(LOGITS, math.inf, 1.0, "no prompt that both models accept")
        )

    @property
    def faults(self) -> list[str]:
        """Return the reasons why the models are not equal, one line each."""
        faults = []
        logits = self.logits
        allowed = self.tolerance * max(1.0, logits.scale)
        if self.vocabularies[0] != self.vocabularies[1]:
            faults.append(
                f"the vocabularies have {self.vocabularies[0]} and {self.vocabularies[1]} entries"
            )
        if self.tokenizers:
            faults.append(f"the tokenizers differ: {self.tokenizers}")
        if not logits.absolute <= allowed:
            note = f": {logits.note}" if logits.note else ""
            faults.append(
                f"logits differ by {number(logits.absolute)}, more than {number(allowed)}{note}"
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
        """True if the models are equal and all weights and all outputs agree bit for bit."""
        return (
            self.equal
            and (self.weights is None or self.weights.equal)
            and all(d.absolute == 0 for d in self.differences.values())
        )

    def first(self) -> First | None:
        """Return the first place whose weights or output differ by more than the tolerance, or
        None.
        """
        far = self.weights.beyond(self.tolerance) if self.weights else []
        order = list(self.differences.values())
        cut = next(
            (index for index, found in enumerate(order) if found.relative > self.tolerance), None
        )
        before = max((found.relative for found in order[:cut]), default=0.0)
        computed = None if cut is None else order[cut]
        if computed is None and not far:
            return None
        layers = [layer_of(place_of_weight(found.where)) for found in far[:1]]
        if computed is not None:
            layers.append(layer_of(computed.where))
        layer = min(layers)
        here = [found for found in far if layer_of(place_of_weight(found.where)) == layer]
        if computed is not None and layer_of(computed.where) != layer:
            computed = None
        places = [place_of_weight(found.where) for found in here]
        if computed is not None and (computed.where in places or not places):
            where = computed.where
        else:
            where = places[0]
        return First(where, here if self.weights else None, computed, before)

    def layers(self) -> Iterator[tuple[str, Difference]]:
        """Yield (row of the report, its largest difference) in the order of computation.

        The rows are the embedding, the layers, the final norm and the logits. The row of a layer
        covers all of its modules.
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
