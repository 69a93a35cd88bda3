"""Tests of cluster profiles: the shipped ones, allowed values, and derived values.
`fem_common.config` reads them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import yaml

from fem_common import config
from fem_common.errors import UserError
from fem_common.settings import spec
from launch.cluster import profile_values
from launch.cluster.profile import Profile, from_json, load_profile
from tests.launch import hostile
from tests.wording import Wording

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs" / "cluster").glob("*.yaml"))
KEYS = [
    (key, item) for key, item, kind in config.walk(Profile) if not dataclasses.is_dataclass(kind)
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the test's profile."""
    return tmp_path / "profile.yaml"


def given(path: Path, text: str, *overrides: str) -> Profile:
    """Load a profile from text."""
    path.write_text(text, encoding="utf-8")
    return load_profile(path, overrides)


def test_shipped_profiles_are_right_survive_json_and_give_a_reason_for_each_variable() -> None:
    names = "slurm_h100_ib slurm_h100_efa slurm_generic local_gpu local_cpu".split()
    assert {shipped.stem for shipped in SHIPPED} >= {*names}
    for shipped in SHIPPED:
        profile = load_profile(shipped)
        assert profile.scheduler == shipped.stem.partition("_")[0]
        plain = json.loads(json.dumps(profile.as_json()))
        assert plain == profile.as_json() and from_json(plain) == profile
        lines = shipped.read_text(encoding="utf-8").splitlines()
        for name in profile.environment:
            (at,) = (
                number for number, line in enumerate(lines) if line.strip().startswith(f"{name}:")
            )
            assert "#" in lines[at] or lines[at - 1].strip().startswith("#"), (
                f"{shipped.name}: {name}"
            )


def test_the_generic_profile_shows_every_key_with_its_default() -> None:
    path = ROOT / "configs/cluster/slurm_generic.yaml"
    tree, profile = yaml.safe_load(path.read_text()), load_profile(path)
    # A comment or an example shows another value for these keys.
    other = {"nodes.gpus", "nodes.cpus", "environment"}
    for key, item in KEYS:
        shown = tree
        default = Profile()
        value = profile
        for name in key.split("."):
            assert name in shown, f"{key} is not shown"
            shown = shown[name]
            default = getattr(default, name)
            value = getattr(value, name)
        assert (value == default or key in other) and len(spec(item).doc) >= 10, key


def test_a_profile_may_write_over_another_from_next_to_it_or_a_shipped_one(path: Path) -> None:
    (path.parent / "site.yaml").write_text(
        "nodes: {gpus: 4, cpus: 9}\nenvironment: {A: 1, B: 2}\nslurm: {exclude: [n1]}\n"
    )
    profile = given(
        path,
        "base: site\nnodes: {cpus: 8}\nenvironment: {B: null, C: x}\nslurm: {exclude: [n2],"
        " partition: p}\n",
    )
    assert (profile.nodes.gpus, profile.nodes.cpus) == (4, 8)
    assert (profile.slurm.exclude, profile.slurm.partition) == (("n2",), "p")
    assert profile.environment == {"A": "1", "C": "x"}
    path.write_text("base: slurm_generic\nslurm: {partition: mine}\n")
    assert load_profile(path).slurm.partition == "mine" and load_profile(path).nodes.gpus == 8
    assert load_profile("slurm_generic", ["slurm.time=7"]).slurm.time == "7"


MISTAKES = """\
nodes: {gpuss: 1}
notify: {events: [begun]}
slurm: {time: tomorrow}
slurm: {time: 5}
slurm: {time: 00:06:00}
slurm: {time: 0-1, signal_seconds: 3540}
notify: {command: curl https:///T}
notify: {command: say HTTP://x}
slurm: {options: [-k]}
slurm: {options: [--mail-type FAIL]}
slurm: {options: [--partition=x]}
slurm: {options: [--no-requeue]}
paths: {shared: [$NOT_THERE/x]}
logs: /x/$HF_TOKEN
logs: /x/$(y)
logs: -x
container: {runtime: pyxis}
container: {runtime: pyxis, image: a, mounts: [a]}
container: {runtime: pyxis, image: a, options: [--nv]}
{container: {runtime: pyxis, image: a}, paths: {shared: ['/a:/b']}}
{container: {runtime: pyxis, image: a}, scheduler: local}
nodes: {gpus: 2, processes: 3}
nodes: {numa: node}
nodes: {gpus: null}
nodes: {memory: much}
restarts: {back_off_seconds: 1e3}
environment: {A-B: x}
environment: {WANDB_API_KEY: '0123456789'}
environment: {P: 'redis://a:0123456789@c'}
environment: {PATH: /x}
environment: {SLURM_X: 1}
environment: {L: '/x:$L'}
setup: {lines: ["a\\r"]}
setup: {lines: ["\\0"]}
setup: {modules: [a b]}
"""


def test_each_mistake_is_one_line_that_repeats_no_secret(
    path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    monkeypatch.delenv("NOT_THERE", raising=False)
    for text in MISTAKES.splitlines():
        with pytest.raises(UserError) as caught:
            given(path, text)
        output = str(caught.value)
        assert (
            output.startswith(str(path))
            and "\n" not in output
            and "a-secret-value" not in output
            and "0123456789" not in output
        ), text
        wording(output)
    with pytest.raises(UserError) as caught:
        load_profile("slurm_h100")
    wording(caught.value)


def test_lines_that_bash_does_not_understand_are_refused(path: Path) -> None:
    for line in ("if true", 'a "b'):
        with pytest.raises(UserError, match="setup.lines: bash: "):
            given(path, f"setup: {{lines: ['{line}']}}")


def test_words_and_numbers_are_read_as_written(path: Path) -> None:
    profile = given(
        path,
        """
        slurm: {time: 24:00:00, account: 0123, exclude: [007]}
        nodes: {memory: 0, cpus: 1_0}
        environment: {NCCL_IB_TIMEOUT: 22, HEX: 0x10, DAY: 2024-01-01, ON: "on", TILDE: "~", EMPTY: "", FLOAT: 1.50}
        """,  # noqa: E501
    )
    assert (profile.slurm.time, profile.slurm.account) == ("24:00:00", "0123")
    assert (profile.slurm.exclude, profile.nodes.memory, profile.nodes.cpus) == (("007",), "0", 10)
    written = "NCCL_IB_TIMEOUT=22 HEX=0x10 DAY=2024-01-01 ON=on TILDE=~ EMPTY= FLOAT=1.50"
    assert profile.environment == dict(word.split("=") for word in written.split())
    for text in hostile.TEXTS:
        profile = given(path, hostile.profile_text("environment", "dict", text))
        assert profile.environment == {"VALUE": text}
        assert from_json(json.loads(json.dumps(profile.as_json()))) == profile


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
        """,  # noqa: E501
    )
    here = os.getcwd()
    assert (profile.python, profile.host_python) == (f"{here}/venv/bin/python", "python3")
    home = f"{os.path.expanduser('~')}/x"
    assert profile.paths.shared == ("/shared/me/runs", "/shared/me2", home)
    assert (profile.logs, profile.paths.cordon) == (
        f"{here}/logs",
        f"{os.path.dirname(here)}/cordon.jsonl",
    )
    assert profile.container.image == "nvcr.io/nvidia/pytorch:25.06-py3"
    assert profile.container.mounts == ("/shared/me:/data:ro",)
    assert (profile.environment["KEPT"], profile.notify.command) == ("$PLACE", "echo $PLACE")
    assert (
        given(path, "{container: {runtime: apptainer, image: ./a.sif}}").container.image
        == f"{here}/a.sif"
    )


def test_what_follows_from_values(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, ranks in (
        ("{}", 1),
        ("{gpus: 4}", 4),
        ("{gpus: 4, processes: 2}", 2),
        ("{processes: 6}", 6),
    ):
        assert given(path, f"nodes: {nodes}").processes_per_node == ranks
    assert given(path, "logs: /x").interpreters("/me") == ("/me", "/me")
    assert given(path, "python: /p").interpreters("/me") == ("/p", "/p")
    assert given(path, "{python: /p, host_python: /h}").interpreters("/me") == ("/p", "/h")
    assert given(path, "{python: /p, container: {runtime: pyxis, image: i}}").interpreters(
        "/me"
    ) == ("/p", "/me")
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    # The count is that of a program in place of nvidia-smi. If it lists no GPU, or does not exist,
    # the count is 1, so that the check before the run reports the missing GPU.
    for listed, visible, gpus in ((None, "", 1), (3, "", 3), (3, "0,2", 2), (0, "", 1)):
        if listed is not None:
            rows = "\n".join(f"GPU {number}: NVIDIA H100" for number in range(listed))
            hostile.program(path.parent / "nvidia-smi", f"#!/bin/sh\ncat <<'END'\n{rows}\nEND\n")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert given(path, "{scheduler: local, nodes: {gpus: null}}").nodes.gpus == gpus


TIMES = {
    "30": 1800,
    "30:15": 1815,
    "12:00:00": 43200,
    "2-12": 216000,
    "2-12:30": 217800,
    "1-00:00:01": 86401,
    "UNLIMITED": float("inf"),
}


def test_time_limits_are_read_as_slurm_writes_them_and_taken_where_they_leave_time(
    path: Path,
) -> None:
    assert {limit: profile_values.seconds(limit) for limit in TIMES} == TIMES
    for slurm in (
        "{time: 7}",
        "{time: 00:06:01}",
        "{time: 0-1, signal_seconds: 3539}",
        "{time: unlimited}",
        "{}",
    ):
        given(path, f"slurm: {slurm}")
