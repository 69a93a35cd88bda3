"""A resume uses the current configuration, or refuses it: every key, with both engines."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_common.config import plain, walk
from fem_common.errors import ConfigError
from fem_megatron.config import ModelConfig
from fem_megatron.megatron import platform
from fem_megatron.mixers.attention.shape import AttentionConfig
from fem_megatron.mixers.fem.shape import FemConfig
from pretrain.checkpoint.folder import MANIFEST
from pretrain.checkpoint.reader import read_common
from pretrain.checkpoint.resume import FREE, RULES, TOLD, changes, check, check_model, rule
from pretrain.config import OptimizerConfig, RunConfig
from pretrain.trainer import Trainer
from tests.pretrain.conftest import QUIET, Command, back_to
from tests.pretrain.jobs import PLAIN
from tests.ranks import losses, records

# Every key of the optimizer. Keys in one unit exclude those in another unit, and a wsd decay
# requires its length.
CHANGED: dict[str, Any] = {
    "lr": 1e-3,
    "min_lr": 1e-5,
    "weight_decay": 0.3,
    "beta1": 0.8,
    "beta2": 0.5,
    "eps": 1e-3,
    "momentum": 0.9,
    "clip_grad": 0.01,
    "schedule": "wsd",
    "warmup_steps": 5,
    "decay_steps": 2,
}
ENGINES = {"megatron": [], "plain": PLAIN, "deepspeed": ["engine.name=deepspeed"]}
# Parameter groups with different learning rates.
MUP = ["model.parametrization=mup", "model.mup.base_hidden_size=16", "model.tie_embeddings=false"]


def leaves() -> list[str]:
    """Return every key of a run that is neither a section nor a list of sections."""
    keys = [key for key, _, _ in walk(RunConfig)]
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def groups_of(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of a stored optimizer; Megatron's plain optimizer in fp32 stores them one
    level higher.
    """
    groups: list[dict[str, Any]] = optimizer.get("optimizer", optimizer)["param_groups"]
    return groups


# --- a resumed run applies changed keys -----------------------------------------------------------


def test_every_key_of_the_optimizer_is_changed_here() -> None:
    # Keys that other tests cover; from_step: test_fork.
    reported_elsewhere = {"name", "warmup_tokens", "warmup_fraction", "decay_tokens", "from_step"}
    assert {*CHANGED, *reported_elsewhere} == {field.name for field in fields(OptimizerConfig)}
    assert all(value != getattr(OptimizerConfig(), key) for key, value in CHANGED.items())


@pytest.mark.parametrize(
    "engine", ["megatron", "plain", pytest.param("deepspeed", marks=pytest.mark.slow)]
)
def test_changed_optimizer_keys_are_in_the_groups_and_in_the_log(
    pretrain: Command, tmp_path: Path, engine: str
) -> None:
    """The groups in the next checkpoint have the new values and the schedule's rates: those of a
    run that had the values from the start.
    """
    common = [*ENGINES[engine], *MUP]
    new = [f"optimizer.{key}={value}" for key, value in CHANGED.items()]
    pretrain(*common, "train.steps=4")
    pretrain(*common, *new, "train.steps=8")
    resumed, fresh = pretrain.run_dir, tmp_path / "fresh"
    pretrain(*common, *new, "train.steps=8", f"run_dir={fresh}", "checkpoint.interval=0")
    rates = {}
    for run in (resumed, fresh):
        rates[run] = {line["step"]: line["lr"] for line in records(run) if "lr" in line}
    for step in range(5, 9):
        assert rates[resumed][step] == rates[fresh][step]
    stored = [read_common(run / "checkpoints" / "step_00000008")["optimizer"] for run in rates]
    groups, wanted = map(groups_of, stored)
    assert len(groups) > 2 and {group["lr_mult"] for group in groups} > {1.0}
    settings = ("lr", "max_lr", "min_lr", "betas", "eps", "weight_decay", "wd_mult", "lr_mult")
    for group, expected in zip(groups, wanted, strict=True):
        assert {key: group[key] for key in settings} == {key: expected[key] for key in settings}
    assert {group["eps"] for group in groups} == {1e-3}
    assert {tuple(group["betas"]) for group in groups} == {(0.8, 0.5)}


@pytest.mark.slow
def test_engines_agree_on_the_steps_after_a_change(pretrain: Command, tmp_path: Path) -> None:
    """From one checkpoint with every optimizer key changed, both engines give equal losses and
    norms, different from those without the change.
    """
    pretrain("train.steps=4")
    curves = {}
    for engine, change in (("megatron", True), ("deepspeed", True), ("megatron", False)):
        run_dir = tmp_path / f"{engine}_{change}"
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "checkpoints" / "step_00000004").symlink_to(
            pretrain.checkpoints / "step_00000004"
        )
        more = [f"optimizer.{key}={value}" for key, value in CHANGED.items()] if change else []
        pretrain(
            *ENGINES[engine],
            *more,
            f"run_dir={run_dir}",
            "train.steps=8",
            "checkpoint.interval=0",
        )
        curves[engine, change] = [*losses(run_dir).values()]
    assert len(curves["megatron", True]) == 4
    # 1e-6: an fp32 sum in a different order.
    assert curves["deepspeed", True] == [
        pytest.approx(step, rel=1e-6) for step in curves["megatron", True]
    ]
    assert curves["megatron", True][0] == curves["megatron", False][0], (
        "the first loss is of the same weights"
    )
    assert curves["megatron", True][1] != pytest.approx(curves["megatron", False][1], rel=1e-4)


# --- one rule for every key -----------------------------------------------------------------------


def test_every_key_has_a_rule_and_every_rule_a_key() -> None:
    assert all(rule(key) for key in leaves())
    known = {key.replace(".N.", ".").removesuffix(".N") for key, _, _ in walk(RunConfig)}
    assert set(RULES) <= known


def test_changes_are_reported_and_recorded(pretrain: Command) -> None:
    """Changes without effect on training are only recorded; without changes no message is
    printed.
    """
    pretrain("train.steps=4")
    assert "changed since" not in pretrain("train.steps=4")
    pretrain("train.steps=6", "optimizer.lr=1e-3", "log.interval=3")
    assert (
        "changed since the last attempt: train.steps 4 → 6, optimizer.lr 0.003 → 0.001\n"
        in pretrain.out
    )
    attempts = records(pretrain.run_dir, "attempts.jsonl")
    assert ["changed" in attempt for attempt in attempts] == [False, False, True]
    assert attempts[-1]["changed"] == {
        "train.steps": [4, 6],
        "optimizer.lr": [0.003, 0.001],
        "log.interval": [20, 3],
    }


REFUSED = {
    "data.seq_length=64": "checkpoint.load=",
    "data.packing=best_fit": "checkpoint.load=",
    "train.seed=7": "checkpoint.load=",
    "train.precision=bf16": "checkpoint.load=",
    "data.train.0.weight=2": "checkpoint.load=",
    "parallel.use_distributed_optimizer=false": (
        "tools.checkpoint convert {checkpoint} --engine megatron --plain-optimizer --out"
    ),
    "optimizer.name=muon": "checkpoint.load=",
    "model.hidden_size=48": "choose another run_dir",
    "model.rope_scaling.kind=linear": "continue in another folder with --fork",
}


def test_refusals_name_the_key_and_the_way_out(pretrain: Command) -> None:
    """Each key separately and all together; a refused attempt changes no file of the run
    directory.
    """
    keys = [override.split("=")[0].replace(".0.", ".") for override in REFUSED]
    expected = {key for key in RULES if RULES[key] not in (FREE, TOLD, RULES["model"])}
    assert {key.removesuffix(".kind") for key in keys} == expected | {"model.hidden_size"}
    pretrain("train.steps=4")
    before = (pretrain.run_dir / "config.yaml").read_text()
    checkpoint = pretrain.checkpoints / "step_00000004"
    for override, way in REFUSED.items():
        output = pretrain.refused("train.steps=8", override)
        key, value = override.split("=")
        assert f"{key} is " in output
        assert f"in the checkpoint, {value}" in output
        assert way.format(checkpoint=checkpoint) in output
    assert all(
        override.split("=")[0] in pretrain.refused("train.steps=8", *REFUSED)
        for override in REFUSED
    )
    assert (pretrain.run_dir / "config.yaml").read_text() == before
    pretrain("train.steps=8")


def test_a_field_added_since_counts_as_its_default() -> None:
    """Cover a new section and an existing one; with another value it is another model."""
    place = Path("runs/old/checkpoints/step_00000001")
    here = RunConfig(model=ModelConfig(vocab_size=100, hidden_size=96))
    written = json.loads(json.dumps(plain(here)))
    del written["model"]["attention"], written["model"]["fem"]["aft_query"], written["evaluate"]
    assert changes(written, here) == []
    del written["model"]["rope_scaling"]  # a checkpoint whose keys had other names
    written["model"]["attention"] = {"rope_scaling": None, "rope_factor": 4.0}
    assert [str(change) for change in changes(written, here)] == [
        "model.rope_scaling.factor 4.0 → 8.0"
    ]
    del written["model"]["attention"]
    others: dict[str, Any] = {
        "attention.qkv_bias": AttentionConfig(qkv_bias=True),
        "fem.aft_query": FemConfig(aft_query="inside"),
        "hidden_size": 192,
    }
    for key, value in others.items():
        other = replace(here, model=replace(here.model, **{key.split(".")[0]: value}))
        for refuse in (
            lambda: check(place, changes(written, other), other),  # noqa: B023
            lambda: check_model(place, written, other),  # noqa: B023
        ):
            with pytest.raises(ConfigError, match=f"is of another model: model.{key} is") as error:
                refuse()
            assert str(error.value).count(" in the checkpoint, ") == 1
    # A removed key of the model is an error; other removed keys are reported.
    written["model"]["gone"] = written["old"] = 1
    with pytest.raises(ConfigError, match="model.gone is 1 in the checkpoint, null now"):
        check_model(place, written, here)
    assert [
        (change.key, change.rule) for change in changes(written, here) if change.rule == TOLD
    ] == [("old", TOLD)]


def test_weights_alone_require_the_same_model_and_nothing_more(
    pretrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run from step 1 that starts at the final loss of the old one."""
    pretrain("optimizer.lr=1e-2", "checkpoint.interval=0")
    old, second = losses(pretrain.run_dir), tmp_path / "second"
    start = [f"run_dir={second}", f"checkpoint.load={pretrain.run_dir}", "train.steps=4"]
    assert "has no checkpoint; expected" in pretrain.refused(
        *start, f"checkpoint.load={tmp_path / 'nothing'}"
    )
    assert "model.hidden_size is 32 in the checkpoint, 48 now" in pretrain.refused(
        *start, "model.hidden_size=48"
    )
    # A weight that is read is not drawn first.
    monkeypatch.setattr("fem_megatron.megatron.model.start", None)
    pretrain(
        *start,
        "data.seq_length=64",
        "train.seed=7",
        "train.precision=bf16",
        "parallel.use_distributed_optimizer=false",
    )
    assert "weights taken from" in pretrain.out and "changed since" not in pretrain.out
    manifest = json.loads((second / "checkpoints" / "step_00000004" / MANIFEST).read_text())
    assert manifest["config"]["train"]["precision"] == "bf16"
    new = losses(second)
    assert list(new) == [1, 2, 3, 4]
    assert new[1][0] < old[12][0] + 0.3 < old[1][0]


class CudaStates:
    """Random states with the sizes of a CUDA rank in a process without a GPU; torch's CPU state is
    real.
    """

    of_device = {"cuda": torch.arange(16, dtype=torch.uint8)}
    tracker = {
        name: torch.full((16,), 7, dtype=torch.uint8)
        for name in ("model-parallel-rng", "data-parallel-rng")
    }

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.restored = False
        patch.setattr(
            platform,
            "rng_state",
            lambda: {"torch": torch.get_rng_state(), "tracker": self.tracker, **self.of_device},
        )
        patch.setattr(platform, "set_rng_state", self.set)

    def set(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["cuda"], self.of_device["cuda"])
        assert state["tracker"].keys() == self.tracker.keys()
        assert all(
            torch.equal(state["tracker"][name], value) for name, value in self.tracker.items()
        )
        torch.set_rng_state(state["torch"])
        self.restored = True


@pytest.mark.parametrize("written", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_a_checkpoint_of_another_kind_of_device_resumes(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """Everything continues except the random states, which are those of a new run; on the same kind
    of device they continue too.

    An older manifest does not contain the kind of device.
    """
    drawn, step = list[float](), Trainer._step

    def drawing(trainer: Trainer, stream: Any) -> Any:
        drawn.append(float(torch.rand(())))
        return step(trainer, stream)

    def train(kind: str) -> bool:
        """Return True if states of CUDA were restored."""
        drawn.clear()
        with monkeypatch.context() as patch:
            states = CudaStates(patch) if kind == "cuda" else None
            pretrain("train.steps=4", "checkpoint.interval=2", *QUIET)
        return states is not None and states.restored

    monkeypatch.setattr(Trainer, "_step", drawing)
    assert not train(written)
    full, wanted = drawn[:], losses(pretrain.run_dir)
    middle = pretrain.checkpoints / "step_00000002"
    manifest = json.loads((middle / MANIFEST).read_text())
    assert manifest.pop("rng_device") == written and len(set(full)) == 4
    other = {"cpu": "cuda", "cuda": "cpu"}[written]
    for kind, older in ((written, False), (other, False), (other, True), (written, True)):
        back_to(pretrain.run_dir, 2)
        if older:
            (middle / MANIFEST).write_text(json.dumps(manifest))
        restored = train(kind)
        output = [line for line in pretrain.out.splitlines() if "random states" in line]
        assert losses(pretrain.run_dir) == wanted, "to the last bit"
        if kind == written:
            assert (drawn, output, restored) == (full[2:], [], kind == "cuda")
        else:
            line = (
                f"random states are seeded from train.seed: {middle} was written on {written}, this"
                f" run is on {kind}"
            )
            assert (drawn, output, restored) == (full[:2], [line], False)
