"""``python -m tools.bench.mixers``: train every mixer on the demo's data.

It writes the table of docs/mixers.md.

All models have the same width, depth, tokens and seed. Each model trains in a separate process of
``python -m pretrain``, one after another. The Transformer is the baseline of every ratio.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from fem_common.cli import run
from fem_common.errors import Fault
from fem_megatron.catalogue import MIXERS
from pretrain.config import load_run
from pretrain.plan.run_plan import count_by_component, decoding_state_bytes
from pretrain.report.history import History
from tools.bench import runner

PROGRAM = "tools.bench.mixers"
RUN = "configs/run/demo.yaml"
BASELINE = "transformer"
# With the demo's learning rate of 3e-3, CEM does not get below the text's unigram entropy in 200
# steps (6.97 nats against 6.60).
GENTLER = ("optimizer.lr=1e-3", "optimizer.min_lr=1e-4")
# Differences from the demo's model, besides the mixer's name. Hyper-SET iterates one block; a
# looped Transformer iterates any block.
SETTINGS: dict[str, tuple[str, ...]] = {
    "cem": GENTLER,
    "hyperset": ("model.num_layers=1", "model.recurrence=4"),
    "energy_transformer": ("model.recurrence=2", "model.energy_transformer.alpha=1.0"),
    "transformer, looped twice": (
        "model.mixer=transformer",
        "model.num_layers=2",
        "model.recurrence=2",
    ),
    "hybrid: fem_softmax, fem_gla": ("model.pattern=[fem_softmax, fem_gla]",),
    "transformer with CEM's MLP": ("model.mixer=transformer", "model.mlp=cem", *GENTLER),
    "cem with SwiGLU": ("model.mixer=cem", "model.mlp=swiglu", *GENTLER),
}


def names() -> list[str]:
    """Return the names of all compared models.

    The baseline is first. The mixers that run without a GPU follow, and then the combinations in
    SETTINGS.
    """
    own = [name for name in MIXERS if not name.startswith("fla.") and name != BASELINE]
    return [BASELINE, *own, *(name for name in SETTINGS if name not in MIXERS)]


def run_folder(name: str, folder: Path) -> Path:
    """Return the run directory of the model ``name`` below ``folder``."""
    return folder / "".join(letter if letter.isalnum() else "_" for letter in name)


def overrides(name: str, steps: int, folder: Path) -> list[str]:
    """Return the ``section.key=value`` overrides with which the model ``name`` trains."""
    mixer = [f"model.mixer={name}"] if name in MIXERS else []
    fixed = [
        f"run_dir={run_folder(name, folder)}",
        f"train.steps={steps}",
        f"train.eval_interval={steps}",
        "log.interval=5",
        "data.test=[]",
    ]
    return [*mixer, *SETTINGS.get(name, ()), *fixed, "optimizer.warmup_steps=15"]


def train(name: str, steps: int, folder: Path) -> dict[str, float | str]:
    """Train one model and return its figures.

    Raises Fault with the end of the run's output if the run fails.
    """
    settings = overrides(name, steps, folder)
    command = [sys.executable, "-m", "pretrain", RUN, *settings]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        raise Fault(
            f"{name}: {' '.join(command)} ended with {done.returncode}\n{done.stderr[-2000:]}"
        )
    run_dir = run_folder(name, folder)
    config, history = load_run(run_dir / "config.yaml", ()), History.read(run_dir)
    counts = count_by_component(config.model)
    label = f"{name} (lr {config.optimizer.lr:g})" if set(GENTLER) <= set(settings) else name
    outside = ("embedding", "output layer")
    return {
        "name": label,
        "cost": MIXERS[name].cost if name in MIXERS else "",
        "parameters": sum(count for part, count in counts.items() if part not in outside),
        "tokens_per_second": history.tokens_per_second(),
        "first_loss": history.steps[0]["loss"],
        "heldout_loss": history.validations[-1][1],
        "state_bytes": decoding_state_bytes(config.model, 4096, 2),
    }


def table(rows: list[dict[str, float | str]], steps: int) -> str:
    """Return the results as a Markdown table."""
    base = next(float(row["tokens_per_second"]) for row in rows if row["name"] == BASELINE)
    lines = []
    for row in rows:
        parameters, loss, speed, state = (
            float(row[key])
            for key in ("parameters", "heldout_loss", "tokens_per_second", "state_bytes")
        )
        cells = [
            str(row["name"]),
            str(row["cost"]),
            f"{parameters / 1e6:.2f}M",
            f"{loss:.3f}",
            f"{speed:,.0f}",
            f"{speed / base:.2f}",
        ]
        lines.append([*cells, f"{state / 1024:,.0f} KiB"])
    columns = (
        "mixer|cost in T|parameters of the layers|held-out loss, nats|tokens/s|÷ Transformer|"
        "state of 4,096 tokens"
    )
    return (
        f"{runner.sentence(runner.facts())}; {steps} steps of 1,024 tokens.\n\n"
        f"{runner.table(columns.split('|'), lines)}\n"
    )


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments, run the benchmark and return the exit code."""
    parser = runner.command_line(
        PROGRAM, "Train every mixer on the data that `make demo` writes, and compare them."
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/mixers"),
        help="folder of the runs, table.md and table.json",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these and the baseline")
    options = parser.parse_args(arguments)
    return run(PROGRAM, lambda: measure(options))


def measure(options: argparse.Namespace) -> int:
    """Train the selected mixers one after the other and write the table and the JSON. Return 0.

    Raises Fault if a run fails.
    """
    chosen = [name for name in names() if not options.only or name in {*options.only, BASELINE}]
    rows: list[dict[str, float | str]] = []
    began = time.monotonic()
    for number, name in enumerate(chosen):
        rows.append(train(name, options.steps, options.out))
        left = (time.monotonic() - began) / (number + 1) * (len(chosen) - number - 1)
        print(
            f"{name}: held-out {rows[-1]['heldout_loss']:.3f}; {left / 60:.0f} min left", flush=True
        )
        runner.write_json(options.out / "table.json", rows)
    (options.out / "table.md").write_text(table(rows, options.steps))
    content = {
        "suite": "mixers",
        "machine": runner.facts(),
        "steps": options.steps,
        "baseline": BASELINE,
        "rows": rows,
    }
    runner.write_json(options.json, content)
    print(f"wrote {options.out / 'table.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
