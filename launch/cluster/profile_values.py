"""Check single values of a cluster profile. Uses only the standard library.

Each check returns an error text, or None for a valid value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from fem_common import secrets

TIME = r"\d+(:\d\d){0,2}|\d+-\d{1,2}(:\d\d){0,2}|infinite|unlimited"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Variables that the launcher, torchrun or bash itself sets -> the remedy.
_TAKEN = {
    "PATH": "write `export PATH=/folder:$PATH` in setup.lines",
    "PYTHONPATH": (
        "the launcher sets it to the code snapshot; install what is needed into the interpreter"
    ),
    "PYTHONSAFEPATH": "the launcher sets it",
    **dict.fromkeys(
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split(),
        "torchrun sets it",
    ),
    **dict.fromkeys(
        "_ BASHOPTS BASHPID BASH_ARGV0 BASH_COMMAND BASH_ENV COMP_WORDBREAKS DIRSTACK ENV "
        "EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME GROUPS "
        "HISTCMD IFS LINENO OLDPWD OPTARG OPTERR OPTIND POSIXLY_CORRECT PPID PWD RANDOM SECONDS "
        "SHELLOPTS SHLVL SRANDOM UID".split(),
        "bash itself uses it",
    ),
}
# Options of sbatch that the launcher sets -> the setting that determines them.
_DECIDED = {
    **{
        name: f"slurm.{name}"
        for name in "partition account qos time constraint exclude reservation".split()
    },
    **dict.fromkeys(
        (
            "ntasks ntasks-per-node export export-file requeue no-requeue open-mode chdir wrap "
            "parsable wait test-only"
        ).split()
    ),
    "array": "--tasks of submit",
    "cpus-per-task": "nodes.cpus",
    "dependency": "--dependency of submit",
    "error": "logs",
    "exclusive": "nodes.exclusive",
    "gpus-per-node": "nodes.gpus",
    "gres": "nodes.gres",
    "job-name": "--name of submit",
    "mem": "nodes.memory",
    "nodes": "--nodes of submit",
    "output": "logs",
    "signal": "slurm.signal_seconds",
}


def seconds(limit: str) -> float:
    """Convert a Slurm time limit to seconds. The result is infinite for UNLIMITED.

    Accepted forms are 30, 30:00, 12:00:00, 2-12, 2-12:00 and 2-12:00:00.
    """
    if not limit[:1].isdigit():
        return float("inf")
    days, dash, rest = limit.rpartition("-")
    numbers = [int(word) for word in rest.split(":")]
    if dash:
        hours, minutes, left = (*numbers, 0, 0)[:3]
        return int(days) * 86400.0 + hours * 3600 + minutes * 60 + left
    if len(numbers) == 3:
        return numbers[0] * 3600.0 + numbers[1] * 60 + numbers[2]
    return numbers[0] * 60.0 + (numbers[1] if len(numbers) == 2 else 0)


def matches(pattern: str, what: str) -> Callable[[str], str | None]:
    """Return a check for texts that must match a pattern (ASCII) completely.

    what: description of the expected text, for the error text.
    """
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: None if compiled.fullmatch(text) else f"expected {what}"


word = matches(
    r"[A-Za-z0-9_][A-Za-z0-9_.,:+@/=-]*", "a name of letters, digits and _ . , : + @ / = -"
)
hosts = matches(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*", "a node's name, or node[01-04,07]")


def argument(text: str) -> str | None:
    """Check a text that is passed to a program."""
    if not text:
        return "it is empty"
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return "NUL and unpaired surrogates cannot be passed to a program"
    return None


def variable(text: str) -> str | None:
    """Check the value of an environment variable: like `argument`, but it may be empty."""
    return argument(text or "-")


def hook(text: str) -> str | None:
    """Check a program or a line of sh.

    Web addresses are refused: a chat's address lets anyone who has it write to the chat, and a
    profile is copied into every run.
    """
    if re.search(r"https?://", text, re.IGNORECASE):
        return (
            "an address may contain a token: put the call into a script that reads the token from "
            "the environment or a file"
        )
    return argument(text)


def bash(text: str) -> str | None:
    """Check a line of bash for the batch script."""
    return "sbatch refuses scripts with carriage returns" if "\r" in text else argument(text)


def path(text: str) -> str | None:
    """Check a path, which `fill` can make absolute."""
    if text.startswith("-"):
        return "a path cannot begin with a dash; write ./-..."
    if CONTROL.search(text):
        return "a path cannot have line breaks or control characters"
    return _variables_fault(text) or argument(text)


def program(text: str) -> str | None:
    """Check a program: a path, or a bare name that is found through PATH at the time of the run."""
    return path(text)


def image(text: str) -> str | None:
    """Check a container's image.

    It is a path that begins with / or ./, or an address (``nvcr.io/nvidia/pytorch:25.06-py3``).
    """
    return path(text)


def mount(text: str) -> str | None:
    """Check HOST:CONTAINER or HOST:CONTAINER:ro. For both runtimes a comma ends a mount."""
    if not re.fullmatch(r"[/$][^:,]*:/[^:,]*(:r[ow])?", text) or CONTROL.search(text):
        return "expected /on/the/node:/in/the/container or /a:/b:ro, without commas"
    return _variables_fault(text) or argument(text)


def fill(check: object, text: str) -> str:
    """Return the value that a job uses for a setting.

    check: the check of the setting, which determines its type.

    In paths and mounts, variables are replaced. Paths are also made absolute, with ~ expanded.
    Other values are returned unchanged.
    """
    if check not in (path, program, image, mount):
        return text
    text = _VARIABLE.sub(lambda match: os.environ[match[1] or match[2]], text)
    if check is mount:
        return text
    text = os.path.expanduser(text)
    is_path = (
        check is path or (check is program and "/" in text) or text.startswith(("/", "./", "../"))
    )
    return os.path.abspath(text) if is_path else text


def _variables_fault(text: str) -> str | None:
    """Return an error text about the variables in a path, or None."""
    for match in _VARIABLE.finditer(text):
        name = match[1] or match[2]
        if secrets.is_secret(name):
            return f"${name} looks like a secret, which may not become part of a path"
        if not os.environ.get(name):
            return f"${name} is not set"
    return (
        "only $NAME and ${NAME} are replaced, and a path may contain no other $"
        if "$" in _VARIABLE.sub("", text)
        else None
    )


def option(text: str) -> str | None:
    """Check a long command-line option that is one word: --name or --name=value."""
    return (
        argument(text)
        if re.match(r"--[a-z][a-z0-9-]*(=|\Z)", text)
        else "expected one option as --name or --name=value"
    )


def sbatch_option(text: str) -> str | None:
    """Check a long sbatch option, and refuse those that the launcher or another key sets."""
    name = text.partition("=")[0].removeprefix("--")
    if name in _DECIDED:
        where = _DECIDED[name]
        return f"write it as {where}" if where else "the launcher sets it"
    return (
        "line breaks and control characters are not allowed in an sbatch option"
        if CONTROL.search(text)
        else option(text)
    )


def variable_fault(name: str, value: str) -> str | None:
    """Return the reason for which a profile may not set a variable, or None."""
    if not _NAME.fullmatch(name):
        return f"environment: {name!r} is not a variable's name: letters, digits and _"
    if secrets.is_secret(name) or secrets.hides_a_password(value):
        return (
            f"environment.{name} looks like a secret: export it in your shell, from which the job "
            "inherits it"
        )
    if re.search(rf"\$({name}\b|{{{name}\b)", value):
        return (
            f"environment.{name} would refer to itself, and values are not expanded: write `export "
            f"{name}=...` in setup.lines"
        )
    if name in _TAKEN or name.startswith(("SLURM_", "BASH_FUNC_")):
        return f"environment.{name} cannot be set here: {_TAKEN.get(name, 'Slurm sets it')}"
    return None
