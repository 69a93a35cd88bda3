"""Search, download and validation of Hugging Face tokenizer folders.

This module does not encode text; see encoders.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer

from data_prep.prepared.staging import existing_folder
from data_prep.sources.hub_client import SHORT_WAITS, Repository, patiently
from fem_common.errors import UserError
from fem_common.files import expand_home, sha256
from fem_common.text import nearest, one_line

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    CHAT_TEMPLATE,
)


@dataclass(frozen=True)
class TokenizerFolder:
    """Validated Hugging Face tokenizer in a local folder.

    eod_token: text of the end-of-document (EOD) token, which is the folder's eos_token.
    eod_id: id of this token.
    vocab_size: largest id + 1.
    sha256: hash of tokenizer.json.
    template: file that replaces the folder's chat template, or None.
    """

    path: Path
    eod_token: str
    eod_id: int
    vocab_size: int
    sha256: str
    template: Path | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that make up the tokenizer."""
        return tuple(name for name in TOKENIZER_FILES if self.file(name).is_file())

    def file(self, name: str) -> Path:
        """Return the path of a file of the tokenizer."""
        return self.template if self.template and name == CHAT_TEMPLATE else self.path / name


def load_folder(path: Path, template: Path | None = None) -> TokenizerFolder:
    """Read and check a tokenizer folder, with a chat template that replaces its own.

    Raises UserError if the folder is not a readable tokenizer, if it defines no EOD, or if its
    model uses dropout and would therefore give random ids.
    """
    existing_folder(
        path, "a Hugging Face tokenizer; make one with: python -m data_prep train-tokenizer"
    )
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"no tokenizer.json in {path}; make a tokenizer with: python -m data_prep "
            "train-tokenizer"
        )
    try:
        vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises no narrower type than Exception
        raise UserError(
            f"{file} is not a tokenizer that this version of tokenizers "
            f"({tokenizers.__version__}) can read ({one_line(error)})"
        ) from None
    if dropout := json.loads(file.read_bytes())["model"].get("dropout"):
        raise UserError(
            f"{file}: its model has a dropout of {dropout}, so that ids would be random; set "
            "it to null"
        )
    eod = _eod_token(path)
    if eod not in vocabulary:
        raise UserError(
            f"{path}: the EOD token {eod!r} that tokenizer_config.json names as eos_token is "
            "not in tokenizer.json"
        )
    if template and not template.is_file():
        raise UserError(f"no such file: {template} (--chat-template)")
    size = max(vocabulary.values()) + 1
    return TokenizerFolder(path, eod, vocabulary[eod], size, sha256(file), template)


def _eod_token(path: Path) -> str:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = path / name
        if not file.is_file():
            continue
        try:
            token = json.loads(file.read_bytes()).get("eos_token")
        except (ValueError, AttributeError):
            raise UserError(f"{file} is not a JSON object") from None
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    raise UserError(
        f"the tokenizer {path} has no EOD: set eos_token in its tokenizer_config.json (it "
        "separates documents)"
    )


_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[^@]+))?")
_HUB = ("hf://models/", "hf://")
WHAT = "a Hugging Face tokenizer; make one with: python -m data_prep train-tokenizer"


def find_tokenizer(name_or_path: str) -> Path:
    """Return the local folder of a tokenizer, and download the tokenizer if necessary.

    ``name_or_path`` is a local path or a name on the Hugging Face Hub. A local folder is returned
    unchanged. ``ORG/NAME[@REVISION]`` is downloaded into the cache of huggingface_hub; cached files
    are also found without a network. A name without a prefix is a path if it exists or if its first
    part is an existing folder. A name with the prefix ``hf://`` is always on the Hub. Raises
    UserError if the folder or the repository does not exist, if access is denied, or if the
    repository has no tokenizer.json.
    """
    path = Path(expand_home(name_or_path))
    name = next(
        (name_or_path.removeprefix(prefix) for prefix in _HUB if name_or_path.startswith(prefix)),
        name_or_path,
    )
    match = _NAME.fullmatch(name)
    if match is not None and (name != name_or_path or not (path.exists() or path.parent.is_dir())):
        return _fetch(Repository("model", match["id"], match["revision"]))
    if name != name_or_path:
        raise UserError(f"{name_or_path} is not of the form hf://ORG/NAME[@REVISION]")
    if not path.exists():
        raise UserError(f"no such folder: {name_or_path} ({_hint(path)})")
    return existing_folder(path, WHAT)


def _hint(path: Path) -> str:
    siblings = []
    if path.parent.is_dir():
        siblings = [other.name for other in path.parent.iterdir() if other.is_dir()]
    near = nearest(path.name, siblings)
    return (
        f"did you mean {path.parent / near}?"
        if near
        else f"{WHAT}, or name one on the Hugging Face Hub: hf://ORG/NAME"
    )


def _fetch(repository: Repository) -> Path:
    from huggingface_hub import snapshot_download

    def fetch() -> str:
        return snapshot_download(
            repository.id, revision=repository.revision, allow_patterns=list(TOKENIZER_FILES)
        )

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
