"""``plan``: list the runs of a study with their cost, one line each; refuse runs that cannot answer
the study's question. The module does not import torch.

    plan STUDY.yaml [--csv FILE]

Parameters and FLOPs are those of `pretrain --plan`; hours follow from the study's assumed
throughput.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from fem_common.text import aligned, counted
from tools.scaling.planned_runs import PlannedRun, plan_study, rule_words
from tools.scaling.study import Study, load_study

COLUMNS: dict[str, Callable[[PlannedRun], str]] = {
    "variant": lambda run: run.variant,
    "budget": lambda run: "-" if run.budget is None else f"{run.budget:.4g}",
    "layers x width": lambda run: f"{run.layers} x {run.width}",
    "heads": lambda run: str(run.heads),
    "non-embedding": lambda run: f"{run.non_embedding_parameters:,}",
    "parameters": lambda run: f"{run.parameters:,}",
    "FLOPs/token": lambda run: f"{run.flops_per_token:,.0f}",
    "tokens": lambda run: f"{run.tokens:,}",
    "tokens/par.": lambda run: f"{run.tokens / run.parameters:.3g}",
    "batch": lambda run: f"{run.batch_tokens:,}",
    "steps": lambda run: f"{run.steps:,}",
    "lr": lambda run: f"{run.learning_rate:g}",
    "seed": lambda run: str(run.seed),
    "begins": lambda run: f"{run.begin_step:,}",
    "epochs": lambda run: "-" if run.epochs is None else f"{run.epochs:.2f}",
    "hours": lambda run: "-" if run.hours is None else _hours(run.hours),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="the study")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the runs as a table")


def main(arguments: argparse.Namespace) -> int:
    """Print the plan and return 0. Raises ConfigError, StorageError."""
    study = load_study(arguments.study)
    runs = plan_study(study)
    print(render(study, runs))
    if arguments.csv is not None:
        import pandas as pd

        from tools.scaling.table import write_table

        write_table(
            pd.DataFrame([asdict(run) | {"settings": " ".join(run.settings)} for run in runs]),
            arguments.csv,
        )
    return 0


def render(study: Study, runs: Sequence[PlannedRun]) -> str:
    """Return the plan as text for a console."""
    columns = {name: text for name, text in COLUMNS.items() if study.trunks or name != "begins"}
    rows = [[text(run) for text in columns.values()] for run in runs]
    table = aligned([list(columns), *rows], left=(0,))
    others = [variant for variant in study.variants if variant != study.baseline]
    against = f"{', '.join(others)} against {study.baseline}" if others else study.baseline
    question = f"{study.name}: {against}; every run is {study.base} with its settings"
    return "\n".join([question, "", *table, "", *_notes(study, runs)])


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}"


def _notes(study: Study, runs: Sequence[PlannedRun]) -> list[str]:
    """Return the totals, and the assumptions of the numbers."""
    cluster = study.cluster
    total = sum(run.hours or 0.0 for run in runs)
    notes = [
        f"{counted(len(runs), 'run')}, {sum(run.flops for run in runs):.4g} FLOPs,"
        f" {sum(run.tokens for run in runs):.4g} tokens"
    ]
    if study.trunks:
        forks = sum(bool(run.trunk) for run in runs)
        straight = sum(run.flops for run in runs)
        own = sum(run.own_flops for run in runs)
        notes.append(
            f"trunks: {counted(forks, 'run')} start from the checkpoint of a longer run at the step"
            f" where their decay begins: {own:.4g} FLOPs are trained, {straight - own:.4g} saved"
            f" ({1 - own / straight:.0%})"
        )
    if cluster.tflops is None:
        notes.append("hours: unknown, because the study does not set cluster.tflops")
    else:
        where = cluster.name or "the study's machine"
        processes = f"{counted(cluster.processes, 'process')} per run"
        notes += [
            (
                f"{_hours(total)} hours of runs on {where}, {processes}:"
                f" {_hours(total / min(cluster.at_once, len(runs)))} hours with {cluster.at_once}"
                f" runs at once, {_hours(total * cluster.processes)} process hours"
            ),
            (
                f"the hours assume that a process sustains {cluster.tflops:g} TFLOP/s for every"
                " variant and size"
            ),
        ]
    if study.warmup_steps is None:
        warmup = f"{study.warmup:g} of a run's steps"
    else:
        warmup = f"of {study.warmup_steps} steps"
    notes.append(
        f"shape rule: {rule_words(study.shape)}; explicit layers, heads or ffn of a size"
        " override it"
    )
    notes.append(
        f"warm-up {warmup}; {study.validations} validations per run; the smallest learning rate is"
        " proportional to the peak"
    )
    known = [run.epochs for run in runs if run.epochs is not None]
    if len(known) < len(runs):
        notes.append(
            "the data is not on this machine: it was not checked whether a run reads it more than"
            " once"
        )
    elif known:
        notes.append(
            f"data is read at most {max(known):.2f} times (max_epochs {study.max_epochs:g})"
        )
    notes.append(f"run directories: {study.directory}/RUN; results: {study.results}")
    return notes
