"""Read a model's tokenizer, check that it fits the model, and copy its files into an export."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from fem_common.errors import ConfigError
from fem_common.files import sha256
from fem_megatron.config import ModelConfig

from . import tokenization_fem
from .folder import json_object
from .paths import CONFIG

SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# Files that a tokenizer's copy leaves out: those of the model in the same folder, and the file that
# transformers prefers to tokenizer.json for Mistral models.
NOT_A_TOKENIZERS = ("config.json", "generation_config.json", "training.json", "tekken.json")
ENDINGS_OF_OTHERS = (".index.json",)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NAME_A_TOKENIZER = "name its folder with --tokenizer DIR"
WHOLE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
OF_OTHERS = ("auto_map", "fast_tokenizer_files")  # settings that refer to another class or file
# Model types for which transformers 5 ignores the class in tokenizer_config.json and uses its class
# for the model type.
REPLACED = ("qwen2",)


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer that fits the model. entries: number of its entries."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    entries: int

    @classmethod
    def load(cls, folder: Path, model: ModelConfig) -> Tokenizer:
        """Return the tokenizer in ``folder``. Raises ConfigError if it is missing or has entries
        outside the model's vocabulary.
        """
        if not (folder / "tokenizer_config.json").is_file():
            raise ConfigError(
                f"{folder} is not a tokenizer folder: tokenizer_config.json is missing"
            )
        tokenizer = load_tokenizer(folder)
        entries = check_tokenizer(tokenizer, model.vocab_size, folder)
        return cls(folder, tokenizer, entries)

    @property
    def sha256(self) -> str | None:
        """Return the SHA-256 of tokenizer.json, which the manifest of the data also records.

        None if the file does not exist.
        """
        file = self.folder / WHOLE
        return sha256(file) if file.is_file() else None

    def copy_to(self, folder: Path, pad: int | None = None, model_type: str | None = None) -> None:
        """Copy the tokenizer's files into ``folder``, and rewrite tokenizer_config.json.

        transformers 4 and 5 then produce the same ids. pad: padding id that is set if the tokenizer
        defines none. The padding side defaults to "left", as generation requires. model_type: the
        ``model_type`` in the folder's config.json.
        """
        for file in sorted(self.folder.iterdir()):
            ours = (
                file.is_file()
                and file.suffix in SUFFIXES
                and not file.name.endswith(ENDINGS_OF_OTHERS)
            )
            if ours and file.name not in NOT_A_TOKENIZERS and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
        path = folder / SETTINGS
        settings = json_object(path)
        if (folder / WHOLE).is_file():
            settings = _settings_of_any_class(settings, self.tokenizer)
            if model_type in REPLACED:
                settings["auto_map"] = {"AutoTokenizer": [None, tokenization_fem.NAME]}
                code = Path(tokenization_fem.__file__)
                shutil.copyfile(code, folder / code.name)
        settings.setdefault("model_input_names", ["input_ids", "attention_mask"])
        if pad is not None:
            settings.setdefault("padding_side", "left")
            if self.tokenizer.pad_token_id is None:
                settings["pad_token"] = self.tokenizer.convert_ids_to_tokens(pad)
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def special_ids(
    tokenizer: PreTrainedTokenizerBase | None, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ids of special tokens that ``generate`` needs, under transformers' names.

    They are those of the tokenizer; those that it lacks are taken from ``known``. If ``known`` has
    a list of end tokens that includes the tokenizer's, the list is used. A tokenizer without a
    padding token pads with its end token.
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
    """Return the folders that may contain the tokenizer of a checkpoint, by priority.

    First ``tokenizer`` next to the folders of the steps (an import), then the one of the training
    data.
    """
    named = manifest["config"]["data"]["tokenizer"]
    return [step.parent / "tokenizer", *([Path(named)] if named else [])]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder, reading tokenizer.json unchanged if it exists.

    data_prep does the same. The class that the folder names is ignored in this case, because for
    most classes transformers 5 takes only vocabulary and merges from tokenizer.json and rebuilds
    the rest.

    Raises ConfigError if the tokenizer is damaged or requires running code.
    """
    full = folder / WHOLE
    if not full.is_file():
        return auto_tokenizer(folder, trust_remote_code=False)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, tokenizer_file=str(full), local_files_only=True
        )
        for name, token in _tokens_of_class(folder).items():
            if getattr(tokenizer, name) is None and token in tokenizer.get_added_vocab():
                setattr(tokenizer, name, token)
    except Exception as error:  # the parser of the library raises bare Exceptions
        raise ConfigError(
            f"the tokenizer in {folder} cannot be read: {first_line(error)}"
        ) from error
    return tokenizer


def auto_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer that transformers' AutoTokenizer opens in a model's folder.

    Raises ConfigError if it cannot be opened.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers and the code in the folder raise errors of any class
        raise ConfigError(
            f"the tokenizer in {folder} cannot be read: {first_line(error)}"
        ) from error
    return tokenizer


def _tokens_of_class(folder: Path) -> dict[str, str]:
    """Return name -> special token for those that only the tokenizer's class defines.

    tokenizer_config.json does not contain them; GPT-2's, for example, contains none. The class is
    that of tokenizer_config.json, else that of the model type.
    """
    settings, model = (
        json_object(folder / name) if (folder / name).is_file() else {}
        for name in (SETTINGS, CONFIG)
    )
    name = settings.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(
        model.get("model_type", "")
    )
    kind = tokenizer_class_from_name(name) if name else None
    parameters = inspect.signature(kind.__init__).parameters if kind else {}
    names = [
        name
        for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
        if name in parameters and name not in settings
    ]
    return {
        name: parameters[name].default
        for name in names
        if isinstance(parameters[name].default, str)
    }


def _settings_of_any_class(
    settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the content of tokenizer_config.json with which tokenizer.json is read unchanged.

    settings: the original content, which may name any class.
    """
    found = {key: value for key, value in settings.items() if key not in OF_OTHERS}
    found["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES:
        token = getattr(tokenizer, name)
        if token is not None:
            found.setdefault(name, token)
    # In transformers 4 the list is called additional_special_tokens, and extra_special_tokens is a
    # mapping.
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    # transformers 4 replaces the setting of the pre-tokenizer by this one, or by false.
    prefix = getattr(tokenizer.backend_tokenizer.pre_tokenizer, "add_prefix_space", None)
    return found if prefix is None else found | {"add_prefix_space": prefix}


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, folder: Path
) -> int:
    """Return the number of entries of the tokenizer.

    Raises ConfigError if an entry is outside the model's vocabulary of ``vocab_size`` ids.
    """
    entries = max(tokenizer.get_vocab().values(), default=-1) + 1
    if vocab_size is not None and entries > vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {entries} entries, but the model's vocabulary has only"
            f" {vocab_size}: not the model's tokenizer; {NAME_A_TOKENIZER}"
        )
    return entries


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
