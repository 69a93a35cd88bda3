"""For how many heads a free-energy read needs the exact form, beside the fast one, which is right up to a range.

On a CPU a read looks at its own ranges. On a device to look would be to wait, so there a layer's call goes by the one before it (`Ranges`):
what that call's ranges were has been copied to the host behind the device's back, and is asked for a whole call later, when it has long
arrived. Ranks whose calls had the same ranges decide alike at the same call. A call has room for as many heads as passed `SWITCH` in the
last one, rounded up to a power of 2, and gives it on the device to those of the greatest range; the fast form is right up to `MAX_RANGE`.
So only more heads that jump over both within one call are read by the wrong form: finite, and named in a warning by the call after it.

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

from kernels.machine import LateNumbers, capturing

MAX_RANGE = 80.0  # of x: |x| <= 40, so p * exp(x) and its gradients, up to exp(80), stay inside float32 and bfloat16
SWITCH = 64.0  # for a head whose range passes this, the next call on a device has room for the exact form
KEPT = 256  # calls whose form is remembered: more than a pipeline has in flight

log = logging.getLogger("kernels.free_energy.ranges")


class Decision:
    """Of one call of a layer, whose reads ask it. Without ``ranges`` each goes by its own range, which is waited for.

    told: the range that it went by; form: the heads that the exact one has room for, None: not known before a read waits.
    """

    def __init__(
        self, ranges: Ranges | None = None, told: float | None = None, form: int | None = None
    ) -> None:
        self.ranges, self.told, self.form = ranges, told, form
        self.numbers: Tensor | None = (
            None  # the largest of its reads, on the device: range, heads over SWITCH, heads over MAX_RANGE
        )
        self.limit = MAX_RANGE if ranges is None else SWITCH

    def heads(self, largest: Tensor) -> int:
        """For how many heads a read needs the exact form; largest: each one's beta * (max v - min v), [b, h] or [b, h, ..]."""
        largest = largest.flatten(2).amax(2) if largest.dim() > 2 else largest
        if self.ranges is None:
            self.told = float(largest.max())
            return 0 if self.told <= MAX_RANGE else int(_over(largest, MAX_RANGE))
        if recomputing():
            return self.ranges.form_of(largest) if self.form is None else self.form
        numbers, form = (
            torch.stack((largest.max(), _over(largest, SWITCH), _over(largest, MAX_RANGE))),
            self.form,
        )
        if form is None:
            if capturing():
                raise RuntimeError(
                    "free_energy_read: a layer's first call waits for the device; make one before a CUDA graph is captured"
                )
            self.told = float(numbers[0])
            form = 0 if self.told < SWITCH else _room(float(numbers[1]))
        self.numbers = numbers if self.numbers is None else torch.maximum(self.numbers, numbers)
        self.ranges.note(self, largest, form)
        return form

    def exact(self, largest: Tensor) -> bool:
        """Whether it is any."""
        return self.heads(largest) > 0


def _over(largest: Tensor, limit: float) -> Tensor:
    """How many are not at most ``limit``, in their type."""
    return (~(largest <= limit)).sum(dtype=largest.dtype)


def _room(heads: float) -> int:
    return 1 << (int(heads) - 1).bit_length() if heads else 0


class Ranges:
    """What a layer's calls have left behind. It belongs to the layer, is in no checkpoint, and a copy of the layer begins anew.

    late: whether calls go by the ones before them; None: on devices, not on a CPU.
    """

    def __init__(self, late: bool | None = None) -> None:
        self.late = late
        self._numbers: LateNumbers | None = None
        self._last: Decision | None = None
        self._forms: deque[tuple[Tensor, int]] = deque(maxlen=KEPT)

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
        if self._numbers is None:
            self._numbers = LateNumbers(v.device, 3)
        if self._last is None:
            return Decision(self)
        told, near, over = self._numbers.last()
        if self._last.form is not None and over > self._last.form:
            log.warning(
                "free_energy_read: beta * (max v - min v) jumped from %.4g to %.4g within a call of a layer, in more heads than it was "
                "ready for: in that call F is not exact where it lies over %g under the greatest value; from now on heads over %g have the "
                "exact form (slower)",
                self._last.told,
                told,
                MAX_RANGE,
                SWITCH,
            )
        return Decision(self, told, _room(near))

    def forms(self) -> list[int]:
        """Of the last reads, for how many heads each had room."""
        return [form for _, form in self._forms]

    def note(self, decision: Decision, largest: Tensor, form: int) -> None:
        """A read of a call, its heads' ranges and its form."""
        assert self._numbers is not None and decision.numbers is not None
        self._last = decision
        self._numbers.send(decision.numbers)
        if not capturing():
            self._forms.append((largest.detach(), form))

    def form_of(self, largest: Tensor) -> int:
        """The form of the earlier read with these very ranges, which what is computed again has to the last bit.

        Waits, but only while forms have just changed.
        """
        if len(forms := set(self.forms())) == 1:
            return forms.pop()
        alike = partial(torch.allclose, largest, rtol=0, atol=0, equal_nan=True)
        found = next(
            (form for known, form in self._forms if known.shape == largest.shape and alike(known)),
            None,
        )
        return _room(float(_over(largest, SWITCH))) if found is None else found


def recomputing() -> bool:
    """Whether this runs within a backward pass: a forward pass that is made again."""
    return torch._C._current_graph_task_id() >= 0
