"""Tests of ``verify``: equal models are equal bit for bit; for others the damaged tensor is named
for all formats; numbers against a manual count.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.hf.checkpoints import changed, hf, rewrite
from tests.tools.hf.small import export, random_state, small
from tests.tools.hf.texts import save, text_model
from tests.tools.refusals import Refused
from tests.wording import Wording
from tools.hf.__main__ import main
from tools.hf.compare import LOGITS, Predictions, compare_traces, difference, layer_of, trace
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.folder import json_object
from tools.hf.modeling_fem import FemLMForCausalLM
from tools.hf.open_model import open_model
from tools.hf.verify import fixed_ids

FEM = text_model("fem_softmax", num_layers=3)
PLAIN = text_model("transformer", num_query_groups=2, num_layers=3)
Copy = Callable[[str], Path]
"""Name of a folder -> copy that a test may change."""
IN_PROJ = "model.layers.1.mixer.in_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with fem, plain: checkpoints; fem_hf, fem_bf16, plain_hf, plain_bf16: exports of
    them.
    """
    out = tmp_path_factory.mktemp("verify")
    for name, model in (("fem", FEM), ("plain", PLAIN)):
        # Gains below one in every layer, as in trained models; otherwise rounding to bf16 would
        # grow from layer to layer.
        state = {
            key: tensor / 3 if tensor.ndim > 1 else tensor
            for key, tensor in random_state(model).items()
        }
        tokenizer = save(model, out / name, state) / "tokenizer"
        for kind, dtype in (("hf", torch.float32), ("bf16", torch.bfloat16)):
            place, card = out / f"{name}_{kind}", {"seq_length": 64}
            export(model, place, state, tokenizer, dtype=dtype, card=card)
    return out


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Copy:
    """Copies of a folder that a test may change."""
    return lambda name: Path(shutil.copytree(folder / name, tmp_path / "other"))


Verify = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def verify(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Run the command in this process and check its exit code; return its output and JSON. Names
    are those in ``folder``.
    """

    def run(code: int, a: str | Path, b: str | Path, *more: str) -> tuple[str, dict[str, Any]]:
        capsys.readouterr()
        output = ("--json", tmp_path / "found.json")
        assert hf("verify", folder / a, folder / b, *output, "--device", "cpu", *more) == code
        found = json_object(tmp_path / "found.json")
        assert found["equal"] == (code == 0) == (found["faults"] == [])
        assert code == 1 or found["first"] is None
        return capsys.readouterr().out, found

    return run


@pytest.mark.parametrize(("a", "b"), [("fem", "fem_hf"), ("plain_hf", "plain")])
def test_a_checkpoint_and_its_export_are_equal_to_the_bit(
    folder: Path, verify: Verify, wording: Wording, a: str, b: str
) -> None:
    text, found = verify(0, a, b)
    wording(text, FOLDER=folder)
    assert found["bitwise"] and found["configuration"] == {} and found["tokenizers"] is None
    assert found["weights"]["compared"] > 20 and found["weights"]["differing"] == []
    layers = ["embedding", "layer 0", "layer 1", "layer 2", "final norm", "logits"]
    assert [row["layer"] for row in found["layers"] if row["layer"] != "rotary_emb"] == layers
    # 1 + 17 + 64 ids, and one id for each byte of the texts.
    assert found["tokens"] == found["argmax_agrees"] > 82 + 100


@pytest.mark.parametrize("name", ["fem", "plain"])
def test_rounded_weights_are_equal_at_their_own_tolerance(verify: Verify, name: str) -> None:
    text, found = verify(0, name, f"{name}_bf16")
    assert not found["bitwise"]
    assert found["tolerance"] == 2e-2
    assert "the default of bfloat16" in text.splitlines()[-1]
    text, found = verify(1, name, f"{name}_bf16", "--tolerance", "1e-4")
    assert found["first"]["where"] == "embedding"  # the first rounded tensor


@pytest.mark.parametrize(
    ("name", "tensor", "where"),
    [
        ("fem", IN_PROJ, "layer 1, mixer.in_proj"),
        ("plain", "model.layers.2.self_attn.v_proj.weight", "layer 2, self_attn.v_proj"),
        ("plain", "lm_head.weight", "logits"),
    ],
)
def test_the_broken_tensor_is_named(
    verify: Verify, other: Copy, name: str, tensor: str, where: str
) -> None:
    broken = other(f"{name}_hf")
    rewrite(broken, lambda found: found[tensor][7, 3].add_(0.12))
    text, found = verify(1, name, broken)
    assert (found["first"]["where"], found["first"]["weights"]) == (where, [tensor])
    assert f"{where}: first difference, 0.12 in weights ({tensor}), " in text
    assert "; everything before agrees to 0\n" in text
    before = [place for place in found["places"] if layer_of(place["where"]) < layer_of(where)]
    assert before and all(place["absolute"] == 0 for place in before)
    assert next(place["where"] for place in found["places"] if place["absolute"]) == where
    (differing,) = found["weights"]["differing"]
    assert differing["where"] == tensor and differing["absolute"] == pytest.approx(0.12, rel=1e-5)


def test_a_weight_that_no_prompt_reads_is_found(
    verify: Verify, other: Copy, tmp_path: Path
) -> None:
    row = next(row for row in range(101, 256) if all(row not in ids for ids in fixed_ids(257, 64)))
    (tmp_path / "prompts.txt").write_text("abc\n\n")
    broken = other("fem_hf")
    rewrite(broken, lambda found: found["model.embed_tokens.weight"][row].zero_())
    _, found = verify(1, "fem", broken, "--prompts", str(tmp_path / "prompts.txt"))
    assert found["logits"]["absolute"] == 0
    assert found["tokens"] == 82 + 3
    assert found["first"]["where"] == "embedding"


def test_a_setting_alone_is_distinguished_from_a_weight(verify: Verify, other: Copy) -> None:
    edited = other("plain_hf")
    rope = json_object(edited / "config.json")["rope_parameters"]
    changed(edited / "config.json", rope_parameters=rope | {"rope_theta": 500.0})
    text, found = verify(1, "plain", edited)
    assert found["configuration"] == {"rope_parameters.rope_theta": [10000.0, 500.0]}
    assert found["first"]["where"] == "rotary_emb"
    assert "its weights agree, so configuration, code or rounding differs" in text
    # No value is computed from it.
    changed(edited / "config.json", rope_parameters=rope, max_position_embeddings=512)
    assert (
        "configuration: differs: max_position_embeddings 64 and 512"
        in verify(0, "plain", edited)[0]
    )


def test_other_tokenizers_are_reported(verify: Verify, other: Copy) -> None:
    edited = other("plain_hf")
    text = (edited / "tokenizer.json").read_text()
    (edited / "tokenizer.json").write_text(
        text.replace('"a":', '"aa":', 1).replace('"b":', '"a":', 1).replace('"aa":', '"b":', 1)
    )
    _, found = verify(1, "plain_hf", edited)
    assert "2 of them differ, such as 'a'" in found["tokenizers"]
    assert found["logits"]["absolute"] == 0
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (edited / file).unlink()
    assert f"tokenizers: not compared, no tokenizer in {edited}" in verify(0, "plain_hf", edited)[0]


def test_other_models_are_compared_as_far_as_they_go(verify: Verify, tmp_path: Path) -> None:
    _, found = verify(1, "fem", "plain_hf")
    assert found["weights"] is None
    assert found["configuration"]["mixer"] == [
        "fem_softmax",
        "transformer",
    ]
    text, found = verify(
        1,
        "fem",
        save(
            small("fem_softmax", num_layers=1, hidden_size=16),
            tmp_path / "smaller",
            tokenizer=False,
        ),
    )
    assert "the vocabularies have 257 and 50 entries" in text
    assert found["configuration"]["architecture.hidden_size"] == [32, 16]


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    ours, theirs = folder / "fem", folder / "fem_hf"
    for arguments in (
        (ours, tmp_path / "none"),
        (tmp_path, ours),
        (ours, theirs, "--tolerance", "-1"),
        (ours, theirs, "--prompts", tmp_path / "empty.txt"),
        (ours, theirs, "--prompts", tmp_path / "none.txt"),
    ):
        refused(main, "tools.hf", "verify", *arguments)


# --- numbers --------------------------------------------------------------------------------------


def test_one_difference() -> None:
    nan, inf = math.nan, math.inf
    found = difference(
        "x", torch.tensor([1.0, -4.0, nan, inf]), torch.tensor([1.5, -4.0, nan, inf])
    )
    assert (found.absolute, found.scale, found.relative) == (0.5, 4.0, 0.125)
    assert difference("x", torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])).absolute == inf
    assert difference("x", torch.zeros(2), torch.zeros(3)).absolute == inf
    assert difference("x", torch.zeros(2), torch.zeros(2)).relative == 0
    assert (
        difference("x", torch.zeros(2, dtype=torch.bfloat16), torch.tensor([0, 1e-30])).relative
        == 1
    )
    long, last = torch.zeros(2, 2**22 + 5)  # longer than one chunk of the comparison
    last[-1] = 3
    assert difference("x", long, last).absolute == 3
    broken = torch.tensor([[0.0, nan]])  # two broken models do not count as equal
    (found,) = compare_traces({LOGITS: broken}, {LOGITS: broken})
    assert found.absolute == inf


def test_predictions_against_a_count() -> None:
    a = torch.tensor([[0.0, math.log(3)], [5.0, 0.0]])
    b = torch.tensor([[0.0, 0.0], [5.0, 0.0]])
    found = Predictions().and_of(a, b).and_of(a[1:], b[1:])
    assert (found.tokens, found.agree) == (3, 2)
    # KL((1/4, 3/4) || (1/2, 1/2)) = 1/4 ln 1/2 + 3/4 ln 3/2; of two equally likely tokens, the
    # first counts as the likeliest.
    assert (
        found.kl
        == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-7)
        == found.largest_kl
    )


def test_a_trace_is_what_the_model_computes(folder: Path) -> None:
    """Compared with output_hidden_states; recurrent blocks have one entry for each application; no
    hook remains.
    """
    model, ids = open_model(folder / "plain_hf").model, [3, 1, 4, 1, 5]
    seen = trace(model, ids)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), output_hidden_states=True)
    assert torch.equal(seen["logits"], wanted.logits[0])
    assert torch.equal(seen["embedding"], wanted.hidden_states[0][0])
    assert torch.equal(seen["layer 1"], wanted.hidden_states[2][0])
    assert torch.equal(seen["final norm"], wanted.hidden_states[-1][0])
    looped = FemLMForCausalLM(FemLMConfig(text_model("cem", recurrence=2).__dict__)).eval()
    seen = trace(looped, ids)
    assert {"layer 0, mixer", "layer 0, mixer, time 2", "layer 1, mlp, time 2"} <= seen.keys()
    assert "layer 0, time 2" not in seen
