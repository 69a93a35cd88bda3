"""Read ranges of .bin and .mask files in object stores, for one rank, ahead of their use.

The ranges are requested from a separate process, `pretrain.data.store_client`. The module does not
import torch.
"""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fem_common.errors import StorageError
from fem_common.stores import is_url
from pretrain import subprocesses
from pretrain.config import RunConfig
from pretrain.data.store_cache import CLIENT, local_prefix, store_cache
from pretrain.data.store_client import ANSWER, REQUEST

Range = tuple[int, int, int]  # number of the file (`store_client.serve`), offset, length
_PATIENCE = 600.0  # seconds for which a range is retried


class StoreReader:
    """Reader that requests ranges from a client process, which starts with the first request.

    Only one thread may use it.
    """

    def __init__(self, config: RunConfig) -> None:
        sources = (*config.data.train, *config.data.valid)
        self.urls = list(
            dict.fromkeys(source.prefix for source in sources if is_url(source.prefix))
        )
        self.cache, self.capacity = store_cache(config), int(config.data.store_cache_gb * 1e9)
        self.process: subprocess.Popen[bytes] | None = None
        self.requested = dict[Range, bytes | None]()  # None: requested, not received yet
        self.line = deque[Range]()  # order of the answers
        self.planned: list[Range] | None = None

    def local(self, url: str) -> str:
        """Return the local path prefix by which the files of ``url`` are opened."""
        return local_prefix(url, self.cache)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Record ranges during the block instead of reading them, and request them at its end.

        In the block, `read` returns zeros.
        """
        planned = self.planned = list[Range]()
        try:
            yield
        finally:
            self.planned = None
        self._ask(planned)

    def read(self, wanted: Range) -> bytes:
        """Return the bytes of a range. Raises StorageError if the store does not answer.

        Reading is fastest in the order in which the ranges were planned.
        """
        if self.planned is not None:
            self.planned.append(wanted)
            return bytes(wanted[2])
        self._ask([wanted])
        while (content := self.requested[wanted]) is None:
            right, length = ANSWER.unpack(self._receive(ANSWER.size))
            answer = self._receive(length)
            if not right:
                raise StorageError(answer.decode())
            self.requested[self.line.popleft()] = answer
        del self.requested[wanted]
        return content

    def close(self) -> None:
        """Kill the client process."""
        if self.process is not None:
            with self.process as process:
                process.kill()

    def _ask(self, ranges: Iterable[Range]) -> None:
        new = [wanted for wanted in dict.fromkeys(ranges) if wanted not in self.requested]
        if not new:
            return
        if self.process is None:
            command = subprocesses.command(
                CLIENT, "serve", self.cache, _PATIENCE, self.capacity, *self.urls
            )
            # A separate process session: Ctrl-C at the training's terminal does not reach it.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=subprocesses.environ(),
                start_new_session=True,
            )
        self.requested.update(dict.fromkeys(new))
        self.line.extend(new)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"".join(REQUEST.pack(*wanted) for wanted in new))
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _receive(self, length: int) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        content = self.process.stdout.read(length)
        if len(content) < length:
            raise self._gone()
        return content

    def _gone(self) -> StorageError:
        return StorageError(
            f"the process that reads {self.urls[0]} has ended; the same command continues"
        )


class StoredFile:
    """A .bin or .mask file in a store, with the interface of megatron-core's IndexedDataset."""

    def __init__(self, reader: StoreReader, url: str, mask: bool = False) -> None:
        self.reader, self.number = reader, 2 * reader.urls.index(url) + mask

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray[Any, Any]:
        """Return ``count`` items of type ``dtype`` from byte ``offset`` on, [count].

        Raises StorageError (see `StoreReader.read`).
        """
        length = int(count) * np.dtype(dtype).itemsize
        return np.frombuffer(
            self.reader.read((self.number, int(offset), length)) if length else b"", dtype
        )
