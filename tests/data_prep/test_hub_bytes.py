"""The bytes of hf:// files against a server of our own: the local files', in any order of reading, whatever the network does."""

from __future__ import annotations

import io
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data_prep.hub_corpus import (
    CHUNKS,
    EDU,
    EDU_FILES,
    GROUP,
    LONG_PATH,
    PAJAMA,
    PAJAMA_FILES,
    ROWS,
    TEN,
    client_of,
    edu_parquet,
    fill,
    fresh,
    open_code,
    storage,
)
from tests.data_prep.hub_server import TOKEN, Client, ClientUserError, Fault, HubServer, environment, running


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


def test_rows_are_the_local_files(client: Client) -> None:
    read = "import pyarrow.parquet as pq\nresult = repr(pq.read_table(file).to_pydict())"
    for path in (TEN[0], LONG_PATH):
        assert client(open_code(path) + read) == repr(pq.read_table(io.BytesIO(EDU_FILES[path])).to_pydict())


def test_lines_are_the_local_files(client: Client) -> None:
    read = f"import pyarrow as pa\nfile = hub.open_remote(hub.resolve('{PAJAMA}/{CHUNKS[3]}')[0].url)\n"
    read += "result = pa.CompressedInputStream(pa.PythonFile(file), 'zstd').read().decode().splitlines()"
    lines = pa.CompressedInputStream(pa.BufferReader(PAJAMA_FILES[CHUNKS[3]]), "zstd").read().decode().splitlines()
    assert client(read) == lines
    assert len(lines) == 50


@pytest.mark.parametrize("seed", range(4))
def test_any_reads_in_any_order(client: Client, seed: int) -> None:
    """Windows so small that they all turn over: what is read anywhere is what the file has there."""
    data, random_ = EDU_FILES[LONG_PATH][:60_000], random.Random(seed)
    code = f"hub_bytes.WINDOWS, hub_bytes.HOLE, hub_bytes.BUFFER = (700, 1500, 3000, 5000), 300, 100\n{open_code(LONG_PATH)}"
    code += "result = []\n" + ("file = file.raw\n" if seed % 2 else "")
    position, expected = 0, []
    for _ in range(120):
        position = max(0, position + random_.choice([0, 0, 0, 100, 250, 3000, -400, -8000, random_.randrange(-60_000, 60_000)]))
        length = random_.choice([1, 10, 500, 4000, 12_000])
        if position + length > len(data):
            position = random_.randrange(len(data) - length)
        code += f"file.seek({position}); result.append(file.read({length}).hex())\n"
        expected.append(data[position : position + length].hex())
        position += length
    assert client(code) == expected


def test_the_ends_of_a_file(client: Client) -> None:
    size = len(EDU_FILES[LONG_PATH])
    code = open_code(LONG_PATH) + (
        "result = [file.seek(0, 2), file.read(5).hex(), file.seek(-4, 2), file.read(9).decode(), file.tell(), file.seek(10**12), "
        "len(file.read(3)), file.readable(), file.seekable(), file.writable()]\nfile.close()\nresult.append(file.closed)"
    )
    assert client(code) == [size, "", size - 4, "PAR1", size, 10**12, 0, True, True, False, True]


def test_a_row_group_fetches_only_its_part(client: Client, server: HubServer) -> None:
    file = pq.ParquetFile(io.BytesIO(EDU_FILES[LONG_PATH]))
    assert file.num_row_groups == ROWS // GROUP
    one = file.metadata.row_group(4).column(0).total_compressed_size
    assert len(EDU_FILES[LONG_PATH]) > 8 * one > 8_000_000
    read = "import pyarrow.parquet as pq\nresult = pq.ParquetFile(file).read_row_group(4, columns=['text', 'id']).num_rows"
    assert client(open_code(LONG_PATH) + read) == GROUP
    seen = storage(server.taken())
    assert one < sum(request.sent for request in seen) < one + 3 * (1 << 20)
    assert len(seen) <= 4
    assert {request.encodings for request in seen} == {"identity"}  # a part of a compressed answer would be no part of the file


def test_reading_through_fetches_every_byte_once(client: Client, server: HubServer) -> None:
    size = len(EDU_FILES[LONG_PATH])
    assert client(open_code(LONG_PATH) + "result = 0\nwhile piece := file.read(100_000): result += len(piece)") == size
    seen = server.taken()
    assert sum(request.sent for request in storage(seen)) == size
    assert len(storage(seen)) == 3 + -(-(size - (5 << 20) - (1 << 18)) // (8 << 20))
    assert client(open_code(LONG_PATH) + "result = file.read(4).decode()") == "PAR1"
    assert len([request for request in [*seen, *server.taken()] if request.method == "HEAD"]) == 1  # asked once where the bytes are


def test_two_processes_read_a_row_group_each(server: HubServer, tmp_path: Path) -> None:
    clients = [Client(environment(server.endpoint, tmp_path / f"home{i}"), tmp_path / f"stderr{i}") for i in range(2)]
    read = "import pyarrow.parquet as pq\nresult = pq.ParquetFile(file).read_row_group({}, columns=['text', 'id']).to_pydict()"
    for number, one in enumerate(clients):
        one.send(open_code(TEN[0]) + read.format(number))
    parts = [one.result() for one in clients]
    for one in clients:
        one.close()
    assert {key: parts[0][key] + parts[1][key] for key in ("text", "id")} == (
        pq.read_table(io.BytesIO(EDU_FILES[TEN[0]]), columns=["text", "id"]).to_pydict()
    )


def test_a_commit_stays_when_main_moves(client: Client, server: HubServer) -> None:
    client(open_code(TEN[0]) + f"old = hub.resolve('{EDU}', 'sample-10BT')")
    server.push("datasets/HuggingFaceFW/fineweb-edu", EDU_FILES | {path: edu_parquet(77) for path in TEN})
    assert bytes.fromhex(client("result = hub.open_remote(old[1].url).read().hex()")) == EDU_FILES[TEN[1]]
    new = client(
        f"new = hub.resolve('{EDU}', 'sample-10BT')\nresult = [f.url for f in new] != [f.url for f in old], new[0].etag == old[0].etag"
    )
    assert new == [True, False]
    assert bytes.fromhex(client("result = hub.open_remote(new[1].url).read().hex()")) == edu_parquet(77)


# --- when the network fails -------------------------------------------------------------------------------------------------------

READ = "import hashlib\ndigest = hashlib.sha1()\nwhile piece := file.read(200_000): digest.update(piece)\nresult = digest.hexdigest()"


def sha1(data: bytes) -> str:
    return subprocess.run(["sha1sum"], input=data, capture_output=True, check=True).stdout.decode().split()[0]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("Signature", times=3, status=503),
        Fault("Signature", times=2, after=100_000),  # the connection breaks in the middle
        Fault("Signature", times=3),  # it is closed without an answer
        Fault("Signature", status=429, headers={"Retry-After": "1"}),
        Fault("Signature", status=429, headers={"RateLimit": '"resolvers";r=0;t=0'}),
        Fault("resolve", status=500, method="HEAD"),
        Fault("resolve", times=2, method="HEAD"),
        Fault("expand=sha", times=2, status=502),
        Fault("tree", times=2, status=504),
        Fault("paths-info", times=2, method="POST"),
    ],
    ids=str,
)
def test_a_failure_that_passes_is_not_seen(client: Client, server: HubServer, fault: Fault) -> None:
    server.fail(fault)
    started = time.monotonic()
    assert client(open_code(LONG_PATH) + READ) == sha1(EDU_FILES[LONG_PATH])
    assert fault.times == 0 or fault.path == "tree"
    if "Retry-After" in fault.headers:
        assert time.monotonic() - started >= 1.0


def test_an_address_that_expires_is_asked_for_again(client: Client, server: HubServer) -> None:
    client(open_code(LONG_PATH) + "before = file.read(3_000_000)")
    server.signature += 1
    assert client("import hashlib\nresult = hashlib.sha1(before + file.read()).hexdigest()") == sha1(EDU_FILES[LONG_PATH])
    assert [request.status for request in server.taken() if request.storage].count(403) >= 1
    server.signature += 1  # and where the file is opened anew by what was told of it first
    assert client(open_code(LONG_PATH) + READ) == sha1(EDU_FILES[LONG_PATH])


def test_the_token_is_for_the_hub_alone(server: HubServer, tmp_path: Path) -> None:
    server.repositories["datasets/HuggingFaceFW/fineweb-edu"].gated = True
    one = Client(environment(server.endpoint, tmp_path / "home", HF_TOKEN=TOKEN), tmp_path / "stderr")
    found = one(f"result = [len(hub.open_remote(f.url).read()) for f in hub.resolve('{EDU}', 'sample-100BT')]")
    with pytest.raises(ClientUserError) as refused:
        one("hub.resolve('hf://datasets/some/private')")
    one.close()
    assert found == [len(EDU_FILES["sample/100BT/000_00000.parquet"])]
    seen = server.taken()
    ours = [request for request in seen if not request.storage and request.path != "/api/agent-harnesses"]  # huggingface_hub's own question
    assert len(ours) > 5
    assert all(request.token for request in ours)
    assert {request.token for request in storage(seen)} == {False}
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert TOKEN not in "".join([*written, str(refused.value)])


def test_a_broken_network_is_no_damaged_file(client: Client, server: HubServer) -> None:
    """The reader of parquet gets the UserError itself: as an OSError or pyarrow's it would count rows as unreadable."""
    client(open_code(LONG_PATH) + "import pyarrow.parquet as pq\nparquet = pq.ParquetFile(file)")
    server.fail(Fault("Signature", times=10**6, status=503))
    started = time.monotonic()
    with pytest.raises(ClientUserError, match="dataset HuggingFaceFW/fineweb-edu.*answers 503; try again later, or first hf download"):
        client("for batch in parquet.iter_batches(columns=['text', 'id']): pass")
    assert 0.5 < time.monotonic() - started < 60  # it has waited
    server.faults.clear()
    assert client("result = sum(batch.num_rows for batch in parquet.iter_batches(columns=['text', 'id']))") == ROWS


def test_a_closed_file_waits_no_more(client: Client, server: HubServer) -> None:
    """Reading ahead does not go on for minutes after the file is closed."""
    client("hub_bytes.WINDOWS = (1000, 2000, 3000, 5000)\n" + open_code(LONG_PATH) + "raw = file.raw")
    assert client("import threading, time\nresult = [len(raw.read(20_000)), raw._coming is not None]") == [20_000, True]
    server.fail(Fault("Signature", times=10**6, status=503))
    code = "before = threading.active_count()\nraw._coming = None\nraw._ask_ahead(40_000)\n"
    code += "future = raw._coming[2]\ntime.sleep(0.1)\nwaiting = not future.done()\nfile.close()\nstarted = time.monotonic()\n"
    code += "result = [waiting, str(future.exception(20)), time.monotonic() - started < 5]"
    assert client("saved = hub_bytes.LONG_WAITS\nhub_bytes.LONG_WAITS = (30.0,) * 9\n" + code) == [
        True,
        f"{LONG_PATH} has been closed",
        True,
    ]
    client("hub_bytes.LONG_WAITS = saved")
    line = client.log.read_text().splitlines()[-1]  # whoever waits is told
    assert "data_prep: dataset HuggingFaceFW/fineweb-edu: http" in line
    assert " answers 503; " in line
    assert " (trying again in " in line
