"""Low-rank adapters on Megatron-Core's linear layers, which hold several of Hugging Face's at once.

`linear_qkv` is q, k and v interleaved by KV group, `linear_fc1` gate above up, on each tensor parallel rank its own
part. Every one of these has an adapter of its own, as PEFT would have it, and what the adapters compute is put together
as the layer's output is.

| layer                  | A                            | B                          |
|------------------------|------------------------------|----------------------------|
| `linear_qkv`, `fc1`    | whole on every rank          | this rank's rows           |
| `linear_proj`, `fc2`   | this rank's columns          | whole on every rank        |

Between A and B are `lora_rank` numbers a token: they travel where the layer itself would send a whole activation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from ..collectives import copy_to, gather_rows, reduce_from, scatter_sum


@dataclass(frozen=True)
class Tensors:
    """How tensor parallel ranks share the work: their group (None: one rank), whether sequences are cut too."""

    group: dist.ProcessGroup | None
    sequence: bool

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()


@dataclass(frozen=True)
class Fused:
    """The parts of a layer's output: names, rows of each in one block, and how many blocks this rank has.

    `linear_qkv`: (q, k, v), a block is a KV group. `linear_fc1`: (gate, up), one block. Others: one part, one block.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    blocks: int = 1

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Parts (…, blocks·rows) → (…, all rows) as the layer has them; zeros where there is no part."""
        like = next(iter(parts.values()))
        shape = like.shape[:-1]
        found = []
        for name, rows in zip(self.names, self.rows, strict=True):
            part = parts.get(name)
            found.append(like.new_zeros(*shape, self.blocks, rows) if part is None else part.unflatten(-1, (-1, rows)))
        return torch.cat(found, -1).flatten(-2)


class Adapter(nn.Module):
    """A and B of one of Hugging Face's layers; `name` is what it is called there, `whole` its (outputs, inputs)."""

    def __init__(self, name: str, whole: tuple[int, int], rank: int, cut: int, tensors: Tensors, like: Tensor) -> None:
        """`cut` 0: outputs are shared out to the tensor parallel ranks, 1: inputs."""
        super().__init__()
        self.name, self.whole, self.cut, self.tensors = name, whole, cut, tensors
        rows, columns = (n // tensors.size if axis == cut else n for axis, n in enumerate(whole))
        self.lora_A = nn.Parameter(torch.empty(rank, columns, dtype=like.dtype, device=like.device))
        self.lora_B = nn.Parameter(torch.zeros(rows, rank, dtype=like.dtype, device=like.device))
        parts: Any = (self.lora_B, 0, self.lora_A) if cut == 0 else (self.lora_A, 1, self.lora_B)
        _mark_cut(*parts[:2])
        # What is whole sees a part of the tokens of a cut sequence: Megatron-Core sums the gradients of what is marked.
        parts[2].sequence_parallel = tensors.sequence

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, 1, inputs) as the layer gets them → (tokens, 1, outputs) as it returns them, unscaled."""
        group, sequence = self.tensors.group, self.tensors.sequence
        inner = linear(x, self.lora_A)
        if self.cut == 0:
            inner = gather_rows(inner, 0, group) if sequence else copy_to(inner, group)
        else:
            inner = scatter_sum(inner, 0, group) if sequence else reduce_from(inner, group)
        return linear(inner, self.lora_B)


def _mark_cut(parameter: Any, dim: int) -> None:
    """So that the gradient norm counts every rank's part."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


class Adapters(nn.Module):
    """The adapters of one of Megatron's layers, by the part of its output."""

    def __init__(self, fused: Fused, adapters: Mapping[str, Adapter], scale: float) -> None:
        super().__init__()
        self.fused, self.scale = fused, scale
        self.parts = nn.ModuleDict(dict(adapters))

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.join({name: part(x) for name, part in self.parts.items()}) * self.scale

    @torch.no_grad()
    def delta(self) -> Tensor:
        """What is to be added to this rank's part of the weight: (rows, columns), fp32."""
        products = {name: (part.lora_B.float() @ part.lora_A.float()).T for name, part in self.parts.items()}  # type: ignore[operator, union-attr]
        return self.fused.join(products).T * self.scale


def attach(layer: nn.Module, adapters: Adapters) -> None:
    """The layer returns (output, bias); its output has the adapters' added."""
    layer.add_module(NAME, adapters)

    def add(_layer: nn.Module, inputs: Sequence[Any], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return output[0] + adapters(inputs[0]), output[1]

    layer.register_forward_hook(add)


NAME = "lora"
"""What the adapters are called among a layer's modules."""


def is_adapter(name: str) -> bool:
    """Whether a name of a chunk's state is an adapter's."""
    return f".{NAME}.parts." in name


def layers_of(chunk: Any, core: Any, tensors: Tensors) -> list[tuple[str, nn.Module, Fused, tuple[int, int], int]]:
    """(prefix of Hugging Face's names, Megatron's layer, its parts, …) of every layer that may have adapters.

    Inputs and cut are those of all its parts: (prefix, layer, parts, (blocks over all ranks, inputs), cut).
    """
    found: list[tuple[str, nn.Module, Fused, tuple[int, int], int]] = []
    heads, groups, width = core.num_attention_heads, core.num_query_groups, core.kv_channels
    for layer in chunk.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."
        attention, hidden = layer.self_attention, core.hidden_size
        per = heads // groups * width
        qkv = Fused(("q_proj", "k_proj", "v_proj"), (per, width, width), groups // tensors.size)
        found.append((prefix + "self_attn.", attention.linear_qkv, qkv, (groups, hidden), 0))
        o = Fused(("o_proj",), (hidden,))
        found.append((prefix + "self_attn.", attention.linear_proj, o, (1, heads * width), 1))
        if core.num_moe_experts is None:
            inner = core.ffn_hidden_size
            up = Fused(("gate_proj", "up_proj"), (inner // tensors.size,) * 2)
            found.append((prefix + "mlp.", layer.mlp.linear_fc1, up, (tensors.size, hidden), 0))
            found.append((prefix + "mlp.", layer.mlp.linear_fc2, Fused(("down_proj",), (hidden,)), (1, inner), 1))
    return found
