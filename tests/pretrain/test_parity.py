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

from fem_megatron import catalogue
from tests.pretrain.conftest import SMALL

pytestmark = pytest.mark.timeout(1500)  # the first case waits for the processes of all
ROOT = Path(__file__).resolve().parents[2]
TP2 = ["parallel.tensor_model_parallel_size=2"]
PP2 = ["parallel.pipeline_model_parallel_size=2"]
SP = ["parallel.sequence_parallel=true"]
OVERLAP = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
# No parameter stays whole between its uses.
ZERO3 = ["engine.name=deepspeed", "engine.zero_stage=3", "engine.deepspeed.param_persistence_threshold=0"]
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
    4: {
        "TP2 x PP2 + SP": TP2 + PP2 + SP,
        "TP2 x DP2": TP2,
        "TP2 x DP2 + SP, overlapped": TP2 + SP + OVERLAP,
        "PP2 x DP2": PP2,
        "TP2 x DP2 + SP, ZeRO-3": TP2 + SP + ZERO3,
    },
}
# What tensor and pipeline parallelism have to keep together differs, and so does the optimizer's state on disk.
MODELS = {
    "untied": ["model.tie_embeddings=false"],
    "tied": ["model.tie_embeddings=true"],
    "plain optimizer": ["model.tie_embeddings=true", "parallel.use_distributed_optimizer=false"],
}
SOME = ("one process", "PP2 interleaved", "DP2", "TP2 x PP2 + SP")
STEPS = 3
CASES = [
    (model, world, name) for model in MODELS for world, layouts in LAYOUTS.items() for name in layouts if model == "untied" or name in SOME
]
# Every other mixer: a layout that has all of TP, SP and PP, and recompute; every third one of DeepSpeed's; the rest of the matrix is slow.
MIXERS = {name: [f"model.mixer={name}"] for name in catalogue.MIXERS if name != "fem_softmax" and not name.startswith("fla.")} | {
    "hyperset": ["model.mixer=hyperset", "model.recurrence=3", "model.hyperset.lora_rank=2"],
    "hybrid": ["model.pattern=[fem_gla, transformer]"],
    "loop": ["model.mixer=transformer", "model.recurrence=2"],
    # With a vocabulary of 512: at TP2 the second rank's rows are all padding.
    "switched": [
        "model.mixer=transformer",
        "model.num_query_groups=2",
        "model.attention={head_dim: 12, qkv_bias: true, sliding_window: 9, rope_scaling: linear}",
        "model.make_vocab_size_divisible_by=1024",
    ],
}
# feature_eps: at 1e-6 a token whose features meet none of the past's weighs by eps alone, and its gradient is 1/eps times fp32's rounding;
# what tensor parallelism computes there is proven in float64 (tests/fem_megatron/test_tensor_parallel.py).
FEATURES = ["model.fem.feature_eps=0.01"]
MIXER_SMALL = ["model.tie_embeddings=true"]
FAST = ("one process", "recompute", "TP2 x PP2 + SP")
ZERO_3 = "TP2 x DP2 + SP, ZeRO-3"
ALL = [(world, name) for world, layouts in LAYOUTS.items() for name in layouts]
MIXER_CASES = [
    (mixer, world, name) for i, mixer in enumerate(MIXERS) for world, name in ALL if name in FAST or (name == ZERO_3 and i % 3 == 0)
]
SLOW_CASES = [
    (mixer, world, name) for mixer in MIXERS for world, name in ALL if name == "one process" or (mixer, world, name) not in MIXER_CASES
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
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1400)
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
    names = [name for case_model, _, name in CASES if case_model == model and "ZeRO" not in name]
    assert len(wanted) > 40
    assert {name: results[f"{model} fp32 {name}"]["initial"] for name in names} == dict.fromkeys(names, wanted)


def test_the_start_was_not_trivial(results: dict[str, Any]) -> None:
    start, first = results["untied fp32 start"]["steps"], results["untied fp32 one process"]["steps"]
    assert first[0][0] < start[0][0] - 0.1


# --- every mixer -----------------------------------------------------------------------------------------------------------------


def run_mixers(data: Path, folder: Path, cases: list[tuple[str, int, str]], layers: int) -> dict[str, Any]:
    """The cases, and a bf16 run in one process; each mixer starts from a checkpoint of its own, of three steps."""
    base = [f"data.train.0.prefix={data / 'train'}", f"data.valid.0.prefix={data / 'valid'}", "data.test=[]", *SMALL, *MIXER_SMALL]
    base.append(f"model.num_layers={layers}")

    def job(mixer: str, name: str, layout: list[str], **more: Any) -> dict[str, Any]:
        run_dir = str(folder / mixer)
        features = FEATURES if mixer in ("fem_linear", "fem_gla", "hybrid") else []
        overrides = [*base, *MIXERS[mixer], *features, f"run_dir={run_dir}", "train.precision=fp32", *layout]
        return {"name": f"{mixer} {name}", "overrides": overrides, "steps": STEPS, "load": run_dir, **more}

    answers: dict[str, Any] = {}
    for world in LAYOUTS:
        jobs = []
        if world == 1:
            for mixer in MIXERS:
                jobs.append({**job(mixer, "start", []), "save": True, "load": None})
                jobs.append({**job(mixer, "bf16", ["train.precision=bf16"]), "load": None})
        jobs += [job(mixer, name, LAYOUTS[world][name]) for mixer, case_world, name in cases if case_world == world]
        answers |= launch(world, jobs, folder)
    return answers


@pytest.fixture(scope="module")
def mixers(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_mixers(tiny_data, tmp_path_factory.mktemp("mixers"), MIXER_CASES, layers=2)


@pytest.fixture(scope="module")
def slow_mixers(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_mixers(tiny_data, tmp_path_factory.mktemp("slow_mixers"), SLOW_CASES, layers=4)


def check_mixer(found: dict[str, Any], mixer: str, name: str) -> None:
    wanted = found[f"{mixer} one process"]
    # 1e-6: as above; the delta rule solves a triangular system of 32 tokens, which multiplies the rounding of its entries.
    tolerance = 3e-6 if "deltanet" in mixer else 1e-6
    assert found[f"{mixer} {name}"]["steps"] == [pytest.approx(step, rel=tolerance) for step in wanted["steps"]]
    if "ZeRO" not in name:  # there each rank holds a slice of every weight
        assert found[f"{mixer} {name}"]["initial"] == wanted["initial"]


@pytest.mark.parametrize(("mixer", "world", "name"), [case for case in MIXER_CASES if case[2] != "one process"])
def test_every_mixer_equals_one_process(mixers: dict[str, Any], mixer: str, world: int, name: str) -> None:
    check_mixer(mixers, mixer, name)


@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "world", "name"), [case for case in SLOW_CASES if case[2] != "one process"])
def test_every_mixer_at_every_other_layout(slow_mixers: dict[str, Any], mixer: str, world: int, name: str) -> None:
    check_mixer(slow_mixers, mixer, name)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_learns_and_trains_in_bf16(mixers: dict[str, Any], mixer: str) -> None:
    start, first = mixers[f"{mixer} start"]["steps"], mixers[f"{mixer} one process"]["steps"]
    assert first[0][0] < start[0][0]
    # From the same start and with weights rounded to 8 bits.
    assert all(a[0] == pytest.approx(b[0], rel=5e-3) for a, b in zip(mixers[f"{mixer} bf16"]["steps"], start, strict=True))
