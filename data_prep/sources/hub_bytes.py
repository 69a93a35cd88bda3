"""data_prep: the bytes of a file on the Hugging Face Hub, by range requests with read-ahead. Knows no file format and no plan."""

from __future__ import annotations

import functools
import io
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from data_prep.errors import UserError
from data_prep.sources.hub_client import LONG_WAITS, Repository, patiently

MIB = 1 << 20
WINDOWS = (MIB // 4, MIB, 4 * MIB, 8 * MIB)  # bytes asked for at once, growing while the reading goes on forwards
HOLE = MIB  # bytes that may be skipped (columns nobody asked for) in reading that still counts as going on
AHEAD = 2  # the place in WINDOWS from which on the next window comes in the background
KEPT = 4  # windows held, those last used: columns of a row group are read side by side
BUFFER = MIB // 8  # of the buffered reader above, which asks for whole ones and then for the rest


class HubBytes(io.RawIOBase):
    """One file at one commit, read only.

    The Hub is asked once where the bytes are (a signed address elsewhere, for large files) and again when that expires; each window is one
    request, and while the reading goes on forwards the next window comes in the background. At most KEPT + 1 windows are in memory.
    Raises CommandError, never OSError, where the bytes do not come: a reader must not take a broken network for a damaged file.
    """

    def __init__(self, repository: Repository, path: str) -> None:
        super().__init__()
        from huggingface_hub import hf_hub_url

        self._repository, self._path = repository, path
        self._address = hf_hub_url(repository.id, path, repo_type=repository.kind, revision=repository.revision)
        self._closing = threading.Event()
        self._location, self.size = self._patiently(lambda: _location_first_told(self._address))
        self._position, self._level = 0, 0
        self._windows: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._coming: tuple[int, int, Future[bytes]] | None = None

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, past the end too; the place. Raises ValueError before the beginning."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise ValueError(f"seek to {start + offset}, before the file begins")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as the file reaches; the number of bytes."""
        target = memoryview(buffer).cast("B")
        size = max(0, min(len(target), self.size - self._position))
        done = 0
        while done < size:
            start, data = self._window(self._position, size - done)
            piece = memoryview(data)[self._position - start :][: size - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
            self._position += len(piece)
        return done

    def close(self) -> None:
        """End what still waits for the network."""
        self._closing.set()
        super().close()

    def _window(self, position: int, wanted: int) -> tuple[int, bytes]:
        """(start, bytes) of a window that holds ``position``."""
        for window in self._windows:
            if window[0] <= position < window[0] + len(window[1]):
                self._windows.remove(window)
                self._windows.append(window)
                return window
        if self._coming is not None and self._coming[0] <= position < self._coming[1]:
            start, _, future = self._coming
            self._coming = None
            data = future.result()
        else:
            onwards = any(start + len(data) <= position <= start + len(data) + HOLE for start, data in self._windows)
            self._level = min(self._level + 1, len(WINDOWS) - 1) if onwards else 0
            start, data = position, self._fetch(position, position + max(WINDOWS[self._level], min(wanted + BUFFER, WINDOWS[-1])))
        self._windows.append((start, data))
        if self._level >= AHEAD:
            self._ask_ahead(start + len(data))
        return start, data

    def _ask_ahead(self, start: int) -> None:
        """Have the window from ``start`` on come in the background. A daemon thread: it may not keep a process that ends."""
        if start >= self.size or (self._coming is not None and self._coming[0] == start):
            return
        future: Future[bytes] = Future()

        def fetch() -> None:
            try:
                future.set_result(self._fetch(start, start + WINDOWS[-1]))
            except BaseException as error:  # raised where the window is asked for, if ever
                future.set_exception(error)

        self._coming = start, min(start + WINDOWS[-1], self.size), future
        threading.Thread(target=fetch, daemon=True).start()

    def _patiently(self, call: Any) -> Any:
        return patiently(call, self._repository, LONG_WAITS, self._wait)

    def _wait(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise UserError(f"{self._path} has been closed")

    def _fetch(self, start: int, stop: int) -> bytes:
        """Bytes [start, min(stop, size)). Raises UserError."""
        stop = min(stop, self.size)
        return bytes(self._patiently(lambda: self._request(start, stop)))

    def _request(self, start: int, stop: int) -> bytes:
        from huggingface_hub import get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

        for attempt in range(2):
            headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
            elsewhere = urlsplit(self._location).netloc != urlsplit(self._address).netloc
            if not elsewhere:  # the token is for the Hub alone
                headers |= build_hf_headers()
            response = get_session().get(self._location, headers=headers, timeout=_timeout())
            if elsewhere and attempt == 0 and response.status_code in (400, 401, 403, 404, 410):  # the signed address has expired
                self._location, _ = _location(self._address)
                continue
            break
        hf_raise_for_status(response)
        if response.status_code != 206 and (start, stop) != (0, self.size):
            raise UserError(f"{self._repository}: the server does not serve parts of files (Range); first {self._repository.download}")
        if len(response.content) != stop - start:
            raise UserError(
                f"{self._repository}: {len(response.content)} bytes of {self._path} at {start}, where its size says {stop - start}"
            )
        return response.content


def _location(address: str) -> tuple[str, int]:
    """Where the Hub has the bytes, and how many they are."""
    from huggingface_hub import get_hf_file_metadata

    found = get_hf_file_metadata(address)
    if found.size is None:
        raise UserError(f"the server does not tell the size of {address}")
    return found.location, found.size


@functools.lru_cache(maxsize=4096)
def _location_first_told(address: str) -> tuple[str, int]:
    """The Hub counts these questions, and a file at a commit is opened several times: asked once in a process."""
    return _location(address)


def _timeout() -> float:
    from huggingface_hub import constants

    return constants.HF_HUB_DOWNLOAD_TIMEOUT
