"""``python -m tools.demo.megatron_logits OUT TOKENS.bin CHECKPOINT ...``: write Megatron's logits.

They are computed by the training code in one process.

The complete weights of each checkpoint are loaded into ``fem_megatron.megatron.model``, which reads
the first sequences of a data split. This module does not use the export code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from tools.diagnose.from_checkpoint import megatron_model

SEQUENCES = 4


def main(arguments: list[str] | None = None) -> int:
    """Write the logits of every model to OUT and return the exit code.

    Megatron computes them with tensor and pipeline parallelism of 1.
    """
    parser = argparse.ArgumentParser(prog="tools.demo.megatron_logits", description=__doc__)
    parser.add_argument(
        "out",
        type=Path,
        help="output folder of NAME.npy, float32 [sequences, length, vocabulary]; NAME is the "
        "checkpoint's",
    )
    parser.add_argument("tokens", type=Path, help="a split's .bin file (uint16)")
    parser.add_argument(
        "checkpoints",
        type=Path,
        nargs="+",
        help="checkpoints, or run directories (their newest checkpoints)",
    )
    parser.add_argument("--length", type=int, default=256)
    given = parser.parse_args(arguments)
    ids = np.fromfile(given.tokens, dtype=np.uint16, count=SEQUENCES * given.length)
    tokens = torch.from_numpy(ids.astype(np.int64)).view(SEQUENCES, given.length)
    given.out.mkdir(parents=True, exist_ok=True)
    for checkpoint in given.checkpoints:
        with megatron_model(checkpoint, given.length) as (chunk, model, _):
            logits = chunk(tokens, torch.arange(given.length).expand_as(tokens), None)
            result = logits[..., : model.vocab_size].float()
        np.save(given.out / f"{checkpoint.name}.npy", result.numpy())
        print(
            f"Megatron-core, one process: logits of {ids.size} held-out tokens over "
            f"{result.shape[-1]} entries of {checkpoint}",
            flush=True,
        )
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
