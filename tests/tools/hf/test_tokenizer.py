"""Tokenizers opened by the tools and, from an export, by transformers, read the ids of
tokenizer.json for every class and family.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reader

from tests.tools.hf.checkpoints import hf
from tests.tools.hf.readers import FAMILIES, KINDS, TEXTS, ids, write_reader
from tests.tools.hf.small import export, small
from tools.hf.folder import json_object
from tools.hf.open_model import quiet_transformers
from tools.hf.tokenizer import auto_tokenizer, load_tokenizer

# transformers 5 rebuilds the tokenizers of all these classes except for the last two.
CLASSES = (
    "GPT2Tokenizer Qwen2Tokenizer GPTNeoXTokenizerFast LlamaTokenizer CohereTokenizerFast"
    " CodeLlamaTokenizer GemmaTokenizer BertTokenizer T5TokenizerFast RobertaTokenizer"
    " OpenAIGPTTokenizer Qwen3_5Tokenizer PreTrainedTokenizerFast NoSuchTokenizer"
).split()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_tokenizer_json_whatever_class_is_named(tmp_path: Path, kind: str) -> None:
    for name in CLASSES:
        folder = write_reader(tmp_path / name, kind, name)
        assert ids(load_tokenizer(folder)) == [
            Reader.from_file(str(folder / "tokenizer.json")).encode(text).ids for text in TEXTS
        ], name


def test_classes_keep_their_special_tokens(tmp_path: Path) -> None:
    """GPT-2's folder names none: they belong to its class, which follows from the model type; an
    export names them. A null is none.
    """
    folder = write_reader(tmp_path / "gpt2", "regex", None, eos_token=None)
    assert load_tokenizer(folder).eos_token is None
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert load_tokenizer(folder).eos_token == "<|endoftext|>"
    out = export(small("transformer", vocab_size=640), tmp_path / "out", tokenizer=folder)
    settings = json_object(out / "tokenizer_config.json")
    assert settings["eos_token"] == "<|endoftext|>"
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert json_object(out / "config.json")["eos_token_id"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_opens_with_its_own_ids(tmp_path: Path, family: str) -> None:
    folder = write_reader(tmp_path / "tokenizer", "regex", "PreTrainedTokenizerFast")
    out = export(small(**FAMILIES[family]), tmp_path / "out", tokenizer=folder)
    assert json_object(out / "config.json")["model_type"] == family
    assert (out / "tokenization_fem.py").is_file() == (family == "qwen2")
    with quiet_transformers():
        for trust in (True, False):
            assert ids(auto_tokenizer(out, trust_remote_code=trust)) == ids(
                load_tokenizer(folder)
            ), trust


def test_verify_compares_ids_also_as_transformers_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With equal weights and entries: another pattern, and a biased Transformer's folder that
    transformers 5 opens as Qwen2Tokenizer.
    """
    model = small(**FAMILIES["qwen2"])
    reader = write_reader(tmp_path / "reader", "regex", None)
    folder = export(model, tmp_path / "folder", tokenizer=reader)
    other = export(model, tmp_path / "other", tokenizer=reader)
    text = (folder / "tokenizer.json").read_text()
    assert "{1,3}" in text
    (other / "tokenizer.json").write_text(text.replace("{1,3}", "{1,4}"))
    settings = json_object(folder / "tokenizer_config.json")
    del settings["auto_map"]
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    assert hf("verify", folder, other, "--device", "cpu") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "the tokenizers differ: the same entries, but other ids for \"It's 7 o'clock" in last
    assert (
        f"; transformers opens {other / 'tokenizer.json'} as Qwen2Tokenizer: the same entries, but"
        " other ids for" in last
    )
    assert str(folder) not in last
