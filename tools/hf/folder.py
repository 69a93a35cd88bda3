"""A Hugging Face folder as it lies on disk: its configuration, its weights' names and shapes, one tensor at a time. No model is built here.

Safetensors alone: a pickle runs code when it is read. Nothing here contacts a network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fem_common.errors import ConfigError, files_told

CONFIG, WEIGHTS, INDEX, TRAINING = "config.json", "model.safetensors", "model.safetensors.index.json", "training.json"
GENERATION = "generation_config.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
TOKENIZER_FILES = (*TOKENIZERS, "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies. file: its safetensors file. dtype: as the file names it (``F32``, ``BF16``)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Folder:
    """A whole folder. config: config.json. files: of weights. tensors: name -> where it lies."""

    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, Stored]

    @property
    def ours(self) -> bool:
        """Whether it carries this project's modeling code."""
        return self.config.get("model_type") == "fem_lm"

    def get(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in its stored type. Raises ConfigError where it cannot be read."""
        try:
            with safe_open(self.tensors[name].file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except Exception as error:  # the library's exception is a bare subclass of Exception
            raise ConfigError(f"{self.tensors[name].file}: {name} cannot be read ({error}): fetch the file again") from error
        return tensor

    def training(self) -> dict[str, Any]:
        """What an export keeps of the checkpoint's manifest; {} where there is nothing. Raises ConfigError where it is no JSON."""
        path = self.path / TRAINING
        return json_object(path) if path.is_file() else {}


def has_tokenizer(path: Path) -> bool:
    """Whether a tokenizer lies in a folder."""
    return any((path / name).is_file() for name in TOKENIZERS)


def is_folder(path: Path) -> bool:
    """Whether something at ``path`` means to be a Hugging Face folder, be it only half of one."""
    return any((path / name).is_file() for name in (CONFIG, WEIGHTS, INDEX, *PICKLES))


def read_folder(path: Path) -> Folder:
    """The folder, checked: every file that it names is there, whole, and holds the tensors that it should.

    Reads headers, no weights.

    Raises:
        ConfigError: a file is missing, damaged or a pickle; one line that says which.
    """
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} is half a model: {CONFIG} is missing; copy the whole folder again")
    config = json_object(path / CONFIG)
    if (path / INDEX).is_file():
        listed = json_object(path / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise ConfigError(f"{path / INDEX} has no weight_map: fetch it again")
        names = sorted(set(listed.values()))
        absent = [name for name in names if not (path / name).is_file()]
        if absent:
            raise ConfigError(f"{path} is half a model: {absent[0]} is missing ({len(absent)} of {len(names)} files of weights)")
    elif (path / WEIGHTS).is_file():
        listed, names = None, [WEIGHTS]
    else:
        pickled = [name for name in PICKLES if (path / name).is_file()]
        if pickled:
            raise ConfigError(f"{path}: {pickled[0]} is a pickle, which is not read here: save the model as safetensors with transformers")
        raise ConfigError(f"{path} is half a model: {CONFIG} is there, {WEIGHTS} is not")
    files = tuple(path / name for name in names)
    tensors = {name: stored for file in files for name, stored in header(file).items()}
    for name, file_name in (listed or {}).items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ConfigError(f"{path / INDEX} says that {name} is in {file_name}, which does not hold it: fetch both again")
    return Folder(path, config, files, tensors)


def header(file: Path) -> dict[str, Stored]:
    """Name -> tensor of one safetensors file, whose length must be what its header says.

    Raises:
        ConfigError: it is no safetensors file, or not the whole of one.
    """
    with files_told():
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            text = opened.read(length) if length <= size - 8 else b""
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        tensors = {name: Stored(file, tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items()}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, AttributeError, LookupError, TypeError):
        raise ConfigError(f"{file} is damaged: no safetensors file starts like this; fetch it again") from None
    if size != end:
        raise ConfigError(f"{file} is damaged: it has {size} bytes instead of {end}; fetch it again")
    return tensors


def json_object(path: Path) -> dict[str, Any]:
    """A JSON file's object. Raises ConfigError where it holds none."""
    with files_told():
        text = path.read_bytes()
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: no JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object; fetch it again")
    return value
