"""Shape of the modules of multi-token prediction: weights and FLOPs, without torch.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2. Module k = 1, 2, ... receives the hidden state
h^(k-1) of token i and the embedding of token i + k, and predicts token i + k + 1:

    x   = M [RMSNorm(h^(k-1)_i); RMSNorm(Emb(t_(i+k)))]        equation 21, M is [D, 2 D]
    h^k = RMSNorm(block(x)),  p = OutHead(h^k)                  equations 22 and 23
    loss = main loss + (mtp_loss_weight / mtp_depth) sum_k loss_k    equations 24 and 25

h^0 is the output of the final norm. The embedding and the output layer are those of the model. The
block is the model's last block with weights of its own. A prediction counts in loss_k if its token
counts in the main loss; all sums are divided by the number of tokens of the main loss (the paper's
T).
"""

from __future__ import annotations

from dataclasses import dataclass

from fem_megatron.shape import BlockShape, Weight, Weights


@dataclass(frozen=True)
class MtpShape:
    """Shape of one module. hidden: the model's width D. stream: channels of the stream."""

    block: BlockShape
    hidden: int
    stream: int
    norm_eps: float

    def own_weights(self) -> Weights:
        """Return the weights outside the block."""
        norm = Weight((self.hidden,), init=1.0, per_token=True)
        return {
            "hidden_norm.weight": norm,
            "token_norm.weight": norm,
            "projection.weight": Weight((self.hidden, 2 * self.hidden), split=1, precise=True),
            "norm.weight": norm,
        }

    def weights(self) -> Weights:
        """Return the weights of the module, with the names of its state dict."""
        block = {f"block.{name}": weight for name, weight in self.block.weights().items()}
        return self.own_weights() | block
