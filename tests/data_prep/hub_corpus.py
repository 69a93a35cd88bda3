"""What the server of the tests holds: FineWeb-Edu's card and shards of its schema, SlimPajama's lines, and code that reads them."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.data_prep.hub_server import Client, HubServer, Seen, environment

EDU, PAJAMA = "hf://datasets/HuggingFaceFW/fineweb-edu", "hf://datasets/cerebras/SlimPajama-627B"
ROWS, GROUP = 1200, 150
LONG_PATH = "sample/10BT/013_00000.parquet"


def make_texts(number: int, seed: int) -> list[str]:
    """Short texts, not all of them ASCII, each another."""
    random_ = random.Random(seed)
    return [f"{seed}-{i} " + " ".join(random_.choices(["energy", "free", "naïve", "東京", "🙂", "\n"], k=30)) for i in range(number)]


def edu_card() -> str:
    """FineWeb-Edu's front matter, as it is in the parts that matter here."""

    def config(name: str, path: str) -> dict[str, object]:
        return {"config_name": name, "data_files": [{"split": "train", "path": path}]}

    features = [{"name": "text", "dtype": "string"}, {"name": "id", "dtype": "string"}, {"name": "int_score", "dtype": "int64"}]
    crawls = [f"CC-MAIN-{year}-{week:02d}" for year in range(2013, 2025) for week in (5, 10, 18, 26, 38, 46, 51)]
    configs = [config("default", "data/*/*") | {"features": features}]
    configs += [config(f"sample-{size}", f"sample/{size}/*") for size in ("10BT", "100BT", "350BT")]
    configs += [config(crawl, f"data/{crawl}/*") for crawl in crawls]
    front = {"license": "odc-by", "language": ["en"], "pretty_name": "FineWeb-Edu", "size_categories": ["n>1T"], "configs": configs}
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# FineWeb-Edu\n\n---\n\nIt has a rule in its text.\n"


def edu_parquet(seed: int, rows: int = 40, group: int = 20, size: int = 0) -> bytes:
    """A shard in FineWeb-Edu's schema, of short texts or of ones of ``size`` bytes that compress by a quarter."""
    random_ = random.Random(seed)
    texts = [base64.b64encode(random_.randbytes(size)).decode() for _ in range(rows)] if size else make_texts(rows, seed)
    table = pa.table(
        {
            "text": texts,
            "id": [f"<urn:uuid:{seed}-{i}>" for i in range(rows)],
            "dump": ["CC-MAIN-2024-10"] * rows,
            "url": [f"https://github.com/{base64.b64encode(random_.randbytes(30)).decode()}" for _ in range(rows)],
            "language": ["en"] * rows,
            "language_score": [random_.random() for _ in range(rows)],
            "token_count": list(range(rows)),
            "score": [random_.random() * 5 for _ in range(rows)],
            "int_score": [random_.randrange(2, 6) for _ in range(rows)],
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=group)
    return file.getvalue()


def lines_zst(seed: int) -> bytes:
    """SlimPajama's JSONL: text and meta, no id."""
    rows = [json.dumps({"text": text, "meta": {"redpajama_set_name": "RedPajamaBook"}}) for text in make_texts(50, seed)]
    file = pa.BufferOutputStream()
    with pa.CompressedOutputStream(file, "zstd") as stream:
        stream.write(("\n".join(rows) + "\n").encode())
    return file.getvalue().to_pybytes()


EDU_FILES = {
    "README.md": edu_card().encode(),
    ".gitattributes": b"*.parquet filter=lfs\n",
    "sample/10BT/notes.txt": b"no data",
    "empty/notes.txt": b"no data",
    **{f"sample/10BT/{i:03d}_00000.parquet": edu_parquet(i) for i in range(3)},
    LONG_PATH: edu_parquet(13, ROWS, GROUP, size=8400),
    "sample/100BT/000_00000.parquet": edu_parquet(20),
    "data/CC-MAIN-2024-10/000_00000.parquet": edu_parquet(30),
    "data/CC-MAIN-2024-10/train-00001-of-00002.parquet": edu_parquet(31),
    "data/CC-MAIN-2013-05/000_00000.parquet": edu_parquet(32),
}
PAJAMA_FILES = {
    "README.md": b"# no front matter\n",
    **{f"train/chunk{chunk}/example_train_{i}.jsonl.zst": lines_zst(10 * chunk + i) for chunk in (1, 2, 10) for i in range(2)},
    "validation/chunk1/example_holdout_0.jsonl.zst": lines_zst(98),
    "test/chunk1/example_holdout_0.jsonl.zst": lines_zst(99),
}
TEN = [*(f"sample/10BT/{i:03d}_00000.parquet" for i in range(3)), LONG_PATH]
CRAWL = ["data/CC-MAIN-2024-10/000_00000.parquet", "data/CC-MAIN-2024-10/train-00001-of-00002.parquet"]
CHUNKS = [f"train/chunk{chunk}/example_train_{i}.jsonl.zst" for chunk in (1, 10, 2) for i in range(2)]


def fill(server: HubServer) -> HubServer:
    """The server with its two datasets, no faults, and a log that begins now."""
    server.repositories.clear()
    server.faults.clear()
    server.ranges = True
    server.push("datasets/HuggingFaceFW/fineweb-edu", EDU_FILES)
    server.push("datasets/cerebras/SlimPajama-627B", PAJAMA_FILES)
    server.taken()
    return server


@contextmanager
def client_of(server: HubServer, folder: Path) -> Iterator[Client]:
    """A process that knows the server, with its files in ``folder``."""
    client = Client(environment(server.endpoint, folder / "home"), folder / "stderr")
    yield client
    client.close()


def fresh(client: Client) -> Client:
    """The client with nothing remembered, and read-ahead as the program has it."""
    client("hub_bytes._location_first_told.cache_clear()")
    client("hub_bytes.WINDOWS, hub_bytes.HOLE, hub_bytes.BUFFER = (1 << 18, 1 << 20, 4 << 20, 8 << 20), 1 << 20, 1 << 17")
    return client


def paths(client: Client, address: str, subset: str | None = None) -> list[str]:
    found = client(f"result = [f.url for f in hub.resolve({address!r}, {subset!r})]")
    return [url.split("@", 1)[1].split("/", 1)[1] for url in found]


def open_code(path: str) -> str:
    """Code that opens a file of FineWeb-Edu's main branch as ``file``."""
    return f"file = hub.open_remote(hub.resolve('{EDU}/{path}')[0].url)\n"


def storage(seen: list[Seen]) -> list[Seen]:
    return [request for request in seen if request.storage]
