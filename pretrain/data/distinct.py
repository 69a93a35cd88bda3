"""Check that a blend's sources differ: the same tokens under two names would be read twice.

Compares contents. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fem_common.errors import ConfigError
from pretrain.data.facts import SourceFacts, sample_digest


def check_distinct(sources: Iterable[SourceFacts]) -> None:
    """Refuse two sources of a split with the same contents, whatever their paths.

    Files are read only if the headers agree: samples of the .idx and of the .bin (`sample_digest`).

    Raises:
        ConfigError: two sources contain the same tokens.
        OSError: a file system failed.
    """
    alike = dict[tuple[object, ...], list[SourceFacts]]()
    for source in sources:
        alike.setdefault((source.split, source.tokens, source.documents, source.dtype), []).append(
            source
        )
    for group in alike.values():
        seen = dict[tuple[str, ...], SourceFacts]()
        for source in group if len(group) > 1 else ():
            first = seen.setdefault(
                tuple(sample_digest(Path(source.local + ending)) for ending in (".idx", ".bin")),
                source,
            )
            if first is not source:
                raise ConfigError(
                    f"{source.key} = {source.prefix} contains the same tokens as {first.key} = "
                    f"{first.prefix}, which would be read twice; name only one of them, in a blend "
                    "with the sum of the weights"
                )
