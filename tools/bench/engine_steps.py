"""CPU time of complete training steps in one process: `pretrain`'s own engine and a plain loop.

The sides are FEM-SM and the Transformer in the Megatron engine, and Hugging Face's Llama of the
Transformer's sizes with fused AdamW and clipping. All are built first; every round then takes one
step of each. Process time on one thread excludes what other programs use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import torch

from fem_megatron.megatron import upstream
from pretrain.config import RunConfig, load_run
from tools.bench import runner

FEM, TRANSFORMER, LLAMA = "FEM-SM", "Transformer", "Hugging Face's Llama"
RUNS = {FEM: "demo", TRANSFORMER: "demo_transformer"}  # in configs/run
# The vocabulary of `tools.demo`, and the micro-batch of one of its two ranks.
DEMO = ["model.vocab_size=4096", "train.global_batch_size=2"]
SIZES: dict[str, list[str]] = {
    "the demo": DEMO,
    "width 512, length 1,024": [
        *DEMO,
        *("model.hidden_size=512", "model.num_attention_heads=8", "model.ffn_hidden_size=1408"),
        *("data.seq_length=1024", "train.micro_batch_size=1", "train.global_batch_size=1"),
    ],
}
ROUNDS, WARMUP = 24, 3


@dataclass(frozen=True)
class Side:
    """A compared model: its training step, and its number of parameters."""

    step: Callable[[], object]
    parameters: int

    def seconds(self) -> float:
        """Take a step and return its process time."""
        began = time.process_time()
        self.step()
        return time.process_time() - began

    def aten_calls(self) -> int:
        """Return the number of aten operations of a step, with those that operations call."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.step()
        return sum(event.name.startswith("aten::") for event in profile.events())


def compare(sizes: dict[str, list[str]], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each size and side: seconds, ratio to the Transformer and aten calls.

    sizes: name -> overrides of the demo's runs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            row for size, settings in sizes.items() for row in _compared(size, settings, rounds)
        ]
    finally:
        torch.set_num_threads(threads)


def _compared(size: str, settings: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    config = load_run(runner.ROOT / "configs" / "run" / f"{RUNS[FEM]}.yaml", settings)
    with _one_process(config):
        sides = {name: engine(name, settings) for name in RUNS} | {LLAMA: llama(config)}
        timed = [
            {name: side.seconds() for name, side in sides.items()} for _ in range(WARMUP + rounds)
        ]
        calls = {name: side.aten_calls() for name, side in sides.items()}
    base = [each[TRANSFORMER] for each in timed[WARMUP:]]
    for name, side in sides.items():
        own = [each[name] for each in timed[WARMUP:]]
        yield {
            "what": f"step: {name}",
            "size": size,
            "parameters": side.parameters,
            "seconds": asdict(runner.Spread.of(own)),
            "÷ Transformer": asdict(
                runner.Spread.of([mine / theirs for mine, theirs in zip(own, base, strict=True)])
            ),
            "least ÷ least": min(own) / min(base),
            "aten calls": calls[name],
        }


@contextmanager
def _one_process(config: RunConfig) -> Iterator[None]:
    """Create the process groups of one process for the block."""
    upstream.import_megatron()
    from pretrain.engines import building

    building.initialize_distributed(config)
    try:
        building.initialize_model_parallel(config)
        yield
    finally:
        building.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def engine(name: str, settings: Sequence[str]) -> Side:
    """Return a model in `pretrain`'s engine, on random tokens. name: key of RUNS."""
    from pretrain.run import make_engine
    from pretrain.schedule import Schedule

    config = load_run(runner.ROOT / "configs" / "run" / f"{RUNS[name]}.yaml", settings)
    schedule = Schedule.of(config)
    made = make_engine(config, schedule)
    shape = (config.train.micro_batch_size, config.data.seq_length)
    tokens = _tokens(config)
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(shape),
        "position_ids": torch.arange(shape[1]).expand(shape),
    }
    return Side(
        lambda: made.train_step(repeat(batch), schedule.samples_at(1)),
        sum(weight.numel() for model in made.models for weight in model.parameters()),
    )


def llama(config: RunConfig) -> Side:
    """Return Hugging Face's Llama with the run's sizes, batches and AdamW in a plain loop."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, optimizer, train = config.model, config.optimizer, config.train
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.padded_vocab_size(),
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            max_position_embeddings=config.data.seq_length,
            use_cache=False,
        )
    ).float()
    adam = torch.optim.AdamW(
        made.parameters(),
        lr=optimizer.min_lr,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
        fused=True,
    )
    tokens = _tokens(config)
    micro_batches = train.global_batch_size // train.micro_batch_size

    def step() -> None:
        for _ in range(micro_batches):
            (made(tokens[:, :-1], labels=tokens[:, :-1]).loss / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), optimizer.clip_grad)
        adam.step()
        adam.zero_grad()

    return Side(step, sum(weight.numel() for weight in made.parameters()))


def _tokens(config: RunConfig) -> torch.Tensor:
    assert config.model.vocab_size is not None
    shape = (config.train.micro_batch_size, config.data.seq_length + 1)
    return torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `compare` as a Markdown table."""
    header = ["model", "size", "parameters", "least, ms", "median, ms"]
    header += ["÷ Transformer (least)", "(median)", "aten calls"]
    cells = [
        [
            row["what"].removeprefix("step: "),
            row["size"],
            f"{row['parameters']:,}",
            f"{1e3 * row['seconds']['least']:.1f}",
            f"{1e3 * row['seconds']['median']:.1f}",
            f"{row['least ÷ least']:.3f}",
            f"{row['÷ Transformer']['median']:.3f}",
            f"{row['aten calls']:,}",
        ]
        for row in rows
    ]
    return runner.table(header, cells)
