"""`FSDPEngine`: transformers' models on FSDP2, with HSDP, tensor and Ulysses sequence parallelism."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...converter.errors import ConfigError, SourceError
from ..api.base import TrainEngine, made
from ..api.checks import check
from ..api.configs import ParallelStrategy, TrainEngineConfig
from ..data.batches import Batch, MicroBatches, concatenate, pack, split
from ..grad_norm import agreed, clip, gradient_norm
from ..launching import device_of, start
from ..lora import Lora, base_dtype, inject
from ..packed_attention import check_available
from ..schedule import Schedule
from . import model as models
from .forward import Forward, Rows, aux_loss_of, resized
from .mesh import FsdpMesh, make_mesh
from .offload import Offloader
from .optim import make_optimizer, stored_dtype
from .parallelize import named_blocks, reshard, shard_model
from .tensor_parallel import vocabulary

if TYPE_CHECKING:
    from ...converter.checkpoint import Checkpoint
    from ...converter.loading import Loaded
    from ..api.base import LossFn, LossWeightFn
    from ..api.metas import FinetuneSpec, SaveLoadMeta
    from ..sharded_optim import ShardedOptimizer

BACKEND = "fsdp"


class FSDPEngine(TrainEngine):
    """The engine; see `TrainEngine` for what its methods do and `engines/fsdp/` for how.

    Parameters are fp32 masters (`optimizer_dtype`), sharded over dp_shard × sp; computation is in `dtype`. The model's
    parameters, their gradients and the optimizer's states are DTensors, named as transformers names them.
    """

    backend = BACKEND

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self.mesh: FsdpMesh | None = None
        self.device = torch.device("cpu")
        self.hf_config: Any = None
        self.checkpoint: Checkpoint | None = None
        self.loaded: Loaded | None = None
        self.lora: Lora | None = None
        self.optimizer: ShardedOptimizer | None = None
        self.schedule: Schedule | None = None
        self._model: nn.Module | None = None
        self._forward: Forward | None = None
        self._offloader: Offloader | None = None
        self._cpu_group: dist.ProcessGroup | None = None
        self._owns_group = False

    # -------------------------------------------------------------------------------------------- lifecycle

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        config = self.config
        self.device = device_of()
        self.checkpoint = models.open_model(config.path, with_weights=not config.init_from_scratch)
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        strategy = check(
            config, self.checkpoint.config, world, BACKEND, parallel_strategy=parallel_strategy, device=self.device.type
        )
        check_available(config.attn_impl, self.device)
        self._owns_group = start(self.device, strategy.world_size)
        self.strategy = strategy
        self.mesh = make_mesh(
            self.device.type, strategy.dp_replicate_size, strategy.dp_shard_size, strategy.cp_size, strategy.tp_size
        )
        group: Any = dist.new_group(backend="gloo")
        self._cpu_group = group

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        if addr is not None:
            raise ConfigError(f"addr: FSDPEngine has no server to talk to; {addr!r} was given.", hint="Pass None.")
        if self.mesh is None:
            raise ConfigError("The engine has no process groups yet.", hint="Call create_process_group() first.")
        config, mesh, checkpoint = self.config, self.mesh, made(self.checkpoint)
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
        blocks = [name for name, _ in named_blocks(model, config.fsdp)]
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
        if config.init_from_scratch:
            models.init_from_scratch(model, self.hf_config, config.seed)
        else:
            self._load(model, checkpoint)
        if self.lora is not None:
            self.lora.initialise(config.seed)
        self._model = model
        self._forward = Forward(
            model,
            self.device,
            config.attn_impl,
            vocabulary(self.hf_config.vocab_size, tp),
            mesh.sp_group,
            unit=mesh.sp * mesh.tp,
            maximum=config.mb_spec.max_tokens_per_mb if config.pad_to_maximum else None,
            temperature=config.temperature,
            chunk=config.logprobs_chunk_size,
            aux_loss=aux_loss_of(self.hf_config, config),
            stream=mesh.stream,
        )
        if config.optimizer is not None:
            self.optimizer = make_optimizer(
                config.optimizer, config.fsdp, dict(model.named_parameters()), blocks, self.device
            )
            self.schedule = Schedule.of(config.optimizer, ft_spec.total_train_steps if ft_spec else None)
        self._offloader = Offloader(model, self.optimizer, self.device)
        self.train(config.optimizer is not None)

    def _load(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        if self.lora is not None:
            self.loaded = checkpoint.load_into(self.lora.base())
        else:
            self.loaded = models.load(model, checkpoint, critic=self.config.is_critic, seed=self.config.seed)

    def destroy(self) -> None:
        self.lora = None
        self._model = self._forward = self.optimizer = self._offloader = None
        self.mesh = self._cpu_group = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    @property
    def initialized(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> nn.Module:
        """The sharded model. Raises ConfigError before `initialize`."""
        return made(self._model)

    def train(self, mode: bool = True) -> FSDPEngine:
        self.model.train(mode)
        return self

    def offload(self) -> None:
        made(self._offloader).offload()

    def onload(self) -> None:
        made(self._offloader).onload()

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

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        return made(self._cpu_group)

    def current_data_parallel_head(self) -> int:
        return made(self.mesh).data_head()

    def is_data_parallel_head(self) -> bool:
        return self.current_data_parallel_head() == dist.get_rank()

    # -------------------------------------------------------------------------------------------- compute

    def train_batch(
        self, input_: list[Batch] | Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        self.optimizer_zero_grad()
        parts = self._split(input_)
        loss = self._run(parts, loss_fn, loss_weight_fn, forward_only=False)
        stats = self.optimizer_step()
        return {**stats, "num_micro_batches": float(len(parts)), "loss": loss}

    @torch.no_grad()
    def eval_batch(
        self, input_: list[Batch] | Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> torch.Tensor | None:
        return torch.tensor(self._run(self._split(input_), loss_fn, loss_weight_fn, forward_only=True))

    @torch.no_grad()
    def forward_batch(
        self,
        input_: list[Batch] | Batch,
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        parts = self._split(input_)
        found: list[Tensor] = []

        def keep(logits: Tensor, ctx: dict[str, Any]) -> None:
            rows: Rows = ctx["rows"]
            forward = made(self._forward)
            found.append(forward.values(logits, rows) if self.config.is_critic else forward.logprobs(logits, rows)[0])

        self.forward_backward_batch(parts.parts, keep, forward_only=True)
        lengths = {item: length for part, order in zip(parts.parts, parts.order, strict=True)
                   for item, length in zip(order, part["cu_seqlens"].diff().tolist(), strict=False)}  # fmt: skip
        rows = parts.restore(found).split([lengths[i] for i in sorted(lengths)])
        if output_seqlens is not None:
            rows = [resized(row, length) for row, length in zip(rows, output_seqlens, strict=True)]
        return (aggregate_fn or torch.cat)(list(rows))

    def forward_backward_batch(
        self,
        mb_list: Iterable[Batch],
        process_output_fn: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor | None],
        forward_only: bool = False,
    ) -> None:
        """As the base class has it. Under tensor and sequence parallelism `logits` are this rank's slice of the
        vocabulary and of the tokens; `ctx` has `batch`, `rows` (see `forward.Rows`), `vocabulary` and `forward`, whose
        `logprobs(logits, rows)` gives whole log-probabilities on every rank."""
        forward = made(self._forward)
        made(self._offloader).check_here()
        for batch in mb_list:
            rows = forward.rows(batch)
            with torch.set_grad_enabled(not forward_only):
                logits, aux = forward.logits(rows)
                ctx = {"batch": rows.batch, "rows": rows, "vocabulary": forward.vocabulary, "forward": forward}
                loss = process_output_fn(logits, {**ctx, "aux_loss": aux})
            if loss is not None and not forward_only:
                loss.backward()
        if forward_only:
            reshard(self.model)

    def _split(self, input_: list[Batch] | Batch) -> MicroBatches:
        """Micro-batches, as many as on the data-parallel rank that needs most."""
        batch = concatenate([pack(b) for b in input_]) if isinstance(input_, list) else pack(input_)
        spec: Any = self.config.mb_spec
        return split(batch, spec, lambda number: int(self._reduced(float(number), dist.ReduceOp.MAX)))

    def _reduced(self, value: float, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
        if self.data_parallel_world_size == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(number, op, group=self.data_parallel_group)
        return float(number)

    def _run(self, parts: MicroBatches, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, forward_only: bool) -> float:
        """Forward (and backward) of all micro-batches; the weighted loss of the global batch.

        Raises SourceError when nothing in the global batch counts.
        """
        mesh, forward = made(self.mesh), made(self._forward)
        weights = [float(loss_weight_fn(part)) for part in parts.parts]
        total = self._reduced(sum(weights))
        if not total > 0:
            raise SourceError(f"The batch's loss weights sum to {total}: no token of it is a target.")
        todo, losses = iter(weights), []

        def process(logits: Tensor, ctx: dict[str, Any]) -> Tensor:
            rows: Rows = ctx["rows"]
            share = next(todo) / total
            if self.config.is_critic:
                loss = loss_fn(forward.values(logits, rows), rows.batch)
            else:
                loss = loss_fn(*forward.logprobs(logits, rows), rows.batch)
            losses.append(loss.detach().double() * share)
            if ctx["aux_loss"] is not None:
                loss = loss + forward.aux_loss * ctx["aux_loss"] / mesh.sp
            # FSDP averages over dp × sp; the ranks of a sequence each have the gradient of their own slice.
            return loss * (share * mesh.dp * mesh.sp)

        self.forward_backward_batch(parts.parts, process, forward_only)
        return self._reduced(float(torch.stack(losses).sum()))

    def optimizer_zero_grad(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def optimizer_step(self) -> dict[str, float]:
        optimizer, lr = self._optimizer(), self.lr
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = agreed(gradient_norm(gradients, self.device))
        fine = bool(torch.isfinite(norm))
        if fine:
            clip(gradients, norm, made(self.config.optimizer).gradient_clipping)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.optimizer_zero_grad()
        return {"update_successful": float(fine), "grad_norm": float(norm), "lr": lr}

    def lr_scheduler_step(self) -> None:
        self._optimizer()
        self.lr_step += 1

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        self._optimizer()
        return made(self.schedule).at(self.lr_step)

    def _optimizer(self) -> ShardedOptimizer:
        if self.optimizer is None:
            raise ConfigError("optimizer: none is configured, so this engine only evaluates.")
        return self.optimizer

    # -------------------------------------------------------------------------------------------- state and weights

    def save(self, meta: SaveLoadMeta) -> None:
        checkpoint = made(self.checkpoint)
        made(self._offloader).check_here()
        if meta.weight_format == "hf":
            from ..export import save_hf

            if self.lora is not None and not meta.merge_adapters:
                self.lora.save(meta, self.cpu_group)
                return
            save_hf(self.model if self.lora is None else self.lora.merged(), meta, checkpoint, group=self.cpu_group)
            return
        from ..state.saving import Progress, Saver
        from ..states import state_of

        saver = Saver()
        progress = Progress(version=self.get_version(), schedule={"step": self.lr_step}, seed=self.config.seed)
        try:
            saver.save(state_of(self), progress, meta.path, optimizer=meta.with_optim)
        finally:
            saver.close()

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "hf":
            if self.lora is not None and self.lora.is_saved_at(meta.path):
                self.lora.load(meta.path, self.cpu_group)
                return
            self._load(self.model, models.open_model(meta.path))
            return
        from ..state.loading import load
        from ..states import state_of

        restored = load(state_of(self), meta.path, optimizer=meta.with_optim, rng=meta.with_optim)
        if meta.with_optim:
            self.lr_step = int(restored.progress.schedule["step"])
        self.set_version(restored.progress.version)
