"""The command line on hf:// inputs: the bytes that the files themselves give, through failures, of the commit that was planned."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data_prep.conftest import HF, ROOT, SHARES, SMALL_UNITS, cli
from tests.data_prep.hub_corpus import EDU, EDU_FILES, PAJAMA, PAJAMA_FILES, TEN, edu_parquet
from tests.data_prep.hub_server import TOKEN, Fault, HubServer, environment, running

SHARDS = TEN[:3]


@pytest.fixture(scope="module")
def served(tokenizer: Path) -> Iterator[HubServer]:
    with running() as server:
        server.push("models/org/tok", {path.name: path.read_bytes() for path in tokenizer.iterdir()})
        yield server


@pytest.fixture
def server(served: HubServer) -> HubServer:
    served.faults.clear()
    for name in [name for name in served.repositories if name.startswith("datasets/")]:
        del served.repositories[name]
    small = {path: data for path, data in EDU_FILES.items() if path != TEN[3]}
    served.push("datasets/HuggingFaceFW/fineweb-edu", small)
    served.push("datasets/cerebras/SlimPajama-627B", PAJAMA_FILES)
    served.taken()
    return served


@pytest.fixture(scope="module")
def from_files(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> dict[str, bytes]:
    """What the shards of sample-10BT give as local files."""
    folder = tmp_path_factory.mktemp("local")
    for path in SHARDS:
        (folder / Path(path).name).write_bytes(EDU_FILES[path])
    done = cli("run", folder, "--tokenizer", tokenizer, "--out", folder / "out", *SHARES, *SMALL_UNITS, *HF)
    assert done.returncode == 0, done.stderr
    return pairs(folder / "out")


def pairs(out: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in out.glob("*.*") if path.suffix in (".bin", ".idx")}
    assert len(found) == 6
    return found


def remote(server: HubServer, folder: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return cli(*arguments, cwd=ROOT, **environment(server.endpoint, folder / "home", **more))


def test_a_subset_gives_the_bytes_of_its_files(server: HubServer, tmp_path: Path, from_files: dict[str, bytes]) -> None:
    """With a tokenizer by name, a token, and a network that fails now and then."""
    for name in ("datasets/HuggingFaceFW/fineweb-edu", "models/org/tok"):
        server.repositories[name].gated = True
    server.fail(Fault("Signature", times=2, after=1000))
    server.fail(Fault("expand=sha", status=503))
    out = tmp_path / "out"
    settings = ("--tokenizer", "org/tok", "--out", out, *SHARES, *SMALL_UNITS, *HF, "--workers", "2")
    done = remote(server, tmp_path, "run", EDU, "--subset", "sample-10BT", *settings, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert pairs(out) == from_files
    assert [fault.times for fault in server.faults] == [0, 0]
    commit = server.repositories["datasets/HuggingFaceFW/fineweb-edu"].branches["main"]
    manifest = (out / "manifest.json").read_text()
    assert all(f"{EDU}@{commit}/{path}" in manifest for path in SHARDS)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert TOKEN.encode() not in b"".join([*written, done.stdout.encode(), done.stderr.encode()])


def test_lines_without_ids(server: HubServer, tmp_path: Path, tokenizer: Path) -> None:
    for path in ("train/chunk1", "train/chunk10"):
        (tmp_path / path).mkdir(parents=True)
    chosen = {path: data for path, data in PAJAMA_FILES.items() if path.startswith(("train/chunk1/", "train/chunk10/"))}
    for path, data in chosen.items():
        (tmp_path / path).write_bytes(data)
    settings = ("--tokenizer", tokenizer, "--id-column", "text", *SHARES, *HF)
    local = cli("run", tmp_path / "train", *settings, "--out", tmp_path / "local")
    assert local.returncode == 0, local.stderr
    there = remote(server, tmp_path, "run", f"{PAJAMA}/train/chunk1*/*", *settings, "--out", tmp_path / "there")
    assert there.returncode == 0, there.stderr
    assert pairs(tmp_path / "there") == pairs(tmp_path / "local")


def test_the_planned_commit_is_what_is_read(server: HubServer, tmp_path: Path, tokenizer: Path, from_files: dict[str, bytes]) -> None:
    """Between plan and run main moves, access is lost in between, and the run goes on when it is back."""
    out = tmp_path / "out"
    plan = ("plan", EDU, "--subset", "sample-10BT", "--tokenizer", tokenizer, "--out", out, *SHARES, *SMALL_UNITS)
    planned = remote(server, tmp_path, *plan)
    assert planned.returncode == 0, planned.stderr
    server.push("datasets/HuggingFaceFW/fineweb-edu", {path: edu_parquet(50) for path in SHARDS})
    server.repositories["datasets/HuggingFaceFW/fineweb-edu"].gated = True
    refused = remote(server, tmp_path, "run", "--out", out, *HF)
    assert refused.returncode == 2
    last = refused.stderr.strip().splitlines()[-1]
    assert "dataset HuggingFaceFW/fineweb-edu is gated: accept its terms on" in last
    assert "Traceback" not in refused.stderr
    server.repositories["datasets/HuggingFaceFW/fineweb-edu"].gated = False
    done = remote(server, tmp_path, "run", "--out", out, *HF)
    assert done.returncode == 0, done.stderr
    assert pairs(out) == from_files


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((EDU, "--subset", "sample-10B"), "has no subset 'sample-10B'; did you mean sample-10BT"),
        (("hf://datasets/some/typo",), "no dataset some/typo on http"),
        ((f"{PAJAMA}/train/chunk1", "--id-column", "key"), "--id-column text"),  # SlimPajama has no ids
    ],
)
def test_a_mistake_ends_with_one_line(server: HubServer, tmp_path: Path, tokenizer: Path, inputs: tuple[str, ...], message: str) -> None:
    done = remote(server, tmp_path, "run", *inputs, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_inspect(server: HubServer, tmp_path: Path) -> None:
    done = remote(server, tmp_path, "inspect", EDU, "--subset", "sample-10BT")
    assert done.returncode == 0, done.stderr
    assert "120" in done.stdout
