"""hf:// against a server of our own: the files that an address means, at one commit, and errors in one line."""

from __future__ import annotations

import glob
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from data_prep.sources import hub
from tests.data_prep.hub_corpus import CHUNKS, CRAWL, EDU, EDU_FILES, LONG_PATH, PAJAMA, TEN, client_of, fill, fresh, open_code, paths
from tests.data_prep.hub_server import NOBODY, Client, ClientUserError, Fault, HubServer, environment, running


@pytest.fixture(scope="module")
def served() -> Iterator[HubServer]:
    with running(page=3) as server:
        yield server


@pytest.fixture(scope="module")
def shared_client(served: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with client_of(served, tmp_path_factory.mktemp("client")) as client:
        yield client


@pytest.fixture
def server(served: HubServer) -> HubServer:
    return fill(served)


@pytest.fixture
def client(shared_client: Client, server: HubServer) -> Client:
    return fresh(shared_client)


@pytest.mark.parametrize(
    ("address", "subset", "expected"),
    [
        (EDU, "sample-10BT", TEN),
        (EDU, "sample-100BT", ["sample/100BT/000_00000.parquet"]),
        (EDU, "CC-MAIN-2024-10", CRAWL),
        (EDU, None, ["data/CC-MAIN-2013-05/000_00000.parquet", *CRAWL]),
        (EDU, "default", ["data/CC-MAIN-2013-05/000_00000.parquet", *CRAWL]),
        (f"{EDU}/sample/10BT", None, TEN),
        (f"{EDU}@main/sample/10BT/", None, TEN),
        (f"{EDU}/sample/10BT/00[12]_*.parquet", None, TEN[1:3]),
        (f"{EDU}/sample/**/000_*", None, ["sample/100BT/000_00000.parquet", "sample/10BT/000_00000.parquet"]),
        (f"{EDU}/{LONG_PATH}", None, [LONG_PATH]),
        (f"{EDU}/sample/10BT/notes.txt", None, ["sample/10BT/notes.txt"]),  # the reader says what is wrong with it
        (PAJAMA, None, CHUNKS),
        (f"{PAJAMA}/train/chunk10", None, CHUNKS[2:4]),
        (f"{PAJAMA}/*/chunk1/*.jsonl.zst", None, ["test/chunk1/example_holdout_0.jsonl.zst", *CHUNKS[:2],
                                                  "validation/chunk1/example_holdout_0.jsonl.zst"]),
    ],
)  # fmt: skip
def test_an_address_means_these_files(client: Client, address: str, subset: str | None, expected: list[str]) -> None:
    assert paths(client, address, subset) == expected


def test_a_file_has_its_commit_size_and_hash(client: Client, server: HubServer) -> None:
    commit = server.repositories["datasets/HuggingFaceFW/fineweb-edu"].branches["main"]
    found = client(f"result = [[f.url, f.bytes, f.etag] for f in hub.resolve('{EDU}', 'sample-100BT') + hub.resolve('{EDU}/README.md')]")
    data, card = EDU_FILES["sample/100BT/000_00000.parquet"], EDU_FILES["README.md"]
    blob = subprocess.run(["git", "hash-object", "--stdin"], input=card, capture_output=True, check=True).stdout.decode().strip()
    sha256 = subprocess.run(["sha256sum"], input=data, capture_output=True, check=True).stdout.decode().split()[0]
    assert found == [
        [f"{EDU}@{commit}/sample/100BT/000_00000.parquet", len(data), f"sha256:{sha256}"],
        [f"{EDU}@{commit}/README.md", len(card), f"git:{blob}"],
    ]


def test_a_branch_a_tag_a_reference_and_a_commit(client: Client, server: HubServer) -> None:
    old = server.repositories["datasets/HuggingFaceFW/fineweb-edu"].branches["main"]
    for branch in ("v1.0", "feature/x", "refs/convert/parquet", "refs/pr/3"):
        server.push("datasets/HuggingFaceFW/fineweb-edu", {f"{branch}/here.parquet": b"PAR1"}, branch)
    assert paths(client, f"{EDU}@v1.0") == ["v1.0/here.parquet"]
    assert paths(client, f"{EDU}@feature%2Fx/feature") == ["feature/x/here.parquet"]
    assert paths(client, f"{EDU}@refs/convert/parquet/refs/convert") == ["refs/convert/parquet/here.parquet"]
    assert paths(client, f"{EDU}@refs/pr/3") == ["refs/pr/3/here.parquet"]
    assert paths(client, f"{EDU}@{old}", "sample-10BT") == TEN


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"data_files": "a/*.parquet"}, ["a/train.parquet", "a/x.parquet"]),
        ({"data_files": ["a/x.parquet", "b/*"]}, ["a/x.parquet", "b/test.parquet", "b/y.parquet"]),
        ({"data_files": [{"split": "test", "path": "b/test.parquet"}, {"split": "train", "path": ["b/y.parquet"]}]}, ["b/y.parquet"]),
        ({"data_files": {"train": "a/*", "test": "b/*"}}, ["a/train.parquet", "a/x.parquet"]),
        ({"data_files": [{"split": "one", "path": "a/x.*"}, {"split": "two", "path": "b/y.*"}]}, ["a/x.parquet", "b/y.parquet"]),
        ({"data_dir": "b"}, ["b/test.parquet", "b/y.parquet"]),
        ({"data_dir": "b", "data_files": "y*"}, ["b/y.parquet"]),
        ({}, ["a/train.parquet"]),
        ({"data_files": "c/*"}, ["c/lines.json.gz"]),
    ],
)
def test_every_form_of_data_files(client: Client, server: HubServer, config: dict[str, object], expected: list[str]) -> None:
    card = f"---\n{yaml.safe_dump({'configs': [{'config_name': 'only', **config}]})}---\n".encode()
    files = dict.fromkeys(("a/x.parquet", "a/train.parquet", "a/notes.md", "b/y.parquet", "b/test.parquet", "c/lines.json.gz"), b"PAR1")
    server.push("datasets/some/cards", files | {"README.md": card})
    assert paths(client, "hf://datasets/some/cards") == paths(client, "hf://datasets/some/cards", "only") == expected


def test_the_order_is_that_of_local_files(client: Client, server: HubServer) -> None:
    names = ["d/x.parquet", "d-1/x.parquet", "d/e/x.parquet", "d.parquet", "D/x.parquet"]
    server.push("datasets/some/order", dict.fromkeys(names, b"PAR1"))
    assert paths(client, "hf://datasets/some/order") == [path.as_posix() for path in sorted(map(Path, names))] != sorted(names)


def test_globs_are_pythons(tmp_path: Path) -> None:
    """Every pattern finds in a list of paths what glob finds in the folder that has them."""
    names = ["a", "b1", ".h", "10BT", "x[1].parquet", "train"]
    random_ = random.Random(0)
    files = sorted({"/".join(random_.choices(names, k=random_.randint(1, 4))) + ".f" for _ in range(60)})
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    pieces = ["*", "**", "a", "?1*", "[ab]*", "*.f", "[!.]*", ".*", "10BT", "b1.f"]
    found = 0
    for _ in range(400):
        pattern = "/".join(random_.choices(pieces, k=random_.randint(1, 4)))
        expected = {
            name for name in glob.glob(pattern, root_dir=tmp_path, recursive=True) if (tmp_path / name).is_file() and not name.endswith("/")
        }
        matching = {name for name in files if hub._matches(name.split("/"), pattern.split("/"))}
        assert matching == expected, pattern
        found += bool(expected)
    assert found > 100


# --- errors in one line -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"hub.resolve('{EDU}', 'sample-10B')", "dataset HuggingFaceFW/fineweb-edu has no subset 'sample-10B'; did you mean sample-10BT"),
        (f"hub.resolve('{EDU}', 'nothing like it')", "no subset 'nothing like it'; it has default, sample-10BT, .* and 78 more$"),
        (f"hub.resolve('{EDU}/sample/10B')", "dataset HuggingFaceFW/fineweb-edu has no 'sample/10B'; did you mean 'sample/10BT'"),
        (f"hub.resolve('{EDU}/zzz')", "has no 'zzz'; it has the folders: data, empty, sample$"),
        (f"hub.resolve('{EDU}/sample/10BT/*.csv')", "has no file that matches 'sample/10BT/"),
        (f"hub.resolve('{EDU}/empty')", "has no .parquet, .jsonl, .jsonl.gz or .jsonl.zst file in 'empty'$"),
        (f"hub.resolve('{EDU}/sample', 'sample-10BT')", "names a path and --subset sample-10BT another; give one of them"),
        (f"hub.resolve('{EDU}@v9')", "dataset HuggingFaceFW/fineweb-edu has no revision 'v9'; name a branch, a tag or a whole commit hash"),
        (
            f"hub.resolve('{PAJAMA}', 'chunk1')",
            "names no subsets in its card; give a folder instead: hf://datasets/cerebras/SlimPajama-627B/",
        ),
        ("hub.resolve('hf://HuggingFaceFW/fineweb-edu')", "did you mean hf://datasets/HuggingFaceFW/fineweb-edu[?]$"),
        ("hub.resolve('hf://datasets/fineweb-edu')", "is not of the form hf://datasets/OWNER/NAME"),
        (
            "hub.resolve('hf://datasets/HuggingFaceFW/finewebedu')",
            "no dataset HuggingFaceFW/finewebedu on http.*check the spelling, or set HF_TOKEN",
        ),
        ("hub.resolve('hf://datasets/a--b/c')", "a--b/c is no name of a dataset"),
        (f"hub.open_remote('{EDU}@main/gone.parquet')", "has no such file"),
        (f"hub.open_remote('{EDU}@main')", "names no file"),
    ],
)
def test_a_mistake_is_one_line(client: Client, code: str, message: str) -> None:
    with pytest.raises(ClientUserError, match=message) as error:
        client(code)
    assert "\n" not in str(error.value)


def test_what_the_server_does_wrong_is_one_line(client: Client, server: HubServer) -> None:
    server.push("datasets/some/several", {"README.md": b"---\nconfigs:\n- config_name: a\n- config_name: b\n---\n", "a.jsonl": b"{}"})
    server.push("datasets/some/broken", {"README.md": b"---\nconfigs: [\n---\n", "a.jsonl": b"{}"})
    server.push("datasets/some/gated", {"a.parquet": b"PAR1"})
    server.repositories["datasets/some/gated"].gated = True
    for address, message in (
        ("some/several", "dataset some/several has several subsets and no default; choose with --subset: a, b$"),
        ("some/broken", "the front matter of its README.md is not YAML.*give a path instead"),
        ("some/gated/a.parquet", "dataset some/gated is gated: accept its terms on http.* and set HF_TOKEN to a token of that account"),
    ):
        with pytest.raises(ClientUserError, match=message) as error:
            client(f"for file in hub.resolve('hf://datasets/{address}'): hub.open_remote(file.url)")
        assert "\n" not in str(error.value)
    server.fail(Fault("expand=sha", status=200))
    with pytest.raises(ClientUserError, match="http.* does not answer as a Hugging Face Hub does; is HF_ENDPOINT right"):
        client(f"hub.resolve('{EDU}')")
    server.fail(Fault("Signature", status=206))
    with pytest.raises(ClientUserError, match=f": 2 bytes of {LONG_PATH} at 0, where its size says 262144$"):
        client(open_code(LONG_PATH) + "file.read(10)")
    server.ranges = False
    with pytest.raises(
        ClientUserError, match="does not serve parts of files .Range.; first hf download HuggingFaceFW/fineweb-edu --repo-type"
    ):
        client(open_code(LONG_PATH) + "file.read(10)")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "dataset a/b: no answer from http.*:9 .*check the network, set HF_ENDPOINT to a mirror, or first hf download a/b"),
        ({"HF_HUB_OFFLINE": "1"}, "dataset a/b: HF_HUB_OFFLINE is set; unset it, or where there is network: hf download a/b --repo-type"),
    ],
)
def test_without_network(tmp_path: Path, more: dict[str, str], message: str) -> None:
    one = Client(environment(NOBODY, tmp_path / "home", **more), tmp_path / "stderr")
    started = time.monotonic()
    with pytest.raises(ClientUserError, match=message) as error:
        one("hub.resolve('hf://datasets/a/b')")
    one.close()
    assert "\n" not in str(error.value)
    assert (tmp_path / "stderr").read_text() == ""
    assert time.monotonic() - started < 15


def test_local_files_need_no_hub() -> None:
    code = "import sys, data_prep.sources.hub, data_prep.encode.tokenizer; print('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
