"""One process, every ZeRO stage: ``python deepspeed_worker.py OUT.json OVERRIDE …`` trains a little, spoils a step, and looks inside.

The answer maps a stage to what the tests ask of it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fem_megatron.megatron import platform
from pretrain.config import load_run
from pretrain.validate import prepare

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    platform.import_megatron()
    platform.initialize_distributed()
    answers = {str(stage): look(stage, sys.argv[2:]) for stage in (0, 1, 2, 3)}
    Path(sys.argv[1]).write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()


def look(stage: int, overrides: list[str]) -> dict[str, Any]:
    from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel, make_engine
    from pretrain.schedule import Schedule

    settings = [*overrides, "engine.name=deepspeed", f"engine.zero_stage={stage}", "engine.deepspeed.param_persistence_threshold=0"]
    config = prepare(load_run(ROOT / "configs/run/demo.yaml", settings), 1).config
    initialize_model_parallel(config)
    engine: Any = make_engine(config, Schedule.of(config))
    generator = torch.Generator().manual_seed(0)

    def stream(poison: float) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            tokens = torch.randint(0, 512, (2, 33), generator=generator)
            positions = torch.arange(32).repeat(2, 1)
            yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.full((2, 32), poison), "position_ids": positions}

    first = engine.train_step(stream(1.0), 8)
    before = tensors(engine)
    poisoned = engine.train_step(stream(math.nan), 16)
    untouched = same(before, tensors(engine))
    # One number of the loss: gradients are finite until this rank makes them otherwise.
    forward = engine._forward
    engine._forward = lambda batch: (lambda total, tokens: (total + (math.inf - total.detach()), tokens))(*forward(batch))
    infinite = engine.train_step(stream(1.0), 24)
    engine._forward = forward
    untouched = untouched and same(before, tensors(engine))
    good = engine.train_step(stream(1.0), 32)
    moved = not same(before, tensors(engine))
    saved = engine.sharded_state()
    engine.restore(lambda asked: filled(asked, saved))
    flat = engine.state._flat()
    restored = [float(engine.state.adam.state[one]["step"]) for one in flat]
    engine.train_step(stream(1.0), 40)
    answer = {
        "skipped": [first.skipped, poisoned.skipped, infinite.skipped, good.skipped],
        "untouched": untouched,
        "moved": moved,
        "steps": [restored, [float(engine.state.adam.state[one]["step"]) for one in flat]],
        "decays": sorted({group["weight_decay"] for group in engine.engine.optimizer.param_groups}),
        "rates": sorted({group["lr"] for group in engine.engine.optimizer.param_groups}),
        "groups": [group["step"] for group in engine.state.groups()],
    }
    engine.close()
    destroy_model_parallel()
    return answer


def tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Everything a checkpoint would hold, by its names there."""
    state = engine.sharded_state()
    entries = [*state["model0"].values(), *(entry for three in state["optimizer"]["param_state"].values() for entry in three.values())]
    return {entry.key: entry.data.clone() for entry in entries}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def filled(asked: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """What reading a checkpoint gives: tensors for what is asked, and the common part."""
    by_key = {entry.key: entry.data for entry in saved["model0"].values()}
    by_key |= {entry.key: entry.data for three in saved["optimizer"]["param_state"].values() for entry in three.values()}
    states = asked["optimizer"]["param_state"].items()
    return {
        "model0": {name: by_key[entry.key] for name, entry in asked["model0"].items()},
        "optimizer": {
            "optimizer": saved["optimizer"]["optimizer"],
            "param_state": {number: {name: by_key[entry.key] for name, entry in three.items()} for number, three in states},
        },
    }


if __name__ == "__main__":
    main()
