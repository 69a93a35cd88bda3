"""``python -m tools.demo.megatron_logits CHECKPOINT TOKENS.bin OUT.npy``: the logits that the training code computes, in one process.

The checkpoint's whole weights go into ``fem_megatron.megatron.model`` and see the first sequences of a data split.
Knows nothing of the export.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch


def logits(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [b, t, vocab_size] for tokens [b, t], by Megatron's model at TP 1, PP 1.

    Raises:
        ConfigError: the checkpoint cannot be read, or lacks weights of the model.
    """
    from fem_megatron.megatron.platform import import_megatron, initialize_distributed

    import_megatron()
    from megatron.core import parallel_state, tensor_parallel

    from fem_common.errors import ConfigError
    from fem_megatron.megatron import model as fem_model
    from pretrain.checkpoint.reader import load_full_model_state

    state, model, _ = load_full_model_state(checkpoint)
    initialize_distributed()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    (chunk,) = fem_model.build(model, fem_model.Layout(), tokens.shape[1], seed=0)
    answer = chunk.load_state_dict(state, strict=False)
    missing = [name for name in answer.missing_keys if not name.endswith("_extra_state")]
    tied = ["output_layer.weight"] if model.tie_embeddings else []
    if set(missing) - set(tied) or answer.unexpected_keys:
        raise ConfigError(f"checkpoint {checkpoint}: missing {missing}, not known {answer.unexpected_keys}")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        chunk.eval()
        result = chunk(tokens, positions, None)
    return result[..., : model.vocab_size].float()


def main(arguments: list[str] | None = None) -> int:
    """Writes the logits; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.demo.megatron_logits", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run directory (its newest checkpoint)")
    parser.add_argument("tokens", type=Path, help="a split's .bin file (uint16)")
    parser.add_argument("out", type=Path, help="float32 .npy [sequences, length, vocabulary]")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    given = parser.parse_args(arguments)
    ids = np.fromfile(given.tokens, dtype=np.uint16, count=given.sequences * given.length).astype(np.int64)
    result = logits(given.checkpoint, torch.from_numpy(ids).view(given.sequences, given.length))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    np.save(given.out, result.numpy())
    print(f"Megatron-core, one process: logits of {ids.size} held-out tokens over {result.shape[-1]} entries -> {given.out}")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
