"""GPTModel with modules of multi-token prediction (`fem_megatron.mtp`) after its last layer.

Megatron-core's own modules require its attention, so they cannot contain the blocks of this
project. With pipeline stages they also need a second copy of the embedding on the last stage. Here
the first stage embeds the later tokens as well, and the stages pass these embeddings on, behind the
residual stream: weights, gradients and checkpoints are those of one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fem_megatron.block import PredictionModule
from fem_megatron.config import ModelConfig
from fem_megatron.megatron.loss import masked_sum
from fem_megatron.megatron.specs import MegatronBlock, sharded_parameters

Ahead = tuple[Tensor, Tensor]
"""Labels and loss masks of the modules: [depth b, s] each, module after module.

Those of module k are the labels k places later, and 1 where the prediction counts.
"""


class PredictionModules(nn.ModuleList):
    """The modules of a model's last chunk."""

    def sharded_state_dict(self, prefix: str = "", *given: Any, **named: Any) -> dict[str, Any]:
        """Return the parameters for a sharded checkpoint, see `sharded_parameters`."""
        groups: Any = self.get_submodule("0.block").pg_collection
        return sharded_parameters(self, groups, prefix)


class MtpModel(GPTModel):
    """Chunk of a model with ``model.mtp_depth`` modules on its last stage."""

    def __init__(
        self, *given: Any, model: ModelConfig, split: str | None, fp8: bool, **named: Any
    ) -> None:
        super().__init__(*given, **named)
        self.depth, self.stream = model.mtp_depth, model.stream_size
        self.pipelined = not (self.pre_process and self.post_process)
        if not self.post_process:
            return
        shape, modules = model.mtp, []
        for number in range(self.depth):
            block = MegatronBlock(
                self.config,
                shape=shape.block,
                causal=model.causal,
                split=split,
                fp8=fp8,
                pg_collection=self.pg_collection,
                vp_stage=self.vp_stage,
            )
            block.layer_number = model.num_layers + number + 1
            modules.append(PredictionModule(shape, block, block.mixer.parallel))
        self.mtp_modules = PredictionModules(modules)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None = None,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        runtime_gather_output: bool | None = None,
        ahead: Ahead | None = None,
    ) -> Tensor:
        """Return what GPTModel returns, or in training with ``ahead`` the summed losses.

        These are the masked sums [1 + depth] of the main loss and of each module's loss. The inputs
        are [b, s]; ``packed_seq_params`` is the layers' `Context`.
        """
        if not self.training:
            ahead = None
        if self.pre_process:
            stream = self.embedding(input_ids, position_ids)
            later = self._embedded(stream, labels, ahead)
        else:
            stream, later = self.decoder.input_tensor.split(
                [self.stream, self.depth * self.stream], dim=-1
            )
            self.decoder.set_input_tensor(stream)
        hidden = self.decoder(stream, None, packed_seq_params=packed_seq_params)
        if not self.post_process:
            return torch.cat((hidden, later), dim=-1)
        after = partial(self._after, runtime_gather_output)
        main = after(hidden, labels, loss_mask)
        if ahead is None:
            return main
        assert loss_mask is not None
        sums = [masked_sum(main, loss_mask)]
        parts = (part.chunk(self.depth) for part in ahead)
        for module, embedded, own_labels, mask in zip(
            self.mtp_modules, later.chunk(self.depth, dim=-1), *parts, strict=True
        ):
            again = self.config.recompute_granularity == "full"
            run = partial(checkpoint, module, use_reentrant=False) if again else module
            hidden = run(hidden, embedded, None, packed_seq_params)
            sums.append(masked_sum(after(hidden, own_labels, mask), mask))
        return torch.stack(sums)

    def _embedded(self, stream: Tensor, labels: Tensor | None, ahead: Ahead | None) -> Tensor:
        """Return the embeddings of the next ``depth`` tokens side by side, in the last dimension.

        They are zeros if the modules do not run.
        """
        if ahead is None:
            return stream.new_zeros(*stream.shape[:-1], self.depth * self.stream * self.pipelined)
        assert labels is not None
        tokens = torch.cat((labels, *ahead[0].chunk(self.depth)[:-1]))
        embedded: Tensor = self.embedding(tokens, torch.zeros_like(tokens))
        return torch.cat(embedded.chunk(self.depth, dim=1), dim=-1)

    def _after(
        self, gather: bool | None, hidden: Tensor, labels: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Return the logits, or the losses, of hidden states after their norm."""
        unused = ("input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
        result: Tensor = self._postprocess(
            hidden_states=hidden,
            labels=labels,
            loss_mask=mask,
            runtime_gather_output=gather,
            **dict.fromkeys(unused),
        )
        return result
