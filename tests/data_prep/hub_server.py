"""As much of the Hugging Face Hub as huggingface_hub asks of it for datasets and tokenizers, on this machine; it fails when it is told to.

Large files (LFS) are redirected to a second server with a signed address, as the Hub redirects to its storage.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
HERE = "127.0.0.1"
NOBODY = f"http://{HERE}:9"  # an endpoint where nothing answers
LFS_ENDINGS = (".parquet", ".zst", ".gz")
TOKEN = "hf_a_token_of_the_tests"
# kind, id, what is asked (revision, tree, paths-info, resolve), and the rest of the path
API = re.compile(r"/api/(datasets|models)/([^/]+/[^/]+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+))?)?")
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass(frozen=True)
class Seen:
    """A request: ``sent`` bytes of body, ``storage``: to the second server, ``token``: with Authorization, ``encodings``: accepted."""

    method: str
    path: str
    range: str | None
    status: int
    sent: int
    storage: bool
    token: bool
    encodings: str


@dataclass
class Fault:
    """The next ``times`` requests whose path matches fail: with ``status``, or by a connection closed after ``after`` bytes of body."""

    path: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    after: int | None = None
    method: str = "GET"


@dataclass
class Repository:
    """``branches`` point to commits; a commit is its files."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False


class HubServer:
    """``page``: entries in a page of a listing; ``ranges``: whether parts of files are served."""

    def __init__(self, page: int = 1000) -> None:
        self.page, self.ranges = page, True
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.seen: list[Seen] = []
        self.faults: list[Fault] = []
        self.signature = 1  # addresses signed with an older one have expired
        self.lock = threading.Lock()
        self._servers = [_Server(self, storage) for storage in (False, True)]
        self.endpoint, self.storage = (f"http://{HERE}:{server.server_address[1]}" for server in self._servers)

    def start(self) -> None:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def push(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Commit the whole content of ``datasets/OWNER/NAME`` or ``models/ORG/NAME``; the commit."""
        repository = self.repositories.setdefault(name, Repository())
        commit = hashlib.sha1(f"{name} {len(repository.commits)}".encode()).hexdigest()
        repository.commits[commit] = files
        repository.branches[branch] = commit
        self.blobs |= {sha256_of(data): data for path, data in files.items() if path.endswith(LFS_ENDINGS)}
        return commit

    def fail(self, fault: Fault) -> None:
        self.faults.append(fault)

    def taken(self) -> list[Seen]:
        """The requests since the last call."""
        with self.lock:
            seen, self.seen = self.seen, []
        return seen

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: HubServer, storage: bool) -> None:
        super().__init__((HERE, 0), _Storage if storage else _Hub)
        self.hub = hub

    def handle_error(self, request: Any, address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that closes a file while a part of it comes
            super().handle_error(request, address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    storage = False

    def log_message(self, format: str, *arguments: object) -> None:
        return

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self.sent_range = self.headers.get("Range")
        self.form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()) if self.command == "POST" else {}
        self.fault = self.server.hub.fault_for(self.command, self.path)
        if self.fault is not None and self.fault.status is not None:
            self.reply(self.fault.status, b"{}", self.fault.headers)
        elif self.fault is not None and self.fault.after is None:
            self.close_connection = True
        else:
            self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """One answer; what a fault says of its body is done here."""
        sent = b"" if self.command == "HEAD" else body
        if self.fault is not None and self.fault.after is not None:
            sent, self.close_connection = sent[: self.fault.after], True
        request = Seen(
            self.command,
            self.path,
            self.sent_range,
            status,
            len(sent),
            self.storage,
            "Authorization" in self.headers,
            self.headers.get("Accept-Encoding", ""),
        )
        with self.server.hub.lock:
            self.server.hub.seen.append(request)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)

    def reply_file(self, data: bytes, headers: dict[str, str]) -> None:
        """The file, or the part that is asked for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.sent_range or "")
        if match is None or not self.server.hub.ranges:
            self.reply(200, data, headers)
            return
        start, stop = int(match[1]), min(int(match[2] or len(data) - 1) + 1, len(data))
        if start >= len(data):
            self.reply(416, b"", headers | {"Content-Range": f"bytes */{len(data)}"})
            return
        self.reply(206, data[start:stop], headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})


class _Storage(_Handler):
    storage = True

    def answer(self) -> None:
        address = urlsplit(self.path)
        data = self.server.hub.blobs.get(address.path.strip("/"))
        if parse_qs(address.query).get("Signature") != [str(self.server.hub.signature)] or data is None:
            self.reply(403, b"<Error>Request has expired</Error>")
            return
        self.reply_file(data, {"ETag": f'"{address.path.strip("/")}"'})


class _Hub(_Handler):
    def answer(self) -> None:
        address = urlsplit(self.path)
        if match := RESOLVE.fullmatch(address.path):
            self._resolve(f"{match[1] or 'models/'}{match[2]}", unquote(match[3]), unquote(match[4]))
        elif match := API.fullmatch(address.path):
            kind, name, what, revision, path = match.groups()
            self._api(f"{kind}/{name}", what or "revision", unquote(revision or "main"), unquote(path or ""), parse_qs(address.query))
        else:
            self.reply(404, b"{}")

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(commit, files), or None after an error has been sent as the Hub sends it."""
        repository = self.server.hub.repositories.get(name)
        if repository is None and "Authorization" not in self.headers:  # the Hub does not tell strangers what there is
            self.reply(401, b'{"error":"Invalid username or password."}', {"X-Error-Message": "Invalid username or password."})
        elif repository is None:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif (commit := repository.branches.get(revision, revision)) not in repository.commits:
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        else:
            return commit, repository.commits[commit]
        return None

    def _api(self, name: str, what: str, revision: str, path: str, query: dict[str, list[str]]) -> None:
        found = self._files(name, revision)
        if found is None:
            return
        commit, files = found
        if what == "revision":
            self._json({"id": name.split("/", 1)[1], "sha": commit})
        elif what == "paths-info":
            self._json([entry for path in self.form["paths"] for entry in _entries(files, "") if entry["path"] == path])
        elif path and not any(name.startswith(f"{path}/") for name in files):
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Error-Message": f"{path} does not exist"})
        else:
            recursive = query.get("recursive", ["false"])[0].lower() == "true"
            entries = [entry for entry in _entries(files, path) if recursive or "/" not in entry["path"][len(path) :].strip("/")]
            start, page = int(query.get("cursor", ["0"])[0]), self.server.hub.page
            following = f"{self.server.hub.endpoint}{urlsplit(self.path).path}?recursive={recursive}&cursor={start + page}"
            self._json(entries[start : start + page], {"Link": f'<{following}>; rel="next"'} if start + page < len(entries) else {})

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _resolve(self, name: str, revision: str, path: str) -> None:
        found = self._files(name, revision)
        if found is None:
            return
        commit, files = found
        repository = self.server.hub.repositories[name]
        data = files.get(path)
        if repository.gated and "Authorization" not in self.headers:
            self.reply(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {name} is restricted."})
        elif data is None:
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit})
        elif path.endswith(LFS_ENDINGS):
            sha256 = sha256_of(data)
            location = f"{self.server.hub.storage}/{sha256}?Signature={self.server.hub.signature}"
            linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{sha256}"', "X-Repo-Commit": commit, "Location": location}
            self.reply(302, b"", linked)
        else:
            self.reply_file(data, {"ETag": f'"{_git_hash(data)}"', "X-Repo-Commit": commit})


@functools.cache
def sha256_of(data: bytes) -> str:
    """Computed once for each file that the tests hold."""
    return hashlib.sha256(data).hexdigest()


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entries(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    """Every file and folder below a folder, as the Hub describes them."""
    inside = {name: data for name, data in files.items() if not folder or name.startswith(f"{folder}/")}
    folders = {"/".join(name.split("/")[:depth]) for name in inside for depth in range(1, name.count("/") + 1)}
    entries = [
        {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
        for path in folders
        if not folder or path.startswith(f"{folder}/")
    ]
    for path, data in inside.items():
        entry: dict[str, Any] = {"type": "file", "path": path, "oid": _git_hash(data), "size": len(data)}
        if path.endswith(LFS_ENDINGS):
            entry["lfs"] = {"oid": sha256_of(data), "size": len(data), "pointerSize": 134}
        entries.append(entry)
    return sorted(entries, key=lambda entry: str(entry["path"]))


@contextmanager
def running(page: int = 1000) -> Iterator[HubServer]:
    """A server while it is needed."""
    hub = HubServer(page)
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()


def environment(endpoint: str, home: Path, **more: str) -> dict[str, str]:
    """The environment of a client: this server, a cache of its own, no token."""
    ours = {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    return ours | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} | more


CLIENT = """
import contextlib, io, json, sys
from data_prep.sources import hub, hub_bytes
from fem_common.errors import CommandError
hub.SHORT_WAITS = tuple(wait / 200 for wait in hub.SHORT_WAITS)
hub_bytes.LONG_WAITS = tuple(wait / 200 for wait in hub_bytes.LONG_WAITS)
names = {"hub": hub, "hub_bytes": hub_bytes}
for line in sys.stdin:
    names["result"] = None
    try:
        exec(json.loads(line), names)
        answer = {"result": names["result"]}
    except CommandError as error:
        answer = {"user_error": str(error)}
    except Exception as error:
        answer = {"error": repr(error)}
    print(json.dumps(answer), flush=True)
"""


class ClientUserError(Exception):
    """A CommandError in the client."""


class Client:
    """A process whose huggingface_hub has read the environment, which runs code and gives back what the code calls ``result``.

    It waits a two-hundredth of what the program waits after a failure.
    """

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CLIENT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def send(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        if "user_error" in answer:
            raise ClientUserError(answer["user_error"])
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def __call__(self, code: str) -> Any:
        self.send(code)
        return self.result()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)
