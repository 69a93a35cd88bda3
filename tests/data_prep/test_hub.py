"""Tests of hf:// inputs against a small server: files of an address, bytes of the planned commit,
tokens, user mistakes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from data_prep.encode.tokenizer import find_tokenizer
from data_prep.sources import hub
from fem_common.errors import CommandError
from tests.data_prep import conftest as base
from tests.data_prep.hub_server import TOKEN, Hub, running
from tests.wording import Wording

EDU = "hf://datasets/some/edu"


def parquet(seed: int) -> bytes:
    """Return a parquet file of 120 rows in groups of 40."""
    ids, texts = zip(*base.make_documents(120, 30, seed), strict=True)
    file = io.BytesIO()
    pq.write_table(pa.table({"id": ids, "text": texts}), file, row_group_size=40)
    return file.getvalue()


SUBSETS = {
    "default": "data/*/*",
    "ten": "sample/10/*",
    "several": ["sample/10/b*", "data/x/*"],
    "lines": [{"split": "train", "path": "l/a*"}],
}
CONFIGS = [{"config_name": name, "data_files": files} for name, files in SUBSETS.items()]
CARD = f"---\n{yaml.safe_dump({'configs': CONFIGS})}---\n# Card\n"
TEN = ["sample/10/a.parquet", "sample/10/b.parquet"]
DATA = ["data/x/train-0.parquet"]
LINES = ["l/a.jsonl"]
FILES = {path: parquet(seed) for seed, path in enumerate([*TEN, *DATA])}
FILES |= {
    "README.md": CARD.encode(),
    "l/a.jsonl": b'{"text": "x"}\n',
    "sample/.hidden.parquet": b"PAR1",
    "empty/notes.txt": b"no data",
}


@pytest.fixture(scope="module")
def served() -> Iterator[Hub]:
    with running() as server:
        yield server


@pytest.fixture
def server(served: Hub, monkeypatch: pytest.MonkeyPatch, tokenizer: Path, tmp_path: Path) -> Hub:
    """Server with its repositories, configured for huggingface_hub in this process, with short
    waits.
    """
    from huggingface_hub import HfFileSystem, constants

    served.__init__(endpoint=served.endpoint, storage=served.storage)  # type: ignore[misc]
    served.push("datasets/some/edu", FILES)
    served.push(
        "datasets/some/bare",
        dict.fromkeys(("test/x.parquet", "train/x.parquet", "d-1/train.parquet"), b"PAR1"),
    )
    served.push(
        "datasets/some/two",
        {"README.md": b"---\nconfigs:\n- config_name: a\n- config_name: b\n---\n"},
    )
    served.push("datasets/some/broken", {"README.md": b"---\nconfigs: [\n---\n", "a.jsonl": b"{}"})
    served.push("datasets/some/gated", {"a.jsonl": b"{}"})
    served.gated.add("datasets/some/gated")
    served.push(
        "models/org/tok",
        {path.name: path.read_bytes() for path in tokenizer.iterdir()}
        | {"model.safetensors": b"weights"},
    )
    served.push("models/org/none", {"README.md": b""})
    mixed = ".gitattributes a.json.gz b.JSONL c.jsonl.zstd d.csv dataset_infos.json"
    served.push("datasets/some/mixed", dict.fromkeys(mixed.split(), b"{}"))
    monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        served.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    HfFileSystem.clear_instance_cache()
    return served


def paths(address: str, subset: str | None = None) -> list[str]:
    """Return the files of an address, relative to the repository."""
    return [file.url.split("@", 1)[1].split("/", 1)[1] for file in hub.resolve(address, subset)]


@pytest.mark.parametrize(
    ("address", "subset", "expected"),
    [
        (EDU, "ten", TEN),
        (EDU, None, DATA),
        (EDU, "several", [*DATA, TEN[1]]),
        (EDU, "lines", LINES),
        (f"{EDU}/sample/10", None, TEN),
        (f"{EDU}@main/sample/", None, TEN),
        (f"{EDU}/sample/**/[b-z]*.parquet", None, TEN[1:]),
        (f"{EDU}/{TEN[0]}", None, TEN[:1]),
        (
            f"{EDU}/empty/notes.txt",
            None,
            ["empty/notes.txt"],
        ),  # the reader reports its fault
        ("hf://datasets/some/bare", None, ["d-1/train.parquet", "train/x.parquet"]),
        ("hf://datasets/some/mixed", None, ["a.json.gz", "b.JSONL", "c.jsonl.zstd"]),
    ],
)
def test_an_address_means_these_files(
    server: Hub, address: str, subset: str | None, expected: list[str]
) -> None:
    assert paths(address, subset) == expected


def test_what_a_listing_leaves_out_is_named(
    server: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mixed", "bare"):
        paths(f"hf://datasets/some/{name}")
    mixed, bare = capsys.readouterr().err.splitlines()
    assert mixed.endswith(": 3 names left out: d.csv, dataset_infos.json, .gitattributes")
    assert bare.endswith(
        ": 1 name left out, because other paths contain the word train: test/x.parquet"
    )


def test_revisions_and_identities(server: Hub) -> None:
    commit = server.heads["datasets/some/edu"]["main"]
    for revision in ("v1", "feature/x", "refs/pr/3"):
        server.push("datasets/some/edu", {f"{revision}/y.parquet": b"PAR1"}, revision)
        assert paths(
            f"{EDU}@{revision if 'refs' in revision else revision.replace('/', '%2F')}/{revision}"
        ) == [f"{revision}/y.parquet"]
    server.push("datasets/some/edu", {"new.parquet": b"PAR1"})
    (file,) = hub.resolve(f"{EDU}@{commit}/{TEN[0]}")
    assert (
        file.url == f"{EDU}@{commit}/{TEN[0]}"
        and file.bytes == len(FILES[TEN[0]])
        and file.etag.startswith("sha256:")
    )
    with hub.open_remote(file.url) as stream:
        assert stream.seek(-4, io.SEEK_END) == file.bytes - 4 and stream.read() == b"PAR1"
        assert stream.seek(0) == 0 and stream.read() == FILES[TEN[0]]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_network_that_fails_now_and_then_costs_no_byte(server: Hub, ahead: bool) -> None:
    """Connections break and answers are 5xx, first more often than huggingface_hub retries, then
    too often.
    """
    (file,) = hub.resolve(f"{EDU}/{TEN[0]}")
    server.faults = {
        "resolve": [503, 0, 500, 429] * 2,
        "api/datasets": [502],
        f"^/{'[0-9a-f]' * 8}": [0, 503],
    }
    with hub.open_remote(file.url, ahead=ahead) as stream:
        assert stream.read() == FILES[TEN[0]] and not any(server.faults.values())
        server.faults = {"resolve": [503] * 1000}
    with (
        pytest.raises(CommandError, match="answers 503"),
        hub.open_remote(file.url, ahead=ahead) as stream,
    ):
        stream.read()


def test_a_server_without_parts_of_files_is_refused(server: Hub) -> None:
    lines = b'{"text": "x"}\n' * 50_000
    server.push("datasets/some/edu", {"long.jsonl": lines})
    (file,) = hub.resolve(f"{EDU}/long.jsonl")
    server.ranges = False
    with (
        hub.open_remote(file.url) as stream,
        pytest.raises(CommandError, match="first hf download some/edu"),
    ):
        stream.read(10)


MISTAKES = [
    (EDU, "tan"),
    (EDU, "nothing like it"),
    (f"{EDU}/sample/1O", None),
    (f"{EDU}/zzz", None),
    (f"{EDU}/sample/*.csv", None),
    (f"{EDU}/empty", None),
    (f"{EDU}/sample", "ten"),
    (f"{EDU}@v9", None),
    ("hf://datasets/some/bare", "ten"),
    ("hf://some/edu", None),
    ("hf://datasets/edu", None),
    ("hf://datasets/some/typo", None),
    ("hf://datasets/a--b/c", None),
    ("hf://datasets/some/two", None),
    ("hf://datasets/some/broken", None),
]


def test_mistakes_are_one_line(server: Hub, wording: Wording) -> None:
    for address, subset in MISTAKES:
        with pytest.raises(CommandError) as error:
            hub.resolve(address, subset)
        assert "\n" not in str(error.value)
        wording(error.value, ENDPOINT=server.endpoint)
    for url in (f"{EDU}@main/gone.parquet", f"{EDU}@main", "hf://datasets/some/gated@main/a.jsonl"):
        with pytest.raises(CommandError) as error, hub.open_remote(url) as stream:
            stream.read()
        wording(error.value, ENDPOINT=server.endpoint)
    for name in ("hf://org/none", "hf://org/gone", "hf://a", "no/such/folder"):
        with pytest.raises(CommandError) as error:
            find_tokenizer(name)
        wording(error.value, ENDPOINT=server.endpoint)
    server.faults = {"api/datasets": [200]}
    with pytest.raises(CommandError) as error:
        hub.resolve(EDU)
    wording(error.value, ENDPOINT=server.endpoint)


def test_a_tokenizer_by_name_is_its_files_alone(server: Hub, tokenizer: Path) -> None:
    server.faults = {"api/models": [503]}
    folder = find_tokenizer("org/tok")
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert (
        find_tokenizer("hf://org/tok@main") == folder
        and find_tokenizer(str(tokenizer)) == tokenizer
    )


def test_a_run_reads_the_planned_commit_with_a_token_that_no_one_else_sees(
    server: Hub, tmp_path: Path, tokenizer: Path
) -> None:
    """The bytes are those of the files, although main moves and access is lost after the plan.

    The token is in no file and is not sent to the storage server.
    """
    for path in TEN:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(FILES[path])
    base.prepared(tmp_path / "local", [tmp_path / "sample"], tokenizer, base.SMALL_UNITS)
    known = {
        "HF_ENDPOINT": server.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
    }
    out = tmp_path / "out"
    server.gated |= {"datasets/some/edu", "models/org/tok"}
    options = f"--subset ten --tokenizer org/tok --out {out} {base.SHARES} {base.SMALL_UNITS}"
    planned = base.alone("plan", EDU, options, **known)
    assert planned.returncode == 0, planned.stderr
    server.push("datasets/some/edu", {path: parquet(50) for path in TEN})
    refused = base.alone("run", "--out", out, base.HF, **known | {"HF_TOKEN": ""})
    assert (
        refused.returncode == 2
        and "some/edu is gated" in refused.stderr
        and "Traceback" not in refused.stderr
    )
    done = base.alone("run", "--out", out, base.HF, "--workers 2", **known)
    assert done.returncode == 0, done.stderr
    assert (
        base.merged_hashes(out) == base.merged_hashes(tmp_path / "local") and server.strangers == []
    )
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert TOKEN.encode() not in b"".join(
        [*written, done.stdout.encode(), done.stderr.encode(), planned.stderr.encode()]
    )
