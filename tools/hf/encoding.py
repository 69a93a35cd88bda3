"""Convert text to token ids in the way that a model was trained on.

Models that this project trained receive the ids that ``data_prep`` would write. Other models
receive the ids of transformers' tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.encode.encoders import HuggingFace
from data_prep.encode.tokenizer import TokenizerFolder
from fem_common.errors import ConfigError

Encode = Callable[[str], list[int]]


def trained_here(manifest: Mapping[str, Any]) -> bool:
    """Return True if a model was trained on data of ``data_prep``.

    manifest: of its checkpoint, or the training.json of its export; False if empty.

    The import of another project's model counts only after this project has trained it further. If
    the manifest does not record the origin, a model with zero steps and no training data is an
    import.
    """
    foreign = manifest.get("inherited", {}).get("foreign")
    if foreign is None:
        foreign = manifest.get("progress", {}).get("step") == 0 and not manifest.get(
            "config", {}
        ).get("data", {}).get("train")
    return bool(manifest) and not foreign


def encoder(tokenizer: Any, folder: Path | None, *, as_data: bool) -> Encode:
    """Return the function that converts a text to the ids that a model reads.

    as_data: True: the ids that ``data_prep`` writes for the text with the tokenizer in ``folder``,
    without the end-of-document id. No special tokens are added, and the literal text of a special
    token is encoded as ordinary text. False: the result of transformers' ``tokenizer``, including
    the special tokens that it adds.

    Raises:
        ConfigError: ``as_data``, and ``folder`` has no tokenizer.json.
    """
    if not as_data:
        return lambda text: list(tokenizer(text)["input_ids"])
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder}: no tokenizer.json, which the training data was encoded with; name its"
            " folder with --tokenizer DIR"
        )
    eod = tokenizer.eos_token_id
    data = HuggingFace(
        TokenizerFolder(
            folder, tokenizer.eos_token or "", -1 if eod is None else eod, len(tokenizer), ""
        )
    )
    return lambda text: data.encode(pa.array([text], pa.large_string())).ids.tolist()
