"""``--readme``: what the demo measured, into the documents that show it: README.md and docs/evaluation.md, their pictures too.

Between their markers, in a checkout, on an idle machine, of the demo as it stands: they promise what anybody's ``make demo`` finds.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError

COMMAND = "python -m tools.demo --readme"
PAGES = {"demo": "README.md", "evaluation": "docs/evaluation.md"}
NAMES = {"fem": "FEM-softmax", "transformer": "Transformer"}
IDLE = 0.5  # of the cores: the load above which others' work would be in the demo's tokens/s


def check(root: Path, settings: Sequence[str]) -> None:
    """What must be so before anything starts. Raises ConfigError where it is not."""
    if settings:
        raise ConfigError(f"--readme shows the demo as it stands, so it takes no setting ({settings[0]})")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > IDLE * cores:
        raise ConfigError(
            f"--readme: the machine is busy (load {load:.1f} on {cores} cores), and would time that, too: wait until it is idle"
        )
    for name, page in PAGES.items():
        _split(root, name)
        if not os.access(root / page, os.W_OK):
            raise ConfigError(f"--readme: {root / page} may not be written")


def write(root: Path, out: Path, found: dict[str, Any]) -> None:
    """Both pages and their pictures, of the demo in ``out``, whose models were evaluated into ``out/evaluation``."""
    texts = {"demo": demo_text(found), "evaluation": evaluation_text((out / "evaluation" / "table.md").read_text(encoding="utf-8"))}
    for name, text in texts.items():
        before, after = _split(root, name)
        (root / PAGES[name]).write_text(f"{before}\n{text}\n{after}", encoding="utf-8")
    shutil.copyfile(out / "report.png", root / "docs" / "demo.png")
    shutil.copyfile(out / "evaluation" / "table.png", root / "docs" / "evaluation.png")


def demo_text(found: dict[str, Any]) -> str:
    """README.md's picture, table and what they were measured on."""
    run, models, parity, alone, machine = (found[key] for key in ("run", "models", "parity", "unigram", "machine"))
    rows = [
        f"| {name} | {models[key]['heldout_nats_per_token']:.3f} | {models[key]['heldout_bits_per_byte']:.3f} | "
        f"{models[key]['parameters'] / 1e6:.2f}M | {models[key]['tokens_per_second']:,.0f} |"
        for key, name in NAMES.items()
    ]
    difference = max(parity["logit_difference"].values())
    tokens, heldout = models["fem"]["tokens_trained"], models["fem"]["heldout_tokens"]
    return "\n".join(
        [
            "![Training and held-out loss of the demo's two models](docs/demo.png)",
            "",
            f"| {run['steps']} steps of {run['batch_tokens']:,} tokens, {heldout:,} tokens held out | nats a token | bits per byte | "
            "parameters | tokens/s |",
            "|---|---|---|---|---|",
            *rows,
            f"| the text's own unigram entropy | {alone['heldout_entropy']:.3f} | {alone['bits_per_byte']:.3f} | | |",
            "",
            f"Picture and figures: `{COMMAND}`, {date.today().isoformat()}, {machine['cores']} CPU cores ({platform.machine()}), Python "
            f"{machine['python']}, torch {machine['torch']}. tokens/s: the median step of",
            "both models at the same layout, DP 2 of one thread each, with nothing beside them.",
            f"One seed and {tokens / 1e6:.2f}M tokens: it shows that both train, not which is better at scale. Losses of the "
            f"{parity['resume_steps']} steps after the change of layout agree with the old",
            f"layout's to {parity['resume_relative_loss_difference']:.1e}; exported logits are Megatron's "
            + (f"to {difference:.1e}." if difference else "to the last bit."),
        ]
    )


def evaluation_text(report: str) -> str:
    """docs/evaluation.md's picture and table, the first of the report that ``tools.evaluate`` wrote."""
    lines = report.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    last = next((number for number in range(first, len(lines)) if not lines[number].startswith("|")), len(lines))
    return "\n".join(
        [
            "![The quick suite on the demo's two models](evaluation.png)",
            "",
            *lines[first:last],
            "",
            f"*Six small questions to the demo's two models: `{COMMAND}`, {date.today().isoformat()}. ± and whiskers are",
            "one standard error; vermilion: better by more than the standard error of the difference.*",
        ]
    )


def _split(root: Path, name: str) -> tuple[str, str]:
    """A page up to its marker's end, and from the closing marker on. Raises ConfigError where it has not one of each, in this order."""
    path, begin, end = root / PAGES[name], f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ConfigError(f"--readme: {path} has no {begin} with {end} after it: run it in a checkout of the project")
    return before + begin, end + after
