"""Check that documents end with the EOD token if the configuration depends on it.

The module imports neither torch nor Megatron.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Iterator

from fem_common.errors import ConfigError
from fem_common.stores import is_url
from pretrain.config import RunConfig
from pretrain.data.facts import HEADER, DataFacts, SourceFacts, sample_ranges

# Every eighth block of a .bin's sample is read, and 8 to 15 of the documents that end in it.
_EVERY, _DOCUMENTS = 8, 8


def check_document_ends(config: RunConfig, facts: DataFacts) -> None:
    """Check the last tokens of about a hundred documents, spread over each source.

    The .idx files define the boundaries of documents. The check reads files only if documents are
    read separately, positions restart at documents, or document ends do not count in the loss.

    Raises:
        ConfigError: a document's last token is not EOD.
    """
    data = config.data
    requested = {
        "data.documents=joined": ("data.documents = separate", data.documents == "separate"),
        "data.reset_positions=false": ("data.reset_positions = true", bool(data.reset_positions)),
        "data.eod_loss=true": ("data.eod_loss = false", not data.eod_loss),
    }
    wanted = {change: setting for change, (setting, is_set) in requested.items() if is_set}
    for source in facts.sources if wanted else ():
        for document, token in _last_tokens(source):
            if token != facts.eod_id:
                raise ConfigError(
                    f"{source.key} = {source.prefix}: document {document} ends in token {token}, "
                    f"but {', '.join(wanted.values())} finds the ends of documents by EOD "
                    f"({facts.eod_id}); make the data with EOD after each document, as python -m "
                    "data_prep run does, name the tokenizer that it was made with in "
                    f"data.tokenizer, or set {' '.join(wanted)}"
                )


def _last_tokens(source: SourceFacts) -> Iterator[tuple[int, int]]:
    """Yield (document, its last token) for sampled documents and the last document of a source.

    The sampled documents end in the blocks of `sample_ranges`. For a .bin in an object store, only
    these blocks are available locally.
    """
    with open(f"{source.local}.idx", "rb") as index, open(f"{source.local}.bin", "rb") as binary:
        count, size = HEADER.unpack(index.read(HEADER.size))[3], os.fstat(binary.fileno()).st_size
        width = size // source.tokens

        def begin(document: int) -> int:
            place: int = struct.unpack(
                "<q", os.pread(index.fileno(), 8, HEADER.size + 4 * count + 8 * document)
            )[0]
            return place

        def token_before(place: int) -> int:
            return int.from_bytes(os.pread(binary.fileno(), width, place - width), "little")

        blocks, later = sample_ranges(size), range(1, count)
        for start, end in blocks[::_EVERY]:
            first, last = (
                bisect_left(later, place, key=begin) for place in (start + width, end + 1)
            )
            for document in later[first:last][:: max(1, (last - first) // _DOCUMENTS)]:
                yield document - 1, token_before(begin(document))
        if blocks[-1][1] == size or not is_url(source.prefix):
            yield count - 1, token_before(size)
