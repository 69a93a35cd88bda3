"""Render a job's Slurm batch script from the job, its profile and a Jinja template.

The template accepts only quoted text. Quoted text reaches bash and the #SBATCH lines unchanged,
and bash executes no part of it.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fem_common.errors import UserError
from launch.cluster import profile_values
from launch.cluster.profile import Profile, from_json
from launch.cluster.profile_values import CONTROL
from launch.job.job import Job

_PLAIN_DIRECTIVE = re.compile(r"[\w%@+=:,./\[\]&|*()!-]+", re.ASCII)


class Quoted(str):
    """Text that is safe to insert into a script. The template accepts no other text."""

    __slots__ = ()


def shell(text: str) -> Quoted:
    """Quote ``text`` as one bash word on one line.

    Raises:
        UserError: the text cannot be a program's argument.
    """
    check(text, "text")
    if not CONTROL.search(text):
        return Quoted(shlex.quote(text))
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    escaped = CONTROL.sub(_hexadecimal, escaped)
    return Quoted(f"$'{escaped}'")


def _hexadecimal(match: re.Match[str]) -> str:
    r"""Return the matched text as bash's escapes of its bytes, ``\x0a`` for a line break."""
    return "".join(f"\\x{byte:02x}" for byte in match.group().encode("utf-8"))


def directive(option: str, value: str) -> Quoted:
    """Return ``--option=value``, quoted for a #SBATCH line.

    sbatch treats a backslash as an escape inside both kinds of quotes, and an unquoted # as the
    start of a comment.

    Raises:
        UserError: the value has a line break or a control character.
    """
    check(value, option)
    if CONTROL.search(value):
        raise UserError(
            f"{option} = {value!r}: line breaks and control characters are not allowed in an "
            "sbatch option"
        )
    if _PLAIN_DIRECTIVE.fullmatch(value):
        return Quoted(f"{option}={value}")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return Quoted(f'{option}="{escaped}"')


def file_pattern(path: str) -> str:
    """Escape a folder's path for sbatch's --output, in which % begins a placeholder.

    Raises:
        UserError: the path has a backslash, which turns off all placeholders.
    """
    if "\\" in path:
        raise UserError(
            f"{path!r}: Slurm cannot write into a folder with a backslash in its name; set another "
            "with logs in the profile"
        )
    return path.replace("%", "%%")


def check(text: str, what: str) -> None:
    """Raise UserError if ``text`` contains NUL or is not valid Unicode.

    Files and program arguments cannot contain either. ``what`` names the text in the error.
    """
    if fault := profile_values.variable(text):
        raise UserError(f"{what} = {text!r}: {fault}")


# Minimum seconds that a run waits in the queue after its supervisor could not be started, for the
# first, second and third time in a row.
START_DELAYS = (0, 300, 1200)
_DEPENDENCY = re.compile(r"[a-z]+(:[0-9_+]+)*([,?][a-z]+(:[0-9_+]+)*)*", re.ASCII)
_ARRAY = re.compile(
    r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*(%[1-9][0-9]*)?", re.ASCII
)


def render(
    job: Job,
    *,
    dependency: str | None = None,
    array: str | None = None,
    exclude: Sequence[str] = (),
) -> str:
    """Return the text of the batch script. The same arguments give the same text.

    The script consists of #SBATCH lines, the user's setup, and the supervisor, which replaces the
    shell.

    dependency: value of sbatch's --dependency (``afterok:12``).
    array: indices of the items to start (``0,2,5%2``).
    exclude: nodes to exclude in addition to those in the profile.

    Raises:
        UserError: the job is not for Slurm, or a value cannot be quoted for the script.
    """
    profile = from_json(job.profile)
    if profile.scheduler != "slurm":
        raise UserError(
            f"{job.profile_path}: scheduler = {profile.scheduler}: only a profile of Slurm has a "
            "batch script; use `launch local`"
        )
    in_container = profile.container.runtime != "none"
    _, python = profile.interpreters(sys.executable if in_container else job.python)
    notify = profile.notify.command if "stopped" in profile.notify.events else None
    values: dict[str, Any] = {
        "directives": list(_directives(job, profile, dependency, array, exclude)),
        "modules": [shell(name) for name in profile.setup.modules],
        "environment": [
            (Quoted(name), shell(value)) for name, value in profile.environment.items()
        ],
        "lines": [Quoted(line) for line in profile.setup.lines],
        "working_directory": shell(job.working_directory),
        "code": shell(job.code),
        "python": shell(python),
        "directory": shell(job.directory),
        "start_delays": Quoted(" ".join(map(str, START_DELAYS))) if job.kind == "run" else None,
        "starts": Quoted(str(len(START_DELAYS))),
        "notice": shell(_notice(job)),
        "notify": shell(notify) if notify else None,
    }
    return _template().render(values)


def _directives(
    job: Job, profile: Profile, dependency: str | None, array: str | None, exclude: Sequence[str]
) -> Iterator[Quoted]:
    """Yield the options for the #SBATCH lines of the batch script.

    The order is: name and output, resources, placement, time limit, behaviour.
    """
    nodes, slurm = profile.nodes, profile.slurm
    logs = profile.logs or str(job.launch)
    yield directive("--job-name", job.name)
    yield directive(
        "--output", file_pattern(logs) + ("/slurm-%j.out" if array is None else "/slurm-%A_%a.out")
    )
    if array is not None:
        yield directive("--array", _of_pattern(array, _ARRAY, "array"))
    yield directive("--nodes", str(job.nodes))
    yield directive("--ntasks-per-node", "1")
    yield directive("--cpus-per-task", str(nodes.cpus))
    if nodes.memory is not None:
        yield directive("--mem", nodes.memory)
    if nodes.gres is not None or nodes.gpus:
        yield directive("--gres", nodes.gres or f"gpu:{nodes.gpus}")
    if nodes.exclusive:
        yield Quoted("--exclusive")
    for option in ("partition", "account", "qos", "reservation", "constraint", "time"):
        value = getattr(slurm, option)
        if value is not None:
            yield directive(f"--{option}", value)
    away = list(dict.fromkeys([*slurm.exclude, *exclude]))
    if away:
        yield directive("--exclude", ",".join(away))
    if dependency is not None:
        yield directive("--dependency", _of_pattern(dependency, _DEPENDENCY, "dependency"))
        yield directive("--kill-on-invalid-dep", "yes")
    yield directive("--signal", f"B:USR1@{slurm.signal_seconds}")
    yield from map(Quoted, ("--requeue", "--open-mode=append", "--export=ALL"))
    for text in slurm.options:
        option, equals, value = text.partition("=")
        yield directive(option, value) if equals else Quoted(option)


def _notice(job: Job) -> str:
    """Return the JSON of the "stopped" event, for a script whose supervisor cannot start.

    The closing brace is missing, because the script appends further fields.
    """
    message = "the supervisor could not be started on this node, and the job is not requeued"
    facts = {
        "event": "stopped",
        "name": job.name,
        "directory": job.directory,
        "attempt": 0,
        "message": message,
    }
    return json.dumps(facts).removesuffix("}")


def _of_pattern(text: str, pattern: re.Pattern[str], what: str) -> str:
    if not pattern.fullmatch(text):
        raise UserError(f"{what} = {text!r}: not valid for sbatch")
    return text


def _only_quoted(value: Any) -> Quoted:
    """Return the value if it is quoted text. The template calls this for every inserted value.

    Raises:
        TypeError: the value is not quoted.
    """
    if not isinstance(value, Quoted):
        raise TypeError(f"not quoted: {value!r}")
    return value


@functools.cache
def _template() -> jinja2.Template:
    """Load the template, with `_only_quoted` as its guard."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        finalize=_only_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template("job.sh.j2")
