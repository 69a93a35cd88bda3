"""Cluster profiles: every mistake ends in one line that says where, which key, and what would do."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from fem_common.errors import UserError
from launch.cluster import strict
from launch.cluster.profile import Profile, from_json, load_profile
from tests.launch import hostile

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs" / "cluster").glob("*.yaml"))
KEYS = list(strict.walk(Profile))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test writes its profile."""
    return tmp_path / "profile.yaml"


def given(path: Path, text: str, *overrides: str) -> Profile:
    """The profile of a text."""
    path.write_text(text, encoding="utf-8")
    return load_profile(path, overrides)


def complaint(path: Path, text: str, *overrides: str) -> str:
    """What a user is told; fails where nothing is wrong."""
    with pytest.raises(UserError) as caught:
        given(path, text, *overrides)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def nested(key: str, value: Any) -> str:
    """YAML with a value at a dotted key, of the key's line alone."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return yaml.safe_dump(value)


# --- what is shipped -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda shipped: shipped.stem)
def test_shipped_profiles_are_right_and_survive_json(shipped: Path) -> None:
    profile = load_profile(shipped)
    assert profile.scheduler == shipped.stem.partition("_")[0]
    plain = json.loads(json.dumps(profile.as_json()))
    assert plain == profile.as_json()
    assert from_json(plain) == profile


def test_the_five_profiles_are_there() -> None:
    assert {shipped.stem for shipped in SHIPPED} >= {"slurm_h100_ib", "slurm_h100_efa", "slurm_generic", "local_gpu", "local_cpu"}


def test_the_generic_profile_shows_every_key_with_its_default() -> None:
    tree = yaml.safe_load((ROOT / "configs/cluster/slurm_generic.yaml").read_text())
    profile = load_profile(ROOT / "configs/cluster/slurm_generic.yaml")
    other = {"nodes.gpus", "nodes.cpus", "environment"}  # where a comment or an example says another
    for key, _, _ in KEYS:
        shown, default, value = tree, Profile(), profile
        for name in key.split("."):
            assert name in shown, f"{key} is not shown"
            shown, default, value = shown[name], getattr(default, name), getattr(value, name)
        assert value == default or key in other, key


def test_variables_in_shipped_profiles_have_a_reason_beside_them() -> None:
    for shipped in SHIPPED:
        lines = shipped.read_text(encoding="utf-8").splitlines()
        for name in load_profile(shipped).environment:
            (at,) = (number for number, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
            assert "#" in lines[at] or lines[at - 1].strip().startswith("#"), f"{shipped.name}: {name}"


def test_every_key_is_documented() -> None:
    assert [key for key, item, _ in KEYS if len(strict.spec(item).doc) < 10] == []


def test_a_profile_may_write_over_another(path: Path) -> None:
    (path.parent / "site.yaml").write_text("nodes: {gpus: 4, cpus: 9}\nenvironment: {A: 1, B: 2}\nslurm: {exclude: [n1]}\n")
    profile = given(path, "base: site\nnodes: {cpus: 8}\nenvironment: {B: null, C: x}\nslurm: {exclude: [n2], partition: p}\n")
    assert (profile.nodes.gpus, profile.nodes.cpus, profile.slurm.exclude, profile.slurm.partition) == (4, 8, ("n2",), "p")
    assert profile.environment == {"A": "1", "C": "x"}
    assert given(path, f"base: {ROOT}/configs/cluster/slurm_h100_ib.yaml").nodes.gpus == 8
    assert "there is no file" in complaint(path, "base: slurm_genric") and "did you mean slurm_generic?" in complaint(
        path, "base: slurm_genric"
    )
    path.write_text("base: slurm_generic\nslurm: {partition: mine}\n")  # a shipped one, from any folder
    assert load_profile(path).slurm.partition == "mine" and load_profile(path).nodes.gpus == 8
    assert load_profile("slurm_generic") == load_profile(ROOT / "configs/cluster/slurm_generic.yaml")
    assert "circle" in complaint(path, "base: profile")
    (path.parent / "site.yaml").write_text("nodes: {gpu: 4}\n")
    assert complaint(path, "base: site").startswith(f"{path.parent}/site.yaml:1: unknown key nodes.gpu;")


@pytest.mark.parametrize("slurm", ["{time: 7}", "{time: 00:06:01}", "{time: 0-1, signal_seconds: 3539}", "{time: unlimited}", "{}"])
def test_a_time_limit_that_leaves_time_is_taken(slurm: str, path: Path) -> None:
    given(path, f"slurm: {slurm}")


# --- mistakes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [key for key, _, _ in KEYS])
def test_a_misspelled_key_is_told_with_its_line_and_the_nearest(key: str, path: Path) -> None:
    *sections, name = key.split(".")
    wrong = ".".join([*sections, name[:-1] + "_"])
    said = complaint(path, f"# a comment\n\n{nested(wrong, 1)}")
    line = 3 + len(sections)
    assert said == f"{path}:{line}: unknown key {wrong}; did you mean {key}?" or (said.startswith(f"{path}:{line}: unknown key {wrong};"))
    assert key in said or len(name) < 4


@pytest.mark.parametrize(("key", "kind"), [(key, kind) for key, _, kind in KEYS])
def test_a_value_of_another_type_is_refused(key: str, kind: Any, path: Path) -> None:
    bare = [inner for inner in typing.get_args(kind) if inner is not type(None)] if type(None) in typing.get_args(kind) else [kind]
    right = typing.get_origin(bare[0]) or bare[0]
    wrong: dict[Any, list[Any]] = {
        bool: ["true", 1, 0, [], {}, "yes"],
        int: ["8", 1.5, True, [], {}, 10**30],
        float: ["8", True, [], {}, float("nan"), float("inf")],
        str: [True, False, [], {}],
        tuple: ["a", 1, True, {}, [True], [[]], [{}], [None]],
        dict: ["a", 1, True, [], {"A": []}, {"A": True}],
    }
    values = wrong[right] + ([] if bare != [kind] or right is dict else [None])
    for value in values:
        said = complaint(path, nested(key, value))
        assert said.startswith(f"{path}:") and key in said and "expected" in said, (value, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scheduler: slrum", "{path}:1: scheduler = 'slrum' is not a choice; did you mean slurm?"),
        ("nodes:\n  numa: nodes", "{path}:2: nodes.numa = 'nodes' is not a choice; did you mean node?"),
        ("notify: {events: [begun]}", "{path}:1: notify.events.0 = 'begun' is not a choice; choose one of started, finished,"),
        ("nodes: {gpus: -1}", "{path}:1: nodes.gpus = -1: must be 0 or more"),
        ("nodes: {cpus: 010}", "{path}:1: nodes.cpus = 010: expected a whole number"),
        ("watchdog: {step_minutes: 1:30}", "{path}:1: watchdog.step_minutes = 1:30: expected a number"),
        ("slurm: {time: tomorrow}", "{path}:1: slurm.time = 'tomorrow': expected 24:00:00, 3-00:00:00 or minutes"),
        ("slurm: {time: 5}", "{path}: slurm.time = 5 must be more than slurm.signal_seconds = 300 and the 60 seconds that"),
        ("slurm: {time: 00:06:00}", "{path}: slurm.time = 00:06:00 must be more than slurm.signal_seconds = 300"),
        ("slurm: {time: 0-1, signal_seconds: 3540}", "{path}: slurm.time = 0-1 must be more than slurm.signal_seconds = 3540"),
        ("notify: {command: curl https:///T}", "{path}:1: notify.command = 'curl https:///T': an address may hold a token: put the"),
        ("notify: {command: say HTTP://x}", "{path}:1: notify.command = 'say HTTP://x': an address may hold a token: put the call"),
        ("slurm: {account: yes}", "{path}:1: slurm.account = yes: expected text or null, in quotes"),
        ("slurm: {partition: null, partition: a}", "{path}:1: key 'partition' is given twice"),
        ("nodes: {gpus: 1}\nlogs: x\nnodes: {cpus: 1}", "{path}:3: key 'nodes' is given twice"),
        ("python: &a x\nhost_python: *a", "{path}:2: alias *a: write the value out"),
        ("python: !!python/name:os.system x", "{path}:1: tag tag:yaml.org,2002:python/name:os.system: a plain value is expected"),
        ("python: !mine x", "{path}:1: tag !mine: a plain value is expected"),
        ("nodes: {gpus: 1", "{path}:1: not valid YAML:"),
        ("a: 1\n\tb: 2", "{path}:2: not valid YAML:"),
        ("- nodes", "{path}: expected a mapping of keys to values, got a list"),
        ("", "{path}: expected a mapping of keys to values, got nothing"),
        ("[a]: 1", "{path}:1: a key must be a word"),
        ("slurm: {options: [-k]}", "{path}:1: slurm.options.0 = '-k': expected one option as --name or --name=value"),
        ("slurm: {options: [--mail-type FAIL]}", "{path}:1: slurm.options.0 = '--mail-type FAIL': expected one option"),
        ("slurm: {options: [--partition=x]}", "{path}:1: slurm.options.0 = '--partition=x': write it as slurm.partition"),
        ("slurm: {options: [--no-requeue]}", "{path}:1: slurm.options.0 = '--no-requeue': the launcher decides it"),
        ("paths: {shared: [$NOT_THERE/x]}", "{path}:1: paths.shared.0 = '$NOT_THERE/x': $NOT_THERE is not set here"),
        ("logs: /x/$HF_TOKEN", "{path}:1: logs = '/x/$HF_TOKEN': $HF_TOKEN looks like a secret, which may not become part of a path"),
        ("logs: /x/$(y)", "{path}:1: logs = '/x/$(y)': only $NAME and ${NAME} are filled in"),
        ("container: {runtime: pyxis}", "{path}: container.runtime = pyxis and container.image = null: give both or neither"),
        ("container: {runtime: pyxis, image: a, mounts: [a]}", "{path}:1: container.mounts.0 = 'a': expected /on/the/node:"),
        ("container: {runtime: pyxis, image: a, options: [--nv]}", "{path}: container.options: '--nv': pyxis has --container-..."),
        ("{container: {runtime: pyxis, image: a}, paths: {shared: ['/a:/b']}}", "{path}: paths.shared: '/a:/b': a folder with a colon"),
        ("nodes: {gpus: 2, processes: 3}", "{path}: nodes.processes = 3 is more than nodes.gpus = 2"),
        ("nodes: {numa: node}", "{path}: nodes.numa = node: torchrun binds ranks to the CPUs near their GPU, and nodes.gpus is 0"),
        ("nodes: {gpus: null}", "{path}: nodes.gpus = null: say how many GPUs a node has"),
        ("restarts: {back_off_seconds: 1e3}", "{path}: restarts.back_off_max_seconds is less than"),
        ("environment: {A-B: x}", "{path}: environment: 'A-B' is not a variable's name"),
        ("environment: {WANDB_API_KEY: x}", "{path}: environment.WANDB_API_KEY looks like a secret: export it in your shell"),
        ("environment: {P: 'redis://a:b@c'}", "{path}: environment.P looks like a secret"),
        ("environment: {PATH: /x}", "{path}: environment.PATH cannot be set here: write `export PATH=/folder:$PATH` in setup.lines"),
        ("environment: {SLURM_X: 1}", "{path}: environment.SLURM_X cannot be set here: Slurm sets it"),
        ("environment: {L: '/x:$L'}", "{path}: environment.L would refer to itself"),
        ("setup: {lines: ['if true']}", "{path}: setup.lines: bash: "),
        ("setup: {lines: ['a \"b']}", "{path}: setup.lines: bash: "),
        ("setup: {lines: [\"a\\r\"]}", "{path}:1: setup.lines.0 = 'a\\\\r': sbatch refuses scripts with carriage returns"),
        ("setup: {lines: [\"\\0\"]}", "{path}:1: setup.lines.0 = '\\\\x00': NUL and half characters"),
    ],
)  # fmt: skip
def test_what_is_said_of_mistakes(text: str, said: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    monkeypatch.delenv("NOT_THERE", raising=False)
    told = complaint(path, text)
    assert told.startswith(said.replace("{path}", str(path)).replace("\\\\", "\\"))
    assert "a-secret-value" not in told


def test_a_value_of_a_secret_is_not_repeated(path: Path) -> None:
    assert "0123456789" not in complaint(path, "environment: {WANDB_API_KEY: '0123456789'}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "slurm_mine.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"slurm_mine.yaml: not a text file in UTF-8"):
        load_profile(tmp_path / "slurm_mine.yaml")
    with pytest.raises(UserError, match=r"slurm_mien.yaml: no such file; did you mean .*/slurm_mine.yaml\?"):
        load_profile(tmp_path / "slurm_mien.yaml")
    with pytest.raises(UserError, match="Is a directory"):
        load_profile(tmp_path)


# --- values as people write them -----------------------------------------------------------------------------------------------


def test_words_and_numbers_are_read_as_written(path: Path) -> None:
    profile = given(
        path,
        """
        slurm: {time: 24:00:00, account: 0123, exclude: [007]}
        nodes: {memory: 0, cpus: 1_0}
        watchdog: {step_minutes: 5, save_minutes: .5}
        restarts: {back_off_max_seconds: 1e3}
        environment: {NCCL_IB_TIMEOUT: 22, HEX: 0x10, DAY: 2024-01-01, ON: "on", TILDE: "~", EMPTY: "", FLOAT: 1.50}
        """,
    )
    assert (profile.slurm.time, profile.slurm.account, profile.slurm.exclude) == ("24:00:00", "0123", ("007",))
    assert (profile.nodes.memory, profile.nodes.cpus) == ("0", 10)
    assert (profile.watchdog.step_minutes, profile.watchdog.save_minutes, profile.restarts.back_off_max_seconds) == (5.0, 0.5, 1000.0)
    assert isinstance(profile.watchdog.step_minutes, float)
    written = {"NCCL_IB_TIMEOUT": "22", "HEX": "0x10", "DAY": "2024-01-01", "ON": "on", "TILDE": "~", "EMPTY": "", "FLOAT": "1.50"}
    assert profile.environment == written


@pytest.mark.parametrize("text", hostile.TEXTS, ids=ascii)
def test_text_of_a_variable_arrives_as_written_and_survives_json(text: str, path: Path) -> None:
    profile = given(path, hostile.profile_text("environment", "dict", text))
    assert profile.environment == {"VALUE": text}
    assert from_json(json.loads(json.dumps(profile.as_json()))) == profile


def test_overrides_go_over_the_file_in_order(path: Path) -> None:
    overrides = ("slurm.partition=a", "slurm.partition=b", "nodes.gpus=2", "environment.X=1", "slurm.exclude=[n1, n2]", "slurm={qos: q}")
    profile = given(path, "slurm: {account: me}", *overrides)
    assert (profile.slurm.partition, profile.slurm.account, profile.slurm.qos, profile.nodes.gpus) == ("b", "me", "q", 2)
    assert (profile.environment, profile.slurm.exclude) == ({"X": "1"}, ("n1", "n2"))
    assert (
        complaint(path, "logs: x", "slurm.partitoin=a")
        == "--set slurm.partitoin: unknown key slurm.partitoin; did you mean slurm.partition?"
    )
    assert complaint(path, "logs: x", "nodes.gpus=many") == "--set nodes.gpus: nodes.gpus = 'many': expected a whole number or null"
    assert complaint(path, "logs: x", "nodes.gpus=[") .startswith("--set nodes.gpus: not valid YAML")  # fmt: skip
    assert complaint(path, "logs: x", "partition") == "--set 'partition': expected section.key=value"
    assert complaint(path, "logs: x", "logs.x=1") == "--set logs.x: logs = a mapping: expected text or null"


def test_paths_are_filled_in_and_absolute(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/shared/me")
    monkeypatch.chdir(path.parent)
    profile = given(
        path,
        """
        python: venv/bin/python
        host_python: python3
        logs: logs
        paths: {shared: [$PLACE/runs, "${PLACE}2", ~/x], cordon: ../cordon.jsonl}
        container: {runtime: pyxis, image: nvcr.io/nvidia/pytorch:25.06-py3, mounts: ["$PLACE:/data:ro"]}
        environment: {KEPT: $PLACE}
        notify: {command: echo $PLACE}
        """,
    )
    here = os.getcwd()
    assert (profile.python, profile.host_python, profile.logs) == (f"{here}/venv/bin/python", "python3", f"{here}/logs")
    assert profile.paths.shared == ("/shared/me/runs", "/shared/me2", f"{os.path.expanduser('~')}/x")
    assert profile.paths.cordon == f"{os.path.dirname(here)}/cordon.jsonl"
    assert (profile.container.image, profile.container.mounts) == ("nvcr.io/nvidia/pytorch:25.06-py3", ("/shared/me:/data:ro",))
    assert (profile.environment["KEPT"], profile.notify.command) == ("$PLACE", "echo $PLACE")
    assert given(path, "{container: {runtime: apptainer, image: ./a.sif}}").container.image == f"{here}/a.sif"


# --- what follows from values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "ranks"), [("{}", 1), ("{gpus: 4}", 4), ("{gpus: 4, processes: 2}", 2), ("{processes: 6}", 6)])
def test_ranks_a_node(nodes: str, ranks: int, path: Path) -> None:
    assert given(path, f"nodes: {nodes}").processes_per_node == ranks


def test_interpreters(path: Path) -> None:
    assert given(path, "logs: /x").interpreters("/me") == ("/me", "/me")
    assert given(path, "python: /p").interpreters("/me") == ("/p", "/p")
    assert given(path, "{python: /p, host_python: /h}").interpreters("/me") == ("/p", "/h")
    assert given(path, "{python: /p, container: {runtime: pyxis, image: i}}").interpreters("/me") == ("/p", "/me")


@pytest.mark.parametrize(("listed", "visible", "gpus"), [(3, None, 3), (3, "0,2", 2), (0, None, 1), (None, None, 1)])
def test_gpus_of_this_machine_are_counted(
    listed: int | None, visible: str | None, gpus: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program in nvidia-smi's place; where it lists none, or there is none, one: the check before the run is to miss it."""
    if listed is not None:
        rows = "\n".join(f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: GPU-{number}ca5)" for number in range(listed))
        program = path.parent / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}\nEND\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert given(path, "{scheduler: local, nodes: {gpus: null}}").nodes.gpus == gpus


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Profile().nodes.gpus = 3  # type: ignore[misc]
