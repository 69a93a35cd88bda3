"""Tests of text to ids: those of the data for a model that was trained by this project, those of
its tokenizer for other models.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.tools.evaluate.tiny import llama_folder
from tests.tools.hf.checkpoints import hf
from tests.tools.hf.texts import save, text_model
from tools.evaluate.harness import Adaptor
from tools.generate import generation
from tools.hf.folder import json_object
from tools.hf.open_model import OpenModel, open_model

END = 256


def with_template(folder: Path) -> None:
    """Add a template to a tokenizer's folder that puts <eod> before and after a text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, bos_token="<eod>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eod> $A <eod>", special_tokens=[("<eod>", END)]
    )
    tokenizer.save_pretrained(folder)


def read(opened: OpenModel, text: str) -> list[int]:
    """Return the ids of a prompt, after checking that generation and the harness agree."""
    settings: Any = SimpleNamespace(max_new_tokens=1, speculative=False)
    (generated,) = generation.encode(opened, [text], settings)
    requested = Adaptor(opened, 1)
    assert (
        requested.tok_encode(text) == requested.tok_batch_encode([text])[0][0].tolist() == generated
    )
    return generated


def test_a_model_trained_here_reads_what_its_data_hold(tmp_path: Path) -> None:
    """For a checkpoint and its export no token is added, and a special token's literal text is
    text.
    """
    checkpoint = save(text_model("transformer"), tmp_path / "model")
    folder = tmp_path / "export"
    with_template(checkpoint / "tokenizer")
    assert hf("export", checkpoint, folder) == 0
    template = PreTrainedTokenizerFast.from_pretrained(folder)
    assert template("ab")["input_ids"] == [END, 64, 65, END]
    for place in (checkpoint, folder):
        opened = open_model(place)
        assert opened.trained_here
        assert read(opened, "ab") == [64, 65]
        assert read(opened, "a<eod>b") == [64, 27, 68, 78, 67, 29, 65]
        ids, mask = Adaptor(opened, 2).tok_batch_encode(["abcd", "b", ""], left_truncate_len=3)
        assert ids[mask.bool()].tolist() == [65, 66, 67, 65, END]
        assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]


def test_another_projects_model_reads_what_its_tokenizer_states(tmp_path: Path) -> None:
    """For its folder, its import (also one that predates the record of it), the export of that, and
    the import of that.
    """
    places = [llama_folder(tmp_path / "llama")]
    with_template(places[0])
    for verb, name in (("import", "imported"), ("export", "exported"), ("import", "again")):
        places.append(tmp_path / name)
        assert hf(verb, *places[-2:]) == 0
    for place in places:
        opened = open_model(place)
        assert not opened.trained_here
        assert read(opened, "ab") == [END, 64, 65, END]
        assert read(opened, "a<eod>b") == [END, 64, END, 65, END]
    file = places[1] / "step_00000000" / "manifest.json"
    manifest = json_object(file)
    assert manifest["inherited"].pop("foreign") is True
    file.write_text(json.dumps(manifest))
    assert not open_model(places[1]).trained_here
