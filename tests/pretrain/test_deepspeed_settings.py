"""What the DeepSpeed engine refuses, what it tells DeepSpeed, and its memory plan. No torch is needed and no process starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fem_common.errors import ConfigError
from pretrain.config import RunConfig, load_run
from pretrain.engines.deepspeed_settings import deepspeed_config
from pretrain.plan.run_plan import make_plan, render
from pretrain.plan.zero_memory import variants, zero_memory
from pretrain.validate import validate
from tests.pretrain.small import SMALL

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs/run/demo.yaml"
ENGINE = "engine.name=deepspeed"
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"


def small(*overrides: str) -> RunConfig:
    return load_run(DEMO, [*SMALL, "model.vocab_size=6000", ENGINE, *overrides])


def told(config: RunConfig) -> dict[str, object]:
    return deepspeed_config(config, 2, parameters=10**6, cuda=False)[0]


@pytest.mark.parametrize(
    ("launched", "overrides", "said"),
    [
        (2, [f"{PP}=2"], f"{PP} = 2: engine.name = deepspeed has no pipeline; set {PP}=1 (engine.zero_stage=3 splits"),
        (2, [f"{PP}=2", "parallel.virtual_pipeline_model_parallel_size=3"], "or engine.name=megatron"),
        (
            1,
            ["engine.zero_stage=0", "train.precision=bf16"],
            "engine.zero_stage = 0 is for train.precision=fp32 alone; in bf16 set engine",
        ),
        (1, ["engine.zero_stage=0", "engine.offload_optimizer=true"], "needs a split optimizer; set engine.zero_stage=1"),
        (1, ["engine.zero_stage=4"], "engine.zero_stage = 4 is not a choice"),
        (1, ["engine.name=deepsped"], "did you mean deepspeed?"),
        (1, ["engine.offload_parameters=true", "engine.offload_optimizer=true"], "needs engine.zero_stage=3, and it is 1"),
        (1, ["engine.offload_parameters=true", "engine.zero_stage=3"], "needs engine.offload_optimizer=true"),
        (1, ["parallel.use_distributed_optimizer=false"], "engine.name=deepspeed needs true"),
        (1, ["engine.deepspeed.gradient_clipping=1"], "unknown key engine.deepspeed.gradient_clipping"),
        (1, ["engine.deepspeed.reduce_bucket_size=0"], "engine.deepspeed.reduce_bucket_size = 0: must be 1 or more"),
        (1, ["engine.deepspeed.file=nowhere.json"], "nowhere.json"),
        (1, ["model.mixer=fla.GatedDeltaNet", "engine.zero_stage=3"], "set engine.zero_stage=2"),
        (1, ["engine.name=megatron", "engine.offload_optimizer=true"], "engine.offload_optimizer = true needs engine.name=deepspeed"),
    ],
)
def test_what_it_cannot_do_is_refused_with_what_it_can(launched: int, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(load_run(DEMO, [*SMALL, "model.vocab_size=6000", ENGINE, *overrides]), launched)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_refusal_comes_before_any_process() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pretrain", str(DEMO), ENGINE, f"{PP}=2", "model.vocab_size=512", "--plan"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, len(errors)) == (2, 1) and errors[0].startswith("pretrain: error: parallel.pipeline_model")
    assert "| torch\n" not in done.stderr and "deepspeed\n" not in done.stderr.replace("deepspeed_settings", "")


def test_the_runs_own_sections_make_deepspeeds_configuration() -> None:
    made = told(small("engine.zero_stage=2", "train.precision=bf16", "train.micro_batch_size=2", "optimizer.clip_grad=0.5"))
    assert made["gradient_accumulation_steps"] == 16 // (2 * 2) and made["train_batch_size"] == 16
    assert (made["gradient_clipping"], made["communication_data_type"]) == (0.5, "fp32")
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["bf16"] == {"enabled": True, "check_grad_overflow": True}
    # No bucket is larger than the model: DeepSpeed allocates it whole.
    assert made["zero_optimization"] == {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}


def test_a_recipe_for_the_other_engine_needs_nothing_else_changed() -> None:
    config = load_run(ROOT / "configs/run/fem_sm_1.3b_100bt.yaml", [ENGINE, "engine.zero_stage=2", "model.vocab_size=50304"])
    validate(config, config.parallel.world_size or 1)
    made, said = deepspeed_config(config, 1, parameters=10**9, cuda=True)
    assert made["zero_optimization"]["overlap_comm"] is config.parallel.overlap_grad_reduce
    assert said == ["parallel.overlap_param_gather is Megatron's and changes nothing here: DeepSpeed gathers as its stage says"]


def test_typed_keys_get_deepspeeds_names() -> None:
    keys = ("sub_group_size=7", "prefetch_bucket_size=8", "param_persistence_threshold=9", "max_live_parameters=10", "pin_memory=true")
    config = small("engine.zero_stage=3", "engine.offload_optimizer=true", *(f"engine.deepspeed.{key}" for key in keys))
    zero = told(config)["zero_optimization"]
    assert isinstance(zero, dict)
    assert (zero["sub_group_size"], zero["stage3_prefetch_bucket_size"], zero["stage3_param_persistence_threshold"]) == (7, 8, 9)
    assert zero["stage3_max_live_parameters"] == 10
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True} and "offload_param" not in zero


def test_a_file_adds_keys_and_the_run_wins_by_name(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    values = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 7.0,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 5},
        "comms_logger": {"enabled": True},
    }
    file.write_text(json.dumps(values))
    config = small("engine.zero_stage=2", f"engine.deepspeed.file={file}")
    made, clashes = deepspeed_config(config, 1, parameters=10**6, cuda=False)
    assert (made["gradient_clipping"], made["train_micro_batch_size_per_gpu"]) == (1.0, 4)
    assert made["zero_optimization"] == {"stage": 2, "overlap_comm": False, "sub_group_size": 5}
    assert made["comms_logger"] == {"enabled": True} and "optimizer" not in made
    assert sorted(line.split(": ")[1].split(" =")[0] for line in clashes) == [
        "gradient_clipping",
        "optimizer",
        "zero_optimization.offload_optimizer",
        "zero_optimization.stage",
    ]
    assert "engine.deepspeed.file: gradient_clipping = 7.0 there, 1.0 here, by optimizer.clip_grad" in clashes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON, line 1"),
        ("[]", "expected a mapping"),
        ('{"zero_optimisation": {}}', "did you mean zero_optimization?"),
        ('{"pipeline": {}}', "is not a key that is passed on"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="engine.deepspeed.file = ") as refused:
        validate(small(f"engine.deepspeed.file={file}"), 1)
    assert said in str(refused.value)


# --- the plan --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_stage_needs_less_of_what_it_splits(precision: str) -> None:
    config = small(f"train.precision={precision}", "engine.deepspeed.max_live_parameters=1000")
    found = {name: zero_memory(config, engine, 10**9, 8, cuda=True) for name, engine in variants(config)}
    assert found["stage 1"].gradients > 4 * found["stage 2"].gradients / 1.01
    assert found["stage 2"].weights > 7.9 * found["stage 3"].weights
    assert found["stage 1"].optimizer == found["stage 2"].optimizer == 12 * 10**9 / 8
    for stage in (1, 2, 3):
        kept, offloaded = found[f"stage {stage}"], found[f"stage {stage}, optimizer offloaded"]
        assert offloaded.peak(10**9) < kept.peak(10**9) and offloaded.optimizer == 0
        assert offloaded.host == kept.optimizer + 2 * 4 * 10**9 / 8
        assert (offloaded.weights, offloaded.gradients) == (kept.weights, 4 * 10**9 if stage == 1 else 0)
    assert ("stage 0" in found) == (precision == "fp32")


def test_the_plan_shows_every_stage_and_marks_the_runs_own() -> None:
    text = render(make_plan(small("engine.zero_stage=2", "parallel.world_size=2"), 2))
    table = text[text.index("under DeepSpeed's stages") :]
    assert sum(line[2:].startswith("stage ") for line in table.splitlines()) == 8
    assert [line.split("  ")[0] for line in table.splitlines() if line.startswith("*")] == ["* stage 2"]
    assert "host" in table and "(DeepSpeed, stage 2)" in text
    assert "under DeepSpeed's" not in render(make_plan(load_run(DEMO, [*SMALL, "model.vocab_size=6000"]), 1))
