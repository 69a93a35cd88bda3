"""data_prep: manifest.json, the last file written and the first one read: what a data folder holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer's copy in the data folder; ``sha256`` is that of tokenizer.json."""

    path: str
    vocab_size: int
    eod_id: int
    sha256: str


@dataclass(frozen=True)
class SplitEntry:
    """One .bin/.idx pair; ``tokens`` counts EOD, ``text_bytes`` is the UTF-8 size of the documents written."""

    documents: int
    tokens: int
    text_bytes: int
    bin_sha256: str
    idx_sha256: str
    bin_bytes: int
    idx_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A data folder; ``source`` says where it came from: inputs, rows, drops by reason, split, fingerprint."""

    tokenizer: TokenizerEntry
    dtype: str
    splits: dict[str, SplitEntry]
    source: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The manifest as manifest.json holds it."""
        return {"format": FORMAT, **asdict(self)}


def read_manifest(folder: Path) -> Manifest:
    """Read DIR/manifest.json. Raises UserError where it is absent, damaged or of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        hint = (
            "a run into it did not finish: start it again"
            if (folder / ".unfinished").exists()
            else "write it with: python -m data_prep run"
        )
        raise UserError(f"no {MANIFEST} in {folder}; {hint}")
    try:
        raw = json.loads(path.read_bytes())
        if raw["format"] != FORMAT:
            raise UserError(f"{path} has format {raw['format']!r}; this data_prep reads format {FORMAT}")
        splits = {name: SplitEntry(**entry) for name, entry in raw["splits"].items()}
        return Manifest(TokenizerEntry(**raw["tokenizer"]), raw["dtype"], splits, raw["source"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); make the data again with: python -m data_prep run") from None
