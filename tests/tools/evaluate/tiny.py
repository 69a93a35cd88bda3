"""Small models that read bytes, and small harness tasks for them."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fem_megatron.config import ModelConfig
from tests.tools.hf.texts import bytes_read
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.modeling_fem import FemLMForCausalLM
from tools.hf.open_model import OpenModel

END = "<eod>"
VOCAB = 257
CONTEXT = 48
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
}


byte_tokenizer = functools.cache(bytes_read)


@functools.cache
def tokenizer_folder() -> Path:
    """Return the byte tokenizer's folder, which exists until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="byte_tokenizer_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    byte_tokenizer().save_pretrained(folder)
    return folder


def opened(mixer: str = "fem_softmax", **changes: Any) -> OpenModel:
    """Return a float64 model as if trained by this project with windows of CONTEXT tokens; weights
    are large enough for the context to matter.
    """
    config = ModelConfig(
        **{**SIZES, "mixer": mixer, "vocab_size": VOCAB, "init_std": 0.3, **changes}
    )
    torch.manual_seed(0)
    model = FemLMForCausalLM(FemLMConfig(architecture=asdict(config))).double().eval()
    manifest = {"config": {"data": {"seq_length": CONTEXT, "valid": []}}}
    return OpenModel(
        mixer,
        Path(),
        model,
        byte_tokenizer(),
        config,
        manifest,
        tokenizer_folder=tokenizer_folder(),
    )


def llama_folder(folder: Path, seed: int = 0) -> Path:
    """Return a Hugging Face folder of a Llama with random weights and the byte tokenizer, which
    opens without Megatron.
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=VOCAB,
        **sizes,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


TASKS = Path(__file__).parent / "tiny_tasks"  # tasks of every kind, a broken task, and a group
ROWS: dict[str, list[dict[str, Any]]] = json.loads((TASKS / "rows.json").read_text())
CHOICES, WORDS, SHOWN = ROWS["choices"], ROWS["words"], ROWS["shown"]
# Module next to the YAML files, which refer to its functions.
DATA_PY = """import json
from pathlib import Path
import datasets

def rows(*names):
    read = json.loads(Path(__file__).with_name("rows.json").read_text())
    return {split: datasets.Dataset.from_list(read[name]) for split, name in zip(("test", "shown"), names)}

def choices(**_): return rows("choices", "shown")
def fewer(**_): return rows("fewer", "shown")
def written(**_): return rows("written")
def words(**_): return rows("words")
def broken(**_): raise RuntimeError("this task's code is broken")
"""  # noqa: E501


def task_folder(folder: Path, **rows: Any) -> Path:
    """Write the harness tasks; ``rows`` replaces examples."""
    shutil.copytree(TASKS, folder)
    (folder / "rows.json").write_text(json.dumps({**ROWS, **rows}))
    (folder / "data.py").write_text(DATA_PY)
    return folder


def suite_file(path: Path, *tasks: str) -> Path:
    """Write a suite of tasks from the folder tasks/ next to it; a task is the content of a YAML
    mapping.
    """
    path.write_text(
        "task_paths: [tasks]\ntasks:\n" + "".join(f"  - {{{task}}}\n" for task in tasks)
    )
    return path
