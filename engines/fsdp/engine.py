"""`FSDPEngine`: transformers' models on FSDP2, with HSDP, tensor and Ulysses sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..api.base import made
from ..api.configs import ParallelStrategy, TrainEngineConfig
from ..forward import Forward, Rows
from ..lora import Lora, base_dtype, inject
from ..optim import stored_dtype
from ..packed_attention import check_available
from ..sharded_engine import ShardedEngine
from ..sharded_optim import Streaming
from ..tensor_parallel import vocabulary
from ..weights import init_from_scratch, load
from . import model as models
from .forward import ModelForward, aux_loss_of
from .mesh import FsdpMesh, make_mesh
from .parallelize import named_blocks, shard_model

if TYPE_CHECKING:
    from ...converter.checkpoint import Checkpoint

BACKEND = "fsdp"


class FSDPEngine(ShardedEngine):
    """The engine; see `TrainEngine` for what its methods do and `engines/fsdp/` for how.

    Parameters are fp32 masters (`optimizer_dtype`), sharded over dp_shard × sp; computation is in `dtype`. The model's
    parameters, their gradients and the optimizer's states are DTensors, named as transformers names them.
    """

    backend = BACKEND

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self.mesh: FsdpMesh | None = None
        self.hf_config: Any = None
        self.lora: Lora | None = None
        self._blocks: list[str] = []

    # -------------------------------------------------------------------------------------------- lifecycle

    def _prepare(self, strategy: ParallelStrategy) -> None:
        check_available(self.config.attn_impl, self.device)

    def _make_mesh(self, strategy: ParallelStrategy) -> None:
        self.mesh = make_mesh(
            self.device.type, strategy.dp_replicate_size, strategy.dp_shard_size, strategy.cp_size, strategy.tp_size
        )

    @property
    def _has_mesh(self) -> bool:
        return self.mesh is not None

    def _make(self) -> tuple[list[nn.Module], Forward]:
        config, mesh, checkpoint = self.config, made(self.mesh), made(self.checkpoint)
        torch.manual_seed(config.seed + mesh.data_rank)  # dropout: as the data, so the same where the data is
        self.hf_config = models.parse_config(checkpoint.config)
        stored = stored_dtype(config)
        frozen = base_dtype(checkpoint, stored) if config.use_lora else stored
        model = models.build(self.hf_config, frozen, critic=config.is_critic)
        self.lora = inject(model, config, stored) if config.use_lora else None
        if config.disable_dropout:
            models.without_dropout(model)
        if config.gradient_checkpointing:
            models.checkpoint_activations(model)
        self._blocks = [name for name, _ in named_blocks(model, config.fsdp)]
        tp = shard_model(
            model,
            self.hf_config,
            mesh,
            config.fsdp,
            compute=getattr(torch, config.dtype),
            reduce=getattr(torch, config.grad_reduce_dtype),
            device=self.device,
        )
        models.materialize(model, self.device, on_cpu=config.fsdp.offload_params)
        self._parts = [model]
        if config.init_from_scratch:
            init_from_scratch(model, self._spread, config.seed)
        else:
            self._load(checkpoint)
        if self.lora is not None:
            self.lora.initialise(config.seed)
        forward = ModelForward(
            model=model,
            device=self.device,
            attention=config.attn_impl,
            size=self.hf_config.get_text_config().vocab_size,
            vocabulary=vocabulary(self.hf_config.vocab_size, tp),
            sp_group=mesh.sp_group,
            unit=mesh.sp * mesh.tp,
            maximum=config.mb_spec.max_tokens_per_mb if config.pad_to_maximum else None,
            temperature=config.temperature,
            chunk=config.logprobs_chunk_size,
            aux_loss=aux_loss_of(self.hf_config, config),
            stream=mesh.stream,
        )
        return [model], forward

    @property
    def _spread(self) -> float:
        return getattr(self.hf_config, "initializer_range", 0.02)

    def _load(self, checkpoint: Checkpoint) -> None:
        config = self.config
        if self.lora is not None:
            self.loaded = checkpoint.load_into(self.lora.base())
        else:
            self.loaded = load(self.parts, checkpoint, critic=config.is_critic, seed=config.seed, spread=self._spread)

    def _streaming(self) -> tuple[Sequence[str], Streaming | None]:
        fsdp = self.config.fsdp
        how = Streaming(self.device, fsdp.optim_step_prefetch_layers) if fsdp.per_layer_optim_step else None
        return self._blocks, how

    def destroy(self) -> None:
        self.mesh = None
        super().destroy()

    # -------------------------------------------------------------------------------------------- topology

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return made(self.mesh).data_group

    @property
    def data_parallel_rank(self) -> int:
        return made(self.mesh).data_rank

    @property
    def data_parallel_world_size(self) -> int:
        return made(self.mesh).dp

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup:
        return made(self.mesh).model_group

    # -------------------------------------------------------------------------------------------- compute

    @property
    def _loss_factor(self) -> int:
        """FSDP averages over dp × sp; the ranks of a sequence each have the gradient of their own slice."""
        mesh = made(self.mesh)
        return mesh.dp * mesh.sp

    def _through(self, rows: Rows) -> tuple[Tensor, dict[str, Any]]:
        forward: Any = made(self._forward)
        logits, aux = forward.logits(rows)
        return logits, {"aux_loss": aux}

    def _plus(self, loss: Tensor, ctx: Mapping[str, Any]) -> Tensor:
        if ctx["aux_loss"] is None:
            return loss
        return loss + ctx["forward"].aux_loss * ctx["aux_loss"] / made(self.mesh).sp
