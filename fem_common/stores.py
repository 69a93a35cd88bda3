"""Object stores and file systems by their URLs, by fsspec: opening one, what it says when it fails, trying again."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fem_common import secrets
from fem_common.errors import MISTAKES, ConfigError, StorageError
from fem_common.files import expand_home
from fem_common.text import nearest

Say = Callable[[str], None]
LONGEST_PAUSE = 60.0  # seconds between two attempts
_UNWRITTEN = {"http", "https", "memory", "data"}  # kinds of places that keep nothing
_OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {
        "config_kwargs": {
            "retries": {"mode": "standard", "total_max_attempts": 2},
            "connect_timeout": 20,
            "read_timeout": 60,
            "max_pool_connections": 16,
        }
    },
}


def is_url(place: str) -> bool:
    """Whether a place is named by a URL, not by a path."""
    return "://" in place


def folder_of(place: str) -> Path | None:
    """The folder that a path or a URL of a file system names; None of another kind's."""
    kind, mark, rest = place.partition("://")
    return Path(rest or kind) if not mark or kind == "file" else None


def refusal(place: str, folder: Path | None) -> str | None:
    """What the name of a place tells that nothing can be kept there, or no copy of what is in ``folder``; None: nothing."""
    kind, mark, rest = place.partition("://")
    if secrets.hides_a_password(place):
        return (
            "has a password in it, which would stand in files; give credentials in the environment"
        )
    if (
        re.match(r"[a-z0-9+]+:/(?!/)|(s3a?|gc?s)//", place)
        or not place.strip()
        or (mark and not rest.strip("/"))
    ):
        return f"= {place or repr(place)} names no bucket and folder; as in s3://BUCKET/FOLDER"
    if folder is None:
        return None
    if (local := folder_of(place)) is None:
        return _unknown(place, kind)
    there, here = local.resolve(), folder.resolve()
    if there.is_relative_to(here) or here.is_relative_to(there):
        return f"= {place} and the folder {folder} lie one in the other, and files would be written over: choose another place"
    return None


def _unknown(place: str, kind: str) -> str | None:
    """Why nothing can be sent to such a kind of place; None: fsspec knows how, and the package that it takes is there."""
    from fsspec.registry import available_protocols, known_implementations

    known = set(available_protocols()) - _UNWRITTEN
    if kind in known:
        package = known_implementations.get(kind, {}).get("class", "fsspec").partition(".")[0]
        return (
            None
            if find_spec(package)
            else f"= {place} needs {package}: pip install -c constraints.txt -e .[stores]"
        )
    near = nearest(kind.lower(), known)
    meant = f"; did you mean {near}://{place.partition('://')[2]}?" if near else ""
    return f"= {place}: nothing can be sent to {kind}://{meant or '; as in s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a folder'}"


def open_store(place: str, folder: Path | None = None) -> tuple[Any, str, str]:
    """(fsspec's file system, the place's path in it, the place's URL) of a URL or a folder's path; for copies of what is in ``folder``.

    Raises:
        ConfigError: no such kind of place, its package is not installed, or see `refusal`.
    """
    import fsspec

    place = expand_home(place)
    if wrong := refusal(place, folder):
        raise ConfigError(f"URL {wrong}")
    url = place if is_url(place) else Path(place).absolute().as_uri()
    try:
        store, root = fsspec.url_to_fs(
            url, use_listings_cache=False, **_OPTIONS.get(url.partition(":")[0], {})
        )
    except ImportError as error:
        raise ConfigError(
            f"{place}: {error}: pip install -c constraints.txt -e .[stores]"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None
    store.retries = (
        1  # s3fs's and gcsfs's own, in whose long pauses nothing is told: `until_it_works` does it
    )
    return store, root, url


def said(error: Exception) -> str:
    """What an error says, on one line, without secrets."""
    text = " ".join(str(error).split()).removeprefix(f"[Errno {getattr(error, 'errno', None)}] ")
    return secrets.hide(text or type(error).__name__, secrets.values(os.environ))[:300]


def kind_of(error: Exception) -> type[ConfigError | StorageError]:
    """What to raise for a store's failure: a place that is not there or not open to one is the user's mistake, all else the store's."""
    return ConfigError if isinstance(error, MISTAKES) else StorageError


def until_it_works(
    work: Callable[[], object], over: Callable[[float], bool], note: Callable[[str | None], None]
) -> Exception | None:
    """Do ``work`` again until it works, with longer and longer pauses; the last failure where it was over before, else None.

    over: waits for so many seconds, and says whether it is over. note: hears why an attempt failed, None where it did not.

    Raises:
        ConfigError: the work's own, at once.
    """
    pause = 0.5
    while True:
        try:
            work()
        except ConfigError:
            raise
        except Exception as error:  # what fsspec's file systems raise has no common kind
            note(said(error))
            if over(pause * random.uniform(0.5, 1.0)):
                return error
            pause = min(2 * pause, LONGEST_PAUSE)
        else:
            note(None)
            return None
