"""Steps, samples and tokens of a run: every length the configuration states in one unit, in all of them. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import RunConfig


@dataclass(frozen=True)
class Schedule:
    """Lengths of a run in optimizer steps and in samples (sequences)."""

    steps: int
    batch_samples: int
    sample_tokens: int
    warmup_samples: int
    decay_samples: int  # of WSD's final decay

    @property
    def total_samples(self) -> int:
        """Sequences the run consumes."""
        return self.steps * self.batch_samples

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_samples * self.sample_tokens

    @classmethod
    def of(cls, config: RunConfig) -> Schedule:
        """The schedule of a validated configuration."""
        batch, length = config.train.global_batch_size, config.data.seq_length
        steps = _samples(config.train.steps, config.train.tokens, batch, length) // batch
        optimizer = config.optimizer
        warmup = _samples(optimizer.warmup_steps, optimizer.warmup_tokens, batch, length)
        if optimizer.warmup_fraction and optimizer.warmup_steps is None and optimizer.warmup_tokens is None:
            warmup = min(max(1, round(optimizer.warmup_fraction * steps)), steps - 1) * batch
        decay = _samples(optimizer.decay_steps, optimizer.decay_tokens, batch, length) or max(1, steps // 10) * batch
        return cls(steps, batch, length, warmup, decay)


def _samples(steps: int | None, tokens: int | None, batch: int, length: int) -> int:
    """Whole steps' worth of samples; tokens are rounded up."""
    if steps is None:
        steps = -(-(tokens or 0) // (batch * length))
    return steps * batch
