"""Results of the demo: training histories, unigram entropies, and the report as text.

A history is read from the run's metrics.jsonl. This module starts no process.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fem_common.text import aligned
from tools.demo.shell import DemoError


@dataclass(frozen=True)
class History:
    """Logged steps and validations of one run, in order.

    steps: entries of metrics.jsonl; the last entry of each step.
    validations: (step, validation loss).
    """

    steps: tuple[dict[str, Any], ...]
    validations: tuple[tuple[int, float], ...]

    @classmethod
    def read(cls, run: Path) -> History:
        """Read the history of a run directory; an incomplete line is left out."""
        steps: dict[int, dict[str, Any]] = {}
        validations: dict[int, float] = {}
        file = run / "metrics.jsonl"
        for line in file.read_text().splitlines() if file.is_file() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "valid_loss" in entry:
                validations[entry["step"]] = _number(entry["valid_loss"])
            elif "loss" in entry:
                steps[entry["step"]] = entry | {"loss": _number(entry["loss"])}
        return cls(tuple(steps[step] for step in sorted(steps)), tuple(sorted(validations.items())))

    @property
    def last_step(self) -> int:
        """Number of the last step; 0 before the first."""
        return self.steps[-1]["step"] if self.steps else 0

    def losses(self) -> dict[int, float]:
        """Return step -> training loss, in nats per token."""
        return {entry["step"]: entry["loss"] for entry in self.steps}

    def part(self, after: int = 0, up_to: int | None = None) -> History:
        """Return the steps ``after`` < step <= ``up_to``, with all validations."""
        end = self.last_step if up_to is None else up_to
        return History(
            tuple(entry for entry in self.steps if after < entry["step"] <= end), self.validations
        )

    def tokens_per_second(self) -> float:
        """Return the median of the tokens per second over the steps."""
        return statistics.median(entry["tokens_per_second"] for entry in self.steps)

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of a rank: the maximum over steps and ranks."""
        return max(entry["peak_memory_bytes"] for entry in self.steps)


def _number(value: float | None) -> float:
    """Return a loss of metrics.jsonl as a float; null, which means not finite, becomes NaN."""
    return math.nan if value is None else value


def checkpoint_step(run: Path) -> int:
    """Return the step of a run's newest checkpoint.

    Raises:
        DemoError: the run has no checkpoint.
    """
    latest = run / "checkpoints" / "latest"
    if not latest.is_file():
        raise DemoError(f"{run}: the run has no checkpoint (checkpoints/latest is missing)")
    return int(latest.read_text().strip().removeprefix("step_"))


def largest_difference(ours: dict[int, float], theirs: dict[int, float]) -> tuple[int, float]:
    """Return (number of common steps, largest relative difference of the losses).

    ours, theirs: step -> loss of two runs.

    Raises:
        DemoError: the runs have no step in common.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise DemoError("the two runs have no step in common, so there is nothing to compare")
    return len(shared), max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in shared)


NAMES = {"fem": "FEM-softmax", "transformer": "Transformer"}
MARGIN = 1.1  # the model must be this far below the unigram entropy, in nats per token


def unigram(train: Path, heldout: Path, vocabulary: int) -> dict[str, float]:
    """Return the nats per token of two models that ignore the context.

    train, heldout: .bin files of uint16.

    ``heldout_entropy`` is that of the held-out split's own token frequencies, a lower bound for
    every model without context. ``train_cross_entropy`` is that of the training split's frequencies
    (one added to each count) on the held-out split, which a trained model without context reaches.
    """
    counts = [
        np.bincount(np.fromfile(file, dtype=np.uint16), minlength=vocabulary)
        for file in (train, heldout)
    ]
    own = counts[1] / counts[1].sum()
    learned = (counts[0] + 1) / (counts[0] + 1).sum()
    seen = own > 0
    return {
        "heldout_entropy": float(-(own[seen] * np.log(own[seen])).sum()),
        "train_cross_entropy": float(-(own[seen] * np.log(learned[seen])).sum()),
    }


def bits_per_byte(nats_per_token: float, split: dict[str, Any]) -> float:
    """Return the loss in bits per byte of text.

    split: the split's entry of the data manifest, with its number of tokens (EOD included) and of
    its text's UTF-8 bytes.
    """
    return nats_per_token / math.log(2) * split["tokens"] / split["text_bytes"]


def model_findings(
    found: dict[str, Any], history: History, heldout: dict[str, Any]
) -> dict[str, Any]:
    """Return one model's entry of report.json: losses, training speed and memory.

    found: results of `tools.demo.stock_transformers`.
    """
    kept = ("heldout_nats_per_token", "heldout_tokens", "parameters", "sample")
    return {
        **{key: found[key] for key in kept},
        "heldout_bits_per_byte": bits_per_byte(found["heldout_nats_per_token"], heldout),
        "tokens_trained": history.steps[-1]["consumed_tokens"],
        "tokens_per_second": history.tokens_per_second(),
        "peak_memory_bytes": history.peak_memory_bytes(),
    }


def table(found: dict[str, Any]) -> str:
    """Return the contents of report.json as a text table, followed by notes."""
    rows = [
        ("", "held-out loss", "bits per", "parameters", "training", "peak memory"),
        ("", "nats per token", "byte", "", "tokens/s", "per rank"),
    ]
    for key, name in NAMES.items():
        model = found["models"][key]
        rows.append(
            (
                name,
                f"{model['heldout_nats_per_token']:.3f}",
                f"{model['heldout_bits_per_byte']:.3f}",
                f"{model['parameters'] / 1e6:.2f}M",
                f"{model['tokens_per_second']:,.0f}",
                f"{model['peak_memory_bytes'] / 2**30:.2f} GiB",
            )
        )
    alone, empty = found["unigram"], ("", "", "")
    own = (f"{alone['heldout_entropy']:.3f}", f"{alone['bits_per_byte']:.3f}", *empty)
    learned = (f"{alone['train_cross_entropy']:.3f}", "", *empty)
    rows += [("unigram (held-out text's own)", *own), ("unigram (from training text)", *learned)]
    lines = aligned(rows, left=(0,))
    return "\n".join([*lines[:2], "-" * max(map(len, lines)), *lines[2:], "", *notes(found)])


def notes(found: dict[str, Any]) -> list[str]:
    """Return lines that explain the table, and the differences between Megatron and the exports."""
    run, parity, fem = found["run"], found["parity"], found["models"]["fem"]
    logits, cache = parity["logit_difference"], parity["cache_difference"]
    return [
        f"Held-out loss: all {fem['heldout_tokens']:,} tokens of the valid split, "
        f"in windows of {run['seq_length']}, by the exported models in stock transformers.",
        f"Training: {run['steps']} steps of {run['batch_tokens']:,} tokens each; "
        f"tokens/s (median) and memory at {run['resumed_layout']};",
        f"  FEM before the stop, at {run['stopped_layout']}: "
        f"{fem['tokens_per_second_stopped_layout']:,.0f} tokens/s, "
        f"{fem['peak_memory_bytes_stopped_layout'] / 2**30:.2f} GiB.",
        f"Parity, largest differences: losses of the {parity['resume_steps']} steps after the "
        "resume at another layout against those without it "
        f"{parity['resume_relative_loss_difference']:.1e} (relative);",
        f"  exported logits against Megatron's {logits['fem']:.1e} (FEM), "
        f"{logits['transformer']:.1e} (Transformer); "
        f"generation with cache against without {cache['fem']:.1e}, {cache['transformer']:.1e}.",
    ]


def verdict(found: dict[str, Any]) -> list[str]:
    """Return sentences that compare FEM with the unigram entropy and with the Transformer."""
    fem, plain = found["models"]["fem"], found["models"]["transformer"]
    gain = plain["heldout_nats_per_token"] - fem["heldout_nats_per_token"]
    relation = "lower" if gain > 0 else "higher"
    below = found["unigram"]["heldout_entropy"] - fem["heldout_nats_per_token"]
    cost = plain["tokens_per_second"] / fem["tokens_per_second"]
    return [
        f"FEM-softmax is {below:.2f} nats per token below the unigram entropy "
        f"(required: {MARGIN}).",
        f"FEM-softmax's held-out loss is {abs(gain):.3f} nats per token {relation} than the "
        "Transformer's after the same steps on the same batches "
        f"({fem['parameters'] / plain['parameters'] - 1:+.1%} parameters), "
        f"and a step takes {cost:.2f} times as long on this machine.",
        f"One seed and {fem['tokens_trained'] / 1e6:.2f}M tokens: this shows that both train and "
        "how they compare in this run, not which is better at scale.",
    ]


def shortfall(found: dict[str, Any]) -> str | None:
    """Return an error text if the FEM model's held-out loss is too high, else None.

    It must be MARGIN below the unigram entropy.
    """
    entropy = found["unigram"]["heldout_entropy"]
    loss = found["models"]["fem"]["heldout_nats_per_token"]
    if loss <= entropy - MARGIN:
        return None
    return (
        f"the held-out loss {loss:.3f} is not {MARGIN} nats below the unigram entropy "
        f"{entropy:.3f}: it must be at most {entropy - MARGIN:.3f}"
    )


def minutes(seconds: float) -> str:
    """Return a duration in seconds as "m:ss"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
