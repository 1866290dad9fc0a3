"""`ArchonEngine`: a model stack of our own in plain torch, with every parallel dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..api.base import made
from ..api.configs import ParallelStrategy, TrainEngineConfig
from ..data.batches import Batch
from ..forward import Forward, Rows, reshard
from ..lora import base_dtype
from ..packed_attention import check_available
from ..sharded_engine import Process, ShardedEngine
from . import loading
from .compute import attention_of, forward_with
from .dims import ArchonParallelDims
from .model import Decoder
from .moe import update_expert_biases
from .parallelize import Parallel
from .pipelined import Pipelined
from .tied import TiedCopies, tied_copies

if TYPE_CHECKING:
    from ...converter.checkpoint import Checkpoint
    from .lora import ArchonLora
    from .schedules import Pipeline

BACKEND = "archon"


class ArchonEngine(ShardedEngine):
    """The engine; see `TrainEngine` for what its methods do and `engines/archon/` for how.

    Parameters are fp32 masters, sharded over dp_shard × cp; computation is in `dtype`. Parameters, gradients and
    optimizer states are DTensors where they are cut at all, under Archon's names. `parts` are this rank's pipeline
    stages, each with the layers' global numbers.
    """

    backend = BACKEND
    _naming = loading.NAMING

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self.mesh: ArchonParallelDims | None = None
        self.parallel: Parallel | None = None
        self._plan: loading.Plan | None = None
        self._pipelined: Pipelined | None = None
        self._tied: TiedCopies | None = None
        self.lora: ArchonLora | None = None

    # -------------------------------------------------------------------------------------------- lifecycle

    def _prepare(self, strategy: ParallelStrategy) -> None:
        check_available(attention_of(self.config), self.device)
        self._plan = loading.plan(self.config, made(self.checkpoint).config, strategy.pp_size)

    def _make_mesh(self, strategy: ParallelStrategy) -> None:
        self.mesh = ArchonParallelDims.of(strategy, strategy.world_size, self.device.type).build()

    @property
    def _has_mesh(self) -> bool:
        return self.mesh is not None

    def _make(self) -> tuple[list[nn.Module], Forward]:
        config, dims, planned = self.config, made(self.mesh), made(self._plan)
        # Dropout: the same where the data is the same, but not on two stages.
        torch.manual_seed(config.seed + self.random_stream)
        stored = torch.float32
        frozen = base_dtype(made(self.checkpoint), stored) if config.use_lora else stored
        parts, self.parallel, self.lora = loading.build(planned, config, dims, self.device, dtype=frozen)
        self._parts = list(parts)
        if config.init_from_scratch:
            loading.draw(parts, planned.args, config.seed)
        else:
            self._load(made(self.checkpoint))
        if self.lora is not None:
            self.lora.initialise(config.seed)
        forward = forward_with(planned.args, self.parallel, config, self.device)
        if planned.pipeline is not None:
            width = 1 if config.is_critic else self.parallel.vocabulary.size
            compute: torch.dtype = getattr(torch, config.dtype)
            self._pipelined = Pipelined(planned.pipeline, parts, dims, forward, compute, width)
            self._tied = tied_copies(planned.pipeline, parts, dims)
        return self._parts, forward

    def _load(self, checkpoint: Checkpoint) -> None:
        self.loaded = loading.fill(self.decoders, made(self._plan).args, checkpoint, self.config, self.lora)

    def destroy(self) -> None:
        self.mesh = self.parallel = self._plan = self._pipelined = self._tied = None
        super().destroy()

    @property
    def decoders(self) -> list[Decoder]:
        """`parts`, by their type."""
        parts: list[Any] = self.parts
        return parts

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages of the run and where they are; None where there is no pipeline."""
        return made(self._plan).pipeline

    # -------------------------------------------------------------------------------------------- topology

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return made(self.mesh).group("dp")

    @property
    def data_parallel_rank(self) -> int:
        return made(self.mesh).rank("dp")

    @property
    def data_parallel_world_size(self) -> int:
        return made(self.mesh).size("dp")

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup:
        return made(self.mesh).group("pp_cp_tp")

    @property
    def random_stream(self) -> int:
        """Which random numbers this rank draws: those of its data and its pipeline rank."""
        dims = made(self.mesh)
        return dims.rank("dp") + dims.size("dp") * dims.rank("pp")

    # -------------------------------------------------------------------------------------------- compute

    @property
    def _loss_factor(self) -> int:
        return made(self.parallel).loss_factor

    def forward_backward_batch(
        self,
        mb_list: Iterable[Batch],
        process_output_fn: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor | None],
        forward_only: bool = False,
    ) -> None:
        """As ShardedEngine has it; under pipeline parallelism `process_output_fn` is called where the last stage is:
        on the last pp rank, or on the first under a V-shaped schedule.

        Raises ConfigError when the schedule does not run with so many micro-batches.
        """
        super().forward_backward_batch(mb_list, process_output_fn, forward_only)

    def _rows(self, batches: Sequence[Batch], forward_only: bool) -> list[Rows]:
        if self._pipelined is None:
            return super()._rows(batches, forward_only)
        return self._pipelined.rows(batches, forward_only=forward_only)

    def _passes(self, rows: Sequence[Rows], process: Process, forward_only: bool) -> None:
        if self._pipelined is None:
            super()._passes(rows, process, forward_only)
            return

        def numbered(number: int, logits: Tensor, one: Rows) -> Tensor | None:
            return process(logits, self._context(number, one))

        self._pipelined.run(rows, numbered, forward_only=forward_only)
        reshard(self.parts)

    def _through(self, rows: Rows) -> tuple[Tensor, dict[str, Any]]:
        logits = self.model(rows.ids[None], packing=rows.packing, positions=rows.positions)
        return logits.squeeze(0), {}

    def _number(self, wanted: int, forward_only: bool) -> int:
        if self._pipelined is None or forward_only:
            return wanted
        return self._pipelined.number(wanted, self.config.mb_spec.n_mbs_divisor)

    def _everywhere(self, found: Mapping[int, Tensor], sizes: Sequence[int]) -> list[Tensor]:
        if self._pipelined is None:
            return super()._everywhere(found, sizes)
        return self._pipelined.everywhere(found, sizes)

    def _summed(self, losses: Sequence[Tensor]) -> float:
        if self._pipelined is None:
            return super()._summed(losses)
        return self._pipelined.told(super()._summed(losses) if losses else 0.0)

    def optimizer_step(self) -> dict[str, float]:
        if self._tied is not None:
            self._tied.sum_gradients()
        return super().optimizer_step()

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Each stage's over its own meshes, then summed over the stages."""
        if self._pipelined is None:
            return super()._norm(gradients)
        gradients = self._tied.counted(gradients) if self._tied is not None else gradients
        square = super()._norm(gradients).square()
        dist.all_reduce(square, group=made(self.mesh).group("pp"))
        return square.sqrt()

    def _stepped(self, fine: bool) -> None:
        """Balance the experts; after a step that was skipped, only begin to count anew."""
        moves = fine and self.lora is None  # a frozen model is what its adapters are for
        rate = self.config.archon.moe_router_bias_update_rate if moves else 0.0
        layers = [moe for part in self.decoders for moe in part.moe_layers()]
        update_expert_biases(layers, rate, made(self.parallel).bias_groups)

    # -------------------------------------------------------------------------------------------- state and weights

    def train_state(self) -> Any:
        """All stages of this rank, under Archon's names; of a model with adapters only these."""
        from ..state.entries import TrainState

        sizes = made(self.strategy)
        names = ("dp_size", "dp_replicate_size", "cp_size", "tp_size", "pp_size", "ep_size", "etp_size")
        return TrainState(
            parts=self.parts if self.lora is None else [],
            extra={} if self.lora is None else self.lora.adapters(),
            naming=self._naming,
            copies=loading.COPY if made(self._plan).args.tied else {},
            base=made(self.checkpoint),
            optimizers=[self.optimizer] if self.optimizer is not None else [],
            topology={name: getattr(sizes, name) for name in names},
            stream=self.random_stream,
            group=self.cpu_group,
        )
