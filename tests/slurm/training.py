"""A real training job of the demo model on a MiniSlurm: its data, its profile, how to submit it, and what to read from it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.slurm import processes
from tests.slurm.mini import MiniSlurm

ROOT = Path(__file__).resolve().parents[2]
DEMO = "configs/run/demo.yaml"
STEPS = 160
SMALL = (
    "data.seq_length=32",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=64",
    f"train.steps={STEPS}",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    f"train.eval_interval={STEPS // 2}",
    "train.eval_batches=1",
    "optimizer.warmup_steps=3",
    "checkpoint.interval=40",
    "log.diagnostics_interval=0",
    "data.test=[]",
)
QUICK = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def prepare_data(folder: Path) -> Path:
    """A data folder of 512 entries by data_prep: some modules of the standard library."""
    texts = [part for module in (ast, inspect, json, os, subprocess, textwrap) for part in inspect.getsource(module).split("\n\n\n")]
    pq.write_table(pa.table({"text": texts, "id": [f"doc-{i}" for i in range(len(texts))]}), folder / "corpus.parquet")
    call("data_prep", "train-tokenizer", folder / "corpus.parquet", "--vocab-size", "512", "--out", folder / "tokenizer")
    splits = ("--valid-percent", "10", "--test-percent", "0")
    call("data_prep", "run", folder / "corpus.parquet", "--tokenizer", folder / "tokenizer", "--out", folder / "data", *splits)
    return folder / "data"


def call(*words: str | Path, env: Mapping[str, str] | None = None, code: int = 0, timeout: float = 300) -> str:
    """``python -m WORDS`` from the checkout: what it printed; fails unless it ends with ``code``."""
    command = [sys.executable, "-m", *map(str, words)]
    environment = {**(os.environ if env is None else env), **QUICK}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == code, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout if code == 0 else done.stdout + done.stderr


def overrides(data: Path, run: Path) -> list[str]:
    """What makes the demo's configuration a run of seconds."""
    return [f"run_dir={run}", f"data.train.0.prefix={data / 'train'}", f"data.valid.0.prefix={data / 'valid'}", *SMALL]


def profile(folder: Path, scheduler: str, sections: Mapping[str, Mapping[str, Any]]) -> Path:
    """A cluster profile of a rank a node without GPUs; ``sections`` are added to its own."""
    values: dict[str, Any] = {
        "scheduler": scheduler,
        "python": sys.executable,
        "nodes": {"gpus": 0, "cpus": 2, "exclusive": False},
        "environment": QUICK,
        "paths": {"shared": [str(folder)], "cordon": str(folder / "cordon.jsonl")},
        "restarts": {"back_off_seconds": 0.2, "back_off_max_seconds": 1.0},
        "health": {"matmul": False, "free_disk_gb": 0},
    }
    if scheduler == "slurm":
        values["slurm"] = {"time": "30"}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path = folder / f"{scheduler}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def losses(run: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Step -> training loss, step -> validation loss; the last line of a step counts."""
    train, valid = dict[int, float](), dict[int, float]()
    for line in _lines(run / "metrics.jsonl"):
        if "loss" in line:
            train[line["step"]] = line["loss"]
        if "valid_loss" in line:
            valid[line["step"]] = line["valid_loss"]
    return train, valid


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


class Run:
    """A training run on two nodes of a cluster, in ``folder``/run."""

    def __init__(self, cluster: MiniSlurm, data: Path, folder: Path, **sections: Mapping[str, Any]) -> None:
        self.cluster, self.folder, self.directory = cluster, folder, folder / "run"
        self.profile = profile(folder, "slurm", sections)
        self.overrides = overrides(data, self.directory)
        self.job = 0

    def submit(self, *more: str, env: Mapping[str, str] | None = None) -> None:
        """``launch submit``."""
        self.job = int(
            self.launch("submit", DEMO, *self.overrides, "--cluster", self.profile, "--nodes", "2", "--parsable", *more, env=env)
        )

    def launch(self, *words: str | Path, env: Mapping[str, str] | None = None, code: int = 0) -> str:
        """A verb of launch on this cluster."""
        return call("launch", *words, env={**self.cluster.environment, **(env or {})}, code=code)

    def step(self) -> int:
        """The last step in metrics.jsonl; 0 before the first."""
        return max((line["step"] for line in _lines(self.directory / "metrics.jsonl")), default=0)

    def until(self, what: str, met: Callable[[], Any], timeout: float = 120) -> Any:
        """Poll until ``met`` gives something true: that. Fails with the run's story after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not (found := met()):
            assert time.monotonic() < deadline, f"no {what} after {timeout} s\n{self.story()}"
            time.sleep(0.05)
        return found

    def until_step(self, step: int) -> None:
        """Wait for a step."""
        self.until(f"step {step}", lambda: self.step() >= step)

    def until_further(self, steps: int) -> None:
        """Wait for so many steps more than there are now, whichever attempt does them; an attempt may do steps again."""
        path = self.directory / "metrics.jsonl"
        lines = len(_lines(path)) + steps
        self.until(f"{steps} further steps", lambda: len(_lines(path)) >= lines or self.state().get("state") == "finished", 600)

    def kill_one(self, what: str, chance: random.Random) -> None:
        """SIGKILL to one of the ranks, or to the batch script, as soon as there is one."""

        def kill() -> bool:
            try:
                pid = chance.choice(self.rank_pids()) if what == "rank" else self.cluster.batch_pid(self.job)
                os.kill(pid, signal.SIGKILL)
            except (LookupError, ProcessLookupError):  # between two attempts
                return False
            return True

        self.until(what, kill, 600)

    def wait(self, *states: str, timeout: float = 240) -> None:
        """Wait until the job is in one of these states; of those that end it, the first counts."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
        state = self.until("end", lambda: (now := self.cluster.state(self.job)) in {*states, *over} and now, timeout)
        assert state in states, f"job {self.job} is {state}\n{self.story()}"

    def state(self) -> dict[str, Any]:
        """state.json; empty where there is none."""
        return _json(self.directory / "launch" / "state.json")

    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt.json, oldest first."""
        return [_json(path) for path in sorted((self.directory / "attempts").glob("*/attempt.json"))]

    def outcomes(self) -> list[str | None]:
        """How the attempts ended."""
        return [attempt.get("outcome") for attempt in self.attempts()]

    def rank_pids(self, rank: int | None = None) -> list[int]:
        """The training processes (not their keepers) that live, as this machine numbers them; of one rank, or of all."""
        wanted = None if rank is None else f"RANK={rank}".encode()
        mine = f"LAUNCH_ATTEMPT={self.directory}/".encode()
        return [
            pid
            for node in self.cluster.nodes
            for pid in processes.by_node(self.cluster.root).get(node, [])
            if " -m pretrain " in f"{processes.command(pid)} "
            and "-m launch.node.rank" not in processes.command(pid)
            and "torch.distributed.run" not in processes.command(pid)
            and any(value.startswith(mine) for value in processes.environment(pid))
            and (wanted is None or wanted in processes.environment(pid))
        ]

    def started(self, attempt: int, rank: int) -> list[int]:
        """Wait for a rank's process in an attempt: its pid, as a list."""
        pids: list[int] = self.until(f"attempt {attempt}", lambda: self.rank_pids(rank) if len(self.attempts()) == attempt else [])
        return pids

    def signal(self, pids: Iterable[int], number: int) -> None:
        """A signal to processes."""
        for pid in pids:
            os.kill(pid, number)

    def story(self) -> str:
        """What happened, for a failed test's report."""
        files = [*sorted((self.directory / "launch").glob("slurm-*.out")), self.directory / "launch" / "state.json"]
        files += sorted((self.directory / "attempts").glob("*/attempt.json"))
        files += sorted((self.directory / "attempts").glob("*/logs/*.log"))
        texts = [f"--- {path.relative_to(self.directory)}\n{path.read_text(errors='replace')[-3000:]}" for path in files if path.is_file()]
        return "\n".join([self.cluster.run("scontrol", "show", "job", check=False).stdout, *texts])


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return {}
