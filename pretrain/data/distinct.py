"""Check that the sources of a blend have different contents.

The same tokens under two paths would be read twice. The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fem_common.errors import ConfigError
from pretrain.data.facts import SourceFacts, sample_digest


def check_distinct(sources: Iterable[SourceFacts]) -> None:
    """Raise ConfigError if two sources of a split have the same contents under different paths.

    Sources with equal numbers of tokens and documents and equal dtypes are compared by hashes of
    samples of their .idx and .bin files (`sample_digest`). Files of other sources are not read.

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
