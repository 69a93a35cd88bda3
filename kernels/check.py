"""Correctness of an operation's implementations on any device: errors against float64, finiteness,
determinism, every element written.

A `Suite` contains an operation's cases and its definition; `check` runs one case. The tests run
small suites in Triton's interpreter; the GPU suite runs them at real sizes on the device.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kernels

Inputs = dict[str, Any]
Outputs = tuple[Tensor, ...]

FLOAT32_BOUND = 1e-5  # relative error of norms, for every output and gradient
FLOAT16_ROUNDING = 2.0**-11  # one rounding of a result: computed in float32
BFLOAT16_FACTOR = 1.5  # times the error of the definition with every step in bfloat16
BFLOAT16_ROUNDING = 2.0**-9  # one rounding of the result: half a unit in the last place
# Upper limit of the bound: for small beta and wide ranges the definition's own error is noise.
BFLOAT16_MOST = 0.25
WITHOUT_GRADIENTS = ("decode",)  # implementations that are not for training
# Third-party code need not be deterministic on a GPU: some of its backward passes add in any order.
OTHERS = (
    "cudnn",
    "flash",
    "flash_attn_2",
    "flash_attn_3",
    "flash_attn_4",
    "efficient",
    "sdpa",
    "fused",
    "fla",
)


@dataclass(frozen=True)
class Suite:
    """Cases of an operation.

    cases: name -> a function of a size (like ``small``) that returns float64 inputs on the CPU, by
    argument name; floating-point tensors are differentiated. definition(inputs): the outputs by the
    equations alone, all at once, in the inputs' type. call(inputs, implementation): the public
    function. small: a size for the interpreter (odd, several blocks); real: a size for a GPU.
    loose: (case, result) -> a separate bound, with the reason in the suite; in bfloat16 the larger
    of the two bounds applies.
    """

    op: str
    cases: Mapping[str, Callable[[Mapping[str, int]], Inputs]]
    definition: Callable[[Inputs], Outputs]
    call: Callable[[Inputs, str], Outputs]
    small: Mapping[str, int]
    real: Mapping[str, int]
    loose: Mapping[tuple[str, str], float]


class Draw:
    """Random float64 numbers; each call continues the sequence."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Draw numbers of mean 0 and standard deviation 1."""
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers in [0, 1)."""
        return torch.rand(*shape, generator=self.rng, dtype=torch.float64)


def suites() -> dict[str, Suite]:
    """Return operation -> suite for every ``kernels/<op>/cases.py``."""
    found = {}
    for each in pkgutil.iter_modules(kernels.__path__):
        if each.ispkg and importlib.util.find_spec(f"kernels.{each.name}.cases"):
            suite = importlib.import_module(f"kernels.{each.name}.cases").SUITE
            found[suite.op] = suite
    return found


@dataclass(frozen=True)
class Finding:
    """One result of a check: an output or a gradient, its error against float64 and the bound."""

    case: str
    result: str
    error: float
    bound: float

    @property
    def good(self) -> bool:
        """Return True if the error is within the bound; NaN is not."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Expected:
    """A case's inputs rounded to a type, and the results of its definition. All implementations are
    compared with the same object.

    inputs: float64 on the CPU. truth: outputs and gradients in float64. rough: the same with every
    step in bfloat16, for that type's bounds; in float32 it equals the truth.
    """

    case: str
    dtype: torch.dtype
    device: torch.device | str
    inputs: Inputs
    truth: Mapping[str, Tensor]
    rough: Mapping[str, Tensor]


def expect(
    suite: Suite,
    case: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    real: bool = False,
    gradients: bool = True,
) -> Expected:
    """Compute the expected results of ``case`` in ``dtype``. real: at the GPU's size."""
    made = suite.cases[case](suite.real if real else suite.small)
    rounded = {name: _floats(x, lambda t: t.to(dtype).double()) for name, x in made.items()}
    truth = results(
        suite.definition, rounded, torch.float64, device, weighted_in=dtype, gradients=gradients
    )
    rough = (
        results(suite.definition, rounded, dtype, device, gradients=gradients)
        if dtype == torch.bfloat16
        else truth
    )
    return Expected(case, dtype, device, rounded, truth, rough)


def check(
    suite: Suite,
    case: str,
    implementation: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    real: bool = False,
) -> list[Finding]:
    """Run one implementation of a case and return its findings (`judge`)."""
    gradients = implementation not in WITHOUT_GRADIENTS
    return judge(
        suite, expect(suite, case, dtype, device, real=real, gradients=gradients), implementation
    )


def judge(suite: Suite, expected: Expected, implementation: str) -> list[Finding]:
    """Return the errors of a case's outputs and gradients. Infinity if one is not finite or, on a
    GPU, if two runs differ in any bit.

    Third-party code on a GPU (``OTHERS``) is not checked for determinism; implementations in
    ``WITHOUT_GRADIENTS`` have no gradients. Uninitialised memory is filled with NaN during the
    check, so that an element that is not written shows.
    """
    case, dtype, device = expected.case, expected.dtype, expected.device
    gradients = implementation not in WITHOUT_GRADIENTS
    with poisoned_memory():
        got = results(
            lambda x: suite.call(x, implementation),
            expected.inputs,
            dtype,
            device,
            gradients=gradients,
        )
        # Programs run in any order on a GPU; on a CPU they run one after another.
        alone = torch.device(device).type == "cpu"
        again = (
            got
            if alone
            else results(
                lambda x: suite.call(x, implementation),
                expected.inputs,
                dtype,
                device,
                gradients=gradients,
            )
        )
    same = implementation not in OTHERS
    findings = []
    for name, true in expected.truth.items():
        if not gradients and name.startswith("d "):
            continue
        error = relative(got[name], true)
        if not got[name].isfinite().all() or (same and not torch.equal(got[name], again[name])):
            error = float("inf")
        bound = suite.loose.get((case, name), FLOAT32_BOUND) + (
            FLOAT16_ROUNDING if dtype == torch.float16 else 0.0
        )
        if dtype == torch.bfloat16:
            own = relative(expected.rough[name], true)
            bound = BFLOAT16_FACTOR * max(own, BFLOAT16_ROUNDING)
            bound = min(bound, BFLOAT16_MOST) if bound == bound else BFLOAT16_MOST
            bound = max(bound, suite.loose.get((case, name), 0.0))
        findings.append(Finding(case, name, error, bound))
    return findings


def results(
    call: Callable[[Inputs], Outputs],
    inputs: Inputs,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    weighted_in: torch.dtype | None = None,
    gradients: bool = True,
) -> dict[str, Tensor]:
    """Return outputs, by number, and the gradients of a random weighting of them, by input; both
    detached.

    weighted_in: the type that the weights are rounded to, so that runs in several types use the
    same weights (None: dtype). gradients False: only the outputs.
    """
    given = {
        name: _floats(x, lambda t: t.detach().to(device, dtype).requires_grad_(gradients))
        for name, x in inputs.items()
    }
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
    leaves = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad}
    outputs = call(given)
    named = {f"output {n}": o.detach() for n, o in enumerate(outputs)}
    if not gradients:
        return named
    rng = torch.Generator().manual_seed(9)
    weights = [
        torch.randn(o.shape, generator=rng, dtype=torch.float64)
        .to(weighted_in or dtype)
        .to(device, o.dtype)
        for o in outputs
    ]
    found = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
    return named | {f"d {name}": g for name, g in zip(leaves, found, strict=True) if g is not None}


def relative(got: Tensor, truth: Tensor) -> float:
    """Return the relative error of norms; the absolute error if the truth is zero."""
    got, truth = got.double(), truth.double()
    size = float(truth.norm())
    return float((got - truth).norm()) / (size if size > 0 else 1.0)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill the memory of torch.empty with NaN, and use the deterministic forms of torch's
    operations.
    """
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


def _floats(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(x) if isinstance(x, Tensor) and x.is_floating_point() else x
