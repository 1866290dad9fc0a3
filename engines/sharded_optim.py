"""Optimizers for DTensor parameters that work on local shards, with states that are DTensors again.

torch's own optimizers run on DTensors too, but dispatch every operation through DTensor and refuse to mix meshes in one
fused call (TP-sharded matrices, whole norms). AdamW is elementwise: each rank steps its own shard with torch's fused
kernel, and a checkpoint still sees states with the parameter's mesh and placements.

State names are torch's: `exp_avg`, `exp_avg_sq`, `step` (AdamW), `momentum_buffer` (SGD), `compensation` (AdamWKahan).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import Optimizer
from torch.optim.sgd import sgd


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory; a plain tensor is its own."""
    given: Any = tensor
    return given._local_tensor if hasattr(given, "device_mesh") else tensor


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """`shard` as a tensor that is laid out as the parameter is, on the shard's own device."""
    given: Any = parameter
    if not hasattr(given, "device_mesh"):
        return shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = given._spec
    meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, shard.dtype)
    return DTensor(shard, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


@dataclass(frozen=True)
class Streaming:
    """Step one block of parameters at a time, states at home in host memory.

    device    where the step is computed
    prefetch  blocks that are fetched ahead
    """

    device: torch.device
    prefetch: int = 1


class ShardedOptimizer(Optimizer):
    """The common part: states per parameter, steps block by block or all at once.

    A parameter without a gradient is left alone, as torch's optimizers do.
    """

    kinds: ClassVar[Mapping[str, torch.dtype | None]] = {}
    """State tensors of a parameter → dtype, None for the parameter's own."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        defaults: dict[str, Any],
        blocks: Sequence[str] = (),
        streaming: Streaming | None = None,
    ) -> None:
        super().__init__(list(named.values()), defaults)
        self.names = {id(p): name for name, p in named.items()}
        self.blocks, self.streaming = tuple(blocks), streaming
        self.own_kinds = self.kinds

    def materialize(self) -> None:
        """Make the states that the first step would make, for a checkpoint to be loaded into."""
        for parameter in self._parameters():
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                for key, dtype in self.own_kinds.items():
                    state[key] = like(parameter, self._zeros(local(parameter), dtype))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of all parameters that have gradients, with the learning rate of the parameter group."""
        if closure is not None:
            raise ValueError("a closure would have to run the model again: gradients must be there already")
        with_gradient = [p for p in self._parameters() if p.grad is not None]
        self.materialize()
        if self.streaming is None:
            self._update([_Shard(self, p) for p in with_gradient], self.param_groups[0])
        else:
            self._stream(list(self._by_block(with_gradient)), self.streaming)
        return None

    def _update(self, shards: Sequence[_Shard], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _zeros(self, shard: Tensor, dtype: torch.dtype | None) -> Tensor:
        if self.streaming is None:
            return torch.zeros_like(shard, dtype=dtype)
        pin = self.streaming.device.type == "cuda"
        return torch.zeros(shard.shape, dtype=dtype or shard.dtype, pin_memory=pin)

    def _by_block(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        def block(parameter: Tensor) -> str:
            name = self.names[id(parameter)]
            return next((prefix for prefix in self.blocks if name.startswith(f"{prefix}.")), "")

        for _, found in groupby(sorted(parameters, key=lambda p: self._place(block(p))), key=block):
            yield list(found)

    def _place(self, block: str) -> int:
        return self.blocks.index(block) if block else len(self.blocks)

    def _stream(self, blocks: list[list[Tensor]], streaming: Streaming) -> None:
        """Fetch, step and put back one block after another; on CUDA the fetches run ahead on a stream of their own."""
        cuda = streaming.device.type == "cuda"
        side = torch.cuda.Stream(streaming.device) if cuda else None
        fetched: list[tuple[list[_Shard], Any]] = []
        for number in range(len(blocks)):
            while len(fetched) <= number + streaming.prefetch and len(fetched) < len(blocks):
                fetched.append(self._fetch(blocks[len(fetched)], streaming.device, side))
            shards, ready = fetched[number]
            if ready is not None:
                torch.cuda.current_stream(streaming.device).wait_event(ready)
            self._update(shards, self.param_groups[0])
            for shard in shards:
                shard.put_back()
            fetched[number] = ([], None)
        if cuda:
            torch.cuda.current_stream(streaming.device).synchronize()

    def _fetch(self, block: list[Tensor], device: torch.device, side: Any) -> tuple[list[_Shard], Any]:
        if side is None:
            return [_Shard(self, p, device) for p in block], None
        # Not before what is queued already has been computed: gradients, and the last step's way back.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            shards = [_Shard(self, p, device) for p in block]
            event = torch.cuda.Event()
            event.record(side)
        for shard in shards:
            shard.used_by(torch.cuda.current_stream(device))
        return shards, event


class _Shard:
    """Parameter, gradient and states of one parameter on this rank, on the device where they are stepped."""

    def __init__(self, optimizer: ShardedOptimizer, parameter: Tensor, device: torch.device | None = None) -> None:
        assert parameter.grad is not None
        self.state = optimizer.state[parameter]
        self.home = {key: local(self.state[key]) for key in optimizer.own_kinds} | {"parameter": local(parameter)}
        self.here = {key: self._fetch(tensor, device) for key, tensor in self.home.items()}
        self.gradient = self._fetch(local(parameter.grad), device).to(self.here["parameter"].dtype)

    @staticmethod
    def _fetch(tensor: Tensor, device: torch.device | None) -> Tensor:
        return tensor if device is None else tensor.to(device, non_blocking=True)

    @property
    def parameter(self) -> Tensor:
        return self.here["parameter"]

    def put_back(self) -> None:
        for key, tensor in self.here.items():
            if tensor is not self.home[key]:
                self.home[key].copy_(tensor, non_blocking=True)

    def used_by(self, stream: Any) -> None:
        """What a side stream allocated must not be given away while this one still works on it."""
        for key, tensor in self.here.items():
            if tensor is not self.home[key]:
                tensor.record_stream(stream)
        self.gradient.record_stream(stream)


class AdamW(ShardedOptimizer):
    """torch's AdamW (fused), on local shards."""

    kinds: ClassVar[Mapping[str, torch.dtype | None]] = {"exp_avg": None, "exp_avg_sq": None}

    def __init__(
        self,
        named: Mapping[str, Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **how: Any,
    ) -> None:
        super().__init__(named, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **how)

    def _update(self, shards: Sequence[_Shard], group: dict[str, Any]) -> None:
        kinds: dict[Any, list[_Shard]] = {}
        for shard in shards:
            shard.state["step"] += 1
            if shard.parameter.numel():  # a rank beyond the last row counts the step and has nothing to do
                kinds.setdefault((shard.parameter.device, shard.parameter.dtype), []).append(shard)
        for (device, _), same in kinds.items():
            adam(
                [s.parameter for s in same],
                [s.gradient for s in same],
                [s.here["exp_avg"] for s in same],
                [s.here["exp_avg_sq"] for s in same],
                [],
                [s.state["step"] - 1 if device.type == "cpu" else (s.state["step"] - 1).to(device) for s in same],
                fused=True,
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


class AdamWKahan(AdamW):
    """AdamW with bfloat16 moments and a Kahan compensation: what rounding took from a bfloat16 parameter is kept and
    added to the next step. 8 bytes a parameter in all, where fp32 masters and moments take 12 (and gradients)."""

    kinds: ClassVar[Mapping[str, torch.dtype | None]] = dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "compensation"), torch.bfloat16
    )

    def _update(self, shards: Sequence[_Shard], group: dict[str, Any]) -> None:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        for shard in shards:
            shard.state["step"] += 1
            step = float(shard.state["step"])
            parameter, lost = shard.parameter, shard.here["compensation"]
            mean, square = shard.here["exp_avg"], shard.here["exp_avg_sq"]
            gradient = shard.gradient.float()
            m = mean.float().lerp_(gradient, 1 - beta1)
            v = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            change = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt_() + group["eps"])
            mean.copy_(m)
            square.copy_(v)
            old = parameter.float()
            wanted = lost.float() - lr * (change + decay * old)
            parameter.copy_(old + wanted)
            lost.copy_(wanted - (parameter.float() - old))


class SGD(ShardedOptimizer):
    """torch's SGD, on local shards. Weight decay is added to the gradient."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **how: Any,
    ) -> None:
        super().__init__(named, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, **how)
        self.own_kinds = {"momentum_buffer": None} if momentum else {}

    def _update(self, shards: Sequence[_Shard], group: dict[str, Any]) -> None:
        kinds: dict[Any, list[_Shard]] = {}
        for shard in shards:
            shard.state["step"] += 1
            kinds.setdefault((shard.parameter.device, shard.parameter.dtype), []).append(shard)
        for same in kinds.values():
            momenta: list[Tensor | None] = [s.here.get("momentum_buffer") for s in same]
            sgd(
                [s.parameter for s in same],
                [s.gradient for s in same],
                momenta,
                foreach=True,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
