"""A model's tokenizer on its way into an exported folder: whether it is the model's, and which of its files go along."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fem_common.errors import ConfigError
from fem_megatron.config import ModelConfig

SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
NOT_A_TOKENIZERS = ("config.json", "generation_config.json", "training.json")  # of a model's folder that has its tokenizer in it
ENDINGS_OF_OTHERS = (".index.json",)
NAME_A_TOKENIZER = "name its folder with --tokenizer DIR"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that fits the model."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    entries: int

    @classmethod
    def load(cls, folder: Path, model: ModelConfig) -> Tokenizer:
        """The tokenizer in ``folder``. Raises ConfigError: there is none, or it has entries that the model does not know."""
        if not (folder / "tokenizer_config.json").is_file():
            raise ConfigError(f"{folder} is no tokenizer folder: tokenizer_config.json is missing")
        tokenizer = load_tokenizer(folder)
        entries = check_tokenizer(tokenizer, model.vocab_size, folder)
        return cls(folder, tokenizer, entries)

    @property
    def sha256(self) -> str | None:
        """Of tokenizer.json, as the data's manifest records it; None where the tokenizer has no such file."""
        file = self.folder / "tokenizer.json"
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None

    def copy_to(self, folder: Path, pad: int | None = None) -> None:
        """The tokenizer's files as they are, told to return nothing that the model does not take.

        pad: the id that fills up a batch where the tokenizer names none; on the left, as generation needs it, where it names no side.
        """
        for file in sorted(self.folder.iterdir()):
            ours = file.is_file() and file.suffix in SUFFIXES and not file.name.endswith(ENDINGS_OF_OTHERS)
            if ours and file.name not in NOT_A_TOKENIZERS and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings.setdefault("model_input_names", ["input_ids", "attention_mask"])
        if pad is not None:
            settings.setdefault("padding_side", "left")
            if self.tokenizer.pad_token_id is None:
                settings["pad_token"] = self.tokenizer.convert_ids_to_tokens(pad)
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def special_ids(tokenizer: PreTrainedTokenizerBase | None, known: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens that ``generate`` must know: the tokenizer's, and those of ``known`` that it does not have.

    Several known ends stay where the tokenizer's is one of them. A tokenizer that has nothing else for it pads a text with its end.
    """
    own = {name: getattr(tokenizer, name, None) for name in SPECIAL_IDS}
    found = {name: known.get(name) if value is None else value for name, value in own.items()}
    end, ends = found["eos_token_id"], known.get("eos_token_id")
    if tokenizer is not None and found["pad_token_id"] is None:
        found["pad_token_id"] = end[0] if isinstance(end, list) else end
    if isinstance(ends, list) and end in ends:
        found["eos_token_id"] = ends
    return found


def tokenizers_of_checkpoint(step: Path, manifest: dict[str, Any]) -> list[Path]:
    """Where a checkpoint's tokenizer may be, the first that is there counts: beside the steps (an import's), where the training had it."""
    named = manifest["config"]["data"]["tokenizer"]
    return [step.parent / "tokenizer", *([Path(named)] if named else [])]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder. Raises ConfigError where it is damaged or wants to run code."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library's parser raises bare Exceptions
        raise ConfigError(f"the tokenizer in {folder} cannot be read: {first_line(error)}") from error
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, folder: Path) -> int:
    """How many entries it has. Raises ConfigError where the model does not know all of them."""
    entries = max(tokenizer.get_vocab().values(), default=-1) + 1
    if vocab_size is not None and entries > vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {entries} entries, the model's vocabulary only {vocab_size}: not its own; {NAME_A_TOKENIZER}"
        )
    return entries


def first_line(error: BaseException) -> str:
    """An exception's message, its first line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
