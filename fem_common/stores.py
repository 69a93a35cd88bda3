"""Access to object stores and file systems by URL, with fsspec.

The module opens stores, formats their errors, and retries failed operations.
"""

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

Log = Callable[[str], None]
LONGEST_PAUSE = 60.0  # seconds between two attempts
_NOT_PERSISTENT = {"http", "https", "memory", "data"}  # URL schemes that cannot keep files
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
    """Return True if ``place`` is a URL, False if it is a path."""
    return "://" in place


def folder_of(place: str) -> Path | None:
    """Return the local folder that ``place`` names, or None for the URL of a store.

    ``place`` is local if it is a path or a URL with the scheme file.
    """
    kind, mark, rest = place.partition("://")
    return Path(rest or kind) if not mark or kind == "file" else None


def refusal(place: str, folder: Path | None) -> str | None:
    """Return the error text if ``place`` cannot receive copies of ``folder``, or None if it can.

    The text follows the name of a setting: "= PLACE ..." or "contains a password ...".
    The store is not contacted; only the text of ``place`` is examined. If ``folder`` is None, only
    the form of ``place`` is checked.
    """
    kind, mark, rest = place.partition("://")
    if secrets.hides_a_password(place):
        return (
            "contains a password, which would be written to files; set credentials in the "
            "environment"
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
        return (
            f"= {place} and the folder {folder} overlap, and files would be overwritten: choose "
            "another place"
        )
    return None


def _unknown(place: str, kind: str) -> str | None:
    """Return the error text if the URL scheme ``kind`` of ``place`` is not supported, or None.

    The text follows the name of a setting. A scheme is supported if fsspec implements it and the
    required package is installed.
    """
    from fsspec.registry import available_protocols, known_implementations

    known = set(available_protocols()) - _NOT_PERSISTENT
    if kind in known:
        package = known_implementations.get(kind, {}).get("class", "fsspec").partition(".")[0]
        return (
            None
            if find_spec(package)
            else f"= {place} needs {package}: pip install -c constraints.txt -e .[stores]"
        )
    near = nearest(kind.lower(), known)
    meant = f"; did you mean {near}://{place.partition('://')[2]}?" if near else ""
    return (
        f"= {place}: {kind}:// is not "
        f"supported{meant or '; use s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a folder'}"
    )


def open_store(place: str, folder: Path | None = None) -> tuple[Any, str, str]:
    """Open the file system of ``place`` and return (fsspec file system, path in it, URL).

    place: URL, or path of a local folder.
    folder: folder whose content will be copied to ``place``; see `refusal`.

    Raises:
        ConfigError: the URL scheme is unknown, its package is not installed, or `refusal` gives a
            reason.
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
    # Disable the silent retries of s3fs and gcsfs: `until_it_works` retries and reports.
    store.retries = 1
    return store, root, url


def message_of(error: Exception) -> str:
    """Return the message of an error on one line, without secrets."""
    text = " ".join(str(error).split()).removeprefix(f"[Errno {getattr(error, 'errno', None)}] ")
    return secrets.hide(text or type(error).__name__, secrets.values(os.environ))[:300]


def kind_of(error: Exception) -> type[ConfigError | StorageError]:
    """Return the exception type with which a store's failure is reported.

    It is ConfigError for the errors in `MISTAKES` (a wrong path or no permission) and StorageError
    for every other failure.
    """
    return ConfigError if isinstance(error, MISTAKES) else StorageError


def until_it_works(
    work: Callable[[], object], over: Callable[[float], bool], note: Callable[[str | None], None]
) -> Exception | None:
    """Repeat ``work`` with growing pauses until it succeeds.

    over: function that waits for the given number of seconds and returns True if ``work`` must not
    be attempted again. note: function that receives the error text of each failed attempt, and None
    after success.

    Returns:
        None after success; the last exception if ``over`` ended the attempts.

    Raises:
        ConfigError: raised by ``work``; it is not retried.
    """
    pause = 0.5
    while True:
        try:
            work()
        except ConfigError:
            raise
        except Exception as error:  # fsspec's file systems have no common error type
            note(message_of(error))
            if over(pause * random.uniform(0.5, 1.0)):
                return error
            pause = min(2 * pause, LONGEST_PAUSE)
        else:
            note(None)
            return None
