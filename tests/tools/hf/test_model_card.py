"""Tests of the model card: its statements on usage, padding, LoRA and licenses are true for the
folder, and its code runs.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from fem_common.errors import ConfigError
from fem_megatron.mixers.attention.shape import AttentionConfig
from tests.tools.hf.checkpoints import hf
from tests.tools.hf.readers import FAMILIES
from tests.tools.hf.small import VOCAB, export, small, write_tokenizer
from tools.hf.model_card import License

ROOT = Path(__file__).parents[3]
LORA = re.compile(r"`LoraConfig\((.*)\)`")


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """Return a folder's card: the metadata for the Hub, and the text."""
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


@pytest.mark.parametrize("name", ["fem_softmax", "transformer"])
def test_the_code_on_the_card_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run in the folder, without a question."""
    folder = export(
        small(name), tmp_path / "model", tokenizer=write_tokenizer(tmp_path / "tokenizer", VOCAB)
    )
    (code,) = re.findall(r"```python\n(.*?)```", card(folder)[1], re.DOTALL)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("changes", "counting"),
    [
        ({"name": "fem_softmax"}, []),
        ({"name": "transformer", "mlp": "cem"}, []),
        ({"name": "cem"}, ["cem"]),
        (
            {"num_layers": 3, "pattern": ("fem_softmax", "deltanet", "mamba2")},
            ["deltanet", "mamba2"],
        ),
        ({"name": "gated_deltanet"}, ["gated_deltanet"]),
        (
            {
                "pattern": ("transformer", "fem_softmax"),
                "attention": AttentionConfig(sliding_window=5),
            },
            ["transformer"],
        ),
        # transformers' own Mistral class.
        ({"name": "transformer", "attention": AttentionConfig(sliding_window=5)}, []),
    ],
)
def test_padding_between_turns(
    changes: dict[str, Any], counting: list[str], tmp_path: Path
) -> None:
    """The card names exactly the mixers whose result padding changes, and has no such note for
    transformers' own classes.
    """
    text = card(export(small(**changes), tmp_path / "model"))[1]
    found = re.search(
        r"^- Pad only before or after the text of a row: (.*) counts? positions", text, re.MULTILINE
    )
    assert (re.findall(r"`(\w+)`", found[1]) if found else []) == counting
    assert bool(LORA.search(text)) == ("modeling_fem.py" in text)


@pytest.mark.parametrize("name", ["fem_softmax", "cem", "hyperset"])
def test_lora(name: str, tmp_path: Path) -> None:
    """Follow the card: every adapter has a gradient, and merging does not change the result."""
    peft = pytest.importorskip("peft")
    folder = export(small(name), tmp_path / "model")
    loader: Any = AutoModelForCausalLM
    plain = loader.from_pretrained(folder, trust_remote_code=True)
    snippet = LORA.search(card(folder)[1])
    assert snippet is not None
    options = eval(f"dict({snippet[1]})")
    assert ("target_parameters" in options) == hasattr(plain.model.layers[0].mlp, "gate_up")
    torch.manual_seed(0)  # draws the adapters
    model = peft.get_peft_model(
        plain, peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False, **options)
    )
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    adapters = {key: weight for key, weight in model.named_parameters() if "lora_" in key}
    assert len(adapters) >= 8 and all(
        weight.grad is not None and weight.grad.abs().max() > 0 for weight in adapters.values()
    )
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        with model.disable_adapter():
            assert (model(input_ids=ids).logits - adapted).abs().max() > 0.1
        # float32 rounding: W + AB is rounded once, and passes through two layers of weights far
        # from their start.
        torch.testing.assert_close(
            model.merge_and_unload()(input_ids=ids).logits, adapted, rtol=1e-3, atol=1e-4
        )


def test_licenses(tmp_path: Path, runs: dict[str, Path]) -> None:
    """For the code this project's, as a file; for the weights the given one, or none."""
    ours = (ROOT / "LICENSE").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tokenizer = write_tokenizer(tmp_path / "tokenizer", VOCAB)
    for name in FAMILIES:
        model = small(**{**FAMILIES[name], "vocab_size": VOCAB})
        folder = export(model, tmp_path / name, tokenizer=tokenizer, weights_license=None)
        metadata, text = card(folder)
        has_code = name in ("fem_lm", "qwen2")  # qwen2: the code of the tokenizer
        assert (
            has_code
            == any(folder.glob("*.py"))
            == (folder / "LICENSE").exists()
            == ("## License" in text)
        )
        assert "license" not in metadata and (
            not has_code or (folder / "LICENSE").read_text() == ours
        )
        assert (
            not has_code
            or f"under {project['license']} ([LICENSE](LICENSE)). No license is stated for the"
            " weights."
            in text
        )
    assert hf("export", runs["transformer"], tmp_path / "stock", "--license", "cc-by-4.0") == 0
    metadata, text = card(tmp_path / "stock")
    assert (
        metadata["license"] == "cc-by-4.0"
        and "The weights are under cc-by-4.0." in text
        and not (tmp_path / "stock" / "LICENSE").exists()
    )
    assert (
        hf(
            "export",
            runs["fem_softmax"],
            tmp_path / "fem",
            "--license",
            "lab-1.0=https://huggingface.co/lab/license",
        )
        == 0
    )
    metadata, text = card(tmp_path / "fem")
    assert (
        metadata
        | {
            "license": "other",
            "license_name": "lab-1.0",
            "license_link": "https://huggingface.co/lab/license",
        }
        == metadata
    )
    assert "The weights are under [lab-1.0](https://huggingface.co/lab/license)." in text


@pytest.mark.parametrize(
    "text", ["", "Apache 2.0", "other", "lab=", "=https://huggingface.co", "lab=two words"]
)
def test_no_license(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^--license .*: expected an id of the Hub, such as apache-2.0, or NAME=LINK for"
            r" another license"
        ),
    ):
        License.read(text)
