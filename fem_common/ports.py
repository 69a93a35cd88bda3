"""Search for a free TCP port, for a server that starts shortly afterwards.

The module uses only the standard library.
"""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

# Below the ephemeral ports of Linux, so that no connection takes one of these in the meantime.
PORTS = range(12000, 32000)
_turns = itertools.count()


def server_port(seed: int | None = None) -> int:
    """Return a free TCP port of this machine.

    The search starts at a port that depends on ``seed``. Without a seed, the first port depends on
    the process id and on the number of earlier calls. Raises OSError if no port is free.
    """
    # The factor separates the ports of processes with consecutive numbers.
    start = 7 * seed if seed is not None else 4099 * os.getpid() + next(_turns)
    for offset in range(0, len(PORTS), 101):
        port = PORTS[(start + offset) % len(PORTS)]
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                listener.bind(("", port))
                return port
    raise OSError(f"no free port from {PORTS.start} to {PORTS.stop} on this machine")
