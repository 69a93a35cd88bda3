"""Results of the demo: comparisons of runs, unigram entropies, and the report as text.

This module starts no process.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.report.history import History
from tools.demo.shell import DemoError


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


def unigram_entropy(file: Path, vocabulary: int) -> float:
    """Return the entropy of the token frequencies of a .bin file (uint16), in nats per token.

    It is a lower bound of the loss of every model that ignores the context.
    """
    counts = np.bincount(np.fromfile(file, dtype=np.uint16), minlength=vocabulary)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def bits_per_byte(nats_per_token: float, split: dict[str, Any]) -> float:
    """Return the loss in bits per byte of text.

    split: the split's entry of the data manifest, with its number of tokens (EOD included) and of
    its text's UTF-8 bytes.
    """
    return nats_per_token / math.log(2) * split["tokens"] / split["text_bytes"]


def model_findings(
    found: dict[str, Any], history: History, heldout: dict[str, Any]
) -> dict[str, Any]:
    """Return one model's entry of report.json: losses and training speed.

    found: results of `tools.demo.stock_transformers`.
    """
    kept = ("heldout_nats_per_token", "heldout_tokens", "parameters", "sample")
    return {
        **{key: found[key] for key in kept},
        "heldout_bits_per_byte": bits_per_byte(found["heldout_nats_per_token"], heldout),
        "tokens_trained": history.steps[-1]["consumed_tokens"],
        "tokens_per_second": history.tokens_per_second(),
    }


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Return the table of report.json without its heads, one row per model and one for unigrams.

    The columns are: name, nats per token, bits per byte, parameters, tokens per second.
    """
    models, alone = found["models"], found["unigram"]
    cells = [
        [
            name,
            f"{models[key]['heldout_nats_per_token']:.3f}",
            f"{models[key]['heldout_bits_per_byte']:.3f}",
            f"{models[key]['parameters'] / 1e6:.2f}M",
            f"{models[key]['tokens_per_second']:,.0f}",
        ]
        for key, name in NAMES.items()
    ]
    entropy = (f"{alone['heldout_entropy']:.3f}", f"{alone['bits_per_byte']:.3f}")
    return [*cells, ["the text's own unigram entropy", *entropy, "", ""]]


def conditions(found: dict[str, Any]) -> str:
    """Return the conditions of the measurements, and the results of the comparisons."""
    parity, fem = found["parity"], found["models"]["fem"]
    logits, cache = (max(parity[key].values()) for key in ("logit_difference", "cache_difference"))
    exact = f"to {logits:.1e}" if logits else "to the last bit"
    return (
        "tokens/s: the median step of both models at DP 2 with one thread per rank. One seed and "
        f"{fem['tokens_trained'] / 1e6:.2f}M tokens: this shows that both train, not which is "
        f"better at scale. Losses of the {parity['resume_steps']} steps after the change of layout "
        f"agree with the old layout's to {parity['resume_relative_loss_difference']:.1e}; exported "
        f"logits equal Megatron's {exact}, and with the cache those without it to {cache:.1e}."
    )


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
