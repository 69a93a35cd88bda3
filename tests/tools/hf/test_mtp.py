"""Tests of modules of multi-token prediction in exports: dropped or kept, and computed as in
training.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.tools.generate.test_speculative import over_the_text
from tests.tools.hf.checkpoints import hf, save, tensors, weights
from tests.tools.hf.small import config_of, here, random_state, small, tokens
from tests.tools.refusals import Refused
from tools.hf.__main__ import main
from tools.hf.folder import json_object
from tools.hf.open_model import open_model

DEPTH, LENGTH = 2, 12


def test_dropped_or_kept(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Transformer without its modules is a Llama; with them it has the same logits. `verify`
    accepts both, `import` keeps what is there, also for another mixer.
    """
    model = small("transformer", mtp_depth=DEPTH)
    checkpoint = save(model, tmp_path / "checkpoint")
    assert hf("export", checkpoint, tmp_path / "plain") == 0
    assert hf("export", checkpoint, tmp_path / "kept", "--mtp") == 0
    kinds = {
        name: json_object(tmp_path / name / "config.json")["architectures"]
        for name in ("plain", "kept")
    }
    assert kinds == {"plain": ["LlamaForCausalLM"], "kept": ["FemLMForCausalLM"]}
    assert not [name for name in tensors(tmp_path / "plain") if "mtp" in name]
    logits = [
        open_model(tmp_path / name).model(tokens(1, 9)).logits
        for name in ("plain", "kept", "checkpoint")
    ]
    # Float32 rounding of transformers' attention and of ours, which the checkpoint has as well.
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(logits[1], logits[2])
    capsys.readouterr()
    assert hf("verify", tmp_path / "plain", checkpoint) == 0
    assert "weights: 21 tensors, equal bit for bit" in capsys.readouterr().out
    assert hf("verify", tmp_path / "kept", checkpoint) == 0
    assert "configuration: equal" in capsys.readouterr().out
    assert hf("import", tmp_path / "plain", tmp_path / "less") == 0
    assert weights(tmp_path / "less").keys() == random_state(small("transformer")).keys()
    assert hf("import", tmp_path / "kept", tmp_path / "grafted", "--mixer", "fem_softmax") == 0
    name = "mtp_modules.1.projection.weight"
    assert torch.equal(weights(tmp_path / "grafted")[name], weights(checkpoint)[name])
    refused(main, "tools.hf", "export", tmp_path / "less", tmp_path / "none", "--mtp")


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", ["fem_gla", "yuriiformer"])
def test_losses_are_those_of_training(name: str) -> None:
    """The losses of training from the logits of an exported model's modules."""
    from fem_megatron.megatron.model import Layout, build

    model = here(name, torch.float64, mtp_depth=DEPTH)
    config = small(**config_of(name).__dict__ | {"mtp_depth": DEPTH})
    (chunk,) = build(config, Layout(params_dtype=torch.float64), LENGTH, seed=0)
    answer = chunk.load_state_dict(random_state(config, torch.float64), strict=False)
    assert not answer.unexpected_keys
    text = tokens(1, LENGTH + 1 + DEPTH)
    ahead = torch.cat([text[:, 1 + k : LENGTH + 1 + k] for k in range(1, DEPTH + 1)])
    ones = torch.ones(1, LENGTH)
    sums = chunk.train()(
        text[:, :LENGTH],
        torch.arange(LENGTH)[None],
        None,
        labels=text[:, 1 : LENGTH + 1],
        loss_mask=ones,
        ahead=(ahead, ones.expand(DEPTH, -1)),
    )
    states = over_the_text(model, text[0].tolist())
    for k, (hidden, wanted) in enumerate(zip(states, sums[1:], strict=True), 1):
        labels = text[0, 1 + k : LENGTH + 1 + k]
        found = cross_entropy(model.lm_head(hidden[:LENGTH, 0]), labels, reduction="sum")
        # The training code computes losses in float32.
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
