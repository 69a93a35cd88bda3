"""The batch script: every text arrives unchanged or is refused, nothing in it runs, and it does what it says."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import subprocess
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
from tests.launch.hostile import given, run

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs" / "cluster").glob("slurm_*.yaml"))
RUNS = ("setup.lines",)  # inserted as they are, by design
KEYS = [(key, shape) for key, shape in hostile.text_keys(Profile) if key not in RUNS]
# No hostile text is right there, nor a plain one.
ENUMERATED = ("scheduler", "nodes.memory", "nodes.numa", "slurm.time", "container.runtime", "notify.events")
CONTROL = r"[\x00-\x1f\x7f-\x9f\u2028\u2029]"
JOB_TEXTS = ("name", "directory", "working_directory", "code", "python")


def directives(script: str) -> list[str]:
    """The options that sbatch reads: the #SBATCH lines before the first command."""
    head = re.split(r"^[^#\s]", script, maxsplit=1, flags=re.MULTILINE)[0]
    return [line.removeprefix("#SBATCH ") for line in head.splitlines() if line.startswith("#SBATCH")]


def as_sbatch_reads(line: str) -> str:
    """A word of a #SBATCH line by sbatch's rules: a backslash escapes everywhere, quotes of both kinds, # ends the line."""
    word, quote, position = "", "", 0
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


def rendered(make: Callable[..., str], *arguments: object) -> str | None:
    """The script, or None where it is refused, in one line."""
    try:
        return make(*arguments)
    except UserError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    return None


def unharmed(root: Path) -> bool:
    """Whether nothing that was injected ran."""
    return not [path for path in root.rglob("*") if path.name.startswith(hostile.MARK)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """See `hostile.make_root`."""
    return hostile.make_root(tmp_path)


# --- nothing injected runs -----------------------------------------------------------------------------------------------------


def test_the_walk_finds_the_places_where_text_can_go() -> None:
    found = dict(hostile.text_keys(Profile))
    assert {"python", "slurm.partition", "slurm.options", "container.mounts", "setup.modules", "environment", "logs"} <= set(found)
    assert found["environment"] == "dict" and found["slurm.exclude"] == "list"


def of_profile(key: str, shape: str, text: str, root: Path) -> str:
    """The script of a profile with the text at the key, which has a recorder for its supervisor where the key does not say another."""
    (root / "profile.yaml").write_text(hostile.profile_text(key, shape, text), encoding="utf-8")
    profile = load_profile(root / "profile.yaml", [] if key in ("python", "host_python") else [f"host_python={root}/recorder"])
    return render(hostile.job(root, profile, python=profile.interpreters("none")[0]), profile)


@pytest.mark.parametrize(("key", "shape"), KEYS, ids=[key for key, _ in KEYS])
def test_text_of_a_profile_arrives_unchanged_or_is_refused(key: str, shape: str, root: Path) -> None:
    """Every key by itself with every text: found by walking the dataclasses, so that a key to come is tested too."""
    accepted = 0
    for text in hostile.as_taken_by(key):
        script = rendered(of_profile, key, shape, text, root)
        if script is None:
            continue
        accepted += 1
        (root / "record").unlink(missing_ok=True)
        done = run(script, root)
        assert unharmed(root), f"{key} = {text!r} ran"
        if key in ("python", "host_python"):  # there is no such program; bash says so
            assert done.returncode == 2 and done.stderr
            continue
        assert done.returncode == 0 and done.stderr == b"", (key, text, done.stderr)
        words, folder, environment = hostile.recorded(root / "record")
        assert words == ["-m", "launch.supervise", str(root / "run")] and folder == str(root)
        assert environment.get("VALUE", text) == text
        read = [*map(as_sbatch_reads, directives(script))]
        assert key != "slurm.options" or text in read
        assert key != "logs" or f"--output={os.path.abspath(os.path.expanduser(text)).replace('%', '%%')}/slurm-%j.out" in read
    assert accepted == {"environment": len(hostile.TEXTS), "notify.command": len(hostile.TEXTS)}.get(key, accepted)
    assert accepted or key in ENUMERATED


@pytest.mark.parametrize("text", hostile.TEXTS, ids=ascii)
def test_text_in_an_option_of_sbatch_is_one_word_of_it(text: str) -> None:
    try:
        line = directive("--comment", text)
    except UserError:
        assert re.search(CONTROL, text)
        return
    assert as_sbatch_reads(line) == f"--comment={text}"


@pytest.mark.parametrize("text", [*hostile.TEXTS, ""], ids=ascii)
def test_text_in_bash_is_one_word_of_it_on_one_line(text: str) -> None:
    word = shell(text)
    assert len(word.splitlines()) == 1
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {word}"], capture_output=True, check=True)
    assert done.stdout.decode("utf-8") == f"{text}\0"


@pytest.mark.parametrize("field", JOB_TEXTS)
def test_text_of_a_job_arrives_unchanged_or_is_refused(field: str, root: Path) -> None:
    assert {item.name for item in dataclasses.fields(Job) if item.type == "str"} == {*JOB_TEXTS, "kind", "profile_path"}  # not in scripts
    profile = Profile()
    refused = 0
    for number, text in enumerate(hostile.TEXTS):
        place = root / str(number)
        value = text if field == "name" else str(place / text)
        if field == "python":
            hostile.recorder(place).rename(place / text)
        elif field == "working_directory":
            (place / text).mkdir(parents=True)
        job = hostile.job(root, profile, **{field: value})
        script = rendered(render, job, profile)
        if script is None:
            refused += 1
            continue
        done = run(script, root)
        assert done.returncode == 0 and done.stderr == b"", (text, done.stderr)
        assert unharmed(root), text
        words, folder, environment = hostile.recorded(root / "record")
        assert words == ["-m", "launch.supervise", job.directory]
        assert (folder, environment["PYTHONPATH"], environment["PYTHONSAFEPATH"]) == (job.working_directory, job.code, "1")
        assert f"--job-name={job.name}" in map(as_sbatch_reads, directives(script))
    not_for_sbatch = {"name": CONTROL, "directory": CONTROL + r"|\\"}.get(field, "(?!)")
    assert refused == sum(bool(re.search(not_for_sbatch, text)) for text in hostile.TEXTS)


@pytest.mark.parametrize("what", ["dependency", "array", "exclude"])
@pytest.mark.parametrize("text", hostile.TEXTS[1:], ids=ascii)
def test_text_among_the_arguments_is_refused_or_one_word(what: str, text: str, root: Path) -> None:
    arguments: dict[str, Any] = {what: [text] if what == "exclude" else text}
    profile = Profile(host_python=str(root / "recorder"))
    script = rendered(functools.partial(render, **arguments), hostile.job(root, profile), profile)
    assert script is None or (what == "exclude" and f"--exclude={text}" in map(as_sbatch_reads, directives(script)))


def test_the_template_takes_quoted_text_alone() -> None:
    template = rendering._template().environment.from_string("echo {{ word }}")
    assert template.render(word=shell("$x")) == "echo '$x'"
    with pytest.raises(TypeError, match=r"not quoted: '\$x'"):
        template.render(word="$x")


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"], ids=ascii)
def test_what_no_program_can_be_given_is_refused(text: str, root: Path) -> None:
    profile = Profile()
    for field in JOB_TEXTS:
        with pytest.raises(UserError, match="cannot be passed to a program"):
            render(hostile.job(root, profile, **{field: f"{root}/{text}"}), profile)


# --- what the script says and does ---------------------------------------------------------------------------------------------


def test_every_setting_of_slurm_is_an_option_of_sbatch(root: Path) -> None:
    profile = given(
        root,
        """
        nodes: {gpus: 4, cpus: 12, memory: 500G, gres: "gpu:h100:4"}
        slurm: {partition: "a,b", account: me, qos: high, time: 1-12:00:00, constraint: "h100&ib", exclude: ["bad[1-2]", worse],
                reservation: mine, signal_seconds: 120, options: [--mail-type=FAIL, --comment=two words, --reboot]}
        logs: LOGS
        """.replace("LOGS", f"{root}/100% logs"),
    )
    job = hostile.job(root, profile, name="a name")
    script = render(job, profile, dependency="afterok:12:13,afterany:14", array="0-2,5%2", exclude=["worse", "node9"])
    assert list(map(as_sbatch_reads, directives(script))) == [
        "--job-name=a name",
        f"--output={root}/100%% logs/slurm-%A_%a.out",
        "--array=0-2,5%2",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=12",
        "--mem=500G",
        "--gres=gpu:h100:4",
        "--exclusive",
        "--partition=a,b",
        "--account=me",
        "--qos=high",
        "--reservation=mine",
        "--constraint=h100&ib",
        "--time=1-12:00:00",
        "--exclude=bad[1-2],worse,node9",
        "--dependency=afterok:12:13,afterany:14",
        "--kill-on-invalid-dep=yes",
        "--signal=B:USR1@120",
        "--requeue",
        "--open-mode=append",
        "--export=ALL",
        "--mail-type=FAIL",
        "--comment=two words",
        "--reboot",
    ]


def test_what_a_profile_leaves_open_is_left_to_slurm(root: Path) -> None:
    profile = given(root, "nodes: {exclusive: false}")
    names = [re.split("[= ]", line)[0] for line in directives(render(hostile.job(root, profile), profile))]
    assert not {"--partition", "--account", "--qos", "--time", "--mem", "--gres", "--exclusive", "--exclude", "--dependency", "--array"} & {
        *names
    }
    assert {"--requeue", "--signal", "--open-mode", "--export"} <= {*names}


def test_gpus_are_asked_for_by_number_where_no_gres_is_named(root: Path) -> None:
    profile = given(root, "nodes: {gpus: 3}")
    assert "--gres=gpu:3" in directives(render(hostile.job(root, profile), profile))


def test_a_local_profile_has_no_script(root: Path) -> None:
    profile = given(root, "scheduler: local")
    with pytest.raises(UserError, match=r"profile.yaml: scheduler = local: .* `launch local`"):
        render(hostile.job(root, profile), profile)


def test_the_same_arguments_give_the_same_script(root: Path) -> None:
    first, second = (given(root, (ROOT / "configs/cluster/slurm_h100_ib.yaml").read_text()) for _ in range(2))
    assert render(hostile.job(root, first), first) == render(hostile.job(root, second), second)


@pytest.mark.parametrize(("task", "words"), [(None, []), ("7", ["--item", "7"])])
def test_a_task_of_an_array_names_its_item(task: str | None, words: list[str], root: Path) -> None:
    profile = Profile()
    assert run(render(hostile.job(root, profile), profile), root, **({"SLURM_ARRAY_TASK_ID": task} if task else {})).returncode == 0
    assert hostile.recorded(root / "record")[0] == ["-m", "launch.supervise", str(root / "run"), *words]


def test_setup_runs_in_order_before_the_supervisor(root: Path) -> None:
    profile = given(
        root,
        """
        setup:
          modules: [cuda/12.8, gcc]
          lines: ['echo "$GIVEN" > lines', 'if true; then', '  export MORE="$GIVEN too"', fi, cd /]
        environment: {GIVEN: a value, PYTHONUNBUFFERED: 1}
        """,
    )
    done = run(render(hostile.job(root, profile), profile), root)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (root / "modules").read_text().split("\0") == ["load", "cuda/12.8", "load", "gcc", ""]
    assert (root / "lines").read_text() == "a value\n"
    _, folder, environment = hostile.recorded(root / "record")
    assert folder == str(root)
    assert (environment["MORE"], environment["PYTHONUNBUFFERED"]) == ("a value too", "1")


def test_a_module_that_is_not_there_ends_the_job_before_it_starts(root: Path) -> None:
    profile = given(root, "setup: {modules: [present, absent]}")
    done = run(render(hostile.job(root, profile), profile), root)
    assert done.returncode == 2 and b"launch: module load absent failed" in done.stderr
    assert not (root / "record").exists()


def test_a_working_directory_that_is_not_there_ends_the_job(root: Path) -> None:
    profile = Profile()
    done = run(render(hostile.job(root, profile, working_directory=f"{root}/gone"), profile), root)
    assert done.returncode == 2 and b"gone: No such file or directory" in done.stderr
    assert not (root / "record").exists()


def test_a_signal_to_save_before_the_supervisor_is_there_does_not_end_the_job(root: Path) -> None:
    profile = given(root, "setup: {lines: [kill -USR1 $$]}")
    assert run(render(hostile.job(root, profile), profile), root).returncode == 0
    assert (root / "record").exists()


def test_the_supervisor_runs_outside_the_container(root: Path) -> None:
    text = f"{{python: python3, container: {{runtime: pyxis, image: an/image}}, host_python: {root}/recorder}}"
    profile = given(root, text)
    script = render(hostile.job(root, profile, python="python3"), profile)
    assert f"exec {root}/recorder -m launch.supervise" in script
    profile = given(root, "{python: python3, container: {runtime: pyxis, image: an/image}}")
    assert "exec python3" not in render(hostile.job(root, profile, python="python3"), profile)


# --- shellcheck ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profiles_give_scripts_that_shellcheck_likes(path: Path, root: Path) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed")
    profile = load_profile(path, ["setup.modules=[cuda/12.8]", "environment.MESS=" + hostile.yaml_word("a'b\n$(c)")])
    job = hostile.job(root, profile, name="it's $(a) name", directory=f"{root}/it's $(a) run")
    (root / "job.sh").write_text(render(job, profile, array="0-3%2", dependency="afterok:1"), encoding="utf-8")
    checked = subprocess.run([program, "--severity=style", str(root / "job.sh")], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    (root / "bad.sh").write_text("#!/bin/bash\ncd $1\n")  # it finds what it is there to find
    assert subprocess.run([program, str(root / "bad.sh")], capture_output=True, check=False).returncode == 1
