"""Any model as transformers sees it: an exported folder, another Hugging Face folder, or a checkpoint of any layout, in one process.

The one way in which ``verify``, ``tools.generate`` and ``tools.evaluate`` come by a model, and the fingerprint of one. Nothing here
contacts a network, and no code comes from a folder but that of our own exports.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
)
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from fem_common.errors import ConfigError
from fem_megatron.config import ModelConfig
from fem_megatron.megatron import platform
from pretrain.checkpoint.folder import Found, find
from pretrain.checkpoint.reader import Weights

from .compare import compare_tokenizers
from .configuration_fem import FemLMConfig
from .encoding import Encode, encoder, trained_here
from .export import AUTO_MAP, check_shapes, hf_config
from .folder import CONFIG, TOKENIZER_FILES, UNREAD, Folder, has_tokenizer, is_folder, read_folder
from .modeling_fem import FemLMForCausalLM
from .recipes import VOCABULARY, Recipes, Tensors, first_of, made, to_fem
from .stock import StockError, model_of, stock_config, to_stock, why_not_stock
from .tokenizer import (
    NAME_A_TOKENIZER,
    WHOLE,
    auto_tokenizer,
    check_tokenizer,
    first_line,
    load_tokenizer,
    special_ids,
    tokenizers_of_checkpoint,
)

CACHE_LINE = 64


@dataclass(frozen=True)
class OpenModel:
    """A model ready for use: on its device, in eval mode.

    name: for tables. source: the checkpoint's step folder or the Hugging Face folder. model: a transformers PreTrainedModel. tokenizer:
    None where none is known, and then ``no_tokenizer`` is a line that says why. config: where the training code knows the model.
    manifest: the checkpoint's, or what an export keeps of it (training.json), else {}. kind: what it was opened from, in words.
    tokenizer_folder: where the tokenizer was read.
    """

    name: str
    source: Path
    model: Any
    tokenizer: Any | None
    config: ModelConfig | None
    manifest: dict[str, Any]
    kind: str = "checkpoint"
    tokenizer_folder: Path | None = None
    no_tokenizer: str | None = None

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the model takes, None: any."""
        if self.config is not None:
            limits = [block.mixer.max_length() for block in self.config.blocks()]
            return min((limit for limit in limits if limit is not None), default=None)
        longest: int | None = getattr(self.model.config, "max_position_embeddings", None)
        return longest

    @property
    def trained_here(self) -> bool:
        """Whether its training data are those of ``data_prep`` (see ``encoding``)."""
        return trained_here(self.manifest)

    @cached_property
    def encode(self) -> Encode:
        """Text to the ids that the model reads, the one way in which every tool encodes a prompt. Raises ConfigError (see ``encoder``)."""
        return encoder(self.tokenizer, self.tokenizer_folder, as_data=self.trained_here)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, as opened."""
        dtype: torch.dtype = self.model.dtype
        return dtype


def open_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    tokenizer: Path | None = None,
) -> OpenModel:
    """Opens what is at ``path``: a run directory (its newest checkpoint), a step's folder, an exported folder, a stock one.

    A checkpoint opens as the class that its export would have: stock where a stock class says the model, else FemLMForCausalLM. The
    weights are held once, and one tensor more while they come. dtype: None: as stored. device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: no model is there, or it cannot be read, or a checkpoint's parts do not fit together.
    """
    place = device_named(device)
    path = Path(path)
    check_there(path)
    with quiet_transformers():
        if not is_folder(path):
            return _open_checkpoint(path, dtype, place, tokenizer)
        folder = read_folder(path)
        check_architecture(folder)
        reader, where, why = _tokenizer(tokenizer, [path])
        model = _loaded(folder, dtype)
        if reader is not None and where is not None:
            check_tokenizer(reader, model.config.vocab_size, where)
        kind = "exported folder" if folder.ours or folder.training() else "Hugging Face folder"
        name, config = path.resolve().name, known_model(folder)
        return OpenModel(
            name, path, model.to(place).eval(), reader, config, folder.training(), kind, where, why
        )


def weights_at(path: Path) -> Path:
    """The folder that ``open_model(path)`` would read now: of a run directory its newest checkpoint, which is not the newest for ever.

    Raises:
        ConfigError: there is none.
    """
    check_there(path)
    if is_folder(path):
        return path
    return find(path).path


def device_named(name: str) -> torch.device:
    """``auto``: what this machine computes on; ``cpu``; ``cuda``. Raises ConfigError where there is no such device."""
    if name == "auto":
        return platform.device()
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda" and platform.has_cuda():
        return platform.device()
    raise ConfigError(
        f"--device {name}: this machine has no such device; auto takes the one that it has"
    )


def check_there(path: Path) -> None:
    """Raises ConfigError unless ``path`` is a folder; what looks like a name on the Hub is told how to be fetched."""
    platform.import_megatron()
    if path.is_dir():
        return
    if path.exists():
        raise ConfigError(
            f"{path} is a file: a model is a folder (a run directory, a checkpoint, or a Hugging Face folder)"
        )
    text = str(path)
    if (
        not path.is_absolute()
        and text.count("/") == 1
        and not text.startswith(".")
        and not path.parent.is_dir()
    ):
        raise ConfigError(
            f"there is no folder {text}, and no model is downloaded here: fetch it (hf download {text} --local-dir DIR) and name DIR"
        )
    raise ConfigError(f"there is no folder {text}")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and no reports from transformers in the block: what matters of them is told as one line."""
    verbosity, bar = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()


# --- Hugging Face folders --------------------------------------------------------------------------------------------------------


def check_architecture(folder: Folder) -> None:
    """Raises ConfigError unless transformers has this architecture as a causal language model, or the folder is an export of ours."""
    kind, wanted = folder.config.get("model_type"), folder.config.get("auto_map")
    if folder.ours:
        named = sorted({f"{value.partition('.')[0]}.py" for value in AUTO_MAP.values()})
        absent = [file for file in named if not (folder.path / file).is_file()]
        if wanted != AUTO_MAP or absent:
            what = (
                f"{absent[0]} is missing"
                if absent
                else f"auto_map in {CONFIG} is not that of an export"
            )
            raise ConfigError(
                f"{folder.path} is half an export: {what}; export the checkpoint again"
            )
        return
    if kind not in CONFIG_MAPPING:
        if wanted:
            raise ConfigError(
                f"{folder.path} (model_type {kind}) wants to run code of its own, which only exports of this project may"
            )
        raise ConfigError(
            f"{folder.path}: model_type {kind} is no architecture that transformers {transformers_version} knows"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{folder.path}: model_type {kind} is no causal language model, so it has no next-token probabilities"
        )


def _loaded(folder: Folder, dtype: torch.dtype | None) -> Any:
    """The folder's model, every weight of it from the folder, on the CPU."""
    loader: Any = AutoModelForCausalLM
    try:
        model, told = loader.from_pretrained(
            folder.path,
            trust_remote_code=folder.ours,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype or "auto",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and the code in the folder raise what they like
        raise ConfigError(
            f"{folder.path} cannot be opened: {type(error).__name__}: {first_line(error)}"
        ) from error
    wrong_shape = [entry[0] for entry in told["mismatched_keys"]]
    unknown = [
        name for name in told["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq")
    ]  # a constant that old files keep
    for complaint, names in (
        ("lacks", told["missing_keys"]),
        ("has another shape than its configuration says for", wrong_shape),
        ("holds, besides the model's,", unknown),
    ):
        if names:
            raise ConfigError(
                f"{folder.path} {complaint} {first_of(names)}: its weights and its {CONFIG} are not one model's"
            )
    _align(model)
    return model


def _align(model: torch.nn.Module) -> None:
    """Moves weights that lie mapped from their file, at any address, to where torch would allocate them.

    A product's sums may be taken in another order where its matrix does not begin on a cache line (64 bytes): with the weights where they
    lay in the file, the same model would differ from its checkpoint in the last bit, by the length of a header.
    """
    for weight in (*model.parameters(), *model.buffers()):
        if weight.data_ptr() % CACHE_LINE:
            weight.data = weight.data.clone()


def known_model(folder: Folder) -> ModelConfig | None:
    """The training code's configuration of the folder's model, None where it has none."""
    if folder.ours:
        return FemLMConfig.from_dict(folder.config).model()
    try:
        return model_of(folder.config)
    except StockError:
        return None


# --- checkpoints -----------------------------------------------------------------------------------------------------------------


def _open_checkpoint(
    path: Path, dtype: torch.dtype | None, device: torch.device, tokenizer: Path | None
) -> OpenModel:
    found = find(path)
    reader, where, why = _tokenizer(tokenizer, tokenizers_of_checkpoint(found.path, found.manifest))
    config = ModelConfig.from_dict(found.manifest["config"]["model"])
    if reader is not None and where is not None:
        check_tokenizer(reader, config.vocab_size, where)
    model = checkpoint_model(found, config, reader, dtype, device)
    name = found.manifest["config"]["name"]
    return OpenModel(
        name,
        found.path,
        model,
        reader,
        config,
        found.manifest,
        tokenizer_folder=where,
        no_tokenizer=why,
    )


# --- tokenizers ------------------------------------------------------------------------------------------------------------------


def tokenizer_of(path: Path, tokenizer: Path | None = None) -> PreTrainedTokenizerBase | None:
    """What ``open_model`` would give as the tokenizer, without the model. Raises ConfigError as it would."""
    check_there(path)
    if is_folder(path):
        return _tokenizer(tokenizer, [path])[0]
    found = find(path)
    return _tokenizer(tokenizer, tokenizers_of_checkpoint(found.path, found.manifest))[0]


def misread_by_transformers(
    path: Path, tokenizer: PreTrainedTokenizerBase | None, texts: list[str]
) -> str | None:
    """How transformers reads these texts unlike ``tokenizer``, the one in a model's folder, and what to do; None: it does not."""
    if tokenizer is None or not is_folder(path) or not (path / WHOLE).is_file():
        return None
    try:
        theirs = auto_tokenizer(path, trust_remote_code=read_folder(path).ours)
    except ConfigError as error:
        return str(error)
    told = compare_tokenizers(tokenizer, theirs, texts)
    fix = "export the checkpoint again, or set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json"
    return told and f"transformers opens {path / WHOLE} as {type(theirs).__name__}: {told}; {fix}"


def _tokenizer(
    named: Path | None, usual: list[Path]
) -> tuple[PreTrainedTokenizerBase | None, Path | None, str | None]:
    """The named tokenizer, else the first that is in the usual folders, and its folder; or why there is none."""
    if named is not None and not has_tokenizer(named):
        raise ConfigError(
            f"--tokenizer {named}: no tokenizer folder; it has none of a tokenizer's files (tokenizer.json, ...)"
        )
    for folder in [named] if named else usual:
        if has_tokenizer(folder):
            return load_tokenizer(folder), folder, None
    where = (
        f"the training's, {usual[-1]}, is not there" if len(usual) > 1 else f"{usual[-1]} has none"
    )
    return None, None, f"no tokenizer: {where}; {NAME_A_TOKENIZER}"


def checkpoint_model(
    found: Found,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Any:
    """The model of a checkpoint on ``device`` in eval mode, special tokens as its export would have them; dtype None: as stored.

    Raises:
        ConfigError: the folder is damaged. ConfigError: its tensors are not those of its configuration.
    """
    weights, inherited = Weights(found.path), found.inherited
    check_shapes(weights.shapes, config)
    kept = dtype or weights.dtypes[VOCABULARY[0]]
    stock = why_not_stock(config) is None
    tokens = special_ids(tokenizer, inherited.special_ids)
    if stock:
        built: Any = stock_config(
            config, dtype=kept, max_position_embeddings=inherited.context_length, **tokens
        )
        maker: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(built)]
    else:
        built, maker = hf_config(config, kept, tokens, inherited.context_length), FemLMForCausalLM
    state = state_of(weights, to_stock(config) if stock else to_fem(config), kept, device)
    model, told = maker.from_pretrained(
        None, config=built, state_dict=state, output_loading_info=True, local_files_only=True
    )
    assert not (told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"]), (
        told
    )  # check_shapes has seen to it
    return model.to(device).eval()


def state_of(
    source: Weights, recipes: Recipes, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """What the recipes make, in its type and place; of a part of a tensor a copy, so that the whole can go."""
    state = {}
    for name, whole in made(source, recipes):
        tensor = whole.to(device=device, dtype=dtype)
        state[name] = (
            tensor.clone()
            if tensor.untyped_storage().nbytes() > tensor.nbytes
            else tensor.contiguous()
        )
        del whole, tensor  # before the next is read
    return state


# --- fingerprint -----------------------------------------------------------------------------------------------------------------

READING = "2 "  # how files become token ids; to be changed with the code that reads them, so that earlier results are not reused


def fingerprint(model: OpenModel | Path, tokenizer: Path | None = None) -> str:
    """64 hex digits that stand for what a model answers: they change with any bit of its weights, its configuration, code or tokenizer.

    model: an opened one, with the tokenizer that it was opened with, or a path as for ``open_model``. Every tensor is read and hashed,
    about 1 GB/s: less than opening it. Not in it: where the model lies, its name, how its weights are cut into files or over ranks, and the
    type and device that it is opened with. The same weights in another format (a checkpoint, its export) have another fingerprint.

    Raises:
        ConfigError: as ``open_model``.
    """
    path, tokenizer = (
        (model.source, model.tokenizer_folder)
        if isinstance(model, OpenModel)
        else (model, tokenizer)
    )
    check_there(path)
    if is_folder(path):
        folder = read_folder(path)
        settings = {key: value for key, value in folder.config.items() if key not in UNREAD}
        code = _files(sorted(path.glob("*.py"))) if folder.ours else ""
        return _digest(
            [_json(settings), code, _tokenizer_digest(tokenizer or path), *_tensors(folder)]
        )
    found = find(path)
    named = [tokenizer] if tokenizer else tokenizers_of_checkpoint(found.path, found.manifest)
    settings = asdict(ModelConfig.from_dict(found.manifest["config"]["model"]))
    del settings["attention_backend"]
    return _digest([_json(settings), _tokenizer_digest(*named), *_tensors(Weights(found.path))])


def _tensors(source: Tensors) -> Iterable[str]:
    for name in sorted(source.shapes):
        tensor = source.read([name])[name].contiguous()
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        yield hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _tokenizer_digest(*folders: Path) -> str:
    """Of the files that a tokenizer reads, in the first of the folders that has some; config.json and weights' indexes are none."""
    folder = next((folder for folder in folders if has_tokenizer(folder)), None)
    return (
        ""
        if folder is None
        else READING
        + _files([folder / name for name in TOKENIZER_FILES if (folder / name).is_file()])
    )


def _files(files: list[Path]) -> str:
    return " ".join(
        f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files
    )


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
