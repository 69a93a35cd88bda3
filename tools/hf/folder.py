"""Read and write a Hugging Face folder: its configuration, names and shapes of the weights, and
tensors one at a time. No model is built.

Only safetensors files are supported, because reading a pickle runs code. No network is used. The
written bytes equal those of the safetensors library. The library's function is not used because it
needs all tensors of a file in memory and copies them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fem_common.errors import ConfigError, convert_os_errors
from fem_common.progress import Progress
from pretrain.checkpoint.folder import HashedFile

from .paths import CONFIG, INDEX, PICKLES, TOKENIZERS, TRAINING, WEIGHTS
from .weight_conversion import Converted

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *TOKENIZERS,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Stored:
    """Location of one tensor.

    file: the safetensors file that contains it. dtype: its name in that file (``F32``, ``BF16``).
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Folder:
    """A complete Hugging Face folder.

    config: content of config.json. files: files of weights. tensors: name -> location.
    """

    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, Stored]

    @property
    def ours(self) -> bool:
        """True if the folder is an export with this project's modeling code."""
        return self.config.get("model_type") == "fem_lm"

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU in its stored dtype. Raises ConfigError if it cannot be
        read.
        """
        try:
            with safe_open(self.tensors[name].file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except Exception as error:  # includes a dtype that torch lacks
            raise ConfigError(
                f"{self.tensors[name].file}: {name} cannot be read ({error}): fetch the file again"
            ) from error
        return tensor

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return name -> tensor on the CPU for ``names``, as ``get`` does for one name."""
        return {name: self.get(name) for name in names}

    def training(self) -> dict[str, Any]:
        """Return the content of training.json, the part of the manifest that an export keeps.

        An empty dictionary if the file is absent. Raises ConfigError if it is not JSON.
        """
        path = self.path / TRAINING
        return json_object(path) if path.is_file() else {}


def read_folder(path: Path) -> Folder:
    """Return the Folder at ``path`` after checking that all its files are complete.

    Every file in the index must exist and contain its tensors. Only headers are read.

    Raises:
        ConfigError: a file is missing, damaged or a pickle; the message names it.
    """
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path} is an incomplete model: {CONFIG} is missing; copy the complete folder again"
        )
    config = json_object(path / CONFIG)
    if (path / INDEX).is_file():
        listed = json_object(path / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise ConfigError(f"{path / INDEX} has no weight_map: fetch it again")
        names = sorted(set(listed.values()))
        absent = [name for name in names if not (path / name).is_file()]
        if absent:
            raise ConfigError(
                f"{path} is an incomplete model: {absent[0]} is missing ({len(absent)} of"
                f" {len(names)} files of weights)"
            )
    elif (path / WEIGHTS).is_file():
        listed, names = None, [WEIGHTS]
    else:
        pickled = [name for name in PICKLES if (path / name).is_file()]
        if pickled:
            raise ConfigError(
                f"{path}: {pickled[0]} is a pickle, which this tool does not read: save the model"
                " as safetensors with transformers"
            )
        raise ConfigError(f"{path} is an incomplete model: it contains {CONFIG}, but not {WEIGHTS}")
    files = tuple(path / name for name in names)
    tensors = {name: stored for file in files for name, stored in header(file).items()}
    for name, file_name in (listed or {}).items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ConfigError(
                f"{path / INDEX} lists {name} in {file_name}, which does not contain it: fetch both"
                " again"
            )
    return Folder(path, config, files, tensors)


def header(file: Path) -> dict[str, Stored]:
    """Return name -> location of every tensor in one safetensors file.

    Raises ConfigError if it is not a complete safetensors file.
    """
    try:
        with convert_os_errors(), safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Stored(file, tuple(part.get_shape()), part.get_dtype())
                for name, part in parts.items()
            }
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged ({error}): fetch it again") from None


def json_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file as a dictionary. Raises ConfigError if it is no object."""
    with convert_os_errors():
        text = path.read_bytes()
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: not JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it is not a JSON object; fetch it again")
    return value


# Keys of config.json that are not compared: origin of the file, dtype for loading, and other keys
# without influence on the computed values.
UNREAD = (
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "architectures",
    "auto_map",
)

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
PIECE = 2**22  # elements whose dtype is converted in one step


def byte_count(text: str | int) -> int:
    """Return a file size in bytes from text such as ``5GB``, ``200MiB`` or ``1000``.

    GB is 10**9 bytes, MiB 2**20. Raises ValueError, with the expected format, for other texts.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?", str(text).strip().upper())
    size = int(float(found[1]) * UNITS[found[2] or "B"]) if found else 0
    if size < 1:
        raise ValueError(f"{text} is not a file size: write it as 5GB or 500MB")
    return size


def write_shards(
    weights: Converted,
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: int,
    progress: Progress,
) -> None:
    """Write the weights as ``model*.safetensors`` into ``folder``, converted to ``dtype``.

    Next to each file a second one with its hash is written, and an index if the weights need
    several files. max_shard_size: maximum bytes per file; a larger tensor has its own file.

    Raises:
        OSError: the file system failed. ConfigError: the source is damaged.
    """
    shapes = weights.shapes
    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    progress.total = total = split.metadata["total_size"]
    for file_name, names in split.filename_to_tensors.items():
        with HashedFile(folder / file_name) as file:
            file.write(_header({name: shapes[name] for name in sorted(names)}, dtype))
            for _, tensor in weights.items(sorted(names)):
                _write(file, tensor, dtype)
                progress.advance(tensor.numel() * dtype.itemsize)
                del tensor  # free it before the next one is read
    if len(split.filename_to_tensors) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def _write(file: IO[bytes], tensor: Tensor, dtype: torch.dtype) -> None:
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE].to(dtype).contiguous()
        file.write(piece.view(torch.uint8).numpy().data)


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """Return the header of a safetensors file: its length in 8 bytes, then JSON.

    The tensors must follow in the order of ``shapes``.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
