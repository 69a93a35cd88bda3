"""Where the files of a source in a store lie here: ``CACHE/<its folder's hash>/``. A path stays what it is. No torch.

The manifest, the tokenizer and the .idx are whole there. The .bin has holes: the blocks that a manifest's sample is of are in it, and those
that `pretrain.data.store_client` has kept.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from fem_common.stores import is_url
from pretrain import beside
from pretrain.config import RunConfig
from pretrain.run_directory import run_directory

CLIENT = "pretrain.data.store_client"
_PATIENCE = 60.0  # seconds that a store has to answer at the start


def store_cache(config: RunConfig) -> Path:
    """The folder of all that is kept of stores."""
    return (
        Path(config.data.store_cache)
        if config.data.store_cache
        else run_directory(config) / "tokens"
    )


def local_prefix(prefix: str, cache: Path) -> str:
    """The prefix by which the files of a source are opened."""
    if not is_url(prefix):
        return prefix
    folder, _, name = prefix.rpartition("/")
    return str(cache / hashlib.sha256(folder.encode()).hexdigest()[:16] / name)


def identity(prefix: str) -> str:
    """What names a source wherever its files are kept: its URL, or its absolute path."""
    return prefix if is_url(prefix) else os.path.abspath(prefix)


def bring(config: RunConfig) -> None:
    """Have the small files of all sources in stores here, and each .bin with its sample, as they are there now.

    Raises:
        ConfigError: a place is none, has no such file, or is another's. StorageError: a store does not answer.
    """
    named = [
        f"data.{split}.{number}.prefix={source.prefix}"
        for split in ("train", "valid", "test")
        for number, source in enumerate(getattr(config.data, split))
        if is_url(source.prefix)
    ]
    if named:
        command = beside.command(CLIENT, "bring", store_cache(config), _PATIENCE, *named)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
            stderr=subprocess.PIPE,
            text=True,
            env=beside.environ(),
        )
        beside.check(done, CLIENT)
