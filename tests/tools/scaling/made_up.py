"""Tables of studies that nobody ran: losses by a law that the test knows, with a run's scatter."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from tools.scaling.fits.parametric import residuals
from tools.scaling.fits.points import points_of
from tools.scaling.fitting import fit_study
from tools.scaling.laws import Estimate
from tools.scaling.results import ParametricFit, StudyFit
from tools.scaling.study import FitConfig
from tools.scaling.table import as_table, final_runs

# Variant -> (E, A, alpha, B, beta)
LAWS = {
    "transformer": (1.70, 400.0, 0.34, 410.0, 0.28),
    "fem_softmax": (1.70, 385.0, 0.34, 400.0, 0.28),
    "fem_gla": (1.72, 395.0, 0.34, 405.0, 0.28),
    "cem": (1.75, 420.0, 0.345, 420.0, 0.28),
    "hyperset": (1.80, 450.0, 0.34, 440.0, 0.28),
}
SHAPES = {64: 2, 128: 2, 192: 3, 256: 4, 384: 6, 512: 8, 768: 12, 1024: 16}
VOCABULARY = 4096


def row(variant: str, width: int, budget: float | None, tokens: float, scatter: float, **more: object) -> dict[str, object]:
    """A final row; ``scatter``: what is added to log loss."""
    layers = SHAPES[width]
    inner = 12 * layers * width**2
    parameters = inner + VOCABULARY * width
    e, a, alpha, b, beta = LAWS[variant]
    loss = (e + a / parameters**alpha + b / tokens**beta) * math.exp(scatter)
    name = f"{variant}-w{width}-{budget or tokens:g}"
    same: dict[str, object] = {
        "run": name, "variant": variant, "seed": 1, "budget": budget, "width": width, "layers": layers, "heads": width // 64 or 1,
        "parametrization": "standard", "parameters": parameters, "non_embedding_parameters": inner, "flops_per_token": 6.0 * parameters,
        "batch_tokens": 4096, "learning_rate": 1e-3, "step": 100, "steps": 100, "tokens": int(tokens), "flops": 6.0 * parameters * tokens,
        "loss": loss, "train_loss": loss, "wall_seconds": 60.0, "final": True, "data": "d", "tokenizer": "t", "config_hash": name,
        "source": "run_dir",
    }  # fmt: skip
    return {**same, **more}


def with_curve(final: dict[str, object]) -> list[dict[str, object]]:
    """The row, and before it four validations on the way."""
    on_the_way: list[dict[str, object]] = []
    for share, higher in ((0.2, 1.25), (0.4, 1.13), (0.6, 1.07), (0.8, 1.03)):
        part: dict[str, object] = {
            "step": int(100 * share),
            "final": False,
            "loss": float(str(final["loss"])) * higher,
            "train_loss": math.nan,
        }
        on_the_way.append({**final, **part, "tokens": int(share * int(str(final["tokens"]))), "flops": share * float(str(final["flops"]))})
    return [*on_the_way, final]


def isoflop_table(variants: int = 3, budgets: int = 3, seed: int = 1, scatter: float = 0.002) -> pd.DataFrame:
    """Variants x budgets x five sizes around the best one."""
    rng = np.random.default_rng(seed)
    widths = [64, 128, 192, 256, 384, 512, 768, 1024]
    rows = []
    for variant in list(LAWS)[:variants]:
        for number in range(budgets):
            budget = 1e15 * 3.0**number
            for width in widths[number // 2 : number // 2 + 5]:
                parameters = row(variant, width, budget, 1e6, 0.0)["parameters"]
                tokens = budget / (6.0 * float(str(parameters)))
                rows += with_curve(row(variant, width, budget, tokens, float(rng.normal(0.0, scatter))))
    return as_table(rows)


def rates_table(variants: int = 2, seed: int = 1) -> pd.DataFrame:
    """Variants x four sizes x five learning rates x two seeds, the optimum falling with size; for the largest at the lowest rate."""
    rng = np.random.default_rng(seed)
    rows = []
    for variant in list(LAWS)[:variants]:
        for width in (64, 128, 256, 512):
            best = 4e-3 * (64 / width) ** 0.8 if width < 512 else 1e-4
            for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3):
                for draw in (1, 2):
                    scatter = 0.01 * math.log(rate / best) ** 2 + float(rng.normal(0.0, 0.001))
                    name = f"{variant}-w{width}-lr{rate:g}-s{draw}"
                    rows.append(row(variant, width, None, 2e8, scatter, run=name, config_hash=name, learning_rate=rate, seed=draw))
    return as_table(rows)


def parametric(variant: str, points: int, seed: int = 1) -> ParametricFit:
    """The law that the variant's losses follow, as if it had been fitted, with 40 draws of it."""
    rng = np.random.default_rng(seed)
    e, a, alpha, b, beta = LAWS[variant]
    draws = [
        (e * (1 + 0.01 * x[0]), a * (1 + 0.05 * x[1]), b * (1 + 0.05 * x[2]), alpha + 0.004 * x[1], beta + 0.004 * x[2])
        for x in rng.normal(size=(40, 3))
    ]
    values = {"E": e, "A": a, "B": b, "alpha": alpha, "beta": beta, "a": beta / (alpha + beta), "b": alpha / (alpha + beta)}
    estimates = {key: Estimate(value, 0.97 * value, 1.03 * value) for key, value in values.items()}
    numbers = {"objective": 1e-4, "huber_delta": 1e-3, "points": points, "starts": 90, "agreeing": 12, "interval": 0.9, "noise": 0.002}
    return ParametricFit(**estimates, **numbers, k=6.0, phi=1.0, resamples=40, failed=0, on_bound=0, draws=draws)  # type: ignore[arg-type]


def fit_of(name: str, table: pd.DataFrame) -> StudyFit:
    """Isoflop and learning-rate fits by the real ones, which take tenths of a second, the parametric laws as they were made up."""
    final = final_runs(table)
    variants = list(dict.fromkeys(final["variant"]))
    fit = fit_study(name, final, variants, FitConfig(approaches=("isoflop",), resamples=50), "runs.csv")
    if final["budget"].isna().any():
        return fit
    whole = {}
    for variant, found in fit.variants.items():
        points = points_of(final[final["variant"] == variant], "total")
        law = parametric(variant, len(points))
        whole[variant] = replace(found, parametric=law, residuals=residuals(points, law))
    return replace(fit, variants=whole)
