"""Collect facts about a model and write them for readers (README.md: description, usage, citation)
and for programs (training.json).

Facts come from the checkpoint, its run directory and its data. References contain only data that
was read in the papers; no author and no number is guessed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml
from transformers import PretrainedConfig

from fem_common.errors import ConfigError
from fem_megatron.catalogue import describe, mixer_names
from fem_megatron.config import ModelConfig
from fem_megatron.shape import SwiGluShape
from pretrain.checkpoint.folder import Found
from pretrain.config import RunConfig, Source, run_of
from pretrain.data.facts import Manifest, read_manifest
from pretrain.plan.run_plan import flops_per_token

from .bundle import LICENSE_ID
from .encoding import trained_here
from .folder import json_object
from .paths import TRAINING, has_tokenizer
from .tokenizer import SETTINGS, WHOLE

# Oldest and newest version of transformers with which exported folders are tested.
TESTED = ("4.57.6", "5.23.0")
TEMPLATE, PAPERS_FILE = (
    (Path(__file__).parent / name).read_text(encoding="utf-8")
    for name in ("model_card.md.j2", "papers.yaml")
)
PAPERS: dict[str, str] = yaml.safe_load(PAPERS_FILE)  # paper in the catalogue -> BibTeX, or a line
ROWS = {
    "data": "Data",
    "tokens": "Tokens seen",
    "steps": "Optimizer steps",
    "batch": "Tokens per step",
    "seq_length": "Context length",
    "optimizer": "Optimizer",
    "precision": "Precision",
    "flops_per_token": "Training FLOPs per token",
    "flops": "Training FLOPs",
    "documents": "Documents in a sequence",
    "heldout_loss": "Held-out loss (nats per token)",
    "bits_per_byte": "Held-out bits per byte",
    "revision": "Code revision",
}


@dataclass(frozen=True)
class License:
    """License of weights: an id of the Hugging Face Hub, or another name with a link."""

    name: str
    link: str | None = None

    @classmethod
    def read(cls, text: str) -> License:
        """Parse ``ID`` or ``NAME=LINK``. Raises ConfigError for other texts."""
        name, equals, link = text.partition("=")
        if (
            not re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", name)
            or bool(equals) != bool(re.fullmatch(r"\S+", link))
            or text == "other"
        ):
            raise ConfigError(
                f"--license {text}: expected an id of the Hub, such as apache-2.0, or NAME=LINK for"
                " another license, such as my-license=URL"
            )
        return cls(name, link or None)

    def __str__(self) -> str:
        return self.name if self.link is None else f"[{self.name}]({self.link})"


def model_card(
    folder: Path,
    model: ModelConfig,
    config: PretrainedConfig,
    parameters: int,
    card: Mapping[str, Any],
    packages: list[str] | None,
    weights_license: License | None,
) -> str:
    """Return the model card of an export as Markdown.

    Args:
        folder: folder of the export, complete except for the card.
        config: content of its config.json.
        parameters: number of parameters.
        card: ``name`` (the title), and facts under the keys of ROWS.
        packages: requirements of the model's code besides torch and transformers;
            None: the model is a class of transformers.
        weights_license: None: no license is stated for the weights.
    """
    mixers = {mixer: describe(mixer) for mixer in mixer_names(model)}
    described = [f"`{name}` ({mixer.about})" for name, mixer in mixers.items()]
    blocks = dict(zip(mixer_names(model), model.blocks(), strict=True))
    mixed = described[0]
    if len(described) > 1:
        mixed = f"{', '.join(described[:-1])} or {described[-1]}, by layer"
    papers = dict.fromkeys(mixer.paper for mixer in mixers.values())
    template = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(TEMPLATE)
    settings = json_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    text = template.render(
        name=card.get("name", "A language model"),
        parameters=_text(parameters),
        mixers=mixers,
        mixed=mixed,
        recurrence=model.recurrence,
        # Also needed for the tokenizer: transformers 5 first reads the configuration of the model,
        # which has code.
        trust="" if packages is None else ", trust_remote_code=True",
        packages=packages,
        architecture=(config.architectures or [""])[0],
        has_code=any(folder.glob("*.py")),
        has_tokenizer=has_tokenizer(folder),
        chat_template=(folder / "chat_template.jinja").is_file() or "chat_template" in settings,
        whole_tokenizer=(folder / WHOLE).is_file(),
        has_training=(folder / TRAINING).is_file(),
        gated=any(isinstance(block.mlp, SwiGluShape) for block in blocks.values()),
        counting=[f"`{name}`" for name, block in blocks.items() if block.counts_padding()],
        weights_license=weights_license,
        code_license=LICENSE_ID,
        tested=TESTED,
        sizes=[(label, _text(value)) for label, value in _architecture(model, config.dtype)],
        training=[
            (label, _text(card[key])) for key, label in ROWS.items() if card.get(key) is not None
        ],
        papers=[PAPERS[paper] for paper in papers if paper in PAPERS],
    )
    return text.rstrip("\n") + "\n"


def _architecture(model: ModelConfig, dtype: Any) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("Layers", model.num_layers),
        ("Width", model.hidden_size),
        ("Heads", model.num_attention_heads),
        ("Vocabulary", model.vocab_size),
        ("Tied embeddings", model.tie_embeddings),
        ("Rotary position embedding", model.rope),
        ("Weights", str(dtype).removeprefix("torch.")),
    ]
    if model.mtp_depth:
        size = sum(weight.size for weight in model.mtp.weights().values())
        what = f"{model.mtp_depth} of {size:,} parameters each, not used by `forward`"
        rows.append(("Modules of multi-token prediction", what))
    if model.pattern:
        rows.append(("Mixers of the layers, repeated in this order", " ".join(model.pattern)))
    for name, block in dict(zip(mixer_names(model), model.blocks(), strict=True)).items():
        shapes = [shape for shape in (block.mixer, block.mlp) if shape is not None]
        rows.append((f"Sizes, `{name}`", ", ".join(shape.summary() for shape in shapes)))
    return rows + _changed(model, "")


def _changed(settings: Any, prefix: str) -> list[tuple[str, Any]]:
    """Return (key as Markdown, value) for each setting of a mixer that differs from its default.

    Nested sections are included; settings of the top level are not.
    """
    rows: list[tuple[str, Any]] = []
    default = type(settings)()
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            rows += _changed(value, f"{prefix}{field.name}.")
        elif prefix and value != getattr(default, field.name):
            rows.append((f"`{prefix}{field.name}`", value))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}" if math.isfinite(value) and abs(value) < 1e6 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


METRICS = "metrics.jsonl"


def run_config(step: Path, manifest: dict[str, Any]) -> RunConfig:
    """Return the run configuration in a checkpoint's manifest.

    step: folder of the checkpoint, for messages. Raises ConfigError if this code does not support
    it.
    """
    return run_of(manifest["config"], step / "manifest.json")


def training_record(manifest: dict[str, Any], heldout_loss: float | None) -> dict[str, Any]:
    """Return the content of training.json, from which an import restores the training state.

    It contains the manifest's entries about the training, but none about files.
    """
    return {
        "format": 1,
        "config": manifest["config"],
        "progress": manifest["progress"],
        "data": manifest.get("data", ""),
        "inherited": {"foreign": not trained_here(manifest)},
        "heldout_loss": heldout_loss,
    }


def heldout_loss(step: Path, manifest: dict[str, Any]) -> float | None:
    """Return the validation loss at the checkpoint's step, in nats per token; None if unknown.

    The loss is in the manifest or in the run's metrics log.
    """
    if manifest.get("heldout_loss") is not None:
        return float(manifest["heldout_loss"])
    place = step.resolve()  # checkpoints/ may be a link to the folder of another run
    log = place.parents[1] / METRICS
    if place.parent.name != "checkpoints" or not log.is_file():
        return None
    found = None
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"valid_loss"' not in line:
                continue
            record = _record(line)
            if record.get("step") == manifest["progress"]["step"]:
                # A resumed run may log the step again: the last record counts.
                found = record.get("valid_loss", found)
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def data_manifests(config: RunConfig) -> tuple[dict[str, Manifest], list[str]]:
    """Return the data_prep manifests of all training and validation sources.

    Returns:
        Prefix of a source -> its manifest, if one exists; and one message for each manifest that
        cannot be read.
    """
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


def training_card(
    config: RunConfig, found: Found, loss: float | None, manifests: dict[str, Manifest]
) -> dict[str, Any]:
    """Return the known facts about the training, under the keys of ``model_card``'s ``card``.

    found: the checkpoint. loss: validation loss in nats per token, or None. manifests: as returned
    by ``data_manifests``.
    """
    train, length = config.train, config.data.seq_length
    card: dict[str, Any] = {
        "name": config.name,
        "seq_length": found.inherited.context_length,
        "heldout_loss": loss,
    }
    ratio = _bytes_per_token(config.data.valid, manifests)
    if loss is not None and ratio:
        card["bits_per_byte"] = loss / math.log(2) / ratio
    tokens = found.progress.consumed_samples * length
    if tokens:
        decay = config.optimizer
        card |= {
            "data": data_text(config.data.train, manifests),
            "tokens": tokens,
            "steps": found.progress.step,
            "batch": train.global_batch_size * length,
            "optimizer": (
                f"AdamW, lr {decay.lr:g} to {decay.min_lr:g} ({decay.schedule}), weight decay"
                f" {decay.weight_decay:g}"
            ),
            "precision": train.precision,
        }
        if not config.model.blocks()[0].mixer.external:
            card |= {
                "flops_per_token": flops_per_token(config),
                "flops": flops_per_token(config) * tokens,
            }
            # The FLOPs per document are unknown: the data with the lengths may have been deleted.
            if config.data.documents == "separate":
                card["documents"] = "separate; FLOPs are counted for complete sequences"
    return {key: value for key, value in card.items() if value not in (None, "")}


def data_text(sources: tuple[Source, ...], manifests: dict[str, Manifest]) -> str:
    """Return one text that describes all data sources.

    For each source it contains the last two parts of its path, its share if several sources are
    blended, and its number of tokens if known.
    """
    total = sum(source.weight for source in sources) or 1.0
    texts = []
    for source in sources:
        details = []
        if len(sources) > 1:
            details.append(f"{100 * source.weight / total:.4g}% of the blend")
        split = _split(source, manifests)
        if split:
            details.append(f"{split['tokens']:,} tokens")
        text = f"`{'/'.join(Path(source.prefix).parts[-2:])}`"
        if details:
            text += f" ({', '.join(details)})"
        texts.append(text)
    return "; ".join(texts)


def _bytes_per_token(sources: tuple[Source, ...], manifests: dict[str, Manifest]) -> float | None:
    """Return the bytes per token of the validation text.

    None without a manifest or if several sources are blended.
    """
    split = _split(sources[0], manifests) if len(sources) == 1 else None
    if not split or not split["tokens"] or not split["text_bytes"]:
        return None
    return split["text_bytes"] / split["tokens"]


def _split(source: Source, manifests: dict[str, Manifest]) -> dict[str, Any] | None:
    manifest = manifests.get(source.prefix)
    return manifest.splits.get(Path(source.prefix).name) if manifest else None


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:  # incomplete last line of a killed run
        return {}
    return record if isinstance(record, dict) else {}
