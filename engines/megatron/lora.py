"""Adapters of a Megatron model: put in, initialised, merged, saved and loaded as PEFT has them.

The names, the first values and the files are those of `engines.lora`: what is trained here goes on there, and the other
way round. Of a mixture of experts only the attention has adapters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...converter.errors import ConfigError, Problems
from ...converter.placement import Piece
from ..api.configs import TrainEngineConfig
from ..lora import ALL, Lora
from ..state.entries import Entry
from .groups import Groups
from .lora_layers import Adapter, Adapters, Tensors, attach, layers_of
from .weights import state_dicts

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..api.metas import SaveLoadMeta

__all__ = ["MegatronLora", "check_model", "inject"]

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MegatronLora:
    """The adapters of this rank's chunks. `config` is PEFT's LoraConfig, with its targets resolved."""

    chunks: Sequence[nn.Module]
    config: Any

    # -------------------------------------------------------------------------------------------- what there is

    def _parts(self) -> Iterator[Adapter]:
        for chunk in self.chunks:
            yield from (module for module in chunk.modules() if isinstance(module, Adapter))

    def adapters(self) -> dict[str, nn.Parameter]:
        """`model.layers.0.self_attn.q_proj.lora_A.weight` → this rank's part of it."""
        return {
            f"{part.name}.{side}.weight": getattr(part, side) for part in self._parts() for side in ("lora_A", "lora_B")
        }

    def entries(self) -> dict[str, Entry]:
        """Which boxes of the whole adapters this rank holds, and where."""
        return {entry.name: entry for part in self._parts() for entry in _entries(part)}

    def base(self) -> list[dict[str, Tensor]]:
        """The frozen weights of every chunk, under the names that they have without adapters."""
        return state_dicts(self.chunks)

    # -------------------------------------------------------------------------------------------- values

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """As `Lora.initialise`: every tensor is drawn whole from the seed and its name, whoever holds which part."""
        for name, entry in self.entries().items():
            if ".lora_B." in name:
                entry.memory.zero_()
                continue
            bound = 1.0 / math.sqrt(entry.shape[1])
            source = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            whole = torch.empty(entry.shape, device="cpu").uniform_(-bound, bound, generator=source)
            for box, region in entry.regions():
                region.copy_(whole[tuple(map(slice, box.lo, box.hi))])

    @torch.no_grad()
    def merged(self) -> list[dict[str, Tensor]]:
        """`base()` with W + (alpha / rank) · B A in the place of every adapted W, each rank's own part.

        The sum is taken in fp32 and rounded once, to W's element type; merged matrices are new and lie in host memory.
        """
        found = self.base()
        for part, chunk in zip(found, self.chunks, strict=True):
            for name, module in chunk.named_modules():
                if isinstance(module, Adapters):
                    key = f"{name.rpartition('.')[0]}.weight"
                    weight = part[key]
                    part[key] = (weight.float() + module.delta()).to(weight.dtype).cpu()
        return found

    # -------------------------------------------------------------------------------------------- files and states

    def save(self, meta: SaveLoadMeta, group: dist.ProcessGroup | None = None) -> None:
        """In PEFT's form; see `adapter_files.save_adapter`."""
        from ..adapter_files import save_adapter

        small = [saved for saved in (meta.tokenizer, meta.processor) if saved is not None]
        save_adapter(self, meta.path, group, base=meta.base_model_path or "", small=small)

    def load(self, path: str, group: dist.ProcessGroup | None = None) -> None:
        """From PEFT's form; see `adapter_files.load_adapter`."""
        from ..adapter_files import load_adapter

        load_adapter(self, path, group)

    is_saved_at = staticmethod(Lora.is_saved_at)

    def sharded_state(self, replica: int) -> dict[str, Any]:
        """For Megatron-Core's checkpoints, by PEFT's names. `replica` numbers the ranks that hold the same."""
        from megatron.core.dist_checkpointing import ShardedTensor

        found = {}
        for part in self._parts():
            for entry, side, cut in zip(_entries(part), ("lora_A", "lora_B"), (1, 0), strict=True):
                tensors, own = part.tensors, part.cut == cut
                offsets = [(cut, tensors.rank, tensors.size)] if own and tensors.size > 1 else []
                found[entry.name] = ShardedTensor.from_rank_offsets(
                    entry.name, getattr(part, side), *offsets, replica_id=(0, 0 if own else tensors.rank, replica)
                )
        return found

    @torch.no_grad()
    def fill(self, values: dict[str, Tensor]) -> None:
        """Take back what `sharded_state` described."""
        for name, parameter in self.adapters().items():
            parameter.copy_(values[name])


def _entries(part: Adapter) -> tuple[Entry, Entry]:
    """A, and B."""
    outputs, inputs = part.whole
    rank = part.lora_A.shape[0]
    column = part.tensors.rank * part.lora_A.shape[1] if part.cut == 1 else 0
    row = part.tensors.rank * part.lora_B.shape[0] if part.cut == 0 else 0
    a = Piece((0, column), (rank, column + part.lora_A.shape[1]), (0, 0))
    b = Piece((row, 0), (row + part.lora_B.shape[0], rank), (0, 0))
    return (
        Entry(f"{part.name}.lora_A.weight", (rank, inputs), part.lora_A.detach(), (a,)),
        Entry(f"{part.name}.lora_B.weight", (outputs, rank), part.lora_B.detach(), (b,)),
    )


# ------------------------------------------------------------------------------------------------ putting them in


def check_model(config: TrainEngineConfig, core: Any) -> tuple[list[str] | str, set[str]]:
    """The targets as PEFT takes them, and Hugging Face's layers that get adapters.

    Raises ConfigError with everything that this model, or Megatron's form of it, cannot have.
    """
    problems, sparse = Problems(), core.num_moe_experts is not None
    can = _ATTENTION if sparse else (*_ATTENTION, *_MLP)
    if core.multi_latent_attention:
        problems.add("use_lora", "megatron has no adapters for multi-head latent attention", "fsdp can")
    if core.num_query_groups % core.tensor_model_parallel_size:
        what = f"does not divide num_key_value_heads={core.num_query_groups}, whose rows adapters could not be cut by"
        problems.add("tensor_parallel_size", f"{core.tensor_model_parallel_size} {what}", "use_lora=false, or fewer")
    wanted = config.target_modules
    if not wanted or wanted == [ALL]:
        problems.raise_as(ConfigError, "The adapters do not fit the model:")
        return (sorted(can) if sparse else ALL), set(can)
    note = " (experts get no adapters)" if sparse else ""
    for target in wanted:
        if target not in can:
            what = "no layer that megatron has adapters for"
            problems.add(f"target_modules: {target}", what, f"there are: {', '.join(can)}{note}")
    problems.raise_as(ConfigError, "The adapters do not fit the model:")
    return list(wanted), set(wanted)


def inject(chunks: Sequence[nn.Module], config: TrainEngineConfig, core: Any, groups: Groups) -> MegatronLora:
    """Put adapters into this rank's chunks, before DDP, and freeze everything else; their values are still to come."""
    from peft import LoraConfig

    targets, names = check_model(config, core)
    peft = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.path,
    )
    tensors = Tensors(groups.tp if groups.tp.size() > 1 else None, core.sequence_parallel)
    scale = config.lora_alpha / config.lora_rank
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
        for prefix, layer, fused, (blocks, inputs), cut in layers_of(chunk, core, tensors):
            like: Any = layer.weight
            adapters = {
                name: Adapter(prefix + name, (rows * blocks, inputs), config.lora_rank, cut, tensors, like)
                for name, rows in zip(fused.names, fused.rows, strict=True)
                if name in names
            }
            if adapters:
                attach(layer, Adapters(fused, adapters, scale))
        embedding: Any = getattr(chunk, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(_with_gradient)
    return MegatronLora(list(chunks), peft)


def _with_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """A recomputed layer has gradients only where its input has one; nothing below the first adapter would."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
