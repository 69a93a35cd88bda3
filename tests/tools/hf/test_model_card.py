"""Tests of the model card: its statements on usage, padding, LoRA and licenses are true for the
folder, and its code runs.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import pipeline
from transformers.cli.serving.model_manager import ModelManager

from fem_common.errors import ConfigError
from fem_megatron.mixers.attention.shape import AttentionConfig
from tests.tools.hf.checkpoints import hf
from tests.tools.hf.readers import FAMILIES
from tests.tools.hf.runs import Folders
from tests.tools.hf.small import LORA, VOCAB, export, small, write_tokenizer
from tools.hf.folder import json_object
from tools.hf.model_card import License

ROOT = Path(__file__).parents[3]


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


@pytest.mark.parametrize("name", ["fem_softmax", "transformer"])
def test_transformers_serve_loads_what_the_card_names(name: str, tmp_path: Path) -> None:
    """The card also names a missing chat template; with one, a pipeline takes messages."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", VOCAB)
    folder = export(small(name), tmp_path / "model", tokenizer=tokenizer)
    assert "no chat template" in card(folder)[1]
    (tokenizer / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    with_template = export(small(name), tmp_path / "chat", tokenizer=tokenizer)
    assert "no chat template" not in card(with_template)[1]
    write = pipeline("text-generation", str(with_template), trust_remote_code=name == "fem_softmax")
    (answer,) = write([{"role": "user", "content": "w1 w2"}], max_new_tokens=3, do_sample=False)
    assert [message["role"] for message in answer["generated_text"]] == ["user", "assistant"]
    server = ModelManager(device="cpu", trust_remote_code=name == "fem_softmax")
    if changed := re.search(r'`"architectures": (\["\w+"\])`', card(folder)[1]):
        with pytest.raises(AttributeError):
            server.load_model_and_processor(f"{folder}@main")
        config = json_object(folder / "config.json")
        config["architectures"] = json.loads(changed[1])
        (folder / "config.json").write_text(json.dumps(config))
    model, _ = server.load_model_and_processor(f"{folder}@main")
    assert type(model).__name__ == {"fem_softmax": "FemLMForCausalLM"}.get(name, "LlamaForCausalLM")


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


def test_licenses(tmp_path: Path, runs: Folders) -> None:
    """For the code this project's, as a file; for the weights the given one, or none."""
    ours = (ROOT / "LICENSE").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = (
        f"under {project['license']} ([LICENSE](LICENSE)). No license is stated for the weights."
    )
    tokenizer = write_tokenizer(tmp_path / "tokenizer", VOCAB)
    for name in FAMILIES:
        model = small(**{**FAMILIES[name], "vocab_size": VOCAB})
        folder = export(model, tmp_path / name, tokenizer=tokenizer, weights_license=None)
        metadata, text = card(folder)
        license = folder / "LICENSE"
        has_code = name in ("fem_lm", "qwen2")  # qwen2: the code of the tokenizer
        assert has_code == any(folder.glob("*.py")) == license.exists() == ("## License" in text)
        assert "license" not in metadata
        assert not has_code or (license.read_text() == ours and stated in text)
    out, link = tmp_path / "stock", "https://huggingface.co/lab/license"
    assert hf("export", runs["transformer"], out, "--license", "cc-by-4.0") == 0
    metadata, text = card(out)
    assert metadata["license"] == "cc-by-4.0" and "The weights are under cc-by-4.0." in text
    assert not (out / "LICENSE").exists()
    assert hf("export", runs["fem_softmax"], tmp_path / "fem", "--license", f"lab-1.0={link}") == 0
    metadata, text = card(tmp_path / "fem")
    report = {"license": "other", "license_name": "lab-1.0", "license_link": link}
    assert metadata | report == metadata
    assert f"The weights are under [lab-1.0]({link})." in text


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
