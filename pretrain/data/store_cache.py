"""Local copies of the files of sources in object stores.

The copies are in ``CACHE/<hash of the source's folder>/``. A source with a local path is used
directly. The manifest, the tokenizer and the .idx are copied completely. The .bin and .mask are
sparse files: they contain the blocks of the manifest's sample and the blocks that
`pretrain.data.store_client` has cached. The module does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from fem_common.stores import is_url
from pretrain import subprocesses
from pretrain.config import RunConfig
from pretrain.run_directory import run_directory

CLIENT = "pretrain.data.store_client"
_PATIENCE = 60.0  # seconds within which a store must answer at the start


def store_cache(config: RunConfig) -> Path:
    """Return the folder that contains all local copies of files in object stores."""
    return (
        Path(config.data.store_cache)
        if config.data.store_cache
        else run_directory(config) / "tokens"
    )


def local_prefix(prefix: str, cache: Path) -> str:
    """Return the local path prefix by which the files of the source ``prefix`` are opened."""
    if not is_url(prefix):
        return prefix
    folder, _, name = prefix.rpartition("/")
    return str(cache / hashlib.sha256(folder.encode()).hexdigest()[:16] / name)


def identity(prefix: str) -> str:
    """Return the text that identifies a source: its URL or absolute path.

    It does not depend on the folder of local copies.
    """
    return prefix if is_url(prefix) else os.path.abspath(prefix)


def bring(config: RunConfig) -> None:
    """Copy the small files of all sources in object stores, and the sample of each .bin.

    Outdated copies are replaced.

    Raises:
        ConfigError: a location is invalid, lacks a file, or belongs to other data.
        StorageError: a store does not answer.
    """
    named = [
        f"{key}={source.prefix}"
        for _, key, source in config.data.named_sources()
        if is_url(source.prefix)
    ]
    if named:
        command = subprocesses.command(CLIENT, "bring", store_cache(config), _PATIENCE, *named)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
            stderr=subprocess.PIPE,
            text=True,
            env=subprocesses.environ(),
        )
        subprocesses.check(done, CLIENT)
