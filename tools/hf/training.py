"""What a checkpoint, its run directory and its data tell of the training: for machines (training.json) and for the model card."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError
from pretrain.checkpoint_reader import Found
from pretrain.config import RunConfig, Source
from pretrain.data_facts import Manifest, read_manifest
from pretrain.loader import load_values
from pretrain.plan import flops_per_token

METRICS = "metrics.jsonl"


def run_config(step: Path, manifest: dict[str, Any]) -> RunConfig:
    """The configuration that a checkpoint carries. Raises ConfigError where it is not one that this code knows."""
    return load_values(manifest["config"], step / "manifest.json")


def training_record(manifest: dict[str, Any], heldout_loss: float | None) -> dict[str, Any]:
    """training.json: what an import restores. Of the manifest that of the training, not that of its files."""
    return {
        "format": 1,
        "config": manifest["config"],
        "progress": manifest["progress"],
        "data": manifest.get("data", ""),
        "heldout_loss": heldout_loss,
    }


def heldout_loss(step: Path, manifest: dict[str, Any]) -> float | None:
    """Nats per token on the validation data at the checkpoint's step: as the manifest says, else as the run logged it; None: nobody did."""
    if manifest.get("heldout_loss") is not None:
        return float(manifest["heldout_loss"])
    place = step.resolve()  # checkpoints/ may be a link to another run's
    log = place.parents[1] / METRICS
    if place.parent.name != "checkpoints" or not log.is_file():
        return None
    found = None
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"valid_loss"' in line and (record := _record(line)).get("step") == manifest["progress"]["step"]:
                found = record.get("valid_loss", found)  # a resumed run says it again: the last counts
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def data_manifests(config: RunConfig) -> tuple[dict[str, Manifest], list[str]]:
    """Prefix of a source -> what data_prep recorded beside it, where that is still there; and a line for each that cannot be read."""
    found, notes = {}, []
    for source in (*config.data.train, *config.data.valid):
        try:
            manifest = read_manifest(Path(source.prefix).parent / "manifest.json")
        except ConfigError as error:
            notes.append(str(error))
            continue
        if manifest is not None:
            found[source.prefix] = manifest
    return found, list(dict.fromkeys(notes))


def training_card(config: RunConfig, found: Found, loss: float | None, manifests: dict[str, Manifest]) -> dict[str, Any]:
    """What is known, by the keys of ``model_card``; what is not known is left out."""
    train, length = config.train, config.data.seq_length
    card: dict[str, Any] = {"name": config.name, "seq_length": found.inherited.context_length, "heldout_loss": loss}
    if loss is not None and (ratio := _bytes_per_token(config.data.valid, manifests)):
        card["bits_per_byte"] = loss / math.log(2) / ratio
    tokens = found.progress.consumed_samples * length
    if tokens:
        decay = config.optimizer
        card |= {
            "data": data_text(config.data.train, manifests),
            "tokens": tokens,
            "steps": found.progress.step,
            "batch": train.global_batch_size * length,
            "optimizer": f"AdamW, lr {decay.lr:g} to {decay.min_lr:g} ({decay.schedule}), weight decay {decay.weight_decay:g}",
            "precision": train.precision,
        }
        if not config.model.blocks()[0].mixer.external:
            card |= {"flops_per_token": flops_per_token(config), "flops": flops_per_token(config) * tokens}
    return {key: value for key, value in card.items() if value not in (None, "")}


def data_text(sources: tuple[Source, ...], manifests: dict[str, Manifest]) -> str:
    """Every source by the last two parts of its path, its share of the blend, and its tokens where they are known."""
    total = sum(source.weight for source in sources) or 1.0
    return "; ".join(_source_text(source, source.weight / total, len(sources) > 1, manifests) for source in sources)


def _source_text(source: Source, share: float, blended: bool, manifests: dict[str, Manifest]) -> str:
    split = _split(source, manifests)
    told = [f"{100 * share:.4g}% of the blend"] if blended else []
    told += [f"{split['tokens']:,} tokens"] if split else []
    return f"`{'/'.join(Path(source.prefix).parts[-2:])}`" + (f" ({', '.join(told)})" if told else "")


def _bytes_per_token(sources: tuple[Source, ...], manifests: dict[str, Manifest]) -> float | None:
    """Of the validation text; None where no manifest tells, or several sources are blended."""
    split = _split(sources[0], manifests) if len(sources) == 1 else None
    return split["text_bytes"] / split["tokens"] if split and split["tokens"] and split["text_bytes"] else None


def _split(source: Source, manifests: dict[str, Manifest]) -> dict[str, Any] | None:
    manifest = manifests.get(source.prefix)
    return manifest.splits.get(Path(source.prefix).name) if manifest else None


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:  # the last line of a killed run
        return {}
    return record if isinstance(record, dict) else {}
