"""``python -m pretrain.report.evaluation_process PARENT COMMAND...``: run a command niced, and end
it with its parent.

The parent is a rank. The process replaces itself by the command, so that the process that was
started is the command and not a wrapper. It imports only the standard library and the exit codes.
"""

from __future__ import annotations

import os
import signal
import sys

from fem_common.exits import Exit
from fem_common.signals import PDEATHSIG, prctl

_NICENESS = 19


def main(words: list[str]) -> int:
    """Replace this process by the command, run at low priority.

    Return 127 if the command cannot be started, 0 if the parent has ended.
    """
    parent, command = int(words[0]), words[1:]
    # A queue sends these signals to all processes of a job; only the ranks handle them.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    prctl(PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 0  # the parent ended before the death signal was set
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(
            f"pretrain.report.evaluation_process: error: {command[0]}: {error.strerror}",
            file=sys.stderr,
        )
    return Exit.NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
