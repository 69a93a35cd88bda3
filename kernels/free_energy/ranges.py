"""Which form of a free-energy read its values need: the fast one, right up to a range, or the exact one.

On a CPU a read looks at its own range. On a device to look would be to wait, so there a layer's call goes by the one before it (`Ranges`):
that call's range has been copied to the host behind the device's back, and is asked for a whole call later, when it has long arrived. Ranks
whose calls had the same ranges decide alike at the same call. The exact form runs from `SWITCH` on and the fast one is right up to
`MAX_RANGE`, so only a jump over both within one call is read by the wrong form: finite, and named in a warning by the call after it.

A layer's first call waits. What is computed again in a backward pass takes the form that it took first; where calls under way had different
forms, it knows its own by its ranges, and waits. (Two calls with the same values cannot be told apart there; torch refuses the wrong form.)
A CUDA graph holds the form that its layer had reached when it was captured; replays are noticed by the next call outside it.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kernels.machine import LateNumber, capturing

MAX_RANGE = 80.0  # of x: |x| <= 40, so p * exp(x) and its gradients, up to exp(80), stay inside float32 and bfloat16
SWITCH = 64.0  # where a call's range passes this, the next call on a device is exact
KEPT = 256  # calls whose form is remembered: more than a pipeline has in flight

log = logging.getLogger("kernels.free_energy.ranges")


class Decision:
    """Of one call of a layer, whose reads ask it. Without ``ranges`` each goes by its own range, which is waited for.

    told: the range that it went by; form: whether the exact one runs, None: not known before a read waits.
    """

    def __init__(self, ranges: Ranges | None = None, told: float | None = None, form: bool | None = None) -> None:
        self.ranges, self.told, self.form = ranges, told, form
        self.number: Tensor | None = None  # the largest of its reads, on the device
        self.limit = MAX_RANGE if ranges is None else SWITCH

    def exact(self, largest: Tensor) -> bool:
        """Whether a read needs the exact form whose values have these ``largest`` beta * (max v - min v), of any shape."""
        if self.ranges is None:
            self.told = float(largest.max())
            return not self.told <= MAX_RANGE
        if recomputing():
            return self.ranges.form_of(largest) if self.form is None else self.form
        number, form = largest.max(), self.form
        if form is None:
            if capturing():
                raise RuntimeError("free_energy_read: a layer's first call waits for the device; make one before a CUDA graph is captured")
            self.told = float(number)
            form = not self.told < SWITCH
        self.number = number if self.number is None else torch.maximum(self.number, number)
        self.ranges.note(self, largest, form)
        return form


class Ranges:
    """What a layer's calls have left behind. It belongs to the layer, is in no checkpoint, and a copy of the layer begins anew.

    late: whether calls go by the ones before them; None: on devices, not on a CPU.
    """

    def __init__(self, late: bool | None = None) -> None:
        self.late = late
        self._number: LateNumber | None = None
        self._last: Decision | None = None
        self._forms: deque[tuple[Tensor, bool]] = deque(maxlen=KEPT)

    def __reduce__(self) -> tuple[type[Ranges], tuple[bool | None]]:
        return Ranges, (self.late,)

    def decide(self, v: Tensor) -> Decision | None:
        """For a call that begins, whose values are ``v``; None: each of its reads goes by its own range.

        Waits, where it must, for the call before.
        """
        late = v.device.type != "cpu" if self.late is None else self.late
        if torch.compiler.is_compiling() or isinstance(v, FakeTensor) or not late:
            return None
        if recomputing():
            forms = set(self.forms())
            return Decision(self, form=forms.pop() if len(forms) == 1 else None)
        if self._number is None:
            self._number = LateNumber(v.device)
        if self._last is None:
            return Decision(self)
        told = self._number.last()
        if self._last.form is False and not told <= MAX_RANGE:
            log.warning(
                "free_energy_read: beta * (max v - min v) jumped from %.4g to %.4g within a call of a layer: in that call F is not exact "
                "where it lies over %g under the greatest value; the exact form (slower) runs from now on, while the range is over %g",
                self._last.told,
                told,
                MAX_RANGE,
                SWITCH,
            )
        return Decision(self, told, not told < SWITCH)

    def forms(self) -> list[bool]:
        """Of the last reads, whether each was exact."""
        return [form for _, form in self._forms]

    def note(self, decision: Decision, largest: Tensor, form: bool) -> None:
        """A read of a call, its range and its form."""
        assert self._number is not None and decision.number is not None
        self._last = decision
        self._number.send(decision.number)
        if not capturing():
            self._forms.append((largest.detach(), form))

    def form_of(self, largest: Tensor) -> bool:
        """The form of the earlier read with these very ranges, which what is computed again has to the last bit.

        Waits, but only while forms have just changed.
        """
        if len(forms := set(self.forms())) == 1:
            return forms.pop()
        alike = partial(torch.allclose, largest, rtol=0, atol=0, equal_nan=True)
        found = next((form for known, form in self._forms if known.shape == largest.shape and alike(known)), None)
        return not float(largest.max()) < SWITCH if found is None else found


def recomputing() -> bool:
    """Whether this runs within a backward pass: a forward pass that is made again."""
    return torch._C._current_graph_task_id() >= 0
