"""A decoder, whole or one pipeline stage of it, from the blocks of this folder.

    t tokens · h hidden · v vocabulary

Layers keep their global numbers in a ModuleDict, so that a stage's parameters have the names that they have in the
whole model. A stage is built as what it is: nothing is built to be thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..packed_attention import Packing
from .args import GqaArgs, ModelArgs
from .attention import Angles, GroupedQueryAttention, LatentAttention
from .mlp import GatedMLP
from .moe import MoE
from .norms import RMSNorm
from .rotary import Rotary

Head = Literal["vocabulary", "value"]


@dataclass(frozen=True)
class Part:
    """What of the model is here: layers `begin` up to `end`, with the embedding (`first`), with the head (`last`)."""

    begin: int
    end: int
    first: bool = True
    last: bool = True


class Block(nn.Module):
    """One layer: attention, then a dense or sparse MLP, each behind a norm and beside a residual.

    A dense MLP is called `feed_forward`, a sparse one `moe`, as Archon names them.
    """

    def __init__(self, args: ModelArgs, layer: int, router_dtype: torch.dtype | None) -> None:
        super().__init__()
        window = args.windows[layer]
        if isinstance(args.attention, GqaArgs):
            self.attention = GroupedQueryAttention(args.attention, args.hidden, args.eps, window)
        else:
            self.attention = LatentAttention(args.attention, args.hidden, window)
        self.attention_norm = RMSNorm(args.hidden, args.eps)
        self.ffn_norm = RMSNorm(args.hidden, args.eps)
        self.sparse = args.sparse[layer]
        if self.sparse:
            assert args.moe is not None
            self.moe = MoE(args.moe, args.hidden, router_dtype)
        else:
            self.feed_forward = GatedMLP(args.hidden, args.width)

    def forward(self, x: Tensor, angles: Angles, packing: Packing) -> Tensor:
        """(1, t, h) → (1, t, h)"""
        x = x + self.attention(self.attention_norm(x), angles, packing)
        h = self.ffn_norm(x)
        return x + (self.moe(h, packing.real) if self.sparse else self.feed_forward(h))


class Decoder(nn.Module):
    """The model, or the `part` of it that a pipeline stage has.

    head          logits over the vocabulary (`output`, tied to the embedding where the model says so and both are
                  here), or a critic's values (`score`)
    router_dtype  of routers; None: that of the activations
    """

    def __init__(
        self,
        args: ModelArgs,
        part: Part | None = None,
        *,
        head: Head = "vocabulary",
        router_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__()
        part = part or Part(0, args.layers)
        self.args, self.part = args, part
        self.tok_embeddings = nn.Embedding(args.vocab, args.hidden) if part.first else None
        self.layers = nn.ModuleDict({str(n): Block(args, n, router_dtype) for n in range(part.begin, part.end)})
        self.norm = RMSNorm(args.hidden, args.eps) if part.last else None
        self.output = nn.Linear(args.hidden, args.vocab, bias=False) if part.last and head == "vocabulary" else None
        self.score = nn.Linear(args.hidden, 1) if part.last and head == "value" else None
        self.rotary = Rotary(args.rope)
        self.tie()

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding. With the two on different stages it is a copy, and whoever trains
        has to add the gradients up."""
        return self.args.tied and self.output is not None and self.tok_embeddings is not None

    def tie(self) -> None:
        """Make the tied head the embedding's own parameter: again, where parameters have been replaced."""
        if self.output is not None and self.tok_embeddings is not None and self.args.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, x: Tensor, packing: Packing, positions: Tensor) -> Tensor:
        """Token ids (1, t), or hidden states (1, t, h) of the stage before → logits (1, t, v), values (1, t, 1), or
        hidden states for the next stage.

        positions  (t,) of the tokens whose queries are made here, from 0 in every sequence: under Ulysses this rank's
                   slice, under sequence parallelism all that `enter` gathers
        """
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        angles = self.rotary(positions, x.dtype)
        for layer in self.layers.values():
            x = layer(x, angles, packing)
        if self.norm is not None:
            x = self.norm(x)
        head = self.output if self.output is not None else self.score
        return x if head is None else head(x)

    def moe_layers(self) -> Iterator[MoE]:
        """The sparse MLPs of the layers that are here."""
        yield from (layer.moe for layer in self.layers.values() if isinstance(layer, Block) and layer.sparse)

    def materialize(self, device: torch.device | str) -> None:
        """Memory for a model that was built on the meta device (and sharded since); buffers that no checkpoint has get
        their values, parameters and expert biases are for the hub to fill."""
        self.to_empty(device=device)  # which gives a tied head memory of its own
        self.tie()
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute the buffers that are in no checkpoint."""
        self.rotary.reset()
        for moe in self.moe_layers():
            moe.reset()


def positions_of(cu_seqlens: Tensor) -> Tensor:
    """From 0 in every sequence: (n + 1,) → (t,)."""
    cu = cu_seqlens.long()
    lengths = cu.diff()
    total = int(cu[-1])
    return torch.arange(total, device=cu.device) - torch.repeat_interleave(cu[:-1], lengths, output_size=total)
