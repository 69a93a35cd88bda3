"""Hostile texts that must arrive unchanged or be refused, and the fields of a profile or a job that
accept text.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

from fem_common import config
from launch.cluster.profile import Profile, load_profile
from launch.job import Item, Job

MARK = "pwned"  # each of these texts creates a file of this name if a shell runs it
TEXTS = (
    "plain",
    f"$(touch {MARK})",
    f"`touch {MARK}`",
    f"'; touch {MARK}; '",
    f'"; touch {MARK}; "',
    f"'\"$(touch {MARK})\"'",
    f"; touch {MARK} #",
    f"x && touch {MARK}",
    f"x | touch {MARK}",
    f"> {MARK}",
    f"x\ntouch {MARK}\n",
    f"x\r\ntouch {MARK}\r\n",
    f"x\n#SBATCH --wrap='touch {MARK}'\n",
    f"\\$(touch {MARK})\\",
    f"\\'; touch {MARK}; \\'",
    f"\\'\n$(touch {MARK})\\n\\",
    f"${{IFS}}$(touch${{IFS}}{MARK})",
    f"{{{{ ''.__class__ }}}}{{% set x = '{MARK}' %}}{{# x #}}",
    f"-x $(touch {MARK})",
    "--help",
    "-",
    "~root",
    "* ? [a-z] {a,b} !!",
    "# not a comment",
    "%j %% %A_%a",
    "é ü 日本 🎉 \u202e",
    "\x1b[31m\x07\x7f\x85\u2028\u2029",
    " leading and trailing ",
    "\ttab\t",
)


def as_taken_by(key: str) -> list[str]:
    """Return the texts and, if a key requires a form, also the texts in that form."""
    form = {
        "slurm.options": "--comment={}",
        "slurm.srun_options": "--x={}",
        "container.options": "--container-x={}",
        "container.mounts": "/{0}:/{0}",
    }
    return [
        *TEXTS,
        *(form[key].replace("{0}", "{}").replace("{}", text) for text in TEXTS if key in form),
    ]


def yaml_word(text: str) -> str:
    """Return the text as a double-quoted YAML scalar."""
    word = json.dumps(text, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\u2028\u2029\ufeff]", lambda match: f"\\u{ord(match[0]):04x}", word)


def text_keys(cls: type) -> list[tuple[str, str]]:
    """Return (dotted key, kind: one, list or dict) for every key that accepts text."""
    found = []
    for key, _, kind in config.walk(cls):
        inner, words = typing.get_origin(kind) or kind, typing.get_args(kind)
        if inner is tuple or inner is dict:
            found.append((key, "list" if inner is tuple else "dict"))
        elif kind is str or str in words:
            found.append((key, "one"))
    return found


def profile_text(key: str, shape: str, text: str) -> str:
    """Return a YAML profile with the text at a key, and the other required keys."""
    word = yaml_word(text)
    value = {"one": word, "list": f"[{word}]", "dict": f"{{VALUE: {word}}}"}[shape]
    besides = {
        "container.image": {"container.runtime": "pyxis"},
        "container.runtime": {"container.image": "an/image"},
    }
    tree: dict[str, Any] = {}
    for dotted, written in {key: value, **besides.get(key, {})}.items():
        *sections, name = dotted.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = written
    return _flow(tree)


def _flow(tree: dict[str, Any]) -> str:
    words = (
        f"{name}: {_flow(value) if isinstance(value, dict) else value}"
        for name, value in tree.items()
    )
    return f"{{{', '.join(words)}}}"


def job(root: Path, profile: Profile, **changes: Any) -> Job:
    """Return a job of two nodes whose supervisor is ``root/recorder``."""
    directory = str(root / "run")
    python = str(root / "recorder")
    ranks = profile.processes_per_node
    place = (directory, str(root), f"{directory}/launch/code", python)
    items = (Item(directory, ("-m", "pretrain", "c.yaml"), "job"),)
    made = replace(
        Job("job", "run", *place, 2, ranks, True, items, profile.as_json(), "profile.yaml"),
        **changes,
    )
    with contextlib.suppress(ValueError):  # values that no path can have
        Path(made.code).mkdir(parents=True, exist_ok=True)
    return made


def program(path: Path, text: str) -> Path:
    """Write an executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def recorder(root: Path) -> Path:
    """Write a program that replaces the supervisor's interpreter and records its arguments and
    environment in the file RECORD.
    """
    return program(
        root / "recorder",
        '#!/bin/bash\n{ printf "%s\\0" "$#" "$@" "$PWD"; env -0; } > "${RECORD:?}"\n',
    )


def recorded(path: Path) -> tuple[list[str], str, dict[str, str]]:
    """Return (arguments, working directory, environment) that the recorder wrote."""
    count, *rest = path.read_bytes().decode("utf-8").split("\0")[:-1]
    words = rest[: int(count)]
    folder = rest[int(count)]
    environment = rest[int(count) + 1 :]
    return words, folder, dict(line.split("=", 1) for line in environment)


def make_root(tmp_path: Path) -> Path:
    """Return a folder with a recorder, and a `module` command that records loaded modules; the
    module named absent does not exist.
    """
    recorder(tmp_path)
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text(
        'module() { [ "$2" != absent ] && printf "%s\\0" "$@" >> modules; }\n'
    )
    return tmp_path


def run(script: str, root: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a script with bash in ``root``; the recorder writes root/record."""
    path = root / "job.sh"
    path.write_text(script, encoding="utf-8", newline="")
    environment = {
        "PATH": os.environ["PATH"],
        "RECORD": str(root / "record"),
        "MODULESHOME": str(root),
        **environment,
    }
    return subprocess.run(
        ["bash", str(path)], cwd=root, env=environment, capture_output=True, timeout=60, check=False
    )


def given(root: Path, text: str) -> Profile:
    """Load a profile from YAML text."""
    (root / "profile.yaml").write_text(text, encoding="utf-8")
    return load_profile(root / "profile.yaml")
