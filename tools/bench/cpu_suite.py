"""``python -m tools.bench.cpu_suite``: measure all operations and small models on a CPU, as ratios.

Comparing two runs of the suite shows what a change made slower.

The two sides of a ratio are timed alternately, three times, and the fastest time of each side
counts, since other programs may run at the same time. A ratio to standard attention over the same
number of tokens does not predict the ratio on a GPU, but its change between two commits shows the
effect of the commits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fem_common.cli import run
from fem_common.errors import UserError, convert_os_errors
from tools.bench import engine_steps, runner
from tools.bench.speed import Speed, implementations, time_baseline, time_workload
from tools.bench.whole_model import BASELINE, SCALES, VARIANTS, Scale, train_step
from tools.bench.workloads import WORKLOADS

PROGRAM = "tools.bench.cpu_suite"
STANDARD = "attention: torch's choice"
SLOWER = 1.2
ROUNDS = 3
PASSES = ("forward", "forward + backward")

Ratios = dict[str, float]


@dataclass(frozen=True)
class Effort:
    """Size of the measurement.

    tokens: sequence lengths at which the operations are timed.
    layers, hidden: number of layers and hidden size of the models.
    model_tokens: sequence length of the models.
    budget: seconds of one timing of an operation; a model's training step gets four times as many.
    """

    tokens: tuple[int, ...]
    layers: int
    hidden: int
    model_tokens: int
    budget: float


QUICK = Effort((128,), 2, 128, 128, 0.06)
FULL = Effort((128, 512, 1024), 4, 256, 512, 0.5)


def fastest(sides: dict[str, Callable[[], Speed]]) -> dict[str, tuple[float, float]]:
    """Time all sides alternately and return name -> (forward, forward + backward) seconds.

    sides: name -> function that times the side once. The least time of each side counts.
    """
    found: dict[str, tuple[float, float]] = {}
    for _ in range(ROUNDS):
        for name, time_it in sides.items():
            speed = time_it()
            now = (speed.forward.seconds, speed.both.seconds)
            before = found.get(name, now)
            found[name] = (min(now[0], before[0]), min(now[1], before[1]))
    return found


def operation(name: str, tokens: int, budget: float) -> dict[str, Any]:
    """Return the row of one operation at one length: seconds, and ratios to its baselines.

    The implementation "auto" is compared with standard attention, whose key and value widths are
    (d_k, 2 d_v), and with the implementation "reference" if the operation has one.

    name: key of WORKLOADS.
    tokens: sequence length.
    budget: seconds of one timing.
    """
    workload = WORKLOADS[name]
    size = workload.small_size(tokens)
    reading = size.wider(2)
    sides: dict[str, Callable[[], Speed]] = {
        "ours": lambda: time_workload(name, "auto", size, torch.float32, budget),
        "standard attention": lambda: time_baseline(STANDARD, reading, torch.float32, budget),
    }
    if "reference" in implementations(workload.op):
        sides["reference"] = lambda: time_workload(name, "reference", size, torch.float32, budget)
    seconds = fastest(sides)
    row: dict[str, Any] = {"what": name, "tokens": tokens, "seconds": seconds}
    for other in seconds.keys() - {"ours"}:
        row[f"ours / {other}"] = {
            which: seconds["ours"][n] / seconds[other][n] for n, which in enumerate(PASSES)
        }
    return row


def models(effort: Effort) -> Iterator[dict[str, Any]]:
    """Yield a row for each model: its step time, and the ratio to the Transformer's.

    The Transformer is timed before each model.
    """
    scale = small_scale(effort)

    def seconds(variant: str) -> float:
        return train_step(variant, scale, torch.float32, 4 * effort.budget).step.seconds

    for variant in VARIANTS:
        base, own = zip(
            *((seconds(BASELINE), seconds(variant)) for _ in range(ROUNDS)), strict=True
        )
        yield {
            "what": f"model: {variant}",
            "tokens": scale.tokens,
            "seconds": {"ours": (min(own), min(own)), BASELINE: (min(base), min(base))},
            "ours / Transformer": {"train step": min(own) / min(base)},
        }


def small_scale(effort: Effort) -> Scale:
    """Return a scale (model sizes, sequence length, batch size) that fits a CPU."""
    model = replace(
        SCALES["table 7"].model,
        num_layers=effort.layers,
        hidden_size=effort.hidden,
        num_attention_heads=4,
        vocab_size=1024,
    )
    return Scale("a CPU's", model, effort.model_tokens, 1)


def render(rows: list[dict[str, Any]]) -> str:
    """Return the ratios as Markdown tables: operations, then models."""
    operations, steps = [], []
    for row in rows:
        what, tokens = row["what"].removeprefix("model: "), str(row["tokens"])
        if "ours / Transformer" in row:
            steps.append([what, tokens, f"{row['ours / Transformer']['train step']:.2f}"])
            continue
        cells = [what, tokens]
        for other in ("standard attention", "reference"):
            ratios = row.get(f"ours / {other}")
            cells += [f"{ratios[which]:.2f}" if ratios else "" for which in PASSES]
        operations.append(cells)
    header = [
        "operation",
        "tokens",
        "forward ÷ standard",
        "fwd + bwd ÷ standard",
        "forward ÷ reference",
        "fwd + bwd ÷ reference",
    ]
    tables = ((header, operations), (["model", "tokens", "train step ÷ Transformer"], steps))
    return "\n\n".join(runner.table(columns, lines) for columns, lines in tables if lines)


def slower(rows: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[str]:
    """Return a line for each ratio to a baseline that is over 20% larger than in an earlier run.

    rows, earlier: rows of this run and of the earlier one.
    """
    found = []
    before = {(row["what"], row["tokens"]): row for row in earlier}
    for row in rows:
        old = before.get((row["what"], row["tokens"]), {})
        for ratio in ("ours / standard attention", "ours / Transformer"):
            for which, now in row.get(ratio, {}).items():
                then = old.get(ratio, {}).get(which)
                if then and now > SLOWER * then:
                    found.append(
                        f"{row['what']}, {row['tokens']} tokens, {which}: "
                        f"{now / then:.2f} times slower ({then:.2f} -> {now:.2f})"
                    )
    return found


def measure_all(
    effort: Effort, only: list[str] | None, report: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return all rows, and one line for each operation that could not be timed.

    only: names of operations, or "models"; None or empty measures everything.

    The last argument is called with each line of progress.
    """
    rows, gaps = [], []
    wanted = [name for name in WORKLOADS if not only or name in only]
    for name in wanted:
        for tokens in effort.tokens:
            try:
                rows.append(operation(name, tokens, effort.budget))
            except (ValueError, TypeError, RuntimeError) as error:
                gaps.append(f"{name}, {tokens} tokens: {str(error).splitlines()[0]}")
        report(f"{name} done")
    if not only or "models" in only:
        for row in models(effort):
            rows.append(row)
            report(f"{row['what']} done")
    return rows, gaps


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier run's JSON file. Raises UserError, StorageError."""
    with convert_os_errors():
        text = path.read_text(encoding="utf-8")
    try:
        rows: list[dict[str, Any]] = json.loads(text)["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--compare {path}: not the JSON of an earlier run: {error}") from None
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 0, or 2 if the file of ``--compare`` cannot be read."""
    parser = runner.command_line(
        PROGRAM,
        "Measure all operations and small models on a CPU, as ratios to standard attention and "
        "the Transformer.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one short length, tiny models: under two minutes on two cores",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--steps",
        action="store_true",
        help="only complete training steps: the engine's FEM-SM and Transformer, and Hugging "
        "Face's Llama",
    )
    which.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=[*WORKLOADS, "models"],
        help="only these operations, or models",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="PATH",
        help="JSON file of an earlier run: list the ratios that are now over 20%% larger",
    )
    options = parser.parse_args(arguments)
    return run(PROGRAM, lambda: measure(options))


def measure(options: argparse.Namespace) -> int:
    """Time the selected operations and models and print the table. Return 0.

    Raises UserError if the file of ``--compare`` cannot be read.
    """
    earlier = read_rows(options.compare) if options.compare else []
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    gaps: list[str] = []
    if options.steps:
        sizes = dict(list(engine_steps.SIZES.items())[: 1 if options.quick else None])
        rows = engine_steps.compare(sizes, 3 if options.quick else engine_steps.ROUNDS)
        text = engine_steps.render(rows)
    else:
        rows, gaps = measure_all(QUICK if options.quick else FULL, options.only, tell)
        text = render(rows)
    machine = runner.facts()
    print(f"{runner.sentence(machine)}; float32\n\n{text}")
    for gap in gaps:
        print(f"not timed: {gap}")
    runner.write_json(
        options.json, {"suite": "cpu", "machine": machine, "rows": rows, "gaps": gaps}
    )
    if options.compare:
        found = slower(rows, earlier)
        print(
            "\n".join(["", f"slower by over 20% than {options.compare}:", *(found or ["nothing"])])
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
