"""Requests to the Hugging Face Hub with retries and one-line error messages.

huggingface_hub is the only client. It is imported inside functions, so reading local files does not
wait for the import. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have their usual effects. The
token is sent only by huggingface_hub; this module does not read, print or write it.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fem_common.errors import Fault, UserError
from fem_common.text import one_line

SHORT_WAITS = (0.5, 1.0, 2.0)  # seconds between attempts while a user waits
# Seconds between attempts within long work, after half a minute of huggingface_hub's own retries.
LONG_WAITS = (15.0, 30.0, 60.0, 60.0)
SAID_FROM = 10.0  # seconds; a wait of at least this length prints a line
LONGEST_ASKED = 600.0  # seconds; no retry if the server requests a longer pause

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Repository:
    """Dataset or model on the Hub.

    kind: ``dataset`` or ``model``.
    revision: branch, tag or commit; None for the main branch.
    """

    kind: str
    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.id}" + (f"@{self.revision}" if self.revision else "")

    @property
    def download(self) -> str:
        """Shell command that downloads the repository into a folder."""
        return (
            f"hf download {self.id}{' --repo-type dataset' if self.kind == 'dataset' else ''} "
            "--local-dir DIR"
        )


def patiently(
    call: Callable[[], Answer], repository: Repository, waits: tuple[float, ...]
) -> Answer:
    """Return the result of ``call``; retry after a broken connection or a status 408, 429 or 5xx.

    waits: pauses before the retries in seconds; their number is the number of retries. A pause is
    longer if the server requests it.

    Raises Fault if the last attempt fails, and UserError for a failure that retries cannot fix.
    """
    failures = hub_failures()
    for wait in (*waits, None):
        try:
            return call()
        except failures as error:
            requested = _requested_seconds(error)
            if wait is None or not _passes(error) or requested > LONGEST_ASKED:
                raise explain(error, repository) from None
            # Random, so that workers do not retry simultaneously.
            seconds = max(requested, wait * random.uniform(0.7, 1.3))
            if seconds >= SAID_FROM:
                print(
                    f"data_prep: {explain(error, repository)} (trying again in {seconds:.0f} s)",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(seconds)
    raise AssertionError("the last round returns or raises")


def hub_failures() -> tuple[type[Exception], ...]:
    """Return the exception types that requests to the Hub raise on failure.

    They are those of huggingface_hub and its HTTP library.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # the last failure is reported in one line
    # httpx.HTTPError or httpx2.HTTPError, depending on the version of huggingface_hub.
    http_error = HfHubHTTPError.__mro__[1]
    assert issubclass(http_error, Exception)
    return (http_error, OfflineModeIsEnabled, FileNotFoundError)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _passes(error: Exception) -> bool:
    """Return True if the failure is temporary, so that the same request may succeed later."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return _status(error) in (408, 429, 500, 502, 503, 504)
    if isinstance(error, FileNotFoundError):
        return isinstance(error.__cause__, Exception) and _passes(error.__cause__)
    return not isinstance(error, OfflineModeIsEnabled)


def _requested_seconds(error: Exception) -> float:
    """Return the pause in seconds that a 429 or 503 response requests, or 0 without a request."""
    response = getattr(error, "response", None)
    if response is None:
        return 0.0
    after = response.headers.get("retry-after", "").strip()
    if after.isdigit():
        return float(after)
    limit = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)", response.headers.get("ratelimit", ""))
    return float(limit[1]) + 1.0 if limit is not None and _status(error) == 429 else 0.0


def explain(error: Exception, repository: Repository) -> UserError | Fault:
    """Return the error to raise for a failed request, with a message of one line.

    The message names the repository, the failure and the nearest fix.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"{repository.kind} {repository.id}"
    server = constants.ENDPOINT
    status = _status(error)
    first = f"first {repository.download}"
    nor = " and no local folder with this name" if repository.kind == "model" else ""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, hub_failures()):
        return explain(error.__cause__, repository)
    if isinstance(error, OfflineModeIsEnabled):
        return UserError(
            f"{name}: HF_HUB_OFFLINE is set; unset it, or on a machine with a network run "
            f"{repository.download}, and give the folder"
        )
    if isinstance(error, GatedRepoError):
        return UserError(
            f"{name} is gated: accept its terms on {server} and set HF_TOKEN to a token of "
            "that account"
        )
    if isinstance(error, RevisionNotFoundError):
        return UserError(
            f"{name} has no revision {repository.revision!r}; name a branch, a tag or a full "
            "commit hash"
        )
    if isinstance(error, EntryNotFoundError | FileNotFoundError):
        return UserError(f"{repository} has no such file on {server} ({one_line(error)})")
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return UserError(
            f"no {name} on {server}{nor}: check the spelling, or set HF_TOKEN if it is "
            "private (a wrong token gives the same error)"
        )
    if status == 403:
        return UserError(
            f"{name}: {server} refuses access (403); set HF_TOKEN to a token that may read it"
        )
    if status == 429:
        return Fault(
            f"{name}: {server} limits the rate of requests (429); set HF_TOKEN, use fewer "
            f"workers, or {first}"
        )
    if status is not None:
        return Fault(f"{name}: {server} answers {status}; try again later, or {first}")
    return Fault(
        f"{name}: no answer from {server} ({one_line(error)}); check the network, set "
        f"HF_ENDPOINT to a mirror, or {first}"
    )
