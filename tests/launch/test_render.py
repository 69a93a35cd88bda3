"""Tests of the batch script: every text arrives unchanged or is refused, no text is executed, and
the script works.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fem_common.errors import UserError
from launch.cluster.profile import Profile, load_profile
from launch.job import Job
from launch.job import render as rendering
from launch.job.render import directive, render, shell
from tests.launch import hostile
from tests.launch.hostile import given, program, recorded, run
from tests.wording import Wording

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs" / "cluster").glob("slurm_*.yaml"))
# These lines are inserted unchanged, by design.
KEYS = [(key, shape) for key, shape in hostile.text_keys(Profile) if key != "setup.lines"]
# Keys with a fixed set of values: neither a hostile text nor any other text is valid.
ENUMERATED = (
    "scheduler",
    "nodes.memory",
    "nodes.numa",
    "slurm.time",
    "container.runtime",
    "notify.events",
)
CONTROL = r"[\x00-\x1f\x7f-\x9f\u2028\u2029]"
JOB_TEXTS = ("name", "directory", "working_directory", "code", "python")


def directives(script: str) -> list[str]:
    """Return the options that sbatch reads: the #SBATCH lines before the first command."""
    head = re.split(r"^[^#\s]", script, maxsplit=1, flags=re.MULTILINE)[0]
    return [
        as_sbatch_reads(line.removeprefix("#SBATCH "))
        for line in head.splitlines()
        if line.startswith("#SBATCH")
    ]


def as_sbatch_reads(line: str) -> str:
    """Parse a word of a #SBATCH line by sbatch's rules: a backslash always escapes, both kinds of
    quotes, # ends the line.
    """
    word = ""
    quote = ""
    position = 0
    while position < len(line):
        character = line[position]
        if character == "\\":
            position += 1
            word += line[position]
        elif quote:
            quote, word = ("", word) if character == quote else (quote, word + character)
        elif character in "\"'":
            quote = character
        elif character == "#" or character.isspace():
            break
        else:
            word += character
        position += 1
    assert not quote, f"unmatched quote in {line}"
    assert position == len(line), f"sbatch reads {line} up to {position}"
    return word


def rendered(make: Callable[[], str]) -> str | None:
    """Return the script, or None if it is refused with one line."""
    try:
        return make()
    except UserError as error:
        output = str(error)
    assert len(output.splitlines()) == 1
    return None


def runs(script: str, root: Path) -> tuple[list[str], str, dict[str, str]]:
    """Run a script that starts the recorder without output; return how the recorder was started."""
    (root / "record").unlink(missing_ok=True)
    done = run(script, root)
    assert (done.returncode, done.stderr) == (0, b""), script
    assert not [path for path in root.rglob("*") if path.name.startswith(hostile.MARK)], script
    return recorded(root / "record")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of `hostile.make_root`."""
    return hostile.make_root(tmp_path)


def of_profile(root: Path, key: str, shape: str, text: str) -> str:
    """Return the script of a profile with the text at the key; its supervisor is a recorder unless
    the key sets another.
    """
    (root / "profile.yaml").write_text(hostile.profile_text(key, shape, text), encoding="utf-8")
    profile = load_profile(
        root / "profile.yaml",
        [] if key in ("python", "host_python") else [f"host_python={root}/recorder"],
    )
    return render(hostile.job(root, profile, python=profile.interpreters("none")[0]))


def test_text_of_a_profile_arrives_unchanged_or_is_refused(root: Path) -> None:
    """Every key separately with every text. Keys are found in the dataclasses, so that future keys
    are tested too.
    """
    known = set[str]()
    for key, shape in KEYS:
        made = [
            (text, rendered(lambda: of_profile(root, key, shape, text)))  # noqa: B023
            for text in hostile.as_taken_by(key)
        ]
        accepted = [(text, script) for text, script in made if script is not None]
        assert (
            len(accepted) == len(hostile.TEXTS)
            if key in ("environment", "notify.command")
            else accepted or key in ENUMERATED
        ), key
        for text, script in accepted:
            if script in known:
                continue
            known.add(script)
            read = directives(script)
            if key in ("python", "host_python"):  # the program does not exist; bash reports that
                done = run(script, root)
                assert done.returncode == 2 and done.stderr, key
                continue
            words, folder, environment = runs(script, root)
            assert words == ["-m", "launch.supervise", str(root / "run")] and folder == str(root), (
                key
            )
            assert environment.get("VALUE", text) == text
            assert key != "slurm.options" or text in read
            folder = os.path.abspath(os.path.expanduser(text)).replace("%", "%%")
            assert key != "logs" or f"--output={folder}/slurm-%j.out" in read
    assert len(known) > 80


def test_text_is_one_word_of_bash_on_one_line_and_one_of_sbatch_or_refused(root: Path) -> None:
    assert all(len(shell(text).splitlines()) == 1 for text in hostile.TEXTS)
    profile = Profile(host_python=str(root / "recorder"))
    job = hostile.job(root, profile)
    for text in hostile.TEXTS[1:]:
        line = rendered(lambda: directive("--comment", text))  # noqa: B023
        assert (
            bool(re.search(CONTROL, text))
            if line is None
            else as_sbatch_reads(line) == f"--comment={text}"
        )
        for what in ("dependency", "array"):
            assert rendered(lambda: render(job, **{what: text})) is None  # noqa: B023
        script = rendered(lambda: render(job, exclude=[text]))  # noqa: B023
        assert script is None or f"--exclude={text}" in directives(script)
    template = rendering._template().environment.from_string("echo {{ word }}")
    assert template.render(word=shell("$x")) == "echo '$x'"
    with pytest.raises(TypeError, match=r"not quoted: '\$x'"):
        template.render(word="$x")


@pytest.mark.parametrize("field", JOB_TEXTS)
def test_text_of_a_job_arrives_unchanged_or_is_refused(field: str, root: Path) -> None:
    assert {item.name for item in dataclasses.fields(Job) if item.type == "str"} == {
        *JOB_TEXTS,
        "kind",
        "profile_path",
    }  # not in scripts
    profile, refused = Profile(), 0
    for number, text in enumerate(hostile.TEXTS):
        place = root / str(number)
        if field == "python":
            hostile.recorder(place).rename(place / text)
        elif field == "working_directory":
            (place / text).mkdir(parents=True)
        job = hostile.job(root, profile, **{field: text if field == "name" else str(place / text)})
        if (script := rendered(lambda: render(job))) is None:  # noqa: B023
            refused += 1
            continue
        words, folder, environment = runs(script, root)
        assert words == [
            "-m",
            "launch.supervise",
            job.directory,
        ] and f"--job-name={job.name}" in directives(script)
        assert (folder, environment["PYTHONPATH"], environment["PYTHONSAFEPATH"]) == (
            job.working_directory,
            job.code,
            "1",
        )
    not_for_sbatch = {"name": CONTROL, "directory": CONTROL + r"|\\"}.get(field, "(?!)")
    assert refused == sum(bool(re.search(not_for_sbatch, text)) for text in hostile.TEXTS)
    for text in ("a\0b", "a\ud800b"):
        with pytest.raises(UserError, match="cannot be passed to a program"):
            render(hostile.job(root, profile, **{field: f"{root}/{text}"}))


FULL = """
nodes: {gpus: 4, cpus: 12, memory: 500G, gres: "gpu:h100:4"}
slurm: {partition: "a,b", account: me, qos: high, time: 1-12:00:00, constraint: "h100&ib", exclude: ["bad[1-2]", worse],
        reservation: mine, signal_seconds: 120, options: [--mail-type=FAIL, --comment=two words, --reboot]}
setup: {modules: [cuda/12.8, gcc], lines: ['echo "$GIVEN" > lines']}
environment: {GIVEN: "it's $(a) value"}
logs: ROOT/100% logs
"""  # noqa: E501
PROFILES = {
    "full": FULL,
    "nothing": "nodes: {exclusive: false}",
    "gpus": "nodes: {gpus: 3}",
    "container": "container: {runtime: pyxis, image: i}",
}


def test_the_golden_script_of_each_feature(root: Path, wording: Wording) -> None:
    """Omitted settings are left to Slurm; the supervisor runs outside the container; bash and
    shellcheck accept each script.
    """
    array: dict[str, Any] = {
        "dependency": "afterok:12:13,afterany:14",
        "array": "0-2,5%2",
        "exclude": ["worse", "node9"],
    }
    program_there = shutil.which("shellcheck")
    for name, text in {**PROFILES, **{path.stem: path.read_text() for path in SHIPPED}}.items():
        profile = given(root, text.replace("ROOT", str(root)))
        for kind in ("run", "command"):
            job = hostile.job(root, profile, name="a name", python="python3", kind=kind)
            script = render(job, **(array if name == "full" else {}))
            (root / "job.sh").write_text(script)
            subprocess.run(["bash", "-n", str(root / "job.sh")], check=True)
            if program_there:
                subprocess.run(
                    [program_there, "--severity=style", str(root / "job.sh")], check=True
                )
            if kind == "run" or name == "full":
                wording(
                    (
                        script
                        if name == "full"
                        else "\n".join(directives(script) + script.splitlines()[-2:])
                    ),
                    PYTHON=sys.executable,
                )
    with pytest.raises(UserError, match=r"profile.yaml: scheduler = local: .* `launch local`"):
        render(hostile.job(root, given(root, "scheduler: local")))


def test_what_a_script_does(root: Path) -> None:
    setup = (
        "setup: {modules: [cuda/12.8, gcc], lines: ['echo \"$GIVEN\" > lines', 'export"
        ' MORE="$GIVEN too"\', cd /, kill -USR1 $$]}'
    )
    profile = given(root, f"{setup}\nenvironment: {{GIVEN: a value, PYTHONUNBUFFERED: 1}}\n")
    script = render(hostile.job(root, profile))
    # A signal to save that arrives before the supervisor starts does not end the script.
    words, folder, environment = runs(script, root)
    assert (root / "modules").read_text().split("\0") == ["load", "cuda/12.8", "load", "gcc", ""]
    assert (root / "lines").read_text() == "a value\n" and folder == str(root)
    assert (environment["MORE"], environment["PYTHONUNBUFFERED"]) == ("a value too", "1")
    assert run(script, root, SLURM_ARRAY_TASK_ID="7").returncode == 0
    assert recorded(root / "record")[0] == [*words, "--item", "7"]


# Errors of sbatch for jobs that Slurm could never start: too few nodes, and an unknown node in
# --nodelist.
NEVER = (
    "allocation failure: Requested node configuration is not available",
    "allocation failure: Invalid node name specified",
)


def scontrol(root: Path, comment: str = "(null)", words: str = "Access denied") -> dict[str, str]:
    """Return the environment of a job with an scontrol that records its calls, and sends the
    signals of a requeue.

    The job has a ``comment`` and excludes node3. ``words``: sbatch's message if node1 is excluded
    too; by default, that access is denied.
    """
    requested = (
        '#!/bin/bash\nprintf "%s|" "$@" >> "$CALLS"; echo >> "$CALLS"\n[ "$1" = requeue ] && kill'
        ' "$PPID"\n[[ $* != *"$REFUSED"* ]]\n'
    )
    program(root / "bin" / "scontrol", requested)
    program(
        root / "bin" / "squeue", f"#!/bin/bash\n[[ $* == *%k ]] && echo '{comment}' || echo node3\n"
    )
    test = "--test-only --dependency= --exclude=node3,node1 "
    program(
        root / "bin" / "sbatch",
        f"#!/bin/bash\n[[ $* == '{test}'* && -r ${{!#}} ]] && echo '{words}' >&2; exit 1\n",
    )
    calls = {
        "CALLS": str(root / "calls"),
        "SLURM_JOB_ID": "12",
        "SLURMD_NODENAME": "node1",
        "REFUSED": "nothing",
    }
    return {"PATH": f"{root}/bin:{os.environ['PATH']}", **calls}


EARLY = {  # profile, field of the job whose folder is missing, expected error
    "folder": ("{}", "working_directory", b"gone: No such file or directory"),
    "snapshot": ("{}", "code", b"the code snapshot is not visible on this node"),
    "module": ("setup: {modules: [present, absent]}", None, b"launch: module load absent failed"),
    "line": ("setup: {lines: ['[ $SLURMD_NODENAME = node2 ] || exit 7']}", None, b""),
    "interpreter": ("host_python: /gone/python", None, b"/gone/python"),
}


@pytest.mark.parametrize(("text", "folder", "message"), EARLY.values(), ids=EARLY)
def test_a_run_leaves_a_node_that_cannot_start_its_supervisor(
    text: str, folder: str | None, message: bytes, root: Path
) -> None:
    profile = given(root, text)
    job = hostile.job(root, profile, **({folder: f"{root}/gone"} if folder else {}))
    shutil.rmtree(root / "gone", ignore_errors=True)
    script = render(job)
    calls = root / "calls"
    slurm = scontrol(root)
    task = {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "0"}
    for more, name in (({}, "12"), (task, "11_0")):
        done = run(script, root, **slurm, **more)
        assert done.returncode == 0 and message in done.stderr, done.stderr
        assert (
            b"launch: the supervisor did not start on node1: back to the queue, without that node"
            in done.stderr
        )
        requested = [f"update|JobId={name}|Comment=not-started:1:1|", f"requeue|{name}|"]
        assert calls.read_text().splitlines() == [
            *requested,
            f"update|JobId={name}|StartTime=now+0|ExcNodeList=node3,node1|",
        ]
        calls.unlink()
    # A command may not be restarted.
    assert run(render(dataclasses.replace(job, kind="command")), root, **slurm).returncode != 0
    assert not calls.exists() and not (root / "record").exists()


# The restarts so far; what scontrol refuses; the delay, or - if it gives up; the old comment -> the
# new one.
STARTS = """\
7 nothing    0 (null) -> not-started:8:1
7 nothing    0 grant 12 -> grant 12 not-started:8:1
7 nothing  300 grant not-started:7:1 -> grant not-started:8:2
8 nothing 1200 grant not-started:8:2 -> grant not-started:9:3
9 nothing    - grant not-started:9:3 ->
9 nothing    0 grant not-started:8:3 -> grant not-started:10:1
2 Comment 1200 (null) -> not-started:3:1
3 Comment    - (null) ->
0 requeue    - (null) ->
"""


@pytest.mark.parametrize("line", STARTS.splitlines())
def test_only_starts_that_failed_in_a_row_are_counted(line: str, root: Path) -> None:
    """Requeues after a time limit or a preemption do not count; the hook receives the last failure.
    Strict modes of bash have no effect.
    """
    restarts, refused, delay, comments = line.split(maxsplit=3)
    comment, _, report = comments.partition(" ->")
    strict = "setup: {lines: [set -euo pipefail]}"
    profile = given(
        root,
        f"host_python: /gone/python\nnotify: {{command: \"cat > '{root}/notice'; exit"
        f' 1"}}\n{strict}\n',
    )
    job = hostile.job(root, profile, name="50% 'a\\b")
    slurm = scontrol(root, comment, NEVER[int(restarts) % 2]) | {
        "REFUSED": refused,
        "SLURM_RESTART_COUNT": restarts,
    }
    done, calls = run(render(job), root, **slurm), root / "calls"
    requested = calls.read_text().splitlines() if calls.exists() else []
    if not report:
        assert done.returncode == 2 and not any("StartTime" in call for call in requested)
        event = json.loads((root / "notice").read_text())
        names = (event["event"], event["name"], event["directory"], event["job_id"])
        assert names == ("stopped", job.name, job.directory, "12")
        assert event["nodes"] == ["node1"] and abs(event["time"] - time.time()) < 60
        return
    assert done.returncode == 0 and not (root / "notice").exists()
    # Without node1 too few nodes remain, so no node is excluded.
    assert requested == [
        f"update|JobId=12|Comment={report.strip()}|",
        "requeue|12|",
        f"update|JobId=12|StartTime=now+{delay}|",
    ]


def test_a_run_that_is_cancelled_as_it_starts_or_whose_supervisor_ends_does_not_come_back(
    root: Path,
) -> None:
    profile = given(root, "setup: {lines: ['kill $$']}")
    assert run(render(hostile.job(root, profile)), root, **scontrol(root)).returncode == 143
    assert not (root / "record").exists()
    program(root / "recorder", "#!/bin/bash\nexit 1\n")
    assert run(render(hostile.job(root, Profile())), root, **scontrol(root)).returncode == 1
    assert not (root / "calls").exists()
