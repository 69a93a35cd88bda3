"""What the benchmarks compute from their timings, and that every workload runs. How long anything takes is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.implementations import operations
from pretrain.config import load_run
from tests.test_house import ROOT
from tools.bench import cpu_suite, mixers, runner
from tools.bench.runner import Timing, measure
from tools.bench.speed import implementations, time_baseline, time_workload
from tools.bench.whole_model import BASELINE, SCALES, VARIANTS, LanguageModel, train_step
from tools.bench.workloads import BASELINES, WORKLOADS, Draw, Size

ATTENTION = "attention: torch's choice"


def test_every_operation_has_a_workload() -> None:
    within_others = {"free_energy"}  # timed as FEM-GLA's read, a workload of linear_attention
    assert {workload.op for workload in WORKLOADS.values()} >= set(operations()) - within_others
    for workload in WORKLOADS.values():
        assert set(workload.baselines) <= set(BASELINES), workload.name


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_call_of_its_operation(name: str) -> None:
    workload = WORKLOADS[name]
    size = workload.small_size(24)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = workload.inputs(Draw(torch.device("cpu"), dtype, 0), size)
        leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        outputs = workload.call(inputs, "auto")
        gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs])
        assert all(bool(x.isfinite().all()) for x in (*outputs, *gradients))
        assert all(output.dtype == dtype or name == "time_decay_scan" for output in outputs)


@pytest.mark.parametrize("name", [name for name, baseline in BASELINES.items() if baseline.lacks(torch.device("cpu")) is None])
def test_a_baseline_takes_the_size_that_a_workload_asks_for(name: str) -> None:
    holder = next(workload for workload in WORKLOADS.values() if name in workload.baselines)
    size = holder.baselines[name](holder.small_size(24))
    speed = time_baseline(name, size, torch.float32, 0.0)
    assert speed.both.calls >= 2 and speed.flops[0] > 0


def test_standard_attention_is_as_wide_as_the_free_energy_read() -> None:
    """[v | U] is 2 d_v wide: the same pairs, the same FLOPs, the same engine's work."""
    workload = WORKLOADS["fem_attention"]
    size = workload.size(4096, 16384)
    standard = workload.baselines[ATTENTION](size)
    assert standard == Size(4, 4096, 16, 128, 128)
    assert workload.flops(size) == BASELINES[ATTENTION].flops(standard)
    # 256 T^2 forward and 640 T^2 backward of a head under a causal mask (here with its diagonal).
    forward, backward = workload.flops(replace(size, batch=1, heads=1))
    assert (forward, backward) == (256 * 4096 * 4097, 640 * 4096 * 4097)


def test_bytes_count_every_tensor_once_and_again_in_the_backward() -> None:
    speed = time_workload("symmetric_linear_attention", "auto", Size(1, 8, 2, 4, 4), torch.float32, 0.0)
    z = 8 * 2 * 4 * 4
    assert speed.bytes == (2 * z, 5 * z)  # z, out; z, out, z again, d out, d z


def test_implementations_are_the_operations_own() -> None:
    assert implementations("fem_attention")[-1] == "reference"
    assert implementations("an operation that is not there") == ("reference",)


def test_timing_warms_up_and_makes_two_passes() -> None:
    calls: list[int] = []
    timing = measure(calls.append, budget=0.0)
    assert calls == [0, 1, 0, 1, 0, 1, 2, 0, 1, 2]
    assert timing.calls == 6 and timing.seconds > 0 and timing.spread >= 0


# --- whole models -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "variant", "run"),
    [
        ("1.3B", BASELINE, "transformer_1.3b_100bt"),
        ("1.3B", "FEM-SM, C L T G", "fem_sm_1.3b_100bt"),
        ("340M", BASELINE, "transformer_340m_15bt"),
        ("340M", "FEM-SM, C L T G", "fem_sm_340m_15bt"),
        *((size, "CEM", f"cem_{size.lower()}") for size in ("86M", "108M", "134M", "162M")),
        *((size, BASELINE, f"llama_{size.lower()}") for size in ("86M", "108M", "134M", "162M")),
    ],
)
def test_models_are_the_recipes(scale: str, variant: str, run: str) -> None:
    config = load_run(ROOT / f"configs/run/{run}.yaml")
    own = VARIANTS[variant](SCALES[scale].model)
    assert own.blocks() == config.model.blocks()
    assert (own.num_layers, own.vocab_size, own.tie_embeddings) == (config.model.num_layers, config.model.vocab_size, False)
    assert SCALES[scale].tokens == config.data.seq_length


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_trains_and_recomputation_changes_nothing(variant: str) -> None:
    scale = cpu_suite.small_scale(replace(cpu_suite.QUICK, layers=1, hidden=32, model_tokens=16))
    model = VARIANTS[variant](replace(scale.model, vocab_size=64))
    losses = []
    for recompute in (False, True):
        torch.manual_seed(0)
        built = LanguageModel(model, torch.float32, recompute=recompute)
        tokens = torch.arange(17)[None] % 64
        loss = built(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append([loss.detach(), *(weight.grad for weight in built.parameters() if weight.grad is not None)])
    assert len(losses[0]) == 1 + len(list(built.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_a_step_counts_tokens_parameters_and_flops() -> None:
    scale = cpu_suite.small_scale(replace(cpu_suite.QUICK, layers=1, hidden=32, model_tokens=16))
    cost = train_step(BASELINE, scale, torch.float32, 0.0)
    built = LanguageModel(VARIANTS[BASELINE](scale.model), torch.float32)
    assert cost.parameters == sum(weight.numel() for weight in built.parameters())
    assert cost.tokens == 16
    # 6 FLOPs for each number of a matrix and each token, and the pairs of attention, 4 * 3 a channel.
    matrices = sum(w.numel() for name, w in built.named_parameters() if w.dim() > 1 and name != "embedding")
    assert cost.flops == pytest.approx(16 * (6 * matrices + 12 * 32 * 17 / 2))
    assert replace(cost, step=Timing(2.0, 0.0, 2)).tokens_per_second == 8.0
    assert replace(cost, step=Timing(2.0, 0.0, 2)).utilisation(cost.flops) == 0.5


# --- the CPU suite ----------------------------------------------------------------------------------------------------------------


def test_the_cpu_suite_writes_what_it_can_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_suite, "QUICK", cpu_suite.Effort((16,), 1, 32, 16, 0.0))
    path = tmp_path / "deep" / "before.json"
    assert cpu_suite.main(["--quick", "--only", "fem_attention", "models", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| fem_attention | 16 " in out and "| FEM-SM, C L T G " in out
    written = json.loads(path.read_text())
    assert [row["what"] for row in written["rows"]] == ["fem_attention", *(f"model: {variant}" for variant in VARIANTS)]
    assert set(written["rows"][0]) == {"what", "tokens", "seconds", "ours / standard attention", "ours / reference"}
    assert written["machine"]["torch"] == torch.__version__
    assert cpu_suite.main(["--quick", "--only", "fem_attention", "--compare", str(path)]) == 0
    assert "slower by over 20% than" in capsys.readouterr().out


def test_what_became_slower() -> None:
    def row(forward: float, both: float) -> dict[str, Any]:
        return {"what": "x", "tokens": 8, "ours / standard attention": {"forward": forward, "forward + backward": both}}

    model = {"what": "model: y", "tokens": 8, "ours / Transformer": {"train step": 1.5}}
    then = [row(1.0, 2.0), {**model, "ours / Transformer": {"train step": 1.2}}, {"what": "gone", "tokens": 8}]
    assert cpu_suite.slower([row(1.19, 2.5), model, {"what": "new", "tokens": 8}], then) == [
        "x, 8 tokens, forward + backward: 1.25 times slower (2.00 -> 2.50)",
        "model: y, 8 tokens, train step: 1.25 times slower (1.20 -> 1.50)",
    ]


@pytest.mark.parametrize("content", ["", "[]", '{"rows": 1}x'])
def test_a_file_that_cannot_be_compared_is_one_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "before.json"
    path.write_text(content)
    assert cpu_suite.main(["--compare", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- what every benchmark writes --------------------------------------------------------------------------------------------------


def test_mixers_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"cost": "T", "parameters": 1.0, "tokens_per_second": 2.0, "first_loss": 7.0, "heldout_loss": 6.0, "state_bytes": 8.0}
    monkeypatch.setattr(mixers, "train", lambda name, steps, folder: {"name": name, **row})
    (tmp_path / "runs").mkdir()
    path = tmp_path / "mixers.json"
    assert mixers.main(["--only", "fem_aft", "--out", str(tmp_path / "runs"), "--json", str(path)]) == 0
    assert [each["name"] for each in json.loads(path.read_text())["rows"]] == ["transformer", "fem_aft"]


@pytest.mark.parametrize("name", ["cpu_suite", "diagnostics_cost", "gpu_suite", "mixers"])
def test_every_benchmark_takes_json(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"tools.bench.{name}", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--json PATH" in done.stdout


def test_tables_are_aligned() -> None:
    assert runner.table(["a", "bc"], [["def", ""]]) == "| a   | bc |\n|-----|----|\n| def |    |"
