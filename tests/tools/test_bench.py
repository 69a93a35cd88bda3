"""Tests of the benchmarks' computations, and that every workload runs. Durations are not
checked.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.implementations import operations
from pretrain.config import load_run
from tests.ranks import answer
from tests.test_house import ROOT
from tests.tools.test_bench_engines import TINY
from tests.wording import Wording
from tools.bench import cpu_suite, engine_steps, mixers
from tools.bench.engines import __main__ as engines
from tools.bench.gpu_suite import __main__ as suite
from tools.bench.runner import Timing, measure, write_json
from tools.bench.speed import time_baseline, time_workload
from tools.bench.whole_model import BASELINE, SCALES, VARIANTS, LanguageModel, train_step
from tools.bench.workloads import BASELINES, WORKLOADS, Draw, Size

ATTENTION = "attention: torch's choice"
LARGE = (("1.3B", "100bt"), ("340M", "15bt"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_call_of_its_operation(name: str) -> None:
    workload = WORKLOADS[name]
    assert set(workload.baselines) <= set(BASELINES)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = workload.inputs(Draw(torch.device("cpu"), dtype, 0), workload.small_size(24))
        leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        outputs = workload.call(inputs, "auto")
        gradients = torch.autograd.grad(
            outputs, leaves, [torch.ones_like(output) for output in outputs]
        )
        assert all(bool(x.isfinite().all()) for x in (*outputs, *gradients))
        assert all(output.dtype == dtype or name == "time_decay_scan" for output in outputs)


def test_every_operation_has_a_workload() -> None:
    # Measured as the read of FEM-GLA, a workload of linear_attention.
    within_others = {"free_energy"}
    assert {workload.op for workload in WORKLOADS.values()} >= set(operations()) - within_others


@pytest.mark.parametrize(
    "name",
    [name for name, baseline in BASELINES.items() if baseline.lacks(torch.device("cpu")) is None],
)
def test_a_baseline_takes_the_size_that_a_workload_asks_for(name: str) -> None:
    holder = next(workload for workload in WORKLOADS.values() if name in workload.baselines)
    speed = time_baseline(name, holder.baselines[name](holder.small_size(12)), torch.float32, 0.0)
    assert speed.both.calls >= 2 and speed.flops[0] > 0


def test_standard_attention_is_as_wide_as_the_free_energy_read() -> None:
    """[v | U] is 2 d_v wide: the same pairs and FLOPs. A head has 256 T^2 forward and 640 T^2
    backward, in this count with the diagonal of its mask.
    """
    workload = WORKLOADS["fem_attention"]
    size = workload.size(4096, 16384)
    standard = workload.baselines[ATTENTION](size)
    assert standard == Size(4, 4096, 16, 128, 128)
    assert workload.flops(size) == BASELINES[ATTENTION].flops(standard)
    assert workload.flops(replace(size, batch=1, heads=1)) == (256 * 4096 * 4097, 640 * 4096 * 4097)


def test_bytes_count_every_tensor_once_and_again_in_the_backward() -> None:
    speed = time_workload(
        "symmetric_linear_attention", "auto", Size(1, 8, 2, 4, 4), torch.float32, 0.0
    )
    z = 8 * 2 * 4 * 4
    assert speed.bytes == (2 * z, 5 * z)  # forward: z, out; backward: z, out, z again, d out, d z


def test_timing_warms_up_and_makes_two_passes() -> None:
    calls: list[int] = []
    timing = measure(calls.append, budget=0.0)
    assert calls == [0, 1, 0, 1, 0, 1, 2, 0, 1, 2]
    assert timing.calls == 6 and timing.seconds > 0 and timing.spread >= 0


def test_json_goes_where_a_link_leads(tmp_path: Path) -> None:
    """/dev/stdout is a link, which no file may replace."""
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    write_json(link, [1])
    assert link.is_symlink() and json.loads(target.read_text()) == [1]


# --- complete models ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "variant", "run"),
    [
        *((size, BASELINE, f"transformer_{size.lower()}_{tokens}") for size, tokens in LARGE),
        *((size, "FEM-SM, C L T G", f"fem_sm_{size.lower()}_{tokens}") for size, tokens in LARGE),
        *((size, "CEM", f"cem_{size.lower()}") for size in ("86M", "108M", "134M", "162M")),
        *((size, BASELINE, f"llama_{size.lower()}") for size in ("86M", "108M", "134M", "162M")),
    ],
)
def test_models_are_the_recipes(scale: str, variant: str, run: str) -> None:
    config = load_run(ROOT / f"configs/run/{run}.yaml")
    own = VARIANTS[variant](SCALES[scale].model)
    assert own.blocks() == config.model.blocks()
    assert (own.num_layers, own.vocab_size, own.tie_embeddings) == (
        config.model.num_layers,
        config.model.vocab_size,
        False,
    )
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
        losses.append(
            [
                loss.detach(),
                *(weight.grad for weight in built.parameters() if weight.grad is not None),
            ]
        )
    assert len(losses[0]) == 1 + len(list(built.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_a_step_counts_tokens_parameters_and_flops() -> None:
    scale = cpu_suite.small_scale(replace(cpu_suite.QUICK, layers=1, hidden=32, model_tokens=16))
    cost = train_step(BASELINE, scale, torch.float32, 0.0)
    built = LanguageModel(VARIANTS[BASELINE](scale.model), torch.float32)
    assert cost.parameters == sum(weight.numel() for weight in built.parameters())
    assert cost.tokens == 16
    # 6 FLOPs per token for each number of a matrix, plus the pairs of attention: 4 * 3 per channel.
    matrices = sum(
        w.numel() for name, w in built.named_parameters() if w.dim() > 1 and name != "embedding"
    )
    assert cost.flops == pytest.approx(16 * (6 * matrices + 12 * 32 * 17 / 2))
    # Separate documents: a token sees only earlier tokens of the same document.
    scale = replace(scale, documents=4)
    first = [*scale.begins()[0].nonzero()[:, 0].tolist(), 16]
    sizes = [end - begin for begin, end in pairwise(first)]
    assert len(sizes) > 2
    packed = train_step(BASELINE, scale, torch.float32, 0.0)
    assert packed.flops == pytest.approx(
        16 * 6 * matrices + sum(12 * 32 * size * (size + 1) / 2 for size in sizes)
    )
    assert replace(cost, step=Timing(2.0, 0.0, 2)).tokens_per_second == 8.0
    assert replace(cost, step=Timing(2.0, 0.0, 2)).utilisation(cost.flops) == 0.5


def test_what_became_slower() -> None:
    def row(forward: float, both: float) -> dict[str, Any]:
        return {
            "what": "x",
            "tokens": 8,
            "ours / standard attention": {"forward": forward, "forward + backward": both},
        }

    model = {"what": "model: y", "tokens": 8, "ours / Transformer": {"train step": 1.5}}
    then = [
        row(1.0, 2.0),
        {**model, "ours / Transformer": {"train step": 1.2}},
        {"what": "gone", "tokens": 8},
    ]
    assert cpu_suite.slower([row(1.19, 2.5), model, {"what": "new", "tokens": 8}], then) == [
        "x, 8 tokens, forward + backward: 1.25 times slower (2.00 -> 2.50)",
        "model: y, 8 tokens, train step: 1.25 times slower (1.20 -> 1.50)",
    ]


# --- every benchmark once, at toy size ------------------------------------------------------------

TOYS = {
    "cpu_suite": (cpu_suite, ["--quick", "--only", "fem_attention", "models"]),
    "mixers": (mixers, ["--only", "fem_aft", "--out", "OUT"]),
    "engines": (engines, [*TINY, *"--steps 2 --rounds 1 --ranks 2 --variants stage2".split()]),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "engines" else name for name in TOYS],
)
def test_a_benchmark_writes_its_machine_and_a_row_a_side(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, words = TOYS[name]
    row = {
        "cost": "T",
        "parameters": 1.0,
        "tokens_per_second": 2.0,
        "first_loss": 7.0,
        "heldout_loss": 6.0,
        "state_bytes": 8.0,
    }
    monkeypatch.setattr(mixers, "train", lambda name, steps, folder: {"name": name, **row})
    monkeypatch.setattr(cpu_suite, "QUICK", cpu_suite.Effort((16,), 1, 32, 16, 0.0))
    path = tmp_path / "deep" / "out.json"
    assert (
        module.main([*(word.replace("OUT", str(tmp_path)) for word in words), "--json", str(path)])
        == 0
    )
    output, written = capsys.readouterr(), json.loads(path.read_text())
    out = output.out
    assert written["machine"]["torch"] == torch.__version__
    rows = {row.get("what") or row.get("name") or row["variant"]: row for row in written["rows"]}
    if name == "cpu_suite":
        assert list(rows) == ["fem_attention", *(f"model: {variant}" for variant in VARIANTS)]
        found = rows["fem_attention"]
        assert set(found) == {
            "what",
            "tokens",
            "seconds",
            "ours / standard attention",
            "ours / reference",
        }
        ours, standard = found["seconds"]["ours"], found["seconds"]["standard attention"]
        assert found["ours / standard attention"] == {
            "forward": ours[0] / standard[0],
            "forward + backward": ours[1] / standard[1],
        }
        assert cpu_suite.main(["--quick", "--only", "fem_attention", "--compare", str(path)]) == 0
    elif module is engines:
        base = rows["megatron"]
        assert (written["baseline"], written["ranks"]) == ("megatron", 2)
        assert base["step_ratio"] == base["peak_ratio"] == 1.0
        assert "megatron: step 4 of 4: " in output.err
        assert list(rows) == ["megatron", "stage2"]
        for each in rows.values():
            assert each["tokens_per_second"] == 2 * 16 / each["step_seconds"]
            assert min(each["plan_bytes"], each["flops_per_token"], *each["peak_bytes"]) > 0
            assert each["mfu"] is None and each["partial"] is False
            assert each["step_ratio"] == each["step_seconds"] / base["step_seconds"]
            assert f"| {each['variant']} " in out
            # The same steps on the same tokens, with sums in a different order.
            assert each["loss"] == pytest.approx(base["loss"], rel=1e-6)
    else:
        assert list(rows) == ["transformer", "fem_aft"]


def tiny_steps() -> list[dict[str, Any]]:
    return engine_steps.compare({"tiny": [*engine_steps.DEMO, *TINY]}, rounds=2)


def test_training_steps_of_equal_models_are_compared(tmp_path: Path) -> None:
    rows = {
        row["what"].removeprefix("step: "): row
        for row in answer(1, tiny_steps, output=tmp_path / "out")
    }
    assert list(rows) == [engine_steps.FEM, engine_steps.TRANSFORMER, engine_steps.LLAMA]
    fem, base, llama = rows.values()
    assert llama["parameters"] == base["parameters"] != fem["parameters"]
    assert base["÷ Transformer"]["least"] == base["÷ Transformer"]["most"] == 1.0
    assert fem["aten calls"] > base["aten calls"] > 100
    for row in rows.values():
        least, other = row["seconds"]["least"], base["seconds"]["least"]
        assert row["least ÷ least"] == least / other > 0
        assert row["seconds"]["rounds"] == 2
        assert f"{1e3 * least:.1f}" in engine_steps.render([row])


MISTAKES = {
    cpu_suite: ["--only x", "--compare none.json", "--compare list.json"],
    engines: [
        *(
            "--ranks 0",
            "--warmup 1",
            "--variants stage4",
            "model.hiden_size=8",
            "engine.zero_stage=2",
        ),
        *("train.global_batch_size=3", "--model fem_sm_1.3c"),
    ],
    suite: ["--out OUT", "--only ops,model"],
}


def test_a_mistake_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    for module, all_of in MISTAKES.items():
        for words in all_of:
            try:
                code = module.main(words.split())
            except SystemExit as error:
                code = int(str(error.code))
            output = capsys.readouterr()
            assert code == 2 and output.out == "" and output.err.count("\n") == 1, words
            wording(output.err)
