"""A small run whose numbers the tests state, whatever the demo's are tuned to."""

from __future__ import annotations

SMALL = (
    "model.hidden_size=192",
    "model.num_layers=6",
    "model.num_attention_heads=6",
    "model.ffn_hidden_size=512",
    "model.tie_embeddings=true",
    "data.seq_length=256",
    "train.steps=160",
    "train.micro_batch_size=4",
    "train.global_batch_size=16",
    "train.precision=fp32",
    "optimizer.lr=3e-3",
    "optimizer.min_lr=3e-4",
    "optimizer.warmup_steps=20",
)
