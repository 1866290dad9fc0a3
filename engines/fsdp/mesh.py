"""The device mesh of FSDPEngine: dp_replicate × dp_shard × sp × tp, and the groups that are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMS = ("dp_replicate", "dp_shard", "sp", "tp")


@dataclass(frozen=True)
class FsdpMesh:
    """One rank's view of the mesh; groups of one rank are None where a collective would do nothing.

    root   all four dimensions, in the order of DIMS: neighbouring ranks share a tensor-parallel group
    fsdp   what `fully_shard` gets: (shard) or (dp_replicate, shard), where shard is dp_shard × sp flattened.
           The ranks of one sequence hold different parts of the parameters and different tokens, as data ranks do
    data   dp_replicate × dp_shard: ranks that have different batches
    """

    root: DeviceMesh
    fsdp: DeviceMesh
    data: DeviceMesh
    model: DeviceMesh
    replicate: int
    shard: int
    sp: int
    tp: int

    @property
    def dp(self) -> int:
        return self.replicate * self.shard

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self.data.get_group()

    @property
    def data_rank(self) -> int:
        return self.data.get_local_rank()

    @property
    def model_group(self) -> dist.ProcessGroup:
        """sp × tp: ranks that have the same batch."""
        return self.model.get_group()

    @property
    def stream(self) -> int | None:
        """This rank's place among those that have the same batch; None when it is alone with it."""
        return self.model.get_local_rank() if self.sp * self.tp > 1 else None

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        return self.root["sp"].get_group() if self.sp > 1 else None

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return self.root["tp"].get_group() if self.tp > 1 else None

    @property
    def tp_mesh(self) -> DeviceMesh:
        return self.root["tp"]

    def describe(self) -> dict[str, int]:
        """What a checkpoint records as its topology."""
        return {"dp_replicate": self.replicate, "dp_shard": self.shard, "sp": self.sp, "tp": self.tp}


def make_mesh(device_type: str, replicate: int, shard: int, sp: int, tp: int) -> FsdpMesh:
    """Collective: all ranks of the default group call it."""
    root: Any = init_device_mesh(device_type, (replicate, shard, sp, tp), mesh_dim_names=DIMS)
    data = root["dp_replicate", "dp_shard"]._flatten("dp")
    model = root["sp", "tp"]._flatten("sp_tp")
    flat = root["dp_shard", "sp"]._flatten("dp_shard_sp")
    fsdp = flat if replicate == 1 else DeviceMesh._concatenate([root["dp_replicate"], flat])
    return FsdpMesh(root, fsdp, data, model, replicate, shard, sp, tp)
