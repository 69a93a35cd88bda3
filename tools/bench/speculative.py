"""``python -m tools.bench.speculative MODEL``: speed of speculative against greedy decoding.

Both continue the same prompts in one process, alternating. On a CPU the time is that of
the process, so that other programs matter less.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from operator import truediv
from pathlib import Path
from typing import Any

from fem_common.cli import run
from fem_common.errors import ConfigError
from tools.bench import runner

PROGRAM = "tools.bench.speculative"
PROMPTS = ("def read(self", "import os\n", "class Node:\n    def __init__(self", "# Copyright")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and return the exit code."""
    parser = runner.command_line(PROGRAM, "Time speculative and greedy decoding of one model.")
    parser.add_argument("model", type=Path, metavar="MODEL", help="as for tools.generate")
    parser.add_argument("--new", type=int, default=128, metavar="N", help="tokens; default: 128")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    given = parser.parse_args(arguments)
    return run(PROGRAM, lambda: _measure(given.model, given.new, given.rounds, given.json))


def _measure(path: Path, new: int, rounds: int, json: Path | None) -> int:
    import torch

    from fem_megatron.megatron import platform
    from tools.generate.speculative import speculate
    from tools.hf.open_model import open_model, quiet_transformers

    opened = open_model(path, device="auto")
    model: Any = opened.model
    if min(new, rounds) < 1 or opened.tokenizer is None or not hasattr(model, "mtp_modules"):
        raise ConfigError(
            f"{path} needs a tokenizer and modules of multi-token prediction (model.mtp_depth), "
            "and --new and --rounds at least 1"
        )
    model.generation_config.eos_token_id = None  # all texts have equal lengths
    clock = time.perf_counter if platform.has_cuda() else time.process_time
    rows = [opened.encode(prompt) for prompt in PROMPTS]
    counts: dict[tuple[int, ...], tuple[int, int, int]] = {}

    def greedy(row: list[int]) -> list[int]:
        ids = torch.tensor([row], device=model.device)
        made = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
        tokens: list[int] = made[0, len(row) :].tolist()
        return tokens

    def speculative(row: list[int], depth: int | None = None) -> list[int]:
        *_, found = speculate(model, row, new, depth=depth)
        counts[tuple(row)] = (found.drafted, found.accepted, found.passes)
        return found.tokens

    ways: dict[str, Callable[[list[int]], list[int]]] = {
        "greedy, transformers": greedy,
        "greedy, the same loop": lambda row: speculative(row, 0),
        "speculative": speculative,
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    with quiet_transformers():
        for number in range(rounds + 1):
            seconds = dict.fromkeys(ways, 0.0)
            made: dict[str, list[list[int]]] = {way: [] for way in ways}
            for row, (way, decode) in product(rows, ways.items()):
                began = clock()
                made[way].append(decode(row))
                seconds[way] += clock() - began
            for way in ways if number else ():  # the first round is a warm-up
                speeds[way].append(len(rows) * new / seconds[way])
    lines = []
    for way, values in speeds.items():
        ratio = statistics.median(map(truediv, values, speeds["greedy, the same loop"]))
        lines.append((way, f"{statistics.median(values):.1f}", f"{ratio:.2f}"))
    drafted, accepted, passes = map(sum, zip(*counts.values(), strict=True))
    texts = list(made.values())
    equal = "equal" if texts[0] == texts[1] == texts[2] else "NOT equal"
    found = f"{accepted} of {drafted} drafts accepted, {len(rows) * new / passes:.2f} tokens per "
    found += f"forward pass; the tokens are {equal}"
    facts = runner.facts()
    print(runner.sentence(facts), runner.table(("decoding", "tokens/s", "ratio"), lines), sep="\n")
    print(found)
    runner.write_json(json, {"machine": facts, "tokens_per_second": speeds, "drafts": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
