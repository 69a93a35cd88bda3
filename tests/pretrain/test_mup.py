"""Tests of muP in training: parameter groups, bitwise equality with the standard parametrization at
the base size, equivalence with an output multiplier, parallel layouts, resuming, exports.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fem_megatron.config import ModelConfig
from fem_megatron.mup import MupConfig
from pretrain.checkpoint.folder import find
from tests.pretrain.conftest import SMALL, Command, data_of
from tests.pretrain.jobs import (
    PP2,
    SP,
    TP2,
    Done,
    Job,
    engine_of,
    micro_batches,
    run_all,
    values_of_cases,
)
from tests.tools.hf.small import SIZES, random_state

UNTIED = "model.tie_embeddings=false"
MUP = [UNTIED, "model.parametrization=mup"]
STEPS = 3


def train(engine: Any, steps: int = STEPS) -> list[Any]:
    batches = micro_batches(32)
    return [engine.train_step(batches, 4 * (step + 1)) for step in range(steps)]


def groups(engine: Any) -> dict[tuple[float, float], int]:
    """Return the number of elements of the optimizer's groups by (lr_mult, wd_mult)."""
    return {
        (group["lr_mult"], group["wd_mult"]): sum(p.numel() for p in group["params"])
        for group in engine.optimizer.param_groups
    }


@pytest.mark.parametrize(("base", "m"), [(8, 4.0), (128, 0.25)])
def test_groups_learn_and_decay_by_their_powers(settings: list[str], base: int, m: float) -> None:
    """Every parameter's learning rate has muP's power of m, the ratio of the width to the base.

    Vectors have no decay, learning rate x decay is that of the base, and the logged learning rate
    is that of the schedule.
    """
    with engine_of(
        [*settings, *MUP, f"model.mup.base_hidden_size={base}", "model.mixer=cem"]
    ) as engine:
        wanted: dict[tuple[float, float], int] = {}
        for name, weight in engine.models[0].named_parameters():
            powers = {
                "p": -1.0 if "mixer" in name else -0.5,
                "u": -0.5 if "mixer" in name else 0.0,
                "v": -1.0,
                "diagonal": -1.0,
            }
            other = 0.0 if weight.ndim == 1 or "embedding" in name else -1.0
            power = powers.get(name.rpartition(".")[2], other)
            key = (m**power, m**-power if weight.ndim > 1 else 0.0)
            wanted[key] = wanted.get(key, 0) + weight.numel()
        assert groups(engine) == wanted and len(wanted) == 6
        report = train(engine)
        ours = engine.config.optimizer
        # Warm-up over 3 steps: the third step has the peak rate.
        assert [result.lr for result in report] == pytest.approx(
            [ours.lr / 3, ours.lr * 2 / 3, ours.lr], rel=1e-12
        )
        for group in engine.optimizer.param_groups:
            assert group["lr"] == pytest.approx(ours.lr * group["lr_mult"], rel=1e-12)
            assert group["min_lr"] == pytest.approx(ours.min_lr * group["lr_mult"], rel=1e-12)
            decay = ours.weight_decay if group["wd_mult"] else 0.0
            assert group["lr"] * group["weight_decay"] == pytest.approx(ours.lr * decay, rel=1e-12)


@pytest.mark.parametrize("mixer", ["fem_softmax", "differential", "gated_deltanet", "mamba2"])
@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_vectors_are_not_decayed_however_they_are_stored(
    settings: list[str], mixer: str, engine: str
) -> None:
    """Vectors have no weight decay, including the four lambda vectors of differential attention,
    which are stored as one parameter with two dimensions.
    """
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    with engine_of([*settings, f"model.mixer={mixer}", f"engine.name={engine}"]) as made:
        optimizer = made.optimizer if engine == "megatron" else made._optimizer()
        sizes = {True: 0, False: 0}
        for group in optimizer.param_groups:
            sizes[bool(group["wd_mult"])] += sum(parameter.numel() for parameter in group["params"])
        vectors = sum(
            p.numel()
            for name, p in made.models[0].named_parameters()
            if p.ndim == 1 or name.endswith(".lam")
        )
        assert sizes == {
            False: vectors,
            True: sum(p.numel() for p in made.models[0].parameters()) - vectors,
        }


def test_at_the_base_it_is_the_standard_run_to_the_bit(settings: list[str]) -> None:
    runs = []
    for overrides in (
        [UNTIED],
        [*MUP, "model.mup.base_hidden_size=32", "model.mup.base_head_size=8"],
    ):
        with engine_of([*settings, *overrides]) as engine:
            kinds = groups(engine)
            runs.append(
                (
                    kinds,
                    train(engine),
                    [weight.detach().clone() for weight in engine.models[0].parameters()],
                )
            )
    (kinds, report, weights), (mup_kinds, mup_report, mup_weights) = runs
    assert kinds == mup_kinds and report == mup_report
    assert all(torch.equal(a, b) for a, b in zip(weights, mup_weights, strict=True))


# --- layouts, resuming ----------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "resumed": (1, []),
    "TP2+SP": (2, TP2 + SP),
    # The second stage has no parameter group for the preconditioners of CEM.
    "PP2": (2, PP2),
}


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Done]:
    """Results by case: an uninterrupted run of 2 + 3 steps, and the layouts under test resumed from
    its checkpoint after step 2.
    """
    folder = tmp_path_factory.mktemp("mup")
    model = [
        "model.pattern=[cem, cem, transformer, transformer]",
        "model.num_layers=4",
        "model.mlp=swiglu",
        "model.mup.base_hidden_size=8",
    ]
    base = [
        *data_of(tiny_data),
        *SMALL,
        *MUP,
        *model,
        "train.precision=fp32",
        f"run_dir={folder / 'run'}",
    ]
    jobs = {1: [Job("whole", base, 2 + STEPS, save_after=2)], 2: []}
    for name in values_of_cases(request, "test_resumes_with_its_groups_at_every_layout", "name"):
        world, layout = LAYOUTS[name]
        jobs[world].append(Job(name, [*base, *layout], STEPS, load=str(folder / "run"), draw=True))
    return run_all(jobs.items(), folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumes_with_its_groups_at_every_layout(results: dict[str, Done], name: str) -> None:
    """A resumed run gives the losses of the uninterrupted run: bit for bit at the same layout,
    otherwise to 1e-6, because fp32 sums have another order (as in test_parity).
    """
    wanted = results["whole"].steps[2:]
    assert results[name].steps == (
        wanted if name == "resumed" else [pytest.approx(step, rel=1e-6) for step in wanted]
    )
    assert results[name].initial == results["whole"].initial


def test_another_base_is_another_model(pretrain: Command) -> None:
    """A run with muP cannot be resumed with another base, or without muP."""
    base = "model.mup.base_hidden_size=8"
    pretrain(*MUP, base, "train.steps=4")
    for words in (
        [*MUP, "model.mup.base_hidden_size=16"],
        [UNTIED, "model.parametrization=standard"],
    ):
        assert "is of another model: " in pretrain.refused(*words, "train.steps=8")


# --- exports --------------------------------------------------------------------------------------

EXPORTED = {
    "llama": (
        ModelConfig(**SIZES, mixer="transformer", parametrization="mup", mup=MupConfig(16)),
        "LlamaForCausalLM",
    ),
    "transformer, 1/d": (
        ModelConfig(**SIZES, mixer="transformer", parametrization="mup", mup=MupConfig(16, 4)),
        "FemLMForCausalLM",
    ),
    "cem": (
        ModelConfig(**SIZES, mixer="cem", parametrization="mup", mup=MupConfig(16)),
        "FemLMForCausalLM",
    ),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_computes_the_same_and_comes_back(name: str, tmp_path: Path) -> None:
    """An export loaded by stock transformers gives the training model's float32 logits, and its
    import has the same model configuration, including the base.

    The tolerance is 1e-5 of the largest logit, because sums have another order.
    """
    from transformers import AutoModelForCausalLM

    from fem_megatron.megatron.model import Layout, build
    from tests.one_process import megatron_of_one_process
    from tests.tools.hf.checkpoints import hf, save

    model, family = EXPORTED[name]
    state = random_state(model, dtype=torch.float32)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[key][SIZES["vocab_size"] :] = 0
    assert hf("export", save(model, tmp_path / "ck", state), tmp_path / "hf") == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [family]
    tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(1))
    with megatron_of_one_process(), torch.no_grad():
        (chunk,) = build(model, Layout(), 8, seed=1)
        chunk.load_state_dict(state)
        wanted = chunk(tokens, torch.arange(8).repeat(2, 1), None)[..., :50]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tokens).logits, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item()
        )
    assert hf("import", tmp_path / "hf", tmp_path / "again") == 0
    assert ModelConfig.from_dict(find(tmp_path / "again").manifest["config"]["model"]) == model
    assert (
        yaml.safe_load((tmp_path / "again" / "model.yaml").read_text())["mup"]["base_hidden_size"]
        == 16
    )


def test_an_export_s_fresh_weights_start_as_training_s() -> None:
    """An exported model created from its configuration is initialized as in training.

    The standard deviation of the output layer is scaled by 1 / m, that of the matrices by 1 /
    sqrt(m). The tolerance is five times the statistical error of a standard deviation, 1 / sqrt(2
    n).
    """
    from tools.hf.configuration_fem import FemLMConfig
    from tools.hf.modeling_fem import FemLMForCausalLM

    config = replace(EXPORTED["cem"][0], hidden_size=64, mixer="fem_softmax")
    model: Any = FemLMForCausalLM(FemLMConfig(config.__dict__))
    for name, std in (
        ("lm_head", 0.02 / 4),
        ("model.embed_tokens", 0.02),
        ("model.layers.0.mixer.in_proj", 0.01),
    ):
        weight = model.get_submodule(name).weight
        assert weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * weight.numel()))


def test_it_trains_as_an_output_multiplier_does(settings: list[str]) -> None:
    """muP trains like an output layer m times as large, with the base's learning rate and decay,
    followed by a multiplier 1 / m (the form of table 8; lemma J.1).

    m = 4 is a power of two, so both runs round equally. Adam's epsilon and gradient clipping would
    differ; epsilon is reduced and clipping disabled. Losses agree to 1e-6, the rounding of the
    learning rate lr / 4 times a moment.
    """
    plain = [
        "model.mixer=transformer",
        "model.mup.base_hidden_size=8",
        "parallel.use_distributed_optimizer=false",
    ]
    quiet = ["optimizer.clip_grad=0", "optimizer.eps=1.0e-20"]
    losses = []
    for multiplied in (False, True):
        with engine_of([*settings, *MUP, *plain, *quiet, "train.precision=fp32"]) as engine:
            if multiplied:
                layer = engine.models[0].output_layer
                layer.weight.data.mul_(4.0)
                layer.register_forward_pre_hook(lambda module, given: (given[0] / 4.0, *given[1:]))
                by_rate = {
                    (group["lr_mult"], group["wd_mult"]): group["params"]
                    for group in engine.optimizer.param_groups
                }
                hidden = by_rate[0.25, 4.0]
                (index,) = (i for i, parameter in enumerate(hidden) if parameter is layer.weight)
                by_rate[1.0, 1.0].append(hidden.pop(index))
            losses.append([result.loss for result in train(engine, 6)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert abs(losses[0][-1] - losses[0][0]) > 1e-3, "it learns"
