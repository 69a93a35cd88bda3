"""``verify``: equal models are, to the bit; of others the broken tensor is named, whatever the formats; numbers against a plain count."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fem_megatron.config import ModelConfig
from tests.tools.hf.small import random_state, small
from tests.tools.hf.texts import save, text_model
from tools.hf.__main__ import main
from tools.hf.bundle import bundle
from tools.hf.compare import (
    LOGITS,
    Predictions,
    compare_traces,
    difference,
    layer_of,
    trace,
)
from tools.hf.export import export_state_dict, hf_config
from tools.hf.modeling_fem import FemLMForCausalLM
from tools.hf.recipes import to_fem
from tools.hf.verify import fixed_ids

FEM = text_model("fem_softmax", num_layers=3)
PLAIN = text_model("transformer", num_query_groups=2, num_layers=3)
IN_PROJ = "model.layers.1.mixer.in_proj.weight"


pytestmark = pytest.mark.usefixtures("open_folder")  # transformers copies a folder's code before it runs it: not into anybody's home


def exported(model: ModelConfig, state: dict[str, torch.Tensor], out: Path, tokenizer: Path, dtype: torch.dtype = torch.float32) -> Path:
    export_state_dict(state, model, out, tokenizer_dir=tokenizer, dtype=dtype, card={"seq_length": 64})
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fem, plain: checkpoints; fem_hf, fem_bf16, plain_hf: exports of them."""
    out = tmp_path_factory.mktemp("verify")
    for name, model in (("fem", FEM), ("plain", PLAIN)):
        # Gains below one in every layer, as trained models have: else rounding to bf16 would grow from layer to layer.
        state = {key: tensor / 3 if tensor.ndim > 1 else tensor for key, tensor in random_state(model, dtype=torch.float32).items()}
        tokenizer = save(model, out / name, state) / "tokenizer"
        exported(model, state, out / f"{name}_hf", tokenizer)
        exported(model, state, out / f"{name}_bf16", tokenizer, torch.bfloat16)
    return out


Answer = tuple[int, str, dict[str, Any]]


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command in this process: its exit code, what it printed, its JSON."""

    def run(a: Path, b: Path, *more: str) -> Answer:
        code = main(["verify", str(a), str(b), "--json", str(tmp_path / "found.json"), "--device", "cpu", *more])
        return code, capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())

    return run


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of an export with some tensors changed."""

    def change(name: str, **changes: Callable[[torch.Tensor], Any]) -> Path:
        out = Path(shutil.copytree(folder / name, tmp_path / "changed"))
        weights = load_file(out / "model.safetensors")
        for key, edit in changes.items():
            weights[key] = weights[key].clone()
            edit(weights[key])
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        return out

    return change


@pytest.mark.parametrize(("a", "b"), [("fem", "fem_hf"), ("plain_hf", "plain")])
def test_a_checkpoint_and_its_export_are_equal_to_the_bit(folder: Path, verify: Callable[..., Answer], a: str, b: str) -> None:
    code, text, found = verify(folder / a, folder / b)
    assert code == 0 and found["equal"] and found["bitwise"] and found["first"] is None
    assert found["configuration"] == {} and found["tokenizers"] is None and found["faults"] == []
    assert found["weights"]["compared"] > 20 and found["weights"]["differing"] == []
    assert text.splitlines()[-1] == "equal bit for bit: within 0.0001 (the default of float32)"
    assert [row["layer"] for row in found["layers"] if row["layer"] != "rotary_emb"] == [
        "embedding", "layer 0", "layer 1", "layer 2", "final norm", "logits",
    ]  # fmt: skip
    # 1 + 17 + 64 ids; the texts' bytes, of which the tokenizer makes an id each, cut at nothing.
    texts = [
        "The quick brown fox jumps over the lazy dog, and then it sleeps.",
        "def read(self, size=-1):\n    return self.buffer[:size]\n",
    ]
    assert found["tokens"] == found["argmax_agrees"] > 82 + sum(len(text.encode()) for text in texts)


def test_rounded_weights_are_equal_at_their_own_tolerance(folder: Path, verify: Callable[..., Answer]) -> None:
    for name in ("fem", "plain"):
        code, text, found = verify(folder / name, folder / f"{name}_bf16")
        assert code == 0 and not found["bitwise"] and found["tolerance"] == 2e-2
        assert text.splitlines()[-1] == "equal: within 0.02 (the default of bfloat16)"
        code, text, found = verify(folder / name, folder / f"{name}_bf16", "--tolerance", "1e-4")
        # The embedding is the first that was rounded.
        assert (
            code == 1 and found["first"]["where"] == "embedding" and text.splitlines()[-1].startswith("different at 0.0001 (--tolerance): ")
        )


def test_the_broken_tensor_is_named(folder: Path, verify: Callable[..., Answer], changed: Callable[..., Path]) -> None:
    code, text, found = verify(folder / "fem", changed("fem_hf", **{IN_PROJ: lambda weight: weight[7, 3].add_(0.12)}))
    assert code == 1 and not found["equal"] and found["first"]["weights"] == [IN_PROJ]
    (line,) = [line for line in text.splitlines() if "first difference" in line]
    assert re.fullmatch(
        rf"layer 1, mixer.in_proj: first difference, 0.12 in weights \({IN_PROJ}\), \S+ in what it computes; everything before agrees to 0",
        line,
    )
    before = [place for place in found["places"] if layer_of(place["where"]) < 1]
    assert before and all(place["absolute"] == 0 for place in before)
    assert next(place["where"] for place in found["places"] if place["absolute"]) == "layer 1, mixer.in_proj"
    assert [entry["where"] for entry in found["weights"]["differing"]] == [IN_PROJ]
    assert found["weights"]["differing"][0]["absolute"] == pytest.approx(0.12, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.layers.2.self_attn.v_proj.weight", "layer 2, self_attn.v_proj"),
        ("lm_head.weight", "logits"),
    ],
)
def test_in_a_stock_folder_too(folder: Path, verify: Callable[..., Answer], changed: Callable[..., Path], name: str, where: str) -> None:
    code, text, found = verify(folder / "plain", changed("plain_hf", **{name: lambda weight: weight.flatten()[5:9].add_(0.5)}))
    assert code == 1 and found["first"]["where"] == where and found["first"]["weights"] == [name]
    assert f"{where}: first difference, 0.5 in weights ({name}), " in text


def test_a_weight_that_no_prompt_reads_is_found(folder: Path, verify: Callable[..., Answer], changed: Callable[..., Path]) -> None:
    row = next(row for row in range(256) if all(row not in ids for ids in fixed_ids(257, 64)) and row > 100)
    prompts = folder / "prompts.txt"
    prompts.write_text("abc\n\n")
    other = changed("fem_hf", **{"model.embed_tokens.weight": lambda weight: weight[row].zero_()})
    code, text, found = verify(folder / "fem", other, "--prompts", str(prompts))
    assert found["logits"]["absolute"] == 0 and found["tokens"] == 82 + 3
    assert code == 1 and found["first"]["where"] == "embedding" and "1 tensors of weights differ" in text


def test_a_setting_alone_is_told_from_a_weight(folder: Path, verify: Callable[..., Answer], tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder / "plain_hf", tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (other / "config.json").write_text(json.dumps(config))
    code, text, found = verify(folder / "plain", other)
    assert code == 1 and found["configuration"] == {"rope_parameters.rope_theta": [10000.0, 500.0]}
    assert found["first"]["where"] == "rotary_emb" and "its weights agree, so configuration, code or rounding differs" in text
    config["rope_parameters"]["rope_theta"] = 10000.0
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    code, text, found = verify(folder / "plain", other)
    assert code == 0 and "configuration: differs: max_position_embeddings 64 and 512" in text  # told, and nothing is computed from it


def test_our_code_and_the_stock_class_compute_the_same(folder: Path, verify: Callable[..., Answer], tmp_path: Path) -> None:
    """A Transformer as our own modeling code has it, as exports were before: layers and weights correspond, under the stock names."""
    state = random_state(PLAIN, dtype=torch.float32)
    model = FemLMForCausalLM(hf_config(PLAIN, torch.float32, seq_length=64))
    model.load_state_dict({name: recipe.make([state[recipe.sources[0]]]) for name, recipe in to_fem(PLAIN).items()})
    ours = tmp_path / "ours"
    model.save_pretrained(ours)
    for name, code in bundle(PLAIN.blocks()).items():
        (ours / name).write_text(code)
    stock = exported(PLAIN, state, tmp_path / "stock", folder / "fem" / "tokenizer")
    code_, text, found = verify(stock, ours)
    assert code_ == 0 and found["configuration"] == {}
    assert found["weights"]["compared"] == 3 + 9 * PLAIN.num_layers and found["weights"]["differing"] == []
    parts = {place["where"] for place in found["places"]}
    assert {"layer 1", "layer 1, self_attn.o_proj", "layer 1, post_attention_layernorm, given", "layer 1, mlp.down_proj"} <= parts
    weights = load_file(ours / "model.safetensors")
    weights["model.layers.1.mlp.down.weight"][0, 0] += 0.3
    save_file(weights, ours / "model.safetensors", metadata={"format": "pt"})
    code_, text, found = verify(stock, ours)
    assert code_ == 1 and found["first"]["where"] == "layer 1, mlp.down_proj" and "no tokenizer" not in text


def test_other_tokenizers_are_told(folder: Path, verify: Callable[..., Answer], tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder / "plain_hf", tmp_path / "other"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a":', '"aa":', 1).replace('"b":', '"a":', 1).replace('"aa":', '"b":', 1))
    code, text, found = verify(folder / "plain_hf", other)
    assert code == 1 and "2 of them differ, such as 'a'" in found["tokenizers"] and found["logits"]["absolute"] == 0
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (other / file).unlink()
    code, text, found = verify(folder / "plain_hf", other)
    assert code == 0 and f"tokenizers: not compared, none with {other}" in text


def test_other_models_are_compared_as_far_as_they_go(folder: Path, verify: Callable[..., Answer], tmp_path: Path) -> None:
    code, text, found = verify(folder / "fem", folder / "plain_hf")
    assert code == 1 and found["weights"] is None and found["configuration"]["mixer"] == ["fem_softmax", "transformer"]
    smaller = save(small("fem_softmax", num_layers=1, hidden_size=16), tmp_path / "smaller", tokenizer=False)
    code, text, found = verify(folder / "fem", smaller)
    assert code == 1 and "the vocabularies have 257 and 50 entries" in text
    assert found["configuration"]["architecture.hidden_size"] == [32, 16]


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    for arguments, told in (
        ([str(folder / "fem"), str(tmp_path / "none")], "there is no folder"),
        ([str(tmp_path), str(folder / "fem")], "no checkpoint there"),
        ([str(folder / "fem"), str(folder / "fem_hf"), "--tolerance", "-1"], "--tolerance -1.0: a number from 0 on"),
        ([str(folder / "fem"), str(folder / "fem_hf"), "--prompts", str(tmp_path / "empty.txt")], "has no line with a prompt"),
        ([str(folder / "fem"), str(folder / "fem_hf"), "--prompts", str(tmp_path / "none.txt")], "No such file"),
    ):
        assert main(["verify", *arguments, "--device", "cpu"]) == 2
        error = capsys.readouterr().err.splitlines()
        assert error[-1].startswith("tools.hf: error: ") and told in error[-1]


# --- numbers ---------------------------------------------------------------------------------------------------------------------


def test_one_difference() -> None:
    nan, inf = math.nan, math.inf
    found = difference("x", torch.tensor([1.0, -4.0, nan, inf]), torch.tensor([1.5, -4.0, nan, inf]))
    assert (found.absolute, found.scale, found.relative) == (0.5, 4.0, 0.125)
    assert difference("x", torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])).absolute == inf
    assert difference("x", torch.zeros(2), torch.zeros(3)).note == "shapes (2,) and (3,)"
    assert difference("x", torch.zeros(2), torch.zeros(2)).relative == 0
    assert difference("x", torch.zeros(2, dtype=torch.bfloat16), torch.tensor([0, 1e-30])).relative == 1
    long = torch.zeros(2**22 + 5)
    other = long.clone()
    other[-1] = 3
    assert difference("x", long, other).absolute == 3


def test_two_broken_models_are_not_equal() -> None:
    broken = torch.tensor([[0.0, math.nan]])
    (found,) = compare_traces({LOGITS: broken}, {LOGITS: broken})
    assert found.absolute == math.inf and "no finite numbers" in found.note


def test_predictions_against_a_count() -> None:
    a, b = torch.tensor([[0.0, math.log(3)], [5.0, 0.0]]), torch.tensor([[0.0, 0.0], [5.0, 0.0]])
    found = Predictions().and_of(a, b).and_of(a[1:], b[1:])
    assert (found.tokens, found.agree) == (3, 2)
    # KL((1/4, 3/4) || (1/2, 1/2)) = 1/4 ln 1/2 + 3/4 ln 3/2; the likeliest of two equal ones is the first.
    assert found.kl == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-7) == found.largest_kl


def test_a_trace_is_what_the_model_computes(folder: Path) -> None:
    """Against output_hidden_states; looped blocks have a place for each time; no hook stays."""
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(folder / "plain_hf").eval()
    ids = [3, 1, 4, 1, 5]
    seen = trace(model, ids)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), output_hidden_states=True)
    assert torch.equal(seen["logits"], wanted.logits[0]) and torch.equal(seen["embedding"], wanted.hidden_states[0][0])
    assert torch.equal(seen["layer 1"], wanted.hidden_states[2][0]) and torch.equal(seen["final norm"], wanted.hidden_states[-1][0])
    looped = FemLMForCausalLM(hf_config(text_model("cem", recurrence=2), torch.float32)).eval()
    seen = trace(looped, ids)
    assert {"layer 0, mixer", "layer 0, mixer, time 2", "layer 1, mlp, time 2"} <= seen.keys() and "layer 0, time 2" not in seen
