"""A real S3 server behind a proxy that simulates failures of networks and stores."""

from __future__ import annotations

import io
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import boto3
import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from pretrain.data import store_cache, store_client
from tools.checkpoint.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
SECRET = "the-key-of-this-test"


class Proxy(threading.Thread):
    """Forward connections to the server; ``fault`` may modify the client's data, respond in place
    of the server, or close the connection.
    """

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.target = port
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listening.getsockname()[1]
        self.fault: Callable[[socket.socket, bytes], bytes | None] = lambda client, data: data

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, sent: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                changed = self.fault(source, data) if sent else data
                if changed is None:
                    break
                target.sendall(changed)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def s3_server() -> Iterator[int]:
    """Yield the port of an S3 server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3.start()
    try:
        yield s3.get_host_and_port()[1]
    finally:
        s3.stop()


def address(port: int) -> str:
    return f"{'http'}://127.0.0.1:{port}"


class Store:
    """A bucket, the proxy in front of it, and the client's environment variables."""

    def __init__(self, server: int, name: str) -> None:
        self.name = name
        self.url = f"s3://{name}/run"
        self.proxy = Proxy(server)
        self.proxy.start()
        self.client = boto3.client(
            "s3",
            endpoint_url=address(server),
            aws_access_key_id="a",
            aws_secret_access_key="b",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=name)
        self.environ = {
            "AWS_ENDPOINT_URL": address(self.proxy.port),
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def names(self) -> list[str]:
        return [
            entry["Key"]
            for entry in self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        ]

    def upload(self, folder: Path) -> str:
        """Upload a folder and return its URL."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.client.upload_file(str(path), self.name, f"data/{path.relative_to(folder)}")
        return f"s3://{self.name}/data"

    def flip(self, key: str) -> None:
        content = bytearray(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())
        content[len(content) // 2] ^= 1
        self.client.put_object(Bucket=self.name, Key=key, Body=bytes(content))

    def start(self, *arguments: object, **given: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tools.checkpoint", *map(str, arguments)]
        environ = {**os.environ, **self.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=environ, text=True, **{**pipes, **given})

    def run_tool(self, *arguments: object) -> tuple[int, str, str]:
        """Run ``tools.checkpoint`` in this process, which has already imported the client packages;
        return (exit code, stdout, stderr).
        """
        with (
            mock.patch.dict(os.environ, self.environ),
            redirect_stdout(io.StringIO()) as out,
            redirect_stderr(io.StringIO()) as err,
        ):
            forget_clients()
            code = main([*map(str, arguments)])
        assert SECRET not in out.getvalue() + err.getvalue()
        return code, out.getvalue(), err.getvalue()

    def run(self, *arguments: object) -> tuple[int, str]:
        """Run the same command and return (exit code, stdout followed by stderr)."""
        code, out, err = self.run_tool(*arguments)
        return code, out + err


def forget_clients() -> None:
    """Clear cached clients, so that the next one is created from the current environment, as in a
    new process.
    """
    S3FileSystem.clear_instance_cache()


def bring_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Download files that a run reads before training in this process and not in a subprocess,
    whose imports take a second.
    """

    def run(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", store_cache.CLIENT] and given["stderr"] == subprocess.PIPE
        forget_clients()
        with redirect_stderr(io.StringIO()) as output:
            code = store_client.main(command[3:])
        return subprocess.CompletedProcess(command, code, "", output.getvalue())

    monkeypatch.setattr(
        store_cache,
        "subprocess",
        mock.Mock(run=run, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE),
    )


def refused(client: socket.socket, data: bytes) -> None:
    client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
