"""``python tools/demo/stock_transformers.py MODEL ...``: check an exported model.

The check uses stock transformers and no code of this project.

The script is started as a file and makes sure that it imports no package of the project. It
compares logits with Megatron's, measures the loss on a complete held-out split, and generates a
text with the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

OURS = ("fem_common", "fem_megatron", "kernels", "pretrain", "tools")
PROMPT, NEW_TOKENS = "def read(self", 64


def logit_difference(model: Any, tokens: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest absolute difference between the model's logits and ``reference``.

    reference: [sequences, length, vocabulary], the logits of the first sequences * length tokens.
    """
    sequences, length, _ = reference.shape
    ids = torch.from_numpy(tokens[: sequences * length].astype(np.int64)).view(sequences, length)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return float((logits - torch.from_numpy(reference)).abs().max())


def heldout_loss(model: Any, tokens: np.ndarray, length: int, batch: int = 4) -> tuple[float, int]:
    """Return (mean loss in nats per token, number of predicted tokens).

    Every token except the first is predicted once, in windows of ``length`` tokens that do not
    overlap. A token attends only to its predecessors in the same window, as in training.
    """
    ids = torch.from_numpy(tokens.astype(np.int64))
    full = (len(ids) - 1) // length
    inputs = ids[: full * length].view(full, length)
    targets = ids[1 : full * length + 1].view(full, length)
    pieces = [(inputs[i : i + batch], targets[i : i + batch]) for i in range(0, full, batch)]
    if full * length < len(ids) - 1:
        pieces.append((ids[None, full * length : -1], ids[None, full * length + 1 :]))
    total = 0.0
    with torch.no_grad():
        for piece, wanted in pieces:
            logits = model(input_ids=piece, use_cache=False).logits
            total += float(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), wanted.flatten(), reduction="sum"
                )
            )
    return total / (len(ids) - 1), len(ids) - 1


def sample(model: Any, tokenizer: Any) -> tuple[str, float, float]:
    """Continue PROMPT and return (text, seconds, largest difference of the logits).

    The difference is that between the logits computed with the cache and those of one pass over the
    complete text without the cache.
    """
    torch.manual_seed(0)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    started = time.monotonic()
    answer = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=0.7,
        top_k=40,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    seconds = time.monotonic() - started
    with torch.no_grad():
        full = model(input_ids=answer.sequences[:, :-1], use_cache=False).logits[:, -NEW_TOKENS:]
    difference = float((torch.stack(answer.logits, dim=1) - full).abs().max())
    return str(tokenizer.decode(answer.sequences[0], skip_special_tokens=True)), seconds, difference


def main(arguments: list[str] | None = None) -> int:
    """Write the results to --out as JSON, print them and return the exit code.

    The results are not compared with bounds; the caller does that.
    """
    parser = argparse.ArgumentParser(prog="stock_transformers.py", description=__doc__)
    parser.add_argument("model", type=Path, help="an exported model's folder")
    parser.add_argument(
        "--tokens", type=Path, required=True, help="a held-out split's .bin file (uint16)"
    )
    parser.add_argument(
        "--megatron-logits",
        type=Path,
        required=True,
        help="written by tools.demo.megatron_logits from the same tokens",
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--length", type=int, default=256, help="window of the held-out loss")
    given = parser.parse_args(arguments)
    # Imported after parsing, since this takes seconds that --help need not wait for.
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokens = np.fromfile(given.tokens, dtype=np.uint16)
    reference = np.load(given.megatron_logits)
    model = AutoModelForCausalLM.from_pretrained(
        given.model, trust_remote_code=True, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model, trust_remote_code=True)
    imported = sorted(name for name in sys.modules if name.partition(".")[0] in OURS)
    if imported:
        print(
            f"stock_transformers.py: error: {imported[0]} was imported, but the model must load "
            "without the project's packages",
            file=sys.stderr,
        )
        return 1
    print(
        f"loaded {given.model}: {type(model).__name__}, code from its own folder, "
        "none of the project's packages imported",
        flush=True,
    )
    difference = logit_difference(model, tokens, reference)
    print(
        f"logits: largest difference to Megatron's {difference:.1e} "
        f"(of values up to {np.abs(reference).max():.1f})",
        flush=True,
    )
    loss, predicted = heldout_loss(model, tokens, given.length)
    print(
        f"held-out loss {loss:.4f} nats per token over {predicted} tokens, the whole split",
        flush=True,
    )
    text, seconds, cache_difference = sample(model, tokenizer)
    print(
        f"generated {NEW_TOKENS} tokens with the cache in {seconds:.1f} s; "
        f"largest difference to the logits without it {cache_difference:.1e}:"
    )
    print("\n".join(f"  | {line}" for line in text.splitlines()), flush=True)
    findings = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "logit_difference": difference,
        "logits_compared": int(reference.size),
        "heldout_nats_per_token": loss,
        "heldout_tokens": predicted,
        "cache_difference": cache_difference,
        "sample": text,
    }
    given.out.write_text(json.dumps(findings, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
