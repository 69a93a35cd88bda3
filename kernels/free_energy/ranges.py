"""Choice of the heads of a free-energy read that need the exact form in addition to the fast one.

The fast form is correct up to a range, `MAX_RANGE`. On a CPU, a read uses its own ranges. On a
device, reading the range would stall the host, so a layer's call uses the range of its previous
call (`Ranges`). The ranges of that call are copied to the host asynchronously and are read one full
call later, long after the copy has finished. Ranks whose calls had the same ranges decide alike at
the same call. A call reserves the exact form for as many heads as exceeded `SWITCH` in the last
call, rounded up to a power of 2, and gives it on the device to the heads with the greatest range.
The wrong form is used only if more heads than reserved jump over both limits within one call. Their
results are finite, and the next call logs a warning.

A layer's first call waits. A recomputation in a backward pass takes the form of the original
forward. If calls in flight had different forms, the recomputation finds its own by its ranges, and
waits. (Two calls with the same values cannot be distinguished; torch then refuses the wrong form.)
A CUDA graph keeps the form that its layer had at capture; the next call outside the graph takes
replays into account.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kernels.machine import LateNumbers, capturing

# Range of x for the fast form: |x| <= 40, so that p * exp(x) and its gradients, up to exp(80), are
# finite in float32 and bfloat16.
MAX_RANGE = 80.0
# On a device, the next call reserves the exact form for a head whose range exceeds this.
SWITCH = 64.0
KEPT = 256  # calls whose form is stored: more than a pipeline has in flight

log = logging.getLogger("kernels.free_energy.ranges")


class Decision:
    """Form of the reads of one call of a layer.

    Without ``ranges``, each read waits for its own range.
    basis: the range that the decision is based on.
    form: the number of heads reserved for the exact form; None: unknown until a read waits.
    """

    def __init__(
        self, ranges: Ranges | None = None, basis: float | None = None, form: int | None = None
    ) -> None:
        self.ranges, self.basis, self.form = ranges, basis, form
        # The maxima over its reads, on the device: range, heads over SWITCH, heads over MAX_RANGE.
        self.numbers: Tensor | None = None
        self.limit = MAX_RANGE if ranges is None else SWITCH

    def heads(self, largest: Tensor) -> int:
        """Return for how many heads a read needs the exact form.

        largest: beta * (max v - min v) of each head, [b, h] or [b, h, ..].
        """
        largest = largest.flatten(2).amax(2) if largest.dim() > 2 else largest
        if self.ranges is None:
            self.basis = float(largest.max())
            return 0 if self.basis <= MAX_RANGE else int(_over(largest, MAX_RANGE))
        if recomputing():
            return self.ranges.form_of(largest) if self.form is None else self.form
        numbers, form = (
            torch.stack((largest.max(), _over(largest, SWITCH), _over(largest, MAX_RANGE))),
            self.form,
        )
        if form is None:
            if capturing():
                raise RuntimeError(
                    "free_energy_read: a layer's first call waits for the device; make one "
                    "before a CUDA graph is captured"
                )
            self.basis = float(numbers[0])
            form = 0 if self.basis < SWITCH else _reserved_heads(float(numbers[1]))
        self.numbers = numbers if self.numbers is None else torch.maximum(self.numbers, numbers)
        self.ranges.note(self, largest, form)
        return form

    def exact(self, largest: Tensor) -> bool:
        """Return True if any head needs the exact form."""
        return self.heads(largest) > 0


def _over(largest: Tensor, limit: float) -> Tensor:
    """Return how many numbers are not at most ``limit``, in their dtype."""
    return (~(largest <= limit)).sum(dtype=largest.dtype)


def _reserved_heads(heads: float) -> int:
    """Return the number of heads rounded up to a power of 2, 0 for 0."""
    return 1 << (int(heads) - 1).bit_length() if heads else 0


class Ranges:
    """Ranges and forms of a layer's earlier calls.

    They belong to the layer, are in no checkpoint, and a copy of the layer starts empty.
    late: True if calls use the ranges of the previous call; None: True on devices, False on a CPU.
    """

    def __init__(self, late: bool | None = None) -> None:
        self.late = late
        self._numbers: LateNumbers | None = None
        self._last: Decision | None = None
        self._forms: deque[tuple[Tensor, int]] = deque(maxlen=KEPT)

    def __reduce__(self) -> tuple[type[Ranges], tuple[bool | None]]:
        return Ranges, (self.late,)

    def decide(self, v: Tensor) -> Decision | None:
        """Return the decision for a call that begins, with the values ``v``, or None if each of its
        reads uses its own range.

        Waits for the previous call where necessary.
        """
        late = v.device.type != "cpu" if self.late is None else self.late
        if torch.compiler.is_compiling() or isinstance(v, FakeTensor) or not late:
            return None
        if recomputing():
            forms = set(self.forms())
            return Decision(self, form=forms.pop() if len(forms) == 1 else None)
        if self._numbers is None:
            self._numbers = LateNumbers(v.device, 3)
        if self._last is None:
            return Decision(self)
        basis, near, over = self._numbers.last()
        if self._last.form is not None and over > self._last.form:
            log.warning(
                "free_energy_read: beta * (max v - min v) jumped from %.4g to %.4g within a call "
                "of a layer, in more heads than it had reserved for the exact form: in that call F "
                "is not exact where it is more than %g below the maximum; from now on heads with "
                "more than %g use the exact form (slower)",
                self._last.basis,
                basis,
                MAX_RANGE,
                SWITCH,
            )
        return Decision(self, basis, _reserved_heads(near))

    def forms(self) -> list[int]:
        """Return the number of heads reserved for the exact form in each of the last reads."""
        return [form for _, form in self._forms]

    def note(self, decision: Decision, largest: Tensor, form: int) -> None:
        """Record a read of a call: the ranges of its heads and its form."""
        assert self._numbers is not None and decision.numbers is not None
        self._last = decision
        self._numbers.send(decision.numbers)
        if not capturing():
            self._forms.append((largest.detach(), form))

    def form_of(self, largest: Tensor) -> int:
        """Return the form of the earlier read with exactly these ranges, which a recomputation
        reproduces to the last bit.

        Waits only while forms have just changed.
        """
        if len(forms := set(self.forms())) == 1:
            return forms.pop()
        alike = partial(torch.allclose, largest, rtol=0, atol=0, equal_nan=True)
        found = next(
            (form for known, form in self._forms if known.shape == largest.shape and alike(known)),
            None,
        )
        return _reserved_heads(float(_over(largest, SWITCH))) if found is None else found


def recomputing() -> bool:
    """Return True within a backward pass, where a forward pass is computed again."""
    return torch._C._current_graph_task_id() >= 0
