"""Check the paths that a user gave to a tool: checkpoints, Hugging Face folders, outputs.

The module imports neither torch nor transformers, so that a wrong path is reported at once.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fem_common.errors import ConfigError
from pretrain.checkpoint.folder import Found, find

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TRAINING = "training.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
MODEL = "model.yaml"


def has_tokenizer(path: Path) -> bool:
    """Return True if the folder contains a tokenizer."""
    return any((path / name).is_file() for name in TOKENIZERS)


def is_folder(path: Path) -> bool:
    """Return True if ``path`` is a Hugging Face folder, complete or not."""
    return any((path / name).is_file() for name in (CONFIG, WEIGHTS, INDEX, *PICKLES))


def check_there(path: Path) -> None:
    """Raise ConfigError unless ``path`` is a folder; for a name on the Hub the message explains how
    to download it.
    """
    if path.is_dir():
        return
    if path.exists():
        raise ConfigError(
            f"{path} is a file: expected a folder (a run directory, a checkpoint, or a Hugging Face"
            " folder)"
        )
    text = str(path)
    hub_name = not path.is_absolute() and text.count("/") == 1 and not text.startswith(".")
    if hub_name and not path.parent.is_dir():
        raise ConfigError(
            f"there is no folder {text}, and models are not downloaded automatically: fetch it (hf"
            f" download {text} --local-dir DIR) and name DIR"
        )
    raise ConfigError(f"there is no folder {text}")


def check_model(path: Path, tokenizer: Path | None = None) -> None:
    """Raise ConfigError unless ``path`` contains a model, and ``tokenizer`` a tokenizer."""
    check_there(path)
    if not is_folder(path):
        find(path)
    check_tokenizer_folder(tokenizer)


def check_tokenizer_folder(named: Path | None) -> None:
    """Raise ConfigError if the folder of --tokenizer contains no tokenizer."""
    if named is not None and not has_tokenizer(named):
        raise ConfigError(
            f"--tokenizer {named}: not a tokenizer folder; it has no tokenizer files"
            " (tokenizer.json, ...)"
        )


def refuse_occupied(out: Path, overwrite: bool) -> None:
    """Raise ConfigError if ``out`` is a file, or a folder with content that may not be
    overwritten.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: choose a folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(
            f"{out} is not empty: choose another folder, or replace it with --overwrite"
        )
    if Path.cwd().is_relative_to(out.resolve()):
        raise ConfigError(
            f"{out} contains the working directory, which --overwrite does not replace: choose"
            " another folder"
        )


def refuse_foreign(out: Path, file: str, what: str) -> None:
    """Raise ConfigError if the folder ``out`` has content, but not ``file``, which each earlier
    result (``what``: export or import) contains.
    """
    if out.exists() and any(out.iterdir()) and not (out / file).is_file():
        raise ConfigError(
            f"{out} is not an earlier {what} ({file} is missing), and --overwrite replaces only"
            f" {what}s: choose another folder"
        )


def check_export(checkpoint: Path, out: Path, overwrite: bool) -> Found:
    """Return the checkpoint to export. Raise ConfigError for faults in the two paths."""
    if not _found(checkpoint) and _found(out):
        raise ConfigError(
            f"there is no checkpoint in {checkpoint}, but OUT {out} has one: are the arguments"
            " swapped?"
        )
    refuse_occupied(out, overwrite)
    if not checkpoint.exists():
        raise ConfigError(f"there is no checkpoint {checkpoint}")
    if not checkpoint.is_dir():
        raise ConfigError(
            f"{checkpoint} is a file: expected a folder step_NNNNNNNN, or a run directory with"
            " checkpoints"
        )
    if is_folder(checkpoint):
        raise ConfigError(
            f"{checkpoint} is already a Hugging Face folder, which transformers can load: no export"
            " is needed"
        )
    _refuse_overlap(checkpoint, out, inside=False)
    refuse_foreign(out, CONFIG, "export")
    found = find(checkpoint)
    _refuse_overlap(found.path, out)
    return found


def _found(path: Path) -> Found | None:
    with suppress(ConfigError):
        return find(path)
    return None


def _refuse_overlap(checkpoint: Path, out: Path, *, inside: bool = True) -> None:
    """Raise ConfigError if ``out`` is the checkpoint or contains it.

    inside: raise also if ``out`` is inside the checkpoint.
    """
    place, target = checkpoint.resolve(), out.resolve()
    if place.is_relative_to(target) or (inside and target.is_relative_to(place)):
        if place == target:
            relation = "is"
        elif place.is_relative_to(target):
            relation = "contains"
        else:
            relation = "is inside"
        raise ConfigError(
            f"OUT {out} {relation} the checkpoint {checkpoint}: choose a folder outside"
        )


def check_import(hf_dir: Path, out: Path, overwrite: bool) -> None:
    """Raise ConfigError if ``hf_dir`` is not a Hugging Face folder, or if ``out`` contains it or
    anything but an earlier import.

    An earlier import is accepted with ``overwrite``.
    """
    if hf_dir.resolve().is_relative_to(out.resolve()):
        relation = "is" if hf_dir.resolve() == out.resolve() else "contains"
        raise ConfigError(f"{out} {relation} the folder to import: choose another one")
    refuse_occupied(out, overwrite)
    refuse_foreign(out, MODEL, "import")
    check_there(hf_dir)
    if not is_folder(hf_dir):
        raise ConfigError(_no_folder(hf_dir))


def _no_folder(path: Path) -> str:
    """Return the reason why ``path`` is not a Hugging Face folder, and the remedy."""
    ours = any((path / name).exists() for name in ("checkpoints", "latest", "manifest.json"))
    if ours or any(path.glob("step_*")):
        return (
            f"{path} is already a checkpoint, or a run directory with checkpoints: no import is"
            " needed (export converts it to a folder)"
        )
    adapter = ""
    if (path / "adapter_config.json").is_file():
        adapter = " (only an adapter: merge it into its model first)"
    return f"{path} is not a Hugging Face model: {CONFIG} is missing{adapter}"
