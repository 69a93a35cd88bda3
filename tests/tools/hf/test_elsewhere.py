"""Tests of exported folders on another machine: moved, offline, without this repository, without
triton, with the oldest transformers and ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.tools.hf.readers import FAMILIES, TEXTS, write_reader
from tests.tools.hf.small import (
    GREEDY,
    NAMES,
    VOCAB,
    Exports,
    close,
    export,
    padded_batch,
    small,
    write_tokenizer,
)
from tools.hf.folder import json_object
from tools.hf.model_card import TESTED

ROOT = Path(__file__).parents[3]
OLDEST = Path(os.environ.get("FEM_OLDEST_TRANSFORMERS", ROOT / ".venv" / "oldest"))
PINNED = next(
    line
    for line in (ROOT / "tests" / "oldest-transformers.txt").read_text().splitlines()
    if line.startswith("transformers==")
)
# Softmax and linear priors, a conditioner, CEM, a looped block, YaRN; and transformers' own class,
# with RoPE settings other than the defaults.
FEW = ["hybrid", "cem", "hyperset", "rotated", "stretched", "stretched_llama"]

STRANGER = """
import importlib.metadata as metadata, json, sys
site, out, *folders, fem, stock = sys.argv[1:]
if site != "-":
    sys.path.insert(0, site)
for name in ("triton", "fem_megatron", "kernels", "pretrain", "tools", "megatron"):
    sys.modules[name] = None
known = metadata.version
def version(name):
    if "triton" in name:
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
import builtins, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline
builtins.input = sys.exit  # a question whether to run code
ids, mask, sentences, readers = torch.load(out)
found = {}
for folder, trust in readers:
    if trust == "by class":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    found[folder, trust] = [tokenizer(text)["input_ids"] for text in sentences]
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    common = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    ways = ({}, {"use_cache": False}, {"num_beams": 3}, {"num_beams": 3, "use_cache": False}, {"cache_implementation": "static"})
    found[folder] = [logits, *(model.generate(ids, **common, **way) for way in ways)]
torch.save(found, out)
model = AutoModelForCausalLM.from_pretrained(fem, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(fem, trust_remote_code=True)
text = model.generate(**tokenizer("w1 w2 w3", return_tensors="pt"), max_new_tokens=5, do_sample=False)
texts = []
for folder in (fem, stock):
    write = pipeline("text-generation", folder, trust_remote_code=folder == fem)
    prompts = ["w1 w2 w3 w4 w5 w6", "w7", "w8 w9 w10"]
    texts.append([write(prompts, batch_size=size, max_new_tokens=5, do_sample=False) for size in (1, 2)])
print(json.dumps([transformers.__version__, model.config.eos_token_id, model.generation_config.pad_token_id, text.shape[1], texts]))
"""  # noqa: E501


Trust = bool | str | None


def with_readers(root: Path) -> dict[tuple[str, Trust], Path]:
    """Return (exported folder, trust_remote_code) -> its tokenizer.json, for every family and
    tokenizers of other classes, one saved by 5.

    For a model with code, AutoTokenizer of transformers 5 asks if trust_remote_code is None; its
    concrete class does not.
    """
    saved = write_reader(root / "saved", "regex", None)
    PreTrainedTokenizerFast.from_pretrained(saved, extra_special_tokens=["<pad>"]).save_pretrained(
        saved
    )
    assert json_object(saved / "tokenizer_config.json")["tokenizer_class"] == "TokenizersBackend"
    given = dict.fromkeys(FAMILIES, saved)
    named = {
        "GPT2Tokenizer": "regex",
        "GPTNeoXTokenizerFast": "prefixed",
        "CohereTokenizerFast": "regex",
        "LlamaTokenizer": "pieces",
    }
    given |= {name: write_reader(root / f"of-{name}", kind, name) for name, kind in named.items()}
    found: dict[tuple[str, Trust], Path] = {}
    for name, tokenizer in given.items():
        folder = export(
            small(**FAMILIES.get(name, FAMILIES["llama"])), root / name, tokenizer=tokenizer
        )
        found |= {
            (str(folder), trust): folder / "tokenizer.json"
            for trust in (True, False, "by class" if name == "fem_lm" else None)
        }
    return found


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["few", "all"]
)
# All other tests in this folder run with the newest version.
@pytest.mark.parametrize("age", [pytest.param("newest", marks=pytest.mark.slow), "oldest"])
def test_a_stranger_loads_the_folders(
    exported: Exports, tmp_path: Path, age: str, names: list[str]
) -> None:
    """One separate process with several models gives the same logits and tokens, by every strategy,
    cache and batch.

    The ids are those of tokenizer.json, for every kind of tokenizer and every family.
    """
    if age == "oldest" and not OLDEST.is_dir():
        pytest.skip(
            f"no {OLDEST}: `make setup`, or pip install --no-deps --target {OLDEST} -r"
            " tests/oldest-transformers.txt"
        )
    folders = [tmp_path / "moved" / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        shutil.copytree(exported(name).folder, folder)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", VOCAB)
    # The form that data_prep writes.
    assert "pad_token" not in (tokenizer / "tokenizer_config.json").read_text()
    with_words = [
        export(small(name), tmp_path / name, tokenizer=tokenizer)
        for name in ("fem_softmax", "transformer")
    ]
    home, saved = tmp_path / "home", tmp_path / "saved.pt"
    ids, mask = padded_batch()
    readers = with_readers(tmp_path / "readers")
    torch.save((ids, mask, TEXTS, list(readers)), saved)
    env = os.environ | {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    env |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    site = "-" if age == "newest" else str(OLDEST)
    command = [
        sys.executable,
        "-I",
        "-c",
        STRANGER,
        site,
        str(saved),
        *map(str, [*folders, *with_words]),
    ]
    run = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("["), run.stdout
    used, eos, pad, length, texts = json.loads(run.stdout)
    assert used == (
        version("transformers") if age == "newest" else PINNED.removeprefix("transformers==")
    )
    assert (eos, pad) == (0, 0) and 4 <= length <= 8
    for one_by_one, two_at_a_time in texts:
        assert len(one_by_one) == 3 and one_by_one == two_at_a_time
    found = torch.load(saved)
    for (reader, trust), tokenizer_json in readers.items():
        plain = Tokenizer.from_file(str(tokenizer_json))
        assert found[reader, trust] == [plain.encode(text).ids for text in TEXTS], (reader, trust)
    for name, folder in zip(names, folders, strict=True):
        logits, greedy, uncached, beams, beams_uncached, static = found[str(folder)]
        model = exported(name).model
        with torch.no_grad():
            # float32 rounding: sums in a different order with another number of threads. The rows
            # of padding are not compared.
            close(logits[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()], 1e-5)
        wanted = model.generate(ids, attention_mask=mask, max_new_tokens=5, **GREEDY)
        assert all(torch.equal(tokens, wanted) for tokens in (greedy, uncached, static)), name
        assert torch.equal(beams, beams_uncached), name


def test_the_card_names_the_versions_that_are_tested() -> None:
    assert (PINNED.removeprefix("transformers=="), version("transformers")) == TESTED
