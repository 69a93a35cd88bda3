"""Open any model for transformers in one process: an export, another Hugging Face folder, or a
checkpoint of any layout.

``verify``, ``tools.generate`` and ``tools.evaluate`` open models only through this module. It also
computes the fingerprints that identify models in stored results. No network is used, and only code
of our own exports is executed.
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
from fem_common.files import sha256, start_of
from fem_megatron.config import ModelConfig
from fem_megatron.megatron import platform, upstream
from pretrain.checkpoint.folder import Found, find
from pretrain.checkpoint.reader import Weights

from .compare import compare_tokenizers
from .configuration_fem import FemLMConfig
from .encoding import Encode, encoder, trained_here
from .export import AUTO_MAP, check_shapes, hf_config
from .folder import TOKENIZER_FILES, UNREAD, Folder, read_folder
from .modeling_fem import FemLMForCausalLM
from .paths import CONFIG, check_there, check_tokenizer_folder, has_tokenizer, is_folder
from .stock import StockError, exported, model_of
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
from .weight_conversion import VOCABULARY, Converted, Tensors, first_of

CACHE_LINE = 64
Reader = tuple[PreTrainedTokenizerBase | None, Path | None, str | None]
"""(tokenizer, its folder, None), or (None, None, reason) if no tokenizer exists."""


@dataclass(frozen=True)
class OpenModel:
    """A model ready for use: on its device, in eval mode.

    Attributes:
        name: name of the model in tables.
        source: folder of the checkpoint's step, or the Hugging Face folder.
        model: a transformers PreTrainedModel.
        tokenizer: None if none was found; ``no_tokenizer`` is then the reason.
        config: the training code's configuration; None if it does not support the model.
        manifest: the checkpoint's manifest, or an export's training.json, or {}.
        kind: description of the source, for messages.
        tokenizer_folder: folder of the tokenizer.
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
        """Maximum number of tokens in a sequence; None: unlimited."""
        if self.config is not None:
            limits = [block.mixer.max_length() for block in self.config.blocks()]
            return min((limit for limit in limits if limit is not None), default=None)
        longest: int | None = getattr(self.model.config, "max_position_embeddings", None)
        return longest

    @property
    def trained_here(self) -> bool:
        """True if the model was trained on data of ``data_prep`` (see ``encoding``)."""
        return trained_here(self.manifest)

    @cached_property
    def encode(self) -> Encode:
        """Function that converts a text to the ids that the model reads.

        Every tool encodes prompts with it. Raises ConfigError (see ``encoder``).
        """
        return encoder(self.tokenizer, self.tokenizer_folder, as_data=self.trained_here)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype


def open_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    tokenizer: Path | None = None,
) -> OpenModel:
    """Open the model at ``path``: a run directory (its newest checkpoint), the folder of a step, an
    export, or a Hugging Face folder of a class of transformers.

    A checkpoint is opened as the class that its export would have (see ``export``). Peak memory:
    the weights once, plus one tensor while loading.

    Args:
        dtype: dtype of the weights; None: as stored.
        device: ``auto``, ``cpu`` or ``cuda``.
        tokenizer: folder of the tokenizer; None: the model's own, or the training's.

    Raises:
        ConfigError: no model exists, it cannot be read, or tensors and configuration of the
        checkpoint do not match.
    """
    place = device_named(device)
    path = Path(path)
    found, usual = _located(path)
    with quiet_transformers():
        if found is not None:
            return _open_checkpoint(found, dtype, place, _tokenizer(tokenizer, usual))
        folder = read_folder(path)
        check_architecture(folder)
        reader, where, why = _tokenizer(tokenizer, usual)
        model = _loaded(folder, dtype)
        if reader is not None and where is not None:
            check_tokenizer(reader, model.config.vocab_size, where)
        kind = "exported folder" if folder.ours or folder.training() else "Hugging Face folder"
        name, config = path.resolve().name, known_model(folder)
        return OpenModel(
            name, path, model.to(place).eval(), reader, config, folder.training(), kind, where, why
        )


def weights_at(path: Path) -> Path:
    """Return the folder that ``open_model(path)`` would read now; for a run directory its currently
    newest checkpoint.

    Raises:
        ConfigError: it has none.
    """
    found, _ = _located(path)
    return path if found is None else found.path


def _located(path: Path) -> tuple[Found | None, list[Path]]:
    """Return the checkpoint at ``path``, and the folders that may contain its tokenizer.

    The checkpoint is None for a Hugging Face folder. Raises ConfigError if ``path`` is neither.
    """
    check_there(path)
    upstream.import_megatron()
    if is_folder(path):
        return None, [path]
    found = find(path)
    return found, tokenizers_of_checkpoint(found.path, found.manifest)


def device_named(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``.

    ``auto`` selects the accelerator of this machine, if any. Raises ConfigError if the device does
    not exist.
    """
    if name == "auto":
        return platform.device()
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda" and platform.has_cuda():
        return platform.device()
    raise ConfigError(
        f"--device {name}: this machine has no such device; auto selects the available one"
    )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context manager that suppresses progress bars and log messages of transformers.

    Callers print the relevant messages as one line themselves.
    """
    verbosity = transformers_logging.get_verbosity()
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()


# --- Hugging Face folders -------------------------------------------------------------------------


def check_architecture(folder: Folder) -> None:
    """Raise ConfigError unless the folder's model can be opened as a causal language model.

    It must be an export of this project with its code, or a causal class of transformers.
    """
    kind, wanted = folder.config.get("model_type"), folder.config.get("auto_map")
    if folder.ours:
        named = sorted({f"{value.partition('.')[0]}.py" for value in AUTO_MAP.values()})
        absent = [file for file in named if not (folder.path / file).is_file()]
        if wanted != AUTO_MAP or absent:
            what = f"auto_map in {CONFIG} is not the one of an export"
            if absent:
                what = f"{absent[0]} is missing"
            raise ConfigError(
                f"{folder.path} is an incomplete export: {what}; export the checkpoint again"
            )
        return
    if kind not in CONFIG_MAPPING:
        if wanted:
            raise ConfigError(
                f"{folder.path} (model_type {kind}) requires code from its folder, which is run"
                " only for exports of this project"
            )
        raise ConfigError(
            f"{folder.path}: transformers {transformers_version} does not support model_type {kind}"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{folder.path}: model_type {kind} is not a causal language model, so it has no"
            " next-token probabilities"
        )


def _loaded(folder: Folder, dtype: torch.dtype | None) -> Any:
    """Return the folder's model on the CPU, with every weight read from the folder."""
    loader: Any = AutoModelForCausalLM
    try:
        model, info = loader.from_pretrained(
            folder.path,
            trust_remote_code=folder.ours,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype or "auto",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and the code in the folder raise errors of any class
        raise ConfigError(
            f"{folder.path} cannot be opened: {type(error).__name__}: {first_line(error)}"
        ) from error
    wrong_shape = [entry[0] for entry in info["mismatched_keys"]]
    # Old files contain the constant inv_freq.
    unknown = [name for name in info["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq")]
    for complaint, names in (
        ("lacks", info["missing_keys"]),
        ("has a shape that differs from its configuration for", wrong_shape),
        ("contains tensors that the model lacks:", unknown),
    ):
        if names:
            raise ConfigError(
                f"{folder.path} {complaint} {first_of(names)}: its weights and its {CONFIG} belong"
                " to different models"
            )
    _align(model)
    return model


def _align(model: torch.nn.Module) -> None:
    """Copy each weight whose address is not a multiple of a cache line (64 bytes) to aligned
    memory.

    Weights that are mapped from a file may begin anywhere. A matrix product may then be summed in
    another order, so that the same model would differ from its checkpoint in the last bit,
    depending on the length of the file's header.
    """
    for weight in (*model.parameters(), *model.buffers()):
        if weight.data_ptr() % CACHE_LINE:
            weight.data = weight.data.clone()


def known_model(folder: Folder) -> ModelConfig | None:
    """Return the training code's configuration of the folder's model; None if it does not support
    it.
    """
    if folder.ours:
        return FemLMConfig.from_dict(folder.config).model()
    try:
        return model_of(folder.config)
    except StockError:
        return None


# --- checkpoints ----------------------------------------------------------------------------------


def _open_checkpoint(
    found: Found, dtype: torch.dtype | None, device: torch.device, tokenizer: Reader
) -> OpenModel:
    reader, where, why = tokenizer
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


# --- tokenizers -----------------------------------------------------------------------------------


def tokenizer_of(path: Path, tokenizer: Path | None = None) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that ``open_model`` would find, without opening the model; None without
    one.

    Raises ConfigError as ``open_model`` does.
    """
    return _tokenizer(tokenizer, _located(path)[1])[0]


def misread_by_transformers(
    path: Path, tokenizer: PreTrainedTokenizerBase | None, texts: list[str]
) -> str | None:
    """Return a message if transformers would encode some ``texts`` differently from ``tokenizer``.

    The message contains the difference and the remedy. None if both agree, or if ``path`` is not a
    Hugging Face folder with a tokenizer.json.
    """
    if tokenizer is None or not is_folder(path) or not (path / WHOLE).is_file():
        return None
    try:
        theirs = auto_tokenizer(path, trust_remote_code=read_folder(path).ours)
    except ConfigError as error:
        return str(error)
    differences = compare_tokenizers(tokenizer, theirs, texts)
    fix = (
        "export the checkpoint again, or set tokenizer_class to PreTrainedTokenizerFast in"
        " tokenizer_config.json"
    )
    return (
        differences
        and f"transformers opens {path / WHOLE} as {type(theirs).__name__}: {differences}; {fix}"
    )


def _tokenizer(named: Path | None, usual: list[Path]) -> Reader:
    """Find the tokenizer: in the folder ``named``, or else in the first of ``usual`` that has
    one.
    """
    check_tokenizer_folder(named)
    for folder in [named] if named else usual:
        if has_tokenizer(folder):
            return load_tokenizer(folder), folder, None
    where = f"{usual[-1]} has none"
    if len(usual) > 1:
        where = f"the tokenizer of the training, {usual[-1]}, does not exist"
        where = f"{where}; {start_of(usual[-1])}".removesuffix("; ")
    return None, None, f"no tokenizer: {where}; {NAME_A_TOKENIZER}"


def checkpoint_model(
    found: Found,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Any:
    """Return the model of a checkpoint on ``device`` in eval mode.

    It has the special tokens that its export would have. dtype: None: as stored.

    Raises:
        ConfigError: the folder is damaged, or its tensors are not those of its configuration.
    """
    weights, inherited = Weights(found.path), found.inherited
    check_shapes(weights.shapes, config)
    kept = dtype or weights.dtypes[VOCABULARY[0]]
    tokens = special_ids(tokenizer, inherited.special_ids)
    settings = hf_config(config, kept, tokens, inherited.context_length)
    ours = isinstance(settings, FemLMConfig)
    maker: Any = FemLMForCausalLM if ours else MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    state = state_of(exported(weights, config), kept, device)
    model, info = maker.from_pretrained(
        None, config=settings, state_dict=state, output_loading_info=True, local_files_only=True
    )
    # check_shapes has already checked these.
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]), info
    return model.to(device).eval()


def state_of(source: Converted, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return name -> tensor for all tensors of the source, with this dtype and device.

    A tensor that is part of a larger one is copied, so that the memory of the larger one can be
    freed.
    """
    state = {}
    for name, full in source.items():
        tensor = full.to(device=device, dtype=dtype)
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        state[name] = tensor.clone() if is_part else tensor.contiguous()
        del full, tensor  # free them before the next one is read
    return state


# --- fingerprint ----------------------------------------------------------------------------------

# Version of the code that converts files to token ids. Increase it with changes of that code, so
# that earlier results are not reused.
READING = "2 "


def fingerprint(model: OpenModel | Path, tokenizer: Path | None = None) -> str:
    """Return 64 hex digits that change with any bit of the weights, configuration, code or
    tokenizer.

    model: an open model with its tokenizer, or a path as for ``open_model``. Every tensor is read
    and hashed, about 1 GB/s, which is faster than opening it.

    The fingerprint does not depend on the model's folder and name, on the split of its weights into
    files or over ranks, or on dtype and device after opening. The same weights in another format (a
    checkpoint and its export) have different fingerprints.

    Raises:
        ConfigError: as ``open_model``.
    """
    if isinstance(model, OpenModel):
        tokenizer = model.tokenizer_folder
        model = model.source
    found, usual = _located(model)
    reader = _tokenizer_digest(*([tokenizer] if tokenizer else usual))
    if found is None:
        folder = read_folder(model)
        settings = {key: value for key, value in folder.config.items() if key not in UNREAD}
        code = _files(sorted(model.glob("*.py"))) if folder.ours else ""
        return _digest([_json(settings), code, reader, *_tensors(folder)])
    settings = asdict(ModelConfig.from_dict(found.manifest["config"]["model"]))
    del settings["attention_backend"]
    return _digest([_json(settings), reader, *_tensors(Weights(found.path))])


def _tensors(source: Tensors) -> Iterable[str]:
    for name in sorted(source.shapes):
        tensor = source.read([name])[name].contiguous()
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        yield hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _tokenizer_digest(*folders: Path) -> str:
    """Return a digest of the tokenizer's files in the first folder that contains a tokenizer.

    Empty if no folder does.
    """
    folder = next((folder for folder in folders if has_tokenizer(folder)), None)
    if folder is None:
        return ""
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return READING + _files(files)


def _files(files: list[Path]) -> str:
    return " ".join(f"{file.name} {sha256(file)}" for file in files)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
