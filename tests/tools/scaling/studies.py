"""Synthetic studies, created in milliseconds: their files, run directories, and runs with a known
law.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fem_common.config import dump_yaml
from pretrain.config import load_run
from pretrain.run_directory import resolved
from pretrain.validate import prepare
from tools.scaling.fits.points import Array, Points
from tools.scaling.planned_runs import PlannedRun, plan_study
from tools.scaling.study import Study, load_study
from tools.scaling.table import as_table

BASE = """
model: {mixer: transformer, vocab_size: 512}
data: {train: [{prefix: data/train}], valid: [{prefix: data/valid}], seq_length: 64}
train: {steps: 100, global_batch_size: 4, precision: fp32}
optimizer: {lr: 0.001, min_lr: 0.0002, warmup_tokens: 10000000}
"""
STUDY = """
base: base.yaml
variants: {transformer: [model.mixer=transformer], cem: [model.mixer=cem, optimizer.lr=5e-4]}
shape: {head_size: 16, aspect_ratio: 32}
sizes: [32, 64, {width: 96, layers: 2}]
budgets: [4.0e+10, {flops: 1.5e+11, sizes: [64, 96, 128]}]
cluster: {tflops: 0.01}
"""
# Runs of 100, 200 and 400 steps of 256 tokens that decay over the last tenth: two forks of each
# longest run.
TRUNKS = """
budgets: []
sizes: [32, 48]
tokens: [25600, 51200, 102400]
seeds: [1, 2]
warmup_steps: 20
trunks: true
settings: [optimizer.schedule=wsd]
"""


def write(folder: Path, changes: str = "", model: str = "", **changed: Any) -> Path:
    """Write a study's file and its base; ``changes`` is YAML with the keys of the study that
    differ, as are ``changed``, and ``model`` is YAML of the base's model.
    """
    base, more = yaml.safe_load(BASE), yaml.safe_load(model) or {}
    base["model"] |= more
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    values = yaml.safe_load(STUDY) | (yaml.safe_load(changes) or {}) | changed
    (folder / "study.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder / "study.yaml"


def planned(path: Path) -> tuple[Study, list[PlannedRun]]:
    study = load_study(path)
    return study, plan_study(study)


def write_run(
    study: Study,
    run: PlannedRun,
    *,
    up_to: int | None = None,
    state: str = "complete",
    words: tuple[str, ...] = (),
) -> Path:
    """Write a run's directory as pretrain leaves it after ``up_to`` steps; ``words``: settings that
    are not in the study.
    """
    folder = Path(study.directory) / run.name
    folder.mkdir(parents=True, exist_ok=True)
    settings = (*run.settings, *words, f"name={run.name}", f"run_dir={folder}")
    config = resolved(prepare(load_run(study.base, settings), 1).config)
    (folder / "config.yaml").write_text(dump_yaml(config))
    steps, lines = up_to or run.steps, list[dict[str, Any]]()
    for step in range(run.begin_step + 1, steps + 1):
        tokens = step * run.batch_tokens
        seen = loss(run.parameters, tokens)
        line = {"step": step, "consumed_tokens": tokens, "loss": seen - 0.01, "step_seconds": 0.5}
        lines.append(line | {"lr": 1e-3, "skipped": False})
        if step % config.train.eval_interval == 0 or step == run.steps:
            lines.append({"step": step, "valid_loss": seen})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    progress = {
        "format": 1,
        "state": state,
        "step": steps,
        "steps": run.steps,
        "signal": None,
        "message": "out of memory",
    }
    (folder / "progress.json").write_text(json.dumps(progress))
    return folder


# --- runs that follow Chinchilla's law, with log-normal noise -------------------------------------

# The constants of Hoffmann et al., as printed.
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28
TRUTH = {
    "E": E,
    "A": A,
    "B": B,
    "alpha": ALPHA,
    "beta": BETA,
    "a": BETA / (ALPHA + BETA),
    "b": ALPHA / (ALPHA + BETA),
}
BUDGETS = (1e18, 1e19, 1e20, 1e21, 1e22)


def loss(n: Any, d: Any) -> Any:
    """Return the loss of the known law."""
    return E + A * n**-ALPHA + B * d**-BETA


def best_n(flops: float) -> float:
    """Return N of the lowest loss at ``6 N D`` FLOPs: the zero of the derivative along the
    budget.
    """
    return float(
        (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA)) * (flops / 6) ** (BETA / (ALPHA + BETA))
    )


def runs(
    noise: float,
    seed: int,
    budgets: tuple[float, ...] = BUDGETS,
    sizes: int = 7,
    span: float = 6.0,
    share: float = 1.0,
) -> Points:
    """Return runs at each budget, sizes from 1/span to span times the optimum; with ``share`` they
    learn as with C / share FLOPs.
    """
    rng = np.random.default_rng(seed)
    n = np.concatenate([best_n(flops) * np.geomspace(1 / span, span, sizes) for flops in budgets])
    c = np.repeat(np.asarray(budgets), sizes)
    d = c / (6 * n)
    # A shift of C at the same position on the curve of the budget: N and D scale with the powers of
    # the frontier.
    seen = loss(n * share ** -TRUTH["a"], d * share ** -TRUTH["b"])
    return points(n, d, seen * np.exp(rng.normal(0, noise, len(n))), c)


def points(n: Array, d: Array, losses: Array, budget: Array | None = None, **more: Array) -> Points:
    """Return points from arrays; ``budget``, width, rate and seed are NaN by default."""
    given = dict.fromkeys(("budget", "width", "rate", "seed"), np.full(len(n), np.nan)) | more
    if budget is not None:
        given["budget"] = budget
    run = np.array([f"run{index}" for index in range(len(n))])
    return Points(run=run, n=n, d=d, c=6 * n * d, loss=losses, **given)


def table(noise: float = 0.002) -> pd.DataFrame:
    """Return 20 runs of each of two variants in the format of collect, three validations per run;
    the second learns as with 1/0.8 of the FLOPs.
    """
    rows = []
    for seed, (variant, share) in enumerate({"transformer": 1.0, "cem": 0.8}.items()):
        some = runs(noise, seed, budgets=BUDGETS[:4], sizes=5, span=4.0, share=share)
        for run, n, d, flops, found in zip(
            some.run, some.n, some.d, some.c, some.loss, strict=True
        ):
            name = f"{variant}-{run}"
            same = {
                "run": name,
                "config_hash": name,
                "variant": variant,
                "parametrization": "standard",
                "budget": flops,
                "parameters": round(n),
                "flops_per_token": flops / d,
                "data": "d",
                "tokenizer": "t",
                "source": "run_dir",
            }
            for step, higher in ((30, 1.2), (70, 1.05), (100, 1.0)):
                done = {
                    "step": step,
                    "tokens": round(d * step / 100),
                    "flops": flops * step / 100,
                    "loss": found * higher,
                    "wall_seconds": 0.6 * step,
                    "final": step == 100,
                }
                rows.append(same | done)
    return as_table(rows)
