"""Tests of shipped profiles and hostile text with the real sbatch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.cluster.profile import load_profile
from launch.job import Job
from launch.job.render import render
from tests.launch import hostile
from tests.slurm.mini import MiniSlurm

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs" / "cluster").glob("slurm_*.yaml"))


@pytest.fixture(scope="module")
def h100s() -> Iterator[MiniSlurm]:
    """Two nodes with the configured size for which the shipped profiles are made."""
    with MiniSlurm(nodes=2, cpus=96, gpus=8) as running:
        yield running


def refusal(cluster: MiniSlurm, script: str, root: Path) -> str:
    """Return the message of ``sbatch --test-only`` for a script; empty if it would run."""
    path = root / "job.sh"
    path.write_text(script, encoding="utf-8", newline="")
    done = cluster.run("sbatch", "--test-only", path, check=False)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_sbatch_takes_the_shipped_profiles(path: Path, h100s: MiniSlurm, tmp_path: Path) -> None:
    profile = load_profile(path)
    job = hostile.job(tmp_path, profile)
    assert refusal(h100s, render(job), tmp_path) == ""
    assert refusal(h100s, render(job, array="0-5%2", exclude=[]), tmp_path) == ""
    # The cluster refuses resources that it does not have: one more node, one more GPU, excluded
    # nodes.
    assert "not available" in refusal(
        h100s, render(hostile.job(tmp_path, profile, nodes=3)), tmp_path
    )
    assert "not available" in refusal(h100s, render(job, exclude=["node2"]), tmp_path)
    more = load_profile(path, ["nodes.gpus=9"])
    assert "not available" in refusal(h100s, render(hostile.job(tmp_path, more)), tmp_path)


def test_every_option_reaches_slurm(h100s: MiniSlurm, tmp_path: Path) -> None:
    overrides = [
        "nodes.cpus=12",
        "nodes.memory=3G",
        "nodes.gres=gpu:4",
        "slurm.partition=urgent,main",
        "slurm.time=1-02:03:00",
    ]
    overrides += [
        "slurm.exclude=[node1]",
        "slurm.signal_seconds=77",
        "slurm.options=['--comment=two words', --nice=5]",
    ]
    profile = load_profile(SHIPPED[0], overrides)
    first = h100s.sbatch("--hold", "--wrap=true")
    script = render(hostile.job(tmp_path, profile, nodes=1), dependency=f"afterok:{first}")
    (tmp_path / "job.sh").write_text(script)
    job = h100s.job(h100s.sbatch(tmp_path / "job.sh"))
    h100s.run("scancel", job["JobId"], str(first))
    shown = (
        "JobName NumNodes CPUs/Task MinMemoryNode TresPerNode Partition TimeLimit ExcNodeList"
        " Requeue OverSubscribe Nice".split()
    )
    values = "job 1-1 12 3G gres:gpu:4 urgent,main 1-02:03:00 node1 1 NO 5".split()
    assert [job.get(name) for name in shown] == values and (
        job["Comment"],
        job["KillOInInvalidDependent"],
    ) == ("two words", "Yes")
    assert job["Dependency"] == f"afterok:{first}(unfulfilled)"


def test_hostile_text_goes_through_slurm_unchanged(cluster: MiniSlurm, tmp_path: Path) -> None:
    """Each text as the job's name, comment, variable, run directory, working directory and path of
    the output.
    """
    hostile.recorder(tmp_path)
    sent: dict[int, tuple[str, str, Job]] = {}
    for number, text in enumerate(hostile.TEXTS):
        root = tmp_path / str(number)
        on_a_line = text if not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", text) else "plain"
        job_id, job = submitted(text, on_a_line, root, cluster)
        sent[job_id] = (text, on_a_line, job)
    for job_id, (text, on_a_line, job) in sent.items():
        assert cluster.wait(job_id) == "COMPLETED", (text, output(job, job_id))
        assert output(job, job_id) == "", text
        words, folder, environment = hostile.recorded(job.path.parent / "record")
        assert words == ["-m", "launch.supervise", job.directory]
        assert (folder, environment["VALUE"], environment["PYTHONPATH"]) == (
            job.working_directory,
            text,
            job.code,
        )
        shown = cluster.run("scontrol", "show", "--oneliner", "job", str(job_id)).stdout
        assert f"JobName={on_a_line} UserId=" in shown and f"Comment={on_a_line} " in shown
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(hostile.MARK)] == []
    assert not [name for name in os.listdir(cluster.root) if name.startswith(hostile.MARK)]


def submitted(text: str, on_a_line: str, root: Path, cluster: MiniSlurm) -> tuple[int, Job]:
    """Return the id and the job with the text in every possible field; output is in root/logs if
    Slurm does not accept the directory's name.
    """
    directory, work = root / f"run{text}", root / f"work{text}"
    for folder in (directory / "launch", work, root / "logs"):
        folder.mkdir(parents=True)
    (root / "profile.yaml").write_text(
        hostile.profile_text("environment", "dict", text), encoding="utf-8"
    )
    plain = [
        f"host_python={root.parent}/recorder",
        "nodes.exclusive=false",
        "nodes.memory=10M",
        f"environment.RECORD={root}/record",
    ]
    plain += [f"slurm.options=[{hostile.yaml_word(f'--comment={on_a_line}')}]"]
    plain += [f"logs={root}/logs"] if on_a_line != text or "\\" in text else []
    profile = load_profile(root / "profile.yaml", plain)
    job = hostile.job(
        root,
        profile,
        nodes=1,
        name=on_a_line,
        directory=str(directory),
        working_directory=str(work),
        code=f"{root}/code{text}",
    )
    (root / "job.sh").write_text(render(job), encoding="utf-8", newline="")
    return cluster.sbatch(root / "job.sh", cwd=root), job


def output(job: Job, job_id: int) -> str:
    """Return Slurm's output from the one of its two folders where it must be."""
    folders = (job.path / "launch", job.path.parent / "logs")
    (path,) = (folder / f"slurm-{job_id}.out" for folder in folders if any(folder.iterdir()))
    return path.read_text()
