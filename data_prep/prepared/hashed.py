"""Writer of a file whose size and SHA-256 are computed while it is written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from fem_common.files import named_errors


class HashedWriter:
    """Incremental writer of a file; ``bytes`` is the number of bytes written so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes = path, 0
        self._hash = hashlib.sha256()
        self._stream: BinaryIO = path.open("wb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises OSError with the name of the file."""
        raw = memoryview(data)
        self._hash.update(raw)
        self.bytes += len(raw)
        with named_errors(self.path):
            while raw:
                raw = raw[self._stream.write(raw) :]

    def close(self) -> None:
        """Close the file. Nothing more can be written."""
        self._stream.close()

    def complete(self) -> str:
        """Flush the file to disk, close it, and return its SHA-256 in hexadecimal."""
        with named_errors(self.path):
            os.fsync(self._stream.fileno())
            self.close()
        return self._hash.hexdigest()
