"""Megatron-Core's optimizer: made, stepped unless the gradients are not finite, its masters filled, moved away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...converter.errors import ConfigError
from ..api.configs import OptimizerConfig, TrainEngineConfig
from .build import optimizer_config

__all__ = ["StorageOffloader", "fill_masters", "gather_parameters", "make", "step", "tensors_of", "whole_masters"]


def make(config: TrainEngineConfig, optimizer: OptimizerConfig, chunks: Sequence[nn.Module]) -> Any:
    """Weight decay goes to every parameter, as in the other engines: `config_overrides={}` says so to Megatron-Core,
    whose own default leaves out biases and norms."""
    from megatron.core.optimizer import get_megatron_optimizer

    models: Any = list(chunks)
    made = get_megatron_optimizer(optimizer_config(config, optimizer), models, config_overrides={})
    if config.dtype == "float16":
        core: Any = models[0].config
        core.grad_scale_func = made.scale_loss
    return made


def step(optimizer: Any, lr: float) -> tuple[bool, float]:
    """Clip and step; the gradient norm before clipping. Nothing is stepped when it is not finite.

    Megatron-Core's own `step` steps with gradients that are not a number.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    if optimizer.prepare_grads():  # fp16: the loss scale was too large, and is smaller now
        return False, math.inf
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return False, norm
    for part in optimizer.chained_optimizers:
        parameters = [] if part.is_stub_optimizer else part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm, decoupled)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step_with_ready_grads()
    return True, norm


def gather_parameters(chunks: Iterable[Any]) -> None:
    """Have every parameter whole and new on every rank. Collective over the data parallel ranks.

    Under overlap_param_gather a step leaves that to the next forward pass; until then a rank has old values of what
    others stepped.
    """
    for chunk in chunks:
        ddp = getattr(chunk, "ddp_config", None)
        if ddp is not None and ddp.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def fill_masters(optimizer: Any, values: Mapping[Tensor, Tensor] | None) -> None:
    """fp32 masters from what parameters were rounded from, or (None) from the parameters themselves.

    Megatron-Core can take them from a state dict as well, but not those of experts: of several optimizers it gives the
    state dict to the first.
    """
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if values is None or part.config.use_precision_aware_optimizer:
            part.reload_model_params()
            continue
        with torch.no_grad():
            for parameter, master, begin in _masters(part):
                value = values[parameter].view(-1)
                master.view(-1).copy_(value[begin : begin + master.numel()])


@torch.no_grad()
def whole_masters(optimizer: Any) -> dict[Tensor, Tensor]:
    """The fp32 copy of every parameter of this rank that has one, whole, in host memory. Collective.

    Empty for the precision-aware optimizer, whose copies are Transformer Engine's.
    """
    found: dict[Tensor, Tensor] = {}
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer or part.config.use_precision_aware_optimizer:
            continue
        here = {id(parameter): (master, begin) for parameter, master, begin in _masters(part)}
        spread = hasattr(part, "shard_fp32_from_float16_groups")  # each rank has a range of the flat parameter
        for parameter in _narrow_parameters(part) if spread else [p for p, _, _ in _masters(part)]:
            whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            if id(parameter) in here:
                master, begin = here[id(parameter)]
                whole.view(-1)[begin : begin + master.numel()].copy_(master.view(-1))
            if spread:
                # As whole numbers: sums with zeros that change no bit, the sign of a zero neither.
                dist.all_reduce(whole.view(torch.int32), group=part.data_parallel_group)
            found[parameter] = whole.cpu()
    return found


def _narrow_parameters(part: Any) -> list[Tensor]:
    """Of a distributed optimizer: all with masters, on every rank in the same order, also those of others' ranges."""
    return [parameter for buffer in part.buffers for parameter in buffer.params if parameter.dtype != torch.float32]


def _masters(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(parameter, its fp32 copy or a part of that, where the part begins)."""
    if hasattr(part, "shard_fp32_from_float16_groups"):
        for group, shards in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            for parameter, shard in zip(group, shards, strict=True):
                yield parameter, shard, part._get_model_param_range_map(parameter)["param"].start
    elif hasattr(part, "fp32_from_float16_groups"):
        for group, copies in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((parameter, copy, 0) for parameter, copy in zip(group, copies, strict=True))


# ------------------------------------------------------------------------------------------------ out of device memory


def tensors_of(chunks: Iterable[Any], optimizer: Any) -> Iterator[tuple[Tensor, bool]]:
    """Everything that takes memory between steps, with views of one another; False: its values are not needed."""
    for chunk in chunks:
        wrapped = hasattr(chunk, "bucket_groups")  # DDP's `buffers` are its own
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers] if wrapped else []:
            yield buffer.grad_data, False
            if buffer.param_data is not None:
                yield buffer.param_data, True
        model: nn.Module = chunk.module if wrapped else chunk
        yield from ((parameter.data, True) for parameter in model.parameters())
        yield from ((value, True) for value in model.buffers())
    if optimizer is None:
        return
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        yield from ((parameter.data, True) for parameter in part.get_parameters())
        for state in part.optimizer.state.values():
            yield from ((value, True) for value in state.values() if isinstance(value, Tensor))


class StorageOffloader:
    """Moves storages, not tensors, to host memory and back: parameters are views of DDP's buffers, masters views of
    parameters, and stay so."""

    def __init__(self) -> None:
        self._away: list[tuple[Any, int, Any]] = []

    @property
    def away(self) -> bool:
        return bool(self._away)

    def check_here(self) -> None:
        """Raises ConfigError while everything is away: whoever touched it would touch memory that is not there."""
        if self._away:
            raise ConfigError("The engine is offloaded.", hint="Call onload() first.")

    def offload(self, tensors: Iterable[tuple[Tensor, bool]]) -> None:
        """Gradients come back as zeros. A second call does nothing."""
        if self._away:
            return
        found: dict[int, tuple[Any, bool]] = {}
        for tensor, needed in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                before = found.get(storage.data_ptr(), (storage, False))
                found[storage.data_ptr()] = (storage, before[1] or needed)
        for storage, needed in found.values():
            size = storage.nbytes()
            kept = torch.UntypedStorage(size, device="cpu").copy_(storage, False) if needed else None
            self._away.append((storage, size, kept))
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Back, bit for bit, to other addresses. Does nothing when nothing is away."""
        for storage, size, kept in self._away:
            storage.resize_(size)
            if kept is None:
                storage.fill_(0)
            else:
                storage.copy_(kept, False)
        self._away.clear()
