"""Test that every mixer learns the demo's text in 200 steps. Slow, because it trains each mixer.

docs/mixers.md has results of larger models.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fem_megatron.catalogue import MIXERS
from tests.pretrain.conftest import Command

NAMES = [name for name in MIXERS if not name.startswith("fla.")]
# Largest mean loss of the last ten steps, in nats per token. The unigram entropy of the text is 5.3
# with this tokenizer of 512 entries; the loss of an untrained model is 6.3.
BOUND = 4.9
TRAINING = [
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.ffn_hidden_size=128",
    "train.steps=200",
    "train.eval_interval=200",
]
# 512 tokens per step, with which deltanet's loss is 4.68 at the last steps. With half of them it is
# 5.05, only a little below the unigram entropy.
TRAINING += ["train.global_batch_size=8", "train.micro_batch_size=8"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_200_steps_fall_below_the_bound(pretrain: Command, name: str) -> None:
    pretrain(f"model.mixer={name}", "data.seq_length=64", "checkpoint.interval=0", *TRAINING)
    steps = [
        json.loads(line)
        for line in Path(pretrain.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [entry["loss"] for entry in steps if "loss" in entry]
    assert sum(losses[-10:]) / 10 < BOUND
