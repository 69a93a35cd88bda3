"""data_prep: documents with a code point of which libraries may know different things: one unassigned in Python's table of Unicode.

A pre-tokenizer cuts text by the classes of its characters (letter, number, white space). For what Unicode has assigned long since,
libraries agree; of what a new version assigns, a library knows the class only once its own table is as new. Knows no tokenizer.
"""

from __future__ import annotations

import functools
import unicodedata

import numpy as np
import numpy.typing as npt

PLANES_IN_USE = (*range(0x40000), *range(0xE0000, 0xE1000), *range(0xF0000, 0x110000))
HANGUL_VOWELS_AND_ENDS = slice(0x1161, 0x11C3)


@functools.cache
def unsettled_points(composed: bool) -> npt.NDArray[np.bool_]:
    """[0x110000]: whether a code point is unassigned (surrogates are not: no text holds one).

    ``composed``: for a tokenizer that brings text to NFC. Then those count too that NFC may change, join to others or put in another order.
    """
    points = np.ones(0x110000, dtype=bool)
    letters = [chr(point) for point in PLANES_IN_USE]
    points[list(PLANES_IN_USE)] = [unicodedata.category(letter) == "Cn" for letter in letters]
    if composed:
        points[HANGUL_VOWELS_AND_ENDS] = True
        points[list(PLANES_IN_USE)] |= [
            unicodedata.combining(letter) > 0 or not unicodedata.is_normalized("NFC", letter) for letter in letters
        ]
        parts = [unicodedata.decomposition(letter).split() for letter in letters]
        points[[int(part[1], 16) for part in parts if len(part) == 2 and not part[0].startswith("<")]] = True
    return points


def unsettled_documents(
    offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8], points: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Numbers, ascending, of the documents that hold one of ``points``, none of which is ASCII.

    Document i is the valid UTF-8 of ``data[offsets[i]:offsets[i + 1]]``, the first offset 0.
    """
    leads = np.flatnonzero(data >= 0xC0)
    first = data[leads]
    found = []
    for size, lowest, highest in ((2, 0xC0, 0xDF), (3, 0xE0, 0xEF), (4, 0xF0, 0xFF)):
        at = leads[(first >= lowest) & (first <= highest)]
        here = data[at].astype(np.uint32) & (0x7F >> size)
        for place in range(1, size):
            here = here << 6 | (data[at + place] & 0x3F)
        found.append(at[points[here]])
    return np.unique(np.searchsorted(offsets, np.concatenate(found), side="right") - 1)
