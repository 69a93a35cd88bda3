"""Tests of the DeepSpeed engine's refusals, its settings for DeepSpeed, and its memory plan. No
torch is needed and no process starts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fem_common.errors import ConfigError
from pretrain.config import RunConfig, load_run
from pretrain.engines.deepspeed_settings import deepspeed_config
from pretrain.plan.placement import Placement
from pretrain.plan.run_plan import make_plan, render
from pretrain.plan.zero_memory import variants, zero_memory
from pretrain.validate import validate
from tests.pretrain.conftest import DEMO, DEMO_SIZES, ROOT
from tests.wording import Wording

ENGINE = "engine.name=deepspeed"
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"


def small(*overrides: str) -> RunConfig:
    return load_run(DEMO, [*DEMO_SIZES, "model.vocab_size=6000", ENGINE, *overrides])


def config_of(config: RunConfig) -> Any:
    return deepspeed_config(config, 2, parameters=10**6, cuda=False)[0]


def test_the_runs_own_sections_and_the_typed_keys_make_deepspeeds_configuration() -> None:
    made: Any = config_of(
        small(
            "engine.zero_stage=2",
            "train.precision=bf16",
            "train.micro_batch_size=2",
            "optimizer.clip_grad=0.5",
        )
    )
    assert made["gradient_accumulation_steps"] == 16 // (2 * 2) and made["train_batch_size"] == 16
    assert (made["gradient_clipping"], made["communication_data_type"]) == (0.5, "fp32")
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["bf16"] == {"enabled": True, "check_grad_overflow": True}
    # No bucket is larger than the model, because DeepSpeed allocates the full bucket.
    assert made["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": False,
        "reduce_bucket_size": 10**6,
        "allgather_bucket_size": 10**6,
    }
    keys = (
        "sub_group_size=7",
        "prefetch_bucket_size=8",
        "param_persistence_threshold=9",
        "max_live_parameters=10",
        "pin_memory=true",
    )
    zero = config_of(
        small(
            "engine.zero_stage=3",
            "engine.offload_optimizer=true",
            *(f"engine.deepspeed.{key}" for key in keys),
        )
    )
    wanted: dict[str, object] = {
        "sub_group_size": 7,
        "stage3_prefetch_bucket_size": 8,
        "stage3_param_persistence_threshold": 9,
    }
    wanted |= {
        "stage3_max_live_parameters": 10,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert wanted.items() <= zero["zero_optimization"].items()
    assert "offload_param" not in zero["zero_optimization"]


def test_a_recipe_for_the_other_engine_needs_nothing_else_changed() -> None:
    requested = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
    config = load_run(
        ROOT / "configs/run/fem_sm_1.3b_100bt.yaml",
        [ENGINE, "engine.zero_stage=2", "model.vocab_size=50304", *requested],
    )
    validate(config, config.parallel.world_size or 1)
    made, output = deepspeed_config(config, 1, parameters=10**9, cuda=True)
    assert made["zero_optimization"]["overlap_comm"] is config.parallel.overlap_grad_reduce
    assert output == [
        "parallel.overlap_param_gather has no effect: it is Megatron's, and DeepSpeed's stage "
        "decides when it gathers"
    ]


def test_a_file_adds_keys_and_the_run_wins_by_name(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    values = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 7.0,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {
            "stage": 1,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 5,
        },
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
    assert (
        "engine.deepspeed.file: gradient_clipping = 7.0 is overridden by 1.0 from"
        " optimizer.clip_grad" in clashes
    )


def test_a_wrong_file_is_named(tmp_path: Path, wording: Wording) -> None:
    file = tmp_path / "ds.json"
    for text in ("{", "[]", '{"zero_optimisation": {}}', '{"pipeline": {}}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="engine.deepspeed.file = ") as refused:
            validate(small(f"engine.deepspeed.file={file}"), 1)
        wording(refused.value)


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_stage_needs_less_of_what_it_splits(precision: str) -> None:
    config = small(f"train.precision={precision}", "engine.deepspeed.max_live_parameters=1000")
    found = {}
    for name, engine in variants(config):
        placement = Placement(config=replace(config, engine=engine), data_parallel=8, cuda=True)
        found[name] = zero_memory(placement, 10**9)
    assert found["stage 1"].gradients > 4 * found["stage 2"].gradients / 1.01
    assert found["stage 2"].weights > 7.9 * found["stage 3"].weights
    assert found["stage 1"].optimizer == found["stage 2"].optimizer == 12 * 10**9 / 8
    for stage in (1, 2, 3):
        kept, offloaded = found[f"stage {stage}"], found[f"stage {stage}, optimizer offloaded"]
        assert offloaded.peak(10**9) < kept.peak(10**9) and offloaded.optimizer == 0
        assert offloaded.host == kept.optimizer + 2 * 4 * 10**9 / 8
        assert (offloaded.weights, offloaded.gradients) == (
            kept.weights,
            4 * 10**9 if stage == 1 else 0,
        )
    assert ("stage 0" in found) == (precision == "fp32")


def test_the_plan_shows_every_stage_and_marks_the_runs_own() -> None:
    text = render(make_plan(small("engine.zero_stage=2", "parallel.world_size=2"), 2))
    table = text[text.index("under DeepSpeed's stages") :]
    assert sum(line[2:].startswith("stage ") for line in table.splitlines()) == 8
    assert [line.split("  ")[0] for line in table.splitlines() if line.startswith("*")] == [
        "* stage 2"
    ]
    assert "host" in table and "(DeepSpeed, stage 2)" in text
    assert "under DeepSpeed's" not in render(make_plan(small("engine.name=megatron"), 1))
