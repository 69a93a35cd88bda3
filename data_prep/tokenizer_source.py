"""data_prep: where a tokenizer is: a local folder, or a repository on the Hugging Face Hub, fetched. Reads no tokenizer."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from data_prep.encoder import TOKENIZER_FILES
from data_prep.errors import UserError, existing_folder, one_line
from data_prep.hub_access import SHORT_WAITS, Repository, patiently

_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[^@]+))?")
_HUB = ("hf://models/", "hf://")
WHAT = "a Hugging Face tokenizer; make one with: python -m data_prep train-tokenizer"


def find_tokenizer(name_or_path: str) -> Path:
    """The folder of a tokenizer: a folder as it is, ``ORG/NAME[@REVISION]`` from the Hub into huggingface_hub's cache.

    A name whose first part is a folder here is a path; with ``hf://`` before it, it is the Hub's in any case. What the cache holds is found
    without network too. Raises UserError where there is no such folder or repository, no access, or no tokenizer.json in it.
    """
    path = Path(name_or_path).expanduser()
    name = next((name_or_path.removeprefix(prefix) for prefix in _HUB if name_or_path.startswith(prefix)), name_or_path)
    match = _NAME.fullmatch(name)
    if match is not None and (name != name_or_path or not (path.exists() or path.parent.is_dir())):
        return _fetch(Repository("model", match["id"], match["revision"]))
    if name != name_or_path:
        raise UserError(f"{name_or_path} is not of the form hf://ORG/NAME[@REVISION]")
    if not path.exists():
        raise UserError(f"no such folder: {name_or_path} ({_hint(path)})")
    return existing_folder(path, WHAT)


def _hint(path: Path) -> str:
    beside = [other.name for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.parent / near[0]}?" if near else f"{WHAT}, or name one on the Hugging Face Hub: hf://ORG/NAME"


def _fetch(repository: Repository) -> Path:
    from huggingface_hub import snapshot_download

    def fetch() -> str:
        return snapshot_download(repository.id, revision=repository.revision, allow_patterns=list(TOKENIZER_FILES))

    try:
        folder = Path(patiently(fetch, repository, SHORT_WAITS))
    except (OSError, ValueError) as error:
        raise UserError(f"{repository} cannot be fetched ({one_line(error)})") from None
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{repository} has no tokenizer.json; convert it with transformers: "
            f"AutoTokenizer.from_pretrained({repository.id!r}).save_pretrained('DIR'), and give DIR"
        )
    return folder
