"""Steps, samples and tokens of a run: every length the configuration states in one unit, in all of them. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pretrain.config import RunConfig


@dataclass(frozen=True)
class Schedule:
    """Lengths of a run in optimizer steps and in samples (sequences)."""

    steps: int
    batch_samples: int
    sample_tokens: int
    warmup_samples: int
    decay_samples: int  # of WSD's final decay
    rate_samples: int = 0  # consumed where the learning rate's schedule begins
    begin_step: int = 0  # where steps and batches begin to be these: a fork's first step
    begin_samples: int = 0  # consumed until then
    rate_end: int = 0  # consumed where the learning rate's schedule ends; 0: at the end
    run_steps: int = 0  # of all stages, where there are some
    run_tokens: int = 0

    @property
    def total_samples(self) -> int:
        """Sequences that are consumed at the run's end."""
        return self.samples_at(self.steps)

    def samples_at(self, step: int) -> int:
        """Sequences that are consumed after a step."""
        return self.begin_samples + (step - self.begin_step) * self.batch_samples

    @property
    def last_step(self) -> int:
        """The run's last step, whatever its stages."""
        return self.run_steps or self.steps

    @property
    def total_tokens(self) -> int:
        """Tokens that the run consumes, whatever its stages."""
        return self.run_tokens or self.total_samples * self.sample_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_samples * self.sample_tokens

    @classmethod
    def of(cls, config: RunConfig, begin_step: int = 0, begin_samples: int = 0) -> Schedule:
        """The schedule of a validated configuration; of a fork, with the step at which it begins and what was consumed until then."""
        batch, length, train = config.train.global_batch_size, config.data.seq_length, config.train
        tokens = None if train.tokens is None else max(0, train.tokens - begin_samples * length)
        steps = (begin_step if train.steps is None else 0) + _samples(train.steps, tokens, batch, length) // batch
        optimizer = config.optimizer
        span = steps - optimizer.from_step
        warmup = _samples(optimizer.warmup_steps, optimizer.warmup_tokens, batch, length)
        if optimizer.warmup_fraction and optimizer.warmup_steps is None and optimizer.warmup_tokens is None:
            warmup = min(max(1, round(optimizer.warmup_fraction * span)), span - 1) * batch
        decay = _samples(optimizer.decay_steps, optimizer.decay_tokens, batch, length) or max(1, span // 10) * batch
        made = cls(steps, batch, length, warmup, decay, begin_step=begin_step, begin_samples=begin_samples)
        return replace(made, rate_samples=made.samples_at(optimizer.from_step)) if optimizer.from_step else made


def _samples(steps: int | None, tokens: int | None, batch: int, length: int) -> int:
    """Whole steps' worth of samples; tokens are rounded up."""
    if steps is None:
        steps = -(-(tokens or 0) // (batch * length))
    return steps * batch
