"""The verb ``export``: finds in a checkpoint what an export needs. Formats are ``export``'s business and ``pretrain``'s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fem_megatron.platform import quiet_libraries

from .export import VOCABULARY, ExportError, check_state, export_state_dict, refuse_occupied

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_checkpoint(checkpoint: Path, out: Path, dtype: str | None, tokenizer: Path | None, overwrite: bool) -> None:
    """Exports ``checkpoint`` (of any layout; a run directory: its newest) to ``out``; dtype and tokenizer default to the checkpoint's own.

    Raises:
        ExportError: see ``export_state_dict``; the tokenizer that the training used is not found.
        ConfigError: the checkpoint cannot be read.
    """
    refuse_occupied(out, overwrite)
    quiet_libraries()
    from pretrain.checkpoint import load_full_model_state  # Megatron-core takes seconds to import: not for --help or a wrong argument

    state, model, manifest = load_full_model_state(checkpoint)
    check_state(state, model)
    export_state_dict(
        state,
        model,
        out,
        tokenizer_dir=tokenizer or tokenizer_folder(manifest["config"]["data"]),
        dtype=state[VOCABULARY[0]].dtype if dtype is None else DTYPES[dtype],
        card=training_card(manifest),
        overwrite=overwrite,
    )
    print(f"wrote {out}: AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True) loads it")


def tokenizer_folder(data: dict[str, Any]) -> Path | None:
    """The tokenizer that a run's resolved ``data`` section names, None if it names none.

    Raises:
        ExportError: the folder named is not there.
    """
    if data["tokenizer"] is None:
        return None
    folder = Path(data["tokenizer"])
    if not folder.is_dir():
        raise ExportError(f"the tokenizer of the training, {folder}, is not there: name its folder with --tokenizer DIR")
    return folder


def training_card(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint's manifest tells of its training, by the keys of ``model_card``."""
    config, progress = manifest["config"], manifest["progress"]
    names = [Path(source["prefix"]).name for source in config["data"]["train"]]
    seq_length = config["data"]["seq_length"]
    card = {
        "name": config["name"],
        "data": ", ".join(names),
        "steps": progress["step"],
        "tokens": progress["consumed_samples"] * seq_length,
        "seq_length": seq_length,
        "heldout_loss": manifest.get("heldout_loss"),
    }
    return {key: value for key, value in card.items() if value not in (None, "")}
