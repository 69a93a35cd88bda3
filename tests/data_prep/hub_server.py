"""Local server with the part of the Hugging Face Hub that huggingface_hub uses. A second server
stores large files.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

HERE = "127.0.0.1"
TOKEN = "hf_a_token_of_the_tests"
API = re.compile(
    r"/api/(datasets|models)/([^/]+/[^/]+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+))?)?"
)
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """State of the server.

    ``heads``: kind/owner/name -> revision -> commit; ``commits``: commit -> files; ``faults``:
    pattern -> statuses of the next answers, 0 for a broken connection; ``strangers``: storage
    requests that contained a token; ``ranges``: True if byte ranges are supported.
    """

    heads: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    faults: dict[str, list[int]] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    ranges: bool = True
    endpoint: str = ""
    storage: str = ""

    def push(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        commit = hashlib.sha1(f"{name} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = files
        self.heads.setdefault(name, {}).update({revision: commit, commit: commit})
        return commit


@contextmanager
def running() -> Iterator[Hub]:
    """Run both servers within a context."""
    hub = Hub()
    servers = [
        ThreadingHTTPServer((HERE, 0), type("Handler", (_Handler,), {"hub": hub, "stores": stores}))
        for stores in (0, 1)
    ]
    hub.endpoint, hub.storage = (f"http://{HERE}:{server.server_address[1]}" for server in servers)
    for server in servers:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub
    stores: int

    def log_message(self, format: str, *arguments: object) -> None:
        return

    def do_GET(self) -> None:
        form = (
            parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
            if self.command == "POST"
            else {}
        )
        path = urlsplit(self.path).path
        fault = next(
            (
                statuses.pop(0)
                for pattern, statuses in self.hub.faults.items()
                if statuses and re.search(pattern, self.path)
            ),
            None,
        )
        if fault is not None:
            self.close_connection = not fault
            if fault:
                self.reply(fault, b"{}")
        elif self.stores:
            if "Authorization" in self.headers:
                self.hub.strangers.append(path)
            contents = [data for files in self.hub.commits.values() for data in files.values()]
            self.file(next(data for data in contents if sha256(data) == path.strip("/")))
        elif match := RESOLVE.fullmatch(path):
            self.resolve(f"{match[1] or 'models/'}{match[2]}", unquote(match[3]), unquote(match[4]))
        elif match := API.fullmatch(path):
            kind, name, what, revision, below = match.groups()
            self.api(
                f"{kind}/{name}",
                what or "revision",
                unquote(revision or "main"),
                unquote(below or ""),
                form.get("paths", []),
            )
        else:
            self.reply(404, b"{}")

    do_HEAD = do_POST = do_GET

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def file(self, data: bytes, **headers: str) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not match or not self.hub.ranges:
            self.reply(200, data, **headers)
            return
        start, stop = int(match[1]), min(int(match[2] or len(data) - 1) + 1, len(data))
        self.reply(
            206, data[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(data)}", **headers
        )

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return (commit, files), or send the Hub's error and return None."""
        heads = self.hub.heads.get(name)
        if heads is None:
            self.reply(
                401,
                b'{"error":"Invalid username or password."}',
                X_Error_Message="Invalid username or password.",
            )
        elif revision not in heads:
            self.reply(
                404,
                b"{}",
                X_Error_Code="RevisionNotFound",
                X_Error_Message=f"Invalid rev id: {revision}",
            )
        else:
            return heads[revision], self.hub.commits[heads[revision]]
        return None

    def api(self, name: str, what: str, revision: str, below: str, paths: list[str]) -> None:
        if (found := self.files(name, revision)) is None:
            return
        value: Any = {"id": name.split("/", 1)[1], "sha": found[0]}
        if what != "revision":
            entries = entries_of(found[1])
            if paths:
                value = [entry for entry in entries if entry["path"] in paths]
            elif below:
                value = [entry for entry in entries if entry["path"].startswith(f"{below}/")]
            else:
                value = entries
        if what == "tree" and below and not value:
            self.reply(
                404, b"{}", X_Error_Code="EntryNotFound", X_Error_Message=f"{below} does not exist"
            )
        else:
            self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def resolve(self, name: str, revision: str, path: str) -> None:
        if (found := self.files(name, revision)) is None:
            return
        commit, files = found
        if name in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply(
                401,
                b"{}",
                X_Error_Code="GatedRepo",
                X_Error_Message=f"Access to {name} is restricted.",
            )
        elif path not in files:
            self.reply(
                404,
                b"{}",
                X_Error_Code="EntryNotFound",
                X_Error_Message="Entry not found",
                X_Repo_Commit=commit,
            )
        elif path.endswith(".parquet"):
            digest, size = sha256(files[path]), str(len(files[path]))
            linked = {
                "X_Linked_Size": size,
                "X_Linked_ETag": f'"{digest}"',
                "Location": f"{self.hub.storage}/{digest}",
            }
            self.reply(302, b"", X_Repo_Commit=commit, **linked)
        else:
            self.file(files[path], ETag=f'"{git_hash(files[path])}"', X_Repo_Commit=commit)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entries_of(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Return every file and folder in the Hub's format."""
    folders = set[str]()
    for name in files:
        parts = name.split("/")
        folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    found: list[dict[str, Any]] = [
        {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)
    ]
    for path, data in files.items():
        lfs = (
            {"lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 134}}
            if path.endswith(".parquet")
            else {}
        )
        found.append(
            {"type": "file", "path": path, "oid": git_hash(data), "size": len(data), **lfs}
        )
    return found
