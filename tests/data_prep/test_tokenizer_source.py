"""Tokenizers by path and by name: a folder as it is, a repository of a server of our own, and what is said where there is neither."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from data_prep.encode.tokenizer import find_tokenizer, load_folder
from data_prep.errors import UserError
from tests.data_prep.hub_server import NOBODY, TOKEN, Fault, HubServer, environment, running

CODE = """
import sys
from data_prep.sources import hub_client as hub_access, tokenizer_source
from fem_common.errors import CommandError
tokenizer_source.SHORT_WAITS = (0.01, 0.01, 0.01)
try:
    print(tokenizer_source.find_tokenizer(sys.argv[1]))
except CommandError as error:
    print(error, file=sys.stderr)
    sys.exit(error.code)
"""


def tokenizer_json() -> bytes:
    tokenizer = Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str().encode()


FILES = {
    "tokenizer.json": tokenizer_json(),
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "model.safetensors": b"weights" * 1000,
    "onnx/tokenizer.json": b"{}",
    "README.md": b"# a model\n",
}


@pytest.fixture(scope="module")
def served() -> Iterator[HubServer]:
    with running() as server:
        yield server


@pytest.fixture
def server(served: HubServer) -> HubServer:
    served.repositories.clear()
    served.faults.clear()
    served.push("models/org/tok", FILES)
    served.taken()
    return served


def find(server: HubServer | str, name: str, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    endpoint = server if isinstance(server, str) else server.endpoint
    variables = environment(endpoint, tmp_path / "home", **more)
    return subprocess.run([sys.executable, "-c", CODE, name], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)


def found(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return Path(done.stdout.strip())


def refused(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    *before, last = done.stderr.splitlines()
    assert all("Traceback" not in line for line in before)
    return last


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tok").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_tokenizer(str(tmp_path / "org" / "tok")) == tmp_path / "org" / "tok"
    assert find_tokenizer("org/tok") == Path("org/tok")
    assert find_tokenizer("./org/tok/") == Path("org/tok")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/tokenizer-409", r"^no such folder: runs/tokenizer-409 \(did you mean runs/tokenizer-4096\?\)$"),
        ("runs/other", r"^no such folder: runs/other \(a Hugging Face tokenizer; make one with: .* or name one on the Hugging Face Hub: hf://ORG/NAME\)$"),
        ("./nothing", r"^no such folder: ./nothing \("),
        ("nowhere/at/all", r"^no such folder: nowhere/at/all \("),
        ("gpt2", r"^no such folder: gpt2 \(.*hf://ORG/NAME"),
        ("runs/file", r"^runs/file is a file, where a folder is needed"),
        ("hf://gpt2", r"^hf://gpt2 is not of the form hf://ORG/NAME\[@REVISION\]$"),
    ],
)  # fmt: skip
def test_a_path_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    (tmp_path / "runs" / "tokenizer-4096").mkdir(parents=True)
    (tmp_path / "runs" / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        find_tokenizer(name)
    assert "\n" not in str(error.value)


def test_a_name_is_fetched_once_and_only_its_tokenizer(server: HubServer, tmp_path: Path) -> None:
    folder = found(find(server, "org/tok", tmp_path))
    assert folder.is_relative_to(tmp_path / "home")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("tokenizer.json", "tokenizer_config.json")
    }
    assert load_folder(folder).vocab_size == 4
    asked = {request.path.rsplit("/", 1)[1] for request in server.taken() if "/resolve/" in request.path}
    assert asked == {"tokenizer.json", "tokenizer_config.json"}
    assert found(find(server, "org/tok", tmp_path)) == folder
    assert [request for request in server.taken() if "/resolve/" in request.path] == []
    # And where there is no network any more: by a variable, and in truth.
    assert found(find(server, "org/tok", tmp_path, HF_HUB_OFFLINE="1")) == folder
    assert found(find(NOBODY, "org/tok", tmp_path)) == folder


def test_a_revision(server: HubServer, tmp_path: Path) -> None:
    old = server.repositories["models/org/tok"].branches["main"]
    server.push("models/org/tok", FILES | {"tokenizer_config.json": b"{}"})
    assert (found(find(server, f"org/tok@{old}", tmp_path)) / "tokenizer_config.json").read_bytes() == FILES["tokenizer_config.json"]
    assert (found(find(server, "hf://org/tok@main", tmp_path)) / "tokenizer_config.json").read_bytes() == b"{}"
    assert "model org/tok has no revision 'v9'; name a branch, a tag or a whole commit hash" in refused(
        find(server, "org/tok@v9", tmp_path)
    )


def test_a_folder_of_the_organisations_name_hides_the_hub_unless_it_is_asked_for(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    assert "no such folder: org/tok" in refused(find(server, "org/tok", tmp_path))
    assert found(find(server, "hf://org/tok", tmp_path)).is_relative_to(tmp_path / "home")


def test_a_failure_that_passes_is_not_seen(server: HubServer, tmp_path: Path) -> None:
    server.fail(Fault("revision/main", times=2, status=503))
    server.fail(Fault("resolve.*tokenizer.json", after=50))
    folder = Path(find(server, "org/tok", tmp_path).stdout.strip())  # huggingface_hub says on stderr that it tries again
    assert (folder / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]
    assert [fault.times for fault in server.faults] == [0, 0]


def test_what_cannot_be_had_is_one_line(server: HubServer, tmp_path: Path) -> None:
    server.push("models/org/slow", {"tokenizer.model": b"sentencepiece", "tokenizer_config.json": b"{}"})
    server.push("models/org/gated", FILES)
    server.repositories["models/org/gated"].gated = True
    hint = "AutoTokenizer.from_pretrained('org/slow').save_pretrained('DIR'), and give DIR"
    assert refused(find(server, "org/slow", tmp_path)) == f"model org/slow has no tokenizer.json; convert it with transformers: {hint}"
    for token in ({}, {"HF_TOKEN": TOKEN}):
        line = refused(find(server, "org/nothing", tmp_path, **token))
        assert line.startswith(f"no model org/nothing on {server.endpoint} and no such folder here: check the spelling, or set HF_TOKEN")
    assert "model org/gated is gated: accept its terms on" in refused(find(server, "org/gated", tmp_path))
    assert found(find(server, "org/gated", tmp_path, HF_TOKEN=TOKEN)).is_dir()
    assert f"model org/tok: no answer from {NOBODY} " in refused(find(NOBODY, "org/tok", tmp_path), code=1)
    assert "model org/tok: HF_HUB_OFFLINE is set; unset it" in refused(find(server, "org/tok", tmp_path, HF_HUB_OFFLINE="1"))
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
