"""launch: ``python -m launch.supervise.tell ATTEMPT NUMBER``: send a signal to the keepers (`launch.rank`) of an attempt on this node.

To them alone: `scancel --signal` reaches every process of a step, and kills those that know nothing of it, such as the process through
which torch writes a checkpoint. Standard library alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Send it. Returns 0, also where there is none to take it."""
    folder, number = sys.argv[1:] if argv is None else argv
    for pid in keepers(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, int(number))
    return 0


def keepers(folder: str) -> list[int]:
    """The processes on this node that keep a rank of the attempt in a folder."""
    wanted = [b"-m", b"launch.rank", os.fsencode(folder)]
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _words(name)[1:4] == wanted]


def _words(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
