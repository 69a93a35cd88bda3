"""Every layout trains the same model: from one checkpoint, loss and grad norm over three steps equal one process's. Real gloo ranks.

Loss alone would not do: AdamW hides a gradient that is off by a factor. The starting checkpoint has optimizer state, of eight steps.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain.conftest import SMALL

ROOT = Path(__file__).resolve().parents[2]
TP2 = ["parallel.tensor_model_parallel_size=2"]
PP2 = ["parallel.pipeline_model_parallel_size=2"]
SP = ["parallel.sequence_parallel=true"]
OVERLAP = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {"one process": [], "recompute": ["train.recompute=full"], "micro-batches of 4": ["train.micro_batch_size=4"]},
    2: {
        "TP2": TP2,
        "TP2+SP": TP2 + SP,
        "TP2+SP, recompute": TP2 + SP + ["train.recompute=full"],
        "PP2": PP2,
        "PP2 interleaved": [*PP2, "parallel.virtual_pipeline_model_parallel_size=2"],
        "DP2": [],
        "DP2, overlapped": OVERLAP,
    },
    4: {"TP2 x PP2 + SP": TP2 + PP2 + SP, "TP2 x DP2": TP2, "TP2 x DP2 + SP, overlapped": TP2 + SP + OVERLAP, "PP2 x DP2": PP2},
}
# What tensor and pipeline parallelism have to keep together differs, and so does the optimizer's state on disk.
MODELS = {
    "untied": ["model.tie_embeddings=false"],
    "tied": ["model.tie_embeddings=true"],
    "plain optimizer": ["model.tie_embeddings=true", "parallel.use_distributed_optimizer=false"],
}
SOME = ("one process", "TP2+SP", "PP2 interleaved", "DP2", "TP2 x PP2 + SP")
STEPS = 3
CASES = [
    (model, world, name) for model in MODELS for world, layouts in LAYOUTS.items() for name in layouts if model == "untied" or name in SOME
]


def launch(world: int, jobs: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    jobs_file, out = folder / f"jobs{world}.json", folder / f"out{world}.json"
    jobs_file.write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={port}"] if world > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, *launcher, str(ROOT / "tests/pretrain/parity_worker.py"), str(jobs_file), str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases; processes are shared by the cases of one world size."""
    folder = tmp_path_factory.mktemp("parity")
    base = [f"data.train.0.prefix={tiny_data / 'train'}", f"data.valid.0.prefix={tiny_data / 'valid'}", "data.test=[]", *SMALL]

    def job(model: str, precision: str, name: str, layout: list[str], **more: Any) -> dict[str, Any]:
        run_dir = folder / f"{model}-{precision}"
        overrides = [*base, *MODELS[model], f"run_dir={run_dir}", f"train.precision={precision}", *layout]
        return {"name": f"{model} {precision} {name}", "overrides": overrides, "steps": STEPS, "load": str(run_dir), **more}

    start = [*((model, "fp32") for model in MODELS), ("untied", "bf16")]
    answers: dict[str, Any] = {}
    for world, layouts in LAYOUTS.items():
        jobs = []
        if world == 1:
            for model, precision in start:
                first = job(model, precision, "start", [], save=True)
                del first["load"]
                jobs.append({**first, "steps": 8})
        jobs += [job(model, "fp32", name, layouts[name]) for model, case_world, name in CASES if case_world == world]
        jobs += [job("untied", "bf16", name, layout) for name, layout in layouts.items() if name in BF16]
        answers |= launch(world, jobs, folder)
    return answers


BF16 = ("one process", "TP2+SP", "DP2", "TP2 x PP2 + SP")


@pytest.mark.parametrize(("model", "world", "name"), CASES, ids=[f"{model}-{name}" for model, _, name in CASES])
def test_equals_one_process_in_fp32(results: dict[str, Any], model: str, world: int, name: str) -> None:
    wanted = results[f"{model} fp32 one process"]["steps"]
    # 1e-6: an fp32 sum in another order; the factor of a wrong reduction would be 1e-1 and more.
    assert results[f"{model} fp32 {name}"]["steps"] == [pytest.approx(step, rel=1e-6) for step in wanted]


@pytest.mark.parametrize("name", BF16[1:])
def test_equals_one_process_in_bf16(results: dict[str, Any], name: str) -> None:
    wanted = results["untied bf16 one process"]["steps"]
    # bf16 keeps 8 bits: an activation rounded after another order of summation moves by 4e-3; the loss averages over 256 tokens.
    for (loss, norm), (wanted_loss, wanted_norm) in zip(results[f"untied bf16 {name}"]["steps"], wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=2e-4)
        assert norm == pytest.approx(wanted_norm, rel=1e-2)


def test_bf16_is_near_fp32(results: dict[str, Any]) -> None:
    pairs = zip(results["untied bf16 one process"]["steps"], results["untied fp32 one process"]["steps"], strict=True)
    assert all(a[0] == pytest.approx(b[0], rel=2e-3) for a, b in pairs)
    assert results["untied bf16 one process"]["steps"] != results["untied fp32 one process"]["steps"]


@pytest.mark.parametrize("model", MODELS)
def test_initialisation_is_the_same_at_every_layout(results: dict[str, Any], model: str) -> None:
    wanted = results[f"{model} fp32 one process"]["initial"]
    names = [name for case_model, _, name in CASES if case_model == model]
    assert len(wanted) > 40
    assert {name: results[f"{model} fp32 {name}"]["initial"] for name in names} == dict.fromkeys(names, wanted)


def test_the_start_was_not_trivial(results: dict[str, Any]) -> None:
    start, first = results["untied fp32 start"]["steps"], results["untied fp32 one process"]["steps"]
    assert first[0][0] < start[0][0] - 0.1
