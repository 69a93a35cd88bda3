"""Convert every configured length of a run between optimizer steps, samples and tokens.

The conversion is pure arithmetic; the module reads no files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from pretrain.config import RunConfig

Samples = int | Fraction  # a fraction if earlier steps had samples of another length


@dataclass(frozen=True)
class Schedule:
    """Lengths of a run in optimizer steps and in samples (sequences).

    The learning rate is a function of the position in its schedule, which begins with warm-up and
    ends at ``rate_end``. A position is the number of samples since ``rate_samples``.

    After a change of the batch size, warm-up and decay keep the lengths in samples that they had
    with the first batch size. ``knots`` are (consumed samples, position) pairs, between which the
    position is interpolated.
    """

    steps: int
    batch_samples: int
    sample_tokens: int
    warmup_samples: Samples
    decay_samples: Samples  # final decay of WSD; otherwise 0
    rate_samples: Samples = 0  # samples consumed when the learning-rate schedule begins
    # Step of the last change of the batch size, or the first step of a fork.
    begin_step: int = 0
    begin_samples: int = 0  # samples consumed until begin_step
    rate_end: Samples = 0  # samples consumed when the learning-rate schedule ends
    run_steps: int = 0  # steps of all stages; 0 without stages
    run_tokens: int = 0
    # (consumed samples, position), with linear interpolation between them.
    knots: tuple[tuple[Samples, Samples], ...] = ()

    @property
    def total_samples(self) -> int:
        """Number of sequences consumed at the end of the run."""
        return self.samples_at(self.steps)

    def samples_at(self, step: int) -> int:
        """Return the number of sequences consumed after a step."""
        return self.begin_samples + (step - self.begin_step) * self.batch_samples

    @property
    def last_step(self) -> int:
        """Last step of the run, including all stages."""
        return self.run_steps or self.steps

    @property
    def total_tokens(self) -> int:
        """Number of tokens that the run consumes, including all stages."""
        return self.run_tokens or self.total_samples * self.sample_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.batch_samples * self.sample_tokens

    @classmethod
    def of(cls, config: RunConfig, changes: Iterable[tuple[int, int]] = ()) -> Schedule:
        """Return the schedule of a validated configuration.

        changes: one (step, samples) pair for each change of the batch size and each fork: the step
        after which it takes effect, and the samples consumed until then. A length in steps is
        converted with the batch size of the steps that it covers. If a change occurs within a phase
        (warm-up or decay), the rest of the phase is planned again from the change.
        """
        points = sorted({0: 0, **dict(changes)}.items())
        made: Schedule | None = None
        for (step, samples), (later, then) in pairwise(points):
            made = cls._planned(config, Fraction(then - samples, later - step), step, samples, made)
        return cls._planned(config, config.train.global_batch_size, *points[-1], made)

    @classmethod
    def _planned(
        cls, config: RunConfig, batch: Samples, step: int, samples: int, before: Schedule | None
    ) -> Schedule:
        """Return the schedule from ``step`` to the end with one batch size.

        samples: samples consumed until ``step``. before: the schedule until that step, None at the
        start of the run.
        """
        length = config.data.seq_length
        train = config.train
        optimizer = config.optimizer
        tokens = None if train.tokens is None else max(0, train.tokens - samples * length)
        steps = int(
            (step if train.steps is None else 0)
            + _samples(train.steps, tokens, batch, length) // batch
        )
        span, end = steps - optimizer.from_step, samples + (steps - step) * batch
        warmup = _samples(optimizer.warmup_steps, optimizer.warmup_tokens, batch, length)
        if (
            optimizer.warmup_fraction
            and optimizer.warmup_steps is None
            and optimizer.warmup_tokens is None
        ):
            warmup = min(max(1, round(optimizer.warmup_fraction * span)), span - 1) * batch
        decay: Samples = 0
        if optimizer.schedule == "wsd":
            decay = (
                _samples(optimizer.decay_steps, optimizer.decay_tokens, batch, length)
                or max(1, span // 10) * batch
            )
        made = cls(
            steps,
            train.global_batch_size,
            length,
            warmup,
            decay,
            begin_step=step,
            begin_samples=samples,
        )
        if before is None or optimizer.from_step >= step:
            begin = samples + (optimizer.from_step - step) * batch if optimizer.from_step else 0
            return replace(made, rate_samples=begin, rate_end=max(end, begin + batch))
        at, full = before._position(samples), before.rate_end - before.rate_samples
        # A warm-up that is longer than the run planned with the earlier batch size ends in the
        # middle of that plan.
        peak = Fraction(full, 2) if before.warmup_samples >= full else before.warmup_samples
        knots: list[tuple[Samples, Samples]] = [(samples, at)]
        for there, position in (
            (samples + warmup * (1 - Fraction(at) / peak) if at < peak else samples, peak),
            (end - decay, full - before.decay_samples),
            (end, full),
        ):
            if position > knots[-1][1]:
                knots.append((min(max(there, knots[-1][0]), end), position))
        made = replace(
            made, warmup_samples=peak, decay_samples=before.decay_samples, knots=tuple(knots)
        )
        return replace(made, rate_samples=before.rate_samples, rate_end=before.rate_end)

    def rate_position(self, samples: int) -> float:
        """Return the position in the learning-rate schedule after ``samples`` sequences."""
        return float(self._position(samples))

    def _position(self, samples: int) -> Samples:
        if not self.knots:
            return max(0, samples - self.rate_samples)
        after = bisect_right([there for there, _ in self.knots], samples)
        if after == len(self.knots):
            return self.knots[-1][1]
        (left, low), (right, high) = self.knots[after - 1 : after + 1]
        return low + Fraction(samples - left) * (high - low) / (right - left)


def _samples(steps: int | None, tokens: int | None, batch: Samples, length: int) -> Samples:
    """Convert a length to samples: ``steps``, or ``tokens`` rounded up to full steps.

    batch: samples per step. length: tokens per sequence.
    """
    if steps is None:
        steps = -(-(tokens or 0) // (batch * length))
    return steps * batch
