"""Exit codes of every command, for users, scripts and the launcher. Standard library only."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit code of a command. README.md lists the commands that return each code.

    A process that is ended by a signal has the code 128 plus the signal number.
    """

    DONE = 0
    FAULT = 1  # nothing is wrong with the input: a full disk, a stale handle, no memory, a bug; or a check found what it looks for
    WRONG_INPUT = 2  # a wrong path, key, value or command line: the same command ends the same way; argparse's code, too
    DIVERGED = 3  # loss or gradient stayed non-finite: the same command ends the same way
    IN_USE = 75  # another process has the folder: the same command may do later (sysexits.h: EX_TEMPFAIL)
    NOT_STARTED = 126  # of what starts another program: there is one, and it cannot be started
    NOT_FOUND = 127  # ... there is none
    HUNG_UP = 129  # SIGHUP: the terminal was closed
    INTERRUPTED = 130  # SIGINT
    KILLED = 137  # SIGKILL: never a command's own
    READER_GONE = 141  # SIGPIPE: who read the output has seen enough
    TERMINATED = 143  # SIGTERM
