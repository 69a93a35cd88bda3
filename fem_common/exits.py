"""Exit codes of all commands, for users, scripts and the launcher.

The module uses only the standard library.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit code of a command. README.md lists the commands that return each code.

    A process that is ended by a signal has the code 128 plus the signal number.
    """

    DONE = 0
    # A failed check, or a failure that the input did not cause: full disk, stale handle, no memory,
    # a bug.
    FAULT = 1
    # A wrong path, key, value or command line: the same command will fail again. argparse also
    # exits with this code.
    WRONG_INPUT = 2
    # Training stopped because loss or gradient stayed non-finite: the same command will fail again.
    DIVERGED = 3
    # Another process uses the folder: the same command may succeed later (EX_TEMPFAIL, sysexits.h).
    IN_USE = 75
    NOT_STARTED = 126  # a program that the command starts exists but cannot be started
    NOT_FOUND = 127  # a program that the command starts does not exist
    HUNG_UP = 129  # SIGHUP: the terminal was closed
    INTERRUPTED = 130  # SIGINT
    KILLED = 137  # SIGKILL: never returned by a command itself
    READER_GONE = 141  # SIGPIPE: the reader of the output has closed it
    TERMINATED = 143  # SIGTERM
