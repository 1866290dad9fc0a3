"""Megatron-Core's process groups and random states: made for one engine, and given back when it is destroyed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...converter.errors import ConfigError
from ...converter.mesh import Mesh
from ..api.parallel import ParallelStrategy
from ..megatron_cpu import quiet

ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class Groups:
    """One rank's place. Ranks are numbered tensor, context, data, pipeline parallel, the first fastest.

    model   ranks that see the same data: context × tensor × pipeline
    cpu     all ranks, over gloo
    """

    sizes: ParallelStrategy
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    ep: dist.ProcessGroup
    model: dist.ProcessGroup
    cpu: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def last_stage(self) -> int:
        """The global rank of the last stage of this rank's pipeline."""
        return dist.get_global_rank(self.pp, self.pp.size() - 1)

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one of those with the same data whose loss counts."""
        return self.is_last_stage and self.tp.rank() == 0 and self.cp.rank() == 0

    def mesh(self, vpp: int) -> Mesh:
        """The layout of this engine's model, as the converter has it."""
        s = self.sizes
        return Mesh(tp=s.tp_size, pp=s.pp_size, vpp=vpp, ep=s.ep_size, etp=s.etp_size)

    def place(self, mesh: Mesh) -> int:
        """This rank's number on `mesh`, which counts no replicas."""
        inside = dist.get_rank() % (dist.get_world_size() // mesh.pp)
        return self.pp.rank() * mesh.stage_ranks + inside % mesh.stage_ranks


def make(sizes: ParallelStrategy, vpp: int) -> Groups:
    """Initialise Megatron-Core's parallel state. Collective: all ranks of the default group call it.

    Raises ConfigError when the state is taken: it is the process's, which has one MegatronEngine at a time.
    """
    with quiet():
        from megatron.core import parallel_state as ps

    if ps.model_parallel_is_initialized():
        raise ConfigError(
            "Megatron-Core's process groups exist already: a process has one MegatronEngine at a time.",
            hint="destroy() the other one first.",
        )
    ps.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp_size,
        pipeline_model_parallel_size=sizes.pp_size,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=sizes.cp_size,
        expert_model_parallel_size=sizes.ep_size,
        expert_tensor_parallel_size=sizes.etp_size,
        order=ORDER,
    )
    state: Any = ps
    return Groups(
        sizes,
        tp=state.get_tensor_model_parallel_group(),
        pp=state.get_pipeline_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        dp=state.get_data_parallel_group(),
        ep=state.get_expert_model_parallel_group(),
        model=_same_data(sizes),
        cpu=_new_group(None, "gloo"),
    )


def _same_data(sizes: ParallelStrategy) -> dist.ProcessGroup:
    inner, dp = sizes.tp_size * sizes.cp_size, sizes.dp_size
    mine: Any = None
    for d in range(dp):
        ranks = [x + inner * (d + dp * p) for p in range(sizes.pp_size) for x in range(inner)]
        group = _new_group(ranks, None)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _new_group(ranks: list[int] | None, backend: str | None) -> dist.ProcessGroup:
    group: Any = dist.new_group(ranks, backend=backend)
    return group


def seed(value: int) -> None:
    """As Megatron-LM does it: another seed for every stage, the same for all replicas; and its RNG tracker."""
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel

    own = value + 100 * ps.get_pipeline_model_parallel_rank()
    torch.manual_seed(own)
    tensor_parallel.model_parallel_cuda_manual_seed(own)


def release(groups: Groups | None, default_group: bool) -> None:
    """Destroy what `make` made; `default_group`: torch.distributed itself too."""
    from megatron.core import parallel_state as ps

    state: Any = ps
    made = [g for g in (state._global_process_group_list or []) if g is not None]
    ps.destroy_model_parallel()
    if not dist.is_initialized():
        return
    if default_group:
        dist.destroy_process_group()
        return
    known = dist.distributed_c10d._world.pg_map
    own = [] if groups is None else [groups.model, groups.cpu]
    for group in dict.fromkeys([*made, *own]):
        if group in known and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
