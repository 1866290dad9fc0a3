"""Sizes of every kind of parallelism, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...converter.errors import ConfigError, Problem
from .fields import option, settle

__all__ = ["ParallelStrategy"]


@dataclass(kw_only=True, slots=True)
class ParallelStrategy:
    """How many ranks share what. world = dp·cp·tp·pp, and pp·ep·etp divides it.

    `data_parallel_size` counts replicas and shards together: HSDP is `data_parallel_replicate_size` > 1, and the
    parameters are then sharded over `dp_shard_size` = dp / replicate ranks.

    Raises ConfigError when the sizes contradict each other.
    """

    tensor_parallel_size: int = option(1, "ranks that share each matrix", least=1)
    pipeline_parallel_size: int = option(1, "stages that the layers are dealt to", least=1)
    data_parallel_size: int = option(1, "parts of the batch (replicas times shards)", least=1)
    context_parallel_size: int = option(1, "ranks that share each sequence", least=1)
    expert_parallel_size: int = option(1, "ranks that the experts are dealt to", least=1)
    expert_tensor_parallel_size: int = option(1, "ranks that share each expert's matrices", least=1)
    data_parallel_replicate_size: int = option(1, "replicas of the sharded parameters (HSDP); divides dp", least=1)

    def __post_init__(self) -> None:
        settle(self)
        problems = []
        if self.dp_size % self.dp_replicate_size:
            what = f"{self.dp_replicate_size} does not divide data_parallel_size={self.dp_size}"
            problems.append(Problem("data_parallel_replicate_size", what, "dp = replicate × shard"))
        if self.world_size % self.expert_model_parallel_size:
            what = (
                f"pp·ep·etp = {self.pp_size}·{self.ep_size}·{self.etp_size} = {self.expert_model_parallel_size} does "
                f"not divide the world of dp·cp·tp·pp = {self.world_size} ranks"
            )
            problems.append(Problem("expert_parallel_size", what, "the experts share the same ranks"))
        if problems:
            raise ConfigError("ParallelStrategy contradicts itself.", problems)

    @property
    def tp_size(self) -> int:
        return self.tensor_parallel_size

    @property
    def pp_size(self) -> int:
        return self.pipeline_parallel_size

    @property
    def dp_size(self) -> int:
        return self.data_parallel_size

    @property
    def cp_size(self) -> int:
        return self.context_parallel_size

    @property
    def ep_size(self) -> int:
        return self.expert_parallel_size

    @property
    def etp_size(self) -> int:
        return self.expert_tensor_parallel_size

    @property
    def dp_replicate_size(self) -> int:
        return self.data_parallel_replicate_size

    @property
    def dp_shard_size(self) -> int:
        """Ranks that the parameters are sharded over, before context parallelism is counted in."""
        return self.data_parallel_size // self.data_parallel_replicate_size

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp_size * self.cp_size * self.tp_size * self.pp_size

    @property
    def expert_model_parallel_size(self) -> int:
        """Ranks that together hold all experts once."""
        return self.pp_size * self.ep_size * self.etp_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same expert."""
        if self.ep_size == self.etp_size == 1:
            return self.data_parallel_size
        return self.world_size // self.expert_model_parallel_size

    @property
    def edp_size(self) -> int:
        return self.expert_data_parallel_size

    def __str__(self) -> str:
        """Sizes above 1 with their short names: `dp4 tp2`."""
        short = ("tp", "pp", "dp", "cp", "ep", "etp", "dp_replicate")
        sizes = [(name, getattr(self, field.name)) for name, field in zip(short, fields(self), strict=True)]
        return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "1 rank"
