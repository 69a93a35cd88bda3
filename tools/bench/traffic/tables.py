"""Tables of the modelled steps, and the page docs/benchmarks/paper.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fem_common.config import load
from fem_megatron.catalogue import BASELINE, MIXERS
from fem_megatron.config import ModelConfig
from fem_megatron.meta.trace import KINDS, POINTWISE
from tools.bench import runner
from tools.bench.traffic.paper import PASSES, ROOFS, SOURCES, Step, kernels_of, step_of
from tools.bench.whole_model import SCALES, WITHOUT

PAIRS = (
    ("fem_sm_1.3b", "transformer_1.3b"),
    ("fem_sm_340m", "transformer_340m"),
    ("cem_108m", "llama_108m"),
)


def of_part(name: str, tokens: int = 4096, batch: int | None = None) -> Step:
    """Return the modelled step of the model ``name`` in configs/model.

    batch: sequences of a step; None selects the batch of the benchmark of this size, or 4.

    Raises UserError if no model has this name.
    """
    model = load(ModelConfig, runner.model_file(name))
    model = replace(model, vocab_size=model.vocab_size or runner.VOCABULARY)
    sizes = (model.hidden_size, model.num_layers)
    suited = (
        scale.batch
        for scale in SCALES.values()
        if (scale.model.hidden_size, scale.model.num_layers, scale.tokens) == (*sizes, tokens)
    )
    return step_of(name, model, tokens, batch or next(suited, 4))


def every_mixer(tokens: int = 4096, batch: int = 2) -> dict[str, Step]:
    """Return name -> modelled step: the Transformer, the mixers that need no package, and GLA.

    The Transformer is first. All models have the widths of the 1.3B Transformer.

    tokens: length of the sequences, or less for a mixer with a smaller maximum.
    """
    base = load(ModelConfig, runner.MODELS / "transformer_1.3b.yaml")
    models = {
        name: replace(base, mixer=name)
        for name in (BASELINE, *MIXERS)
        if MIXERS[name].package is None
    }
    models["GLA"] = replace(models["fem_gla"], fem=WITHOUT)
    longest = {
        name: model.blocks()[0].mixer.max_length() or tokens for name, model in models.items()
    }
    return {
        name: step_of(name, model, min(tokens, longest[name]), batch)
        for name, model in models.items()
    }


# --- tables -------------------------------------------------------------------------------------


def _kib(size: float) -> str:
    return f"{size / 1024:.0f}"


def steps_table(steps: list[Step]) -> str:
    """Return a table with a row for each model and GPU.

    The columns are the step time, its ratio to the last model's, and the time by category.
    """
    rows = []
    for roof in ROOFS:
        base = steps[-1].time(roof).total
        for step in steps:
            time = step.time(roof)
            categories = [f"{1e3 * each:.1f}" for each in time.seconds.values()]
            total, ratio = f"{1e3 * time.total:.1f}", f"{time.total / base:.3f}"
            rows.append([roof.name, step.name, total, ratio, *categories])
    names = steps[0].time(ROOFS[0]).seconds
    return runner.table(["GPU", "model", "step, ms", f"÷ {steps[-1].name}", *names], rows)


def mixers_table(steps: list[Step]) -> str:
    """Return a table with a row for each mixer.

    The columns include the KiB per token and layer in each pass, and the ratio of the step time per
    token to the Transformer's.
    """
    base, rows = steps[0], []
    products = [kind for kind in KINDS if kind != POINTWISE]
    for step in steps:
        cells = [step.name]
        for backward in (False, True):
            cells += [
                _kib(step.traffic(POINTWISE, backward=backward)),
                _kib(step.traffic(*products, backward=backward)),
                str(len(step.first.passes(backward))),
            ]
        cells += [_kib(step.activations()), str(step.first.host_reads)]
        tokens = step.tokens * step.batch / (base.tokens * base.batch)
        for roof in ROOFS:
            cells.append(f"{step.time(roof).total / base.time(roof).total / tokens:.2f}")
        rows.append(cells)
    header = (
        "mixer|fwd pointwise|fwd products|launches|bwd pointwise|bwd products|launches|kept|"
        "host reads"
    ).split("|")
    return runner.table([*header, *(f"step ÷ {BASELINE}, {roof.name}" for roof in ROOFS)], rows)


def kernels_table(step: Step, least: float = 256.0) -> str:
    """Return a table of the kernels of the model's first layer.

    Kernels that move less than ``least`` bytes per token are left out.
    """
    rows = [
        [PASSES[backward], kind, kernel, str(launches), f"{traffic / 1024:.1f}"]
        for (backward, kind, kernel), (launches, traffic) in kernels_of(step).items()
        if traffic >= least
    ]
    return runner.table(["pass", "kind", "kernel", "launches", "KiB a token"], rows)


def page() -> str:
    """Return the text of docs/benchmarks/paper.md."""
    steps: Mapping[str, Step] = {name: of_part(name) for pair in PAIRS for name in pair}
    parts = ["# Step times: modelled, not measured", INTRODUCTION]
    for ours, theirs in PAIRS:
        step = steps[ours]
        parts += [
            f"## {ours} and {theirs}, {step.batch} x {step.tokens} tokens",
            _shown(steps_table([step, steps[theirs]])),
        ]
    parts += [
        "## Every mixer at the 1.3B widths",
        LEGEND,
        _shown(mixers_table(list(every_mixer().values()))),
    ]
    parts += [f"## A layer of {PAIRS[0][0]}", _shown(kernels_table(steps[PAIRS[0][0]], 1024.0))]
    parts += [
        "## The model's numbers",
        _shown("\n".join(f"{what}: {text}" for what, text in SOURCES.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _shown(table: str) -> str:
    """Return the table as a code block."""
    return f"```text\n{table}\n```"


SAME = """\
Ratios are the same with and without flash-attn: RoPE is this project's, and attention is cuDNN's
wherever it supports the widths."""
INTRODUCTION = f"""\
Written by `python -m tools.bench.traffic --write`, for layers as they would run on an H100.
{SAME}"""
LEGEND = """\
KiB per token and layer; *products*: moved by GEMMs, attention and tiles; *kept*: for the backward
pass; *host reads*: numbers that the host reads from the device. GLA is fem_gla without its
switches; mha2nd has its longest sequences, of 512 tokens."""
