"""Text into bash scripts and #SBATCH lines, so that it arrives unchanged and nothing in it runs. Standard library alone."""

from __future__ import annotations

import re
import shlex

from fem_common.errors import UserError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN_DIRECTIVE = re.compile(r"[\w%@+=:,./\[\]&|*()!-]+", re.ASCII)


class Quoted(str):
    """Text that may stand in a script as it is. The template takes nothing else."""

    __slots__ = ()


def shell(text: str) -> Quoted:
    """``text`` as one word of bash on one line. Raises UserError for what no argument of a program can hold."""
    check(text, "text")
    if not _CONTROL.search(text):
        return Quoted(shlex.quote(text))
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return Quoted("$'" + _CONTROL.sub(_escape, escaped) + "'")


def directive(option: str, value: str) -> Quoted:
    """``--option=value`` as sbatch reads it on a #SBATCH line. Raises UserError for a value with a line break or control character.

    sbatch takes a backslash for an escape inside both kinds of quotes, and an unquoted # for a comment's beginning.
    """
    check(value, option)
    if _CONTROL.search(value):
        raise UserError(f"{option} = {value!r}: line breaks and control characters cannot stand in an option of sbatch")
    if _PLAIN_DIRECTIVE.fullmatch(value):
        return Quoted(f"{option}={value}")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return Quoted(f'{option}="{escaped}"')


def file_pattern(path: str) -> str:
    """A folder's path for --output, where % begins a replacement. Raises UserError for a backslash, which turns all of them off."""
    if "\\" in path:
        raise UserError(f"{path!r}: Slurm cannot write into a folder with a backslash in its name; name another by logs of the profile")
    return path.replace("%", "%%")


def check(text: str, what: str) -> None:
    """Raises UserError where ``text`` holds NUL or is no valid Unicode: no file and no program's argument can hold that."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{what} = {text!r}: NUL and half characters cannot be passed to a program")


def _escape(match: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in match.group().encode("utf-8"))
