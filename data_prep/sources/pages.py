"""Page sizes of a parquet column, read from the page headers.

They are used to bound the memory of a read. Arrow reads a fixed number of rows at a time, decodes
complete pages and does not report their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow.parquet as pq

HEADER_BYTES = 1 << 12  # size of the first read; statistics may make a header longer
DICTIONARY_PAGE = 2
STOP, TRUE, FALSE, BYTE, DOUBLE, BINARY, STRUCT = 0, 1, 2, 3, 7, 8, 12


class BadHeader(ValueError):
    """Error raised for bytes that are not a valid page header."""


@dataclass(frozen=True)
class Pages:
    """Data pages of one column chunk.

    rows: number of rows of each page.
    bytes: uncompressed size of each page.
    dictionary: size of the chunk's dictionary page, 0 if it has none.
    """

    rows: list[int]
    bytes: list[int]
    dictionary: int

    @property
    def largest(self) -> int:
        """Uncompressed bytes of the largest page."""
        return max([self.dictionary, *self.bytes])

    def held(self, rows: int) -> int:
        """Return an upper bound of the memory in bytes that ``rows`` consecutive rows use.

        This is the size of the pages that contain the rows or, if larger, the size of the
        dictionary times ``rows``.
        """
        if not self.rows:
            return 0
        ends, total = np.cumsum(self.rows), np.cumsum(self.bytes)
        first = np.arange(len(ends))
        # The worst window starts at the last row of a page.
        last = np.minimum(
            np.searchsorted(ends, ends[first] + rows - 2, side="right"), len(ends) - 1
        )
        return max(
            int((total[last] - total[first] + np.array(self.bytes)).max()), rows * self.dictionary
        )


def pages_of(file: BinaryIO, chunk: pq.ColumnChunkMetaData) -> Pages:
    """Return the pages of a column chunk. Raises BadHeader for a damaged header."""
    position = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        position = min(position, chunk.dictionary_page_offset)
    end = position + chunk.total_compressed_size
    rows: list[int] = []
    sizes: list[int] = []
    dictionary = 0
    while position < end:
        header, length = _header(file, position)
        data = header.get(5, header.get(8))
        size = header.get(2)
        packed = header.get(3)
        values = data.get(1) if isinstance(data, dict) else 0
        if not (
            isinstance(size, int)
            and isinstance(packed, int)
            and isinstance(values, int)
            and min(size, packed, values) >= 0
        ):
            raise BadHeader
        if header.get(1) == DICTIONARY_PAGE:
            dictionary = size
        else:
            rows.append(values)
            sizes.append(size)
        position += length + packed
    return Pages(rows, sizes, dictionary)


def _header(file: BinaryIO, position: int) -> tuple[dict[int, Any], int]:
    size = HEADER_BYTES
    while True:
        file.seek(position)
        data = file.read(size)
        try:
            parsed = _Compact(data)
            return parsed.struct(), parsed.position
        except IndexError:
            if len(data) < size:
                raise BadHeader from None
        size *= 16


class _Compact:
    """Parser of Thrift's compact protocol. Structs become dictionaries from field number to value.

    Raises IndexError at the end of the bytes and BadHeader for other faults.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Read one struct and return {field number: value}. ``depth`` is the level of nesting."""
        if depth > 8:
            raise BadHeader
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) & 15 != STOP:
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise BadHeader

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, size: int) -> None:
        self.position += size
        if self.position > len(self.data):
            raise IndexError

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if BYTE < kind < DOUBLE:
            return self._signed()
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind not in (BYTE, DOUBLE, BINARY):
            raise BadHeader  # page headers contain no lists, sets or maps
        if kind == BINARY:
            self._skip(self._unsigned())
        elif kind == BYTE:
            self._skip(1)
        else:
            self._skip(8)
        return None
