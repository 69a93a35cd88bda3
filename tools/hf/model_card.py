"""The README.md of an exported folder: what the model is, what is known of its training, how to load it. Text only, no files."""

from __future__ import annotations

import math
from typing import Any

from .configuration_fem import FemLMConfig

ROWS = {
    "data": "Data",
    "tokens": "Tokens seen",
    "steps": "Optimizer steps",
    "seq_length": "Context length",
    "heldout_loss": "Held-out loss (nats per token)",
    "bits_per_byte": "Held-out bits per byte",
    "revision": "Code revision",
}


def model_card(config: FemLMConfig, parameters: int, card: dict[str, Any], has_tokenizer: bool) -> str:
    """Markdown text. ``card``: ``name`` (the title), ``license``, the keys of ROWS, and any others, which are listed by their names."""
    name = str(card.get("name") or "A language model")
    plain = not (config.free_energy or config.gate or config.conditioner_size)
    header = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- " + ("transformer" if plain else "free-energy-mixer"),
    ]
    if card.get("license"):
        header.append(f"license: {card['license']}")
    what = "a Transformer (softmax attention)" if plain else "a Free Energy Mixer over a softmax prior"
    sections = [
        "\n".join([*header, "---"]),
        f"# {name}",
        f"A decoder-only language model of {parameters:,} parameters whose token mixer is {what}, with RMSNorm, SwiGLU"
        + (" and rotary position embeddings." if config.rope else ", without position embeddings."),
        "## Use",
        _usage(has_tokenizer),
        "## Architecture",
        _table(_architecture(config, plain)),
    ]
    training = _training(card)
    if training:
        sections += ["## Training", _table(training)]
    if not plain:
        sections += ["## Citation", "Free Energy Mixer, ICLR 2026, arXiv:2602.07160."]
    return "\n\n".join(sections) + "\n"


def _usage(has_tokenizer: bool) -> str:
    prompt = (
        'inputs = tokenizer("def read(self", return_tensors="pt")' if has_tokenizer else 'inputs = {"input_ids": torch.tensor([[1, 2, 3]])}'
    )
    show = "print(tokenizer.decode(tokens[0]))" if has_tokenizer else "print(tokens[0].tolist())"
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer"
        if has_tokenizer
        else "import torch\nfrom transformers import AutoModelForCausalLM",
        "",
        'folder = "."  # this folder, or the name of this repository',
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)",
        *(["tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)"] if has_tokenizer else []),
        prompt,
        "tokens = model.generate(**inputs, max_new_tokens=40, do_sample=True)",
        show,
        "```",
        "",
        "The code of the model is `configuration_fem.py` and `modeling_fem.py` in this folder; it needs torch and transformers alone.",
    ]
    return "\n".join(lines)


def _architecture(config: FemLMConfig, plain: bool) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("Layers", config.num_hidden_layers),
        ("Width", config.hidden_size),
        ("Heads", config.num_attention_heads),
        ("Query and key channels a head", config.qk_head_dim),
        ("Value channels a head", config.value_head_dim),
        ("MLP width", config.intermediate_size),
        ("Vocabulary", config.vocab_size),
        ("Tied embeddings", _yes(config.tie_word_embeddings)),
        ("Weights", str(config.dtype).removeprefix("torch.")),
    ]
    if not plain:
        rows += [
            ("C: time-decay conditioner", f"width {config.conditioner_size}" if config.conditioner_size else "no"),
            ("L: free-energy branch", _yes(config.free_energy)),
            ("T: learned temperature and inner gate", _yes(config.learned_temperature)),
            ("G: outer gate", _yes(config.gate)),
        ]
    return rows


def _training(card: dict[str, Any]) -> list[tuple[str, Any]]:
    known = [(label, card[key]) for key, label in ROWS.items() if card.get(key) is not None]
    others = [(key, card[key]) for key in sorted(card.keys() - ROWS.keys() - {"name", "license"})]
    return known + [(key, value) for key, value in others if isinstance(value, str | int | float)]


def _table(rows: list[tuple[str, Any]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {label} | {_text(value)} |" for label, value in rows)])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return _yes(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}" if math.isfinite(value) and abs(value) < 1e6 else str(value)
    return str(value).replace("|", "\\|").replace("\n", " ")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
