"""Every parallel dimension of a run: what fits together, which ranks share what, and the meshes made of it.

All ranks lie in one grid, the last dimension running fastest:

    pp · dp_replicate · dp_shard · cp · tp

Experts are dealt to ranks of the same grid. For them dp_shard is cut in two, dp_shard_mod_ep · dp_shard_in_ep, and an
expert-parallel group takes the inner part, all of cp and, where experts are not cut by tp themselves (etp = 1), all of
tp. What is left, dp_shard_mod_ep, holds the same experts: FSDP shards them there.

| kind                  | ranks that                                                                             |
|-----------------------|----------------------------------------------------------------------------------------|
| `pp`                  | have the stages of one pipeline                                                        |
| `dp_replicate`        | hold the same shard of the parameters (HSDP)                                           |
| `dp_shard`            | share parameters and have different batches                                            |
| `cp`, `tp`            | share a sequence; share matrices                                                       |
| `dp`                  | have different batches                                                                 |
| `dp_shard_cp`         | share the parameters that are no experts (FSDP): the parts of a sequence are data too  |
| `dp_cp`               | have different tokens: losses are summed over them                                     |
| `cp_tp`, `pp_cp_tp`   | have the same batch, of one stage and of all                                           |
| `dp_shard_mod_ep`     | share the same experts (FSDP)                                                          |
| `dp_shard_in_ep`      | is the part of `dp_shard` that experts are dealt to                                    |
| `ep`                  | are dealt the experts of a layer                                                       |
| `ep_tp`               | `ep` by `tp`, two dimensions: experts dealt out and cut                                |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from ...converter.errors import MeshError, Problems
from ..api.parallel import ParallelStrategy

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

Groups = tuple[tuple[int, ...], ...]

_SIZES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")


@dataclass
class ArchonParallelDims:
    """How many ranks share what. dp_replicate · dp_shard · cp · tp · pp = world_size; dp_shard = -1 is what is left.

    ep   ranks that a layer's experts are dealt to; 1: every rank has all experts, cut by tp as other matrices are
    etp  ranks that share each expert's matrices when ep > 1: 1 or tp

    Raises MeshError with everything that does not fit, and what would. Sizes and groups need no process group; meshes
    do: `build` makes them, once.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    _: KW_ONLY
    world_size: int = 1
    device_type: str = "cpu"
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = Problems()
        for name in (*_SIZES, "world_size"):
            size = getattr(self, name)
            if size < 1 and not (name == "dp_shard" and size == -1):
                least = "-1 (what is left) or at least 1" if name == "dp_shard" else "at least 1"
                problems.add(name, f"{size}, expected {least}")
        problems.raise_as(MeshError, "These sizes are no sizes:")
        self._check_world(problems)
        self._check_experts(problems)
        given = ", ".join(f"{name}={getattr(self, name)}" for name in _SIZES)
        problems.raise_as(MeshError, f"{given} do not fit together on {self.world_size} ranks:")

    @classmethod
    def of(cls, strategy: ParallelStrategy, world_size: int, device_type: str = "cpu") -> ArchonParallelDims:
        """The dimensions of an engine's `parallel_strategy`. Raises MeshError as the constructor does."""
        return cls(
            dp_replicate=strategy.dp_replicate_size,
            dp_shard=strategy.dp_shard_size,
            cp=strategy.cp_size,
            tp=strategy.tp_size,
            pp=strategy.pp_size,
            ep=strategy.ep_size,
            etp=strategy.etp_size,
            world_size=world_size,
            device_type=device_type,
        )

    # -------------------------------------------------------------------------------------------- what fits

    def _check_world(self, problems: Problems) -> None:
        others = self.dp_replicate * self.cp * self.tp * self.pp
        said = f"dp_replicate·cp·tp·pp = {self.dp_replicate}·{self.cp}·{self.tp}·{self.pp} = {others}"
        if self.dp_shard == -1:
            self.dp_shard = max(1, self.world_size // others)
            if self.world_size % others:
                near = (self.world_size // others + 1) * others
                hint = f"{near} ranks would do" if self.world_size < others else f"{near - others} or {near} ranks do"
                problems.add("world_size", f"{self.world_size} is no multiple of {said}", hint)
        elif self.dp_shard * others != self.world_size:
            what = f"{self.dp_shard}, and {said}: that makes {self.dp_shard * others} ranks of {self.world_size}"
            fits = self.world_size % others == 0
            hint = f"dp_shard={self.world_size // others} would do" if fits else f"{self.dp_shard * others} ranks do"
            problems.add("dp_shard", what, hint)

    def _check_experts(self, problems: Problems) -> None:
        if self.etp not in (1, self.tp):
            problems.add("etp", f"{self.etp}, expected 1 or tp={self.tp}", "experts are cut as far as matrices, or not")
        if self.ep == 1:
            return
        inner, ranks = self._expert_ranks()
        if self.ep % inner or ranks % self.ep:
            words = ("cp", "dp_shard·cp") if self._experts_cut else ("cp·tp", "dp_shard·cp·tp")
            what = f"{self.ep}, expected a multiple of {words[0]} = {inner} that divides {words[1]} = {ranks}"
            fits = ", ".join(str(n) for n in range(inner, ranks + 1, inner) if ranks % n == 0)
            problems.add("ep", what, f"with etp={self.etp} these do: {fits}")

    @property
    def _experts_cut(self) -> bool:
        """Whether tp cuts every expert's matrices: tp is then no part of `ep`."""
        return self.tp == 1 or self.etp == self.tp

    def _expert_ranks(self) -> tuple[int, int]:
        """The ranks of an ep group besides dp_shard's, and all ranks that experts can be dealt to."""
        inner = self.cp if self._experts_cut else self.cp * self.tp
        return inner, self.dp_shard * inner

    # -------------------------------------------------------------------------------------------- sizes

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.tp if self.ep == 1 else self.etp

    @property
    def gradient_divisor(self) -> int:
        """What the sum of an expert's gradients is divided by. FSDP would divide by the ranks that hold the expert;
        its tokens came from all of dp_replicate · dp_shard · cp."""
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def grid(self) -> dict[str, int]:
        """The dimensions of the grid, the outermost first; dp_shard in two parts when experts are dealt out."""
        shard = {"dp_shard": self.dp_shard}
        if self.ep > 1:
            within = self.ep // self._expert_ranks()[0]
            shard = {"dp_shard_mod_ep": self.dp_shard // within, "dp_shard_in_ep": within}
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, **shard, "cp": self.cp, "tp": self.tp}

    @property
    def kinds(self) -> Mapping[str, tuple[str, ...]]:
        """Kind of group → the dimensions of the grid that it spans."""
        shard = tuple(name for name in self.grid if name.startswith("dp_shard"))
        dense: dict[str, tuple[str, ...]] = {
            **{name: (name,) for name in self.grid},
            "dp_shard": shard,
            "dp": ("dp_replicate", *shard),
            "dp_shard_cp": (*shard, "cp"),
            "dp_cp": ("dp_replicate", *shard, "cp"),
            "cp_tp": ("cp", "tp"),
            "pp_cp_tp": ("pp", "cp", "tp"),
        }
        if self.ep == 1:
            return dense
        ep = ("dp_shard_in_ep", "cp") if self._experts_cut else ("dp_shard_in_ep", "cp", "tp")
        return dense | {"ep": ep} | ({"ep_tp": (*ep, "tp")} if self._experts_cut else {})

    def size(self, kind: str) -> int:
        """Ranks of a group of this kind."""
        return math.prod(self.grid[name] for name in self._spans(kind))

    def groups(self, kind: str) -> Groups:
        """All groups of a kind, ranks in order. Pure: for plans, pictures and tests."""
        spans, sizes = self._spans(kind), self.grid
        strides = {name: math.prod(list(sizes.values())[at + 1 :]) for at, name in enumerate(sizes)}

        def offsets(names: tuple[str, ...]) -> list[int]:
            return [
                sum(i * strides[n] for i, n in zip(place, names, strict=True))
                for place in product(*(range(sizes[n]) for n in names))
            ]

        inside = offsets(spans)
        return tuple(tuple(first + at for at in inside) for first in offsets(tuple(n for n in sizes if n not in spans)))

    def _spans(self, kind: str) -> tuple[str, ...]:
        if kind not in self.kinds:
            why = "there is no expert parallelism (ep=1)" if "ep" in kind.split("_") else "unknown"
            if kind == "ep_tp" and self.ep > 1:
                why = f"experts are not cut (etp=1, tp={self.tp}): `ep` is all there is"
            raise MeshError(f"There are no groups of the kind {kind!r}: {why}.", hint=f"Kinds: {', '.join(self.kinds)}")
        return self.kinds[kind]

    # -------------------------------------------------------------------------------------------- meshes

    def build(self) -> ArchonParallelDims:
        """Make all meshes, once. Collective: all ranks of the default process group call it. Returns self.

        Raises MeshError when the default group has another size.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if self._meshes:
            return self
        if dist.get_world_size() != self.world_size:
            what = f"world_size={self.world_size}, and the default process group has {dist.get_world_size()} ranks."
            raise MeshError(what, hint="Start as many processes as the sizes make, or change a size.")
        root: Any = init_device_mesh(self.device_type, tuple(self.grid.values()), mesh_dim_names=tuple(self.grid))
        meshes: dict[str, Any] = {"world": root}
        for kind, spans in self.kinds.items():
            if kind != "ep_tp":
                meshes[kind] = root[spans[0]] if len(spans) == 1 else root[spans]._flatten(kind)
        meshes["fsdp"] = self._replicated(meshes, "dp_shard_cp")
        if self.ep > 1:
            if "ep_tp" in self.kinds:
                meshes["ep_tp"] = _side_by_side(meshes["ep"], meshes["tp"])
            meshes["expert_fsdp"] = self._replicated(meshes, "dp_shard_mod_ep")
        self._meshes = meshes
        return self

    def _replicated(self, meshes: Mapping[str, Any], shard: str) -> Any:
        """What `fully_shard` gets: a shard dimension, under HSDP behind the replicas' one."""
        return meshes[shard] if self.dp_replicate == 1 else _side_by_side(meshes["dp_replicate"], meshes[shard])

    def mesh(self, kind: str) -> DeviceMesh:
        """The mesh of a kind of group; `world` is the whole grid, `fsdp` and `expert_fsdp` are what `fully_shard` gets
        for experts and for the rest: one dimension, or replicas × shards. Raises MeshError before `build`."""
        if not self._meshes:
            raise MeshError(f"The mesh {kind!r} is not there yet.", hint="Call build() on every rank first.")
        if kind not in self._meshes:
            self._spans(kind)
        return self._meshes[kind]

    def group(self, kind: str) -> dist.ProcessGroup:
        """This rank's process group of a kind."""
        return self.mesh(kind).get_group()

    def rank(self, kind: str) -> int:
        """This rank's place in its group of a kind."""
        return self.mesh(kind).get_local_rank()


def _side_by_side(*meshes: Any) -> Any:
    """One mesh with the dimensions of several of the same grid."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))
