"""Weights in and out of Megatron-Core's chunks, through the hub: no bridge, no gathering, every rank its own boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...converter.dtypes import BY_NAME
from ...converter.live import base_of
from ...converter.opening import open_checkpoint
from ..export import save_hf as export
from .lora_layers import is_adapter

if TYPE_CHECKING:
    import torch.distributed as dist

    from ...converter.checkpoint import Checkpoint
    from ...converter.loading import Loaded
    from ...converter.mesh import Mesh
    from ..api.metas import SaveLoadMeta

__all__ = ["load", "open_model", "save_hf", "state_dicts", "stored_wide", "with_masters"]

NAMING = "megatron"


def open_model(path: str, *, with_weights: bool = True) -> Checkpoint:
    """The checkpoint that a model comes from; `with_weights` False: a directory with a config.json will do.

    Raises ConfigError or SourceError when the hub finds nothing that it can read.
    """
    return open_checkpoint(path) if with_weights else base_of(path)


def state_dicts(chunks: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    """Names and tensors of every chunk: parameters, and the routers' biases. `_extra_state` is no tensor, and adapters
    are no weights of the model."""
    return [
        {k: v for k, v in chunk.state_dict().items() if isinstance(v, Tensor) and not is_adapter(k)} for chunk in chunks
    ]


def load(
    chunks: Sequence[nn.Module], checkpoint: Checkpoint, mesh: Mesh, rank: int, *, masters: bool
) -> tuple[Loaded, dict[Tensor, Tensor] | None]:
    """Fill the chunks with this rank's boxes.

    masters  the parameters are narrower than fp32 and an optimizer keeps fp32 copies: read the values as they are
             stored, round them for the parameters, and return them by parameter

    Raises PlanError for a tensor that is missing, surplus, or of another shape.
    """
    held: list[dict[str, Tensor]] = state_dicts(chunks)
    if not masters:
        loaded = checkpoint.load_into(held, mesh, rank, naming=NAMING, allow_cast=True)
        return loaded, None
    wide = [{name: torch.empty_like(value, dtype=torch.float32) for name, value in part.items()} for part in held]
    loaded = checkpoint.load_into(wide, mesh, rank, naming=NAMING)
    with torch.no_grad():
        for part, values in zip(held, wide, strict=True):
            for name, value in part.items():
                value.copy_(values[name])
    own = [(parameter, values[name]) for chunk, values in zip(chunks, wide, strict=True)
           for name, parameter in chunk.named_parameters()]  # fmt: skip
    return loaded, dict(own)


def stored_wide(checkpoint: Checkpoint) -> bool:
    """Whether most of a checkpoint's bytes are fp32: its files hold more than parameters of half precision do."""
    sizes: dict[str, int] = {}
    for slot in (slot for slots in checkpoint.slots.values() for slot in slots):
        sizes[slot.dtype] = sizes.get(slot.dtype, 0) + slot.box.volume * BY_NAME[slot.dtype].size
    return 2 * sizes.get("F32", 0) > sum(sizes.values())


def with_masters(chunks: Sequence[nn.Module], masters: dict[Tensor, Tensor]) -> list[dict[str, Tensor]]:
    """`state_dicts`, with the fp32 copies of parameters in their place."""
    held = state_dicts(chunks)
    for part, chunk in zip(held, chunks, strict=True):
        part |= {name: masters[p] for name, p in chunk.named_parameters() if p in masters and name in part}
    return held


def save_hf(
    held: list[dict[str, Tensor]],
    meta: SaveLoadMeta,
    checkpoint: Checkpoint,
    mesh: Mesh,
    rank: int,
    group: dist.ProcessGroup,
) -> Any:
    """A Hugging Face directory written by all ranks; `held` are the chunks' tensors."""
    return export(held, meta, checkpoint, group=group, mesh=mesh, rank=rank, naming=NAMING)
