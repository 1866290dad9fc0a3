"""`MegatronEngine`: Megatron-Core's GPTModel, DDP, distributed optimizer and pipeline schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...converter.errors import ConfigError
from ..api.base import TrainEngine, made
from ..api.checks import check
from ..api.configs import ParallelStrategy, TrainEngineConfig
from ..data.batches import Batch
from ..launching import device_of, start
from ..megatron_cpu import cpu_megatron, hush
from ..packed_attention import check_available
from ..schedule import Schedule
from ..together import Together
from . import build, groups, lora, mtp, optim, weights
from .batches import Layout, Rows
from .compute import Compute
from .fields import stages
from .fp8 import token_multiple
from .routers import KeptBiases, takes_masks
from .steps import Steps, vocabulary

if TYPE_CHECKING:
    from ...converter.checkpoint import Checkpoint
    from ...converter.loading import Loaded
    from ...converter.mesh import Mesh
    from ..api.base import LossFn, LossWeightFn
    from ..api.metas import FinetuneSpec, SaveLoadMeta
    from ..megatron_model import MegatronConfig

BACKEND = "megatron"

Method = TypeVar("Method", bound=Callable[..., Any])


def _with_megatron(method: Method) -> Method:
    """Megatron-Core runs inside: without CUDA, its calls for CUDA mean the CPU."""

    @wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with cpu_megatron():
            return method(*args, **kwargs)

    return inside  # type: ignore[return-value]


class MegatronEngine(TrainEngine):
    """The engine; see `TrainEngine` for what its methods do and `engines/megatron/` for how.

    Parameters are in `dtype`; under bfloat16 the optimizer has fp32 masters, taken from the checkpoint as it is. Sizes,
    ranks and pipeline chunks are Megatron-Core's. A process has one such engine at a time.
    """

    backend = BACKEND

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self.device = torch.device("cpu")
        self.checkpoint: Checkpoint | None = None
        self.loaded: Loaded | None = None
        self.strategy: ParallelStrategy | None = None
        self.groups: groups.Groups | None = None
        self.core: MegatronConfig | None = None
        self.optimizer: Any = None
        """Megatron-Core's ChainedOptimizer."""
        self.lora: lora.MegatronLora | None = None
        self.schedule: Schedule | None = None
        self.lr_step = 0
        """Steps of the learning rate's schedule so far."""
        self._chunks: list[nn.Module] = []
        self._wrapped: list[nn.Module] = []
        self._compute: Compute | None = None
        self._offloader = optim.StorageOffloader()
        self._owns_group = False

    # -------------------------------------------------------------------------------------------- lifecycle

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        config = self.config
        hush()
        self.device = device_of()
        self.checkpoint = weights.open_model(config.path, with_weights=not config.init_from_scratch)
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        hf_config = self.checkpoint.config
        strategy = check(
            config, hf_config, world, BACKEND, parallel_strategy=parallel_strategy, device=self.device.type
        )
        build.check_fields(config, strategy, self.device)
        if not build.uses_engine(config, self.device):
            check_available(self.config.attn_impl, self.device)
        self.core = build.core_config(config, hf_config, strategy, self.device)
        if config.use_lora:
            lora.check_model(config, self.core.core)
        self._owns_group = start(self.device, strategy.world_size)
        self.strategy = strategy
        self._make_groups(strategy)

    @_with_megatron
    def _make_groups(self, strategy: ParallelStrategy) -> None:
        self.groups = groups.make(strategy, self.vpp)
        groups.seed(self.config.seed)

    @_with_megatron
    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        if addr is not None:
            raise ConfigError(f"addr: MegatronEngine has no server to talk to; {addr!r} was given.", hint="Pass None.")
        if self.groups is None:
            raise ConfigError("The engine has no process groups yet.", hint="Call create_process_group() first.")
        config, core, place = self.config, made(self.core), self.groups
        engine = build.uses_engine(config, self.device)
        self._chunks = build.make_model(core, self._vocabulary, self.config.attn_impl, self.device, engine=engine)
        if config.use_lora:
            self.lora = lora.inject(self._chunks, config, core.core, place)
        masters = None if config.init_from_scratch else self._read_weights(made(self.checkpoint))
        if self.lora is not None:
            self.lora.initialise(config.seed)
        trained = config.optimizer is not None
        self._wrapped = build.wrap(self._chunks, core.core, config) if trained else self._chunks
        if config.optimizer is not None:
            self.optimizer = optim.make(config, config.optimizer, self._wrapped)
            self.schedule = Schedule.of(config.optimizer, ft_spec.total_train_steps if ft_spec else None)
            if masters is not None:
                optim.fill_masters(self.optimizer, masters)
        self._compute = self._make_compute()
        self.train(trained)

    def _make_compute(self) -> Compute:
        config, core, place = self.config, made(self.core).core, made(self.groups)
        padded = build.padded_vocabulary(self._vocabulary, place.sizes.tp_size)
        steps = Steps(
            self._wrapped,
            core,
            place,
            vocabulary(self._vocabulary, padded, place),
            mask_routers=takes_masks(core),
            temperature=config.temperature,
            chunk=config.logprobs_chunk_size,
            entropy_requires_grad=config.megatron.entropy_requires_grad,
        )
        layout = Layout(
            self.device,
            place.sizes.cp_size,
            place.cp.rank(),
            unit=place.sizes.tp_size * token_multiple(config.megatron.fp8_config),
            maximum=config.mb_spec.max_tokens_per_mb if config.pad_to_maximum else None,
        )
        together = Together(self.device, place.cpu)
        biases = KeptBiases(self._chunks)
        return Compute(steps, layout, place, core, config.mb_spec, together, self._vocabulary, biases)

    def destroy(self) -> None:
        self._disconnect()
        self._chunks, self._wrapped = [], []
        self._compute = self.optimizer = self.core = self.lora = None
        if self.groups is not None:
            groups.release(self.groups, self._owns_group)
        self.groups = None
        self._offloader = optim.StorageOffloader()
        self._owns_group = False

    @property
    def initialized(self) -> bool:
        return self._compute is not None

    @property
    def model(self) -> list[nn.Module]:
        """This rank's chunks, one unless the pipeline is interleaved, without DDP. ConfigError before `initialize`."""
        if not self._chunks:
            made(None)
        return self._chunks

    @property
    def vpp(self) -> int:
        return self.config.megatron.virtual_pipeline_parallel_size

    @property
    def mesh(self) -> Mesh:
        """The layout of the weights, as the converter has it; `rank` is this rank's number on it."""
        return stages(self.config.megatron, made(self.groups).mesh(self.vpp))

    @property
    def rank(self) -> int:
        return made(self.groups).place(self.mesh)

    @property
    def _vocabulary(self) -> int:
        return int(made(self.checkpoint).config["vocab_size"])

    def train(self, mode: bool = True) -> MegatronEngine:
        for chunk in self._wrapped or self.model:
            chunk.train(mode)
        return self

    @_with_megatron
    def gather_parameters(self) -> None:
        """Have every parameter whole and new: before anything else than a forward pass reads them. Collective."""
        self._offloader.check_here()
        optim.gather_parameters(self._wrapped)

    @_with_megatron
    def offload(self) -> None:
        if self._offloader.away:
            return
        self.gather_parameters()
        self.optimizer_zero_grad()
        self._offloader.offload(optim.tensors_of(self._wrapped, self.optimizer))

    @_with_megatron
    def onload(self) -> None:
        self._offloader.onload()

    # -------------------------------------------------------------------------------------------- topology

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return made(self.groups).dp

    @property
    def data_parallel_rank(self) -> int:
        return made(self.groups).dp.rank()

    @property
    def data_parallel_world_size(self) -> int:
        return made(self.groups).dp.size()

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup:
        return made(self.groups).model

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        return made(self.groups).cpu

    def current_data_parallel_head(self) -> int:
        return dist.get_global_rank(self.context_and_model_parallel_group, 0)

    def is_data_parallel_head(self) -> bool:
        return self.current_data_parallel_head() == dist.get_rank()

    # -------------------------------------------------------------------------------------------- compute

    @_with_megatron
    def train_batch(
        self, input_: list[Batch] | Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        self._optimizer()
        self.optimizer_zero_grad()
        with self._computing() as compute:
            parts = compute.split(input_)
            losses = compute.loss(parts, loss_fn, loss_weight_fn, forward_only=False)
            stats = self.optimizer_step()
        return {**stats, "num_micro_batches": float(len(parts)), **losses}

    @_with_megatron
    def eval_batch(
        self, input_: list[Batch] | Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> torch.Tensor | None:
        """The loss is on every rank, those of other stages too. Multi-token prediction has no part in it."""
        with self._computing() as compute:
            found = compute.loss(compute.split(input_), loss_fn, loss_weight_fn, forward_only=True)
        return torch.tensor(found["loss"])

    @_with_megatron
    def forward_batch(
        self,
        input_: list[Batch] | Batch,
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Every rank has them, those of other stages too."""
        with self._computing() as compute:
            rows = compute.logprobs(compute.split(input_), output_seqlens)
        return (aggregate_fn or torch.cat)(rows)

    @_with_megatron
    def forward_backward_batch(
        self,
        mb_list: Iterable[Batch],
        process_output_fn: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor | None],
        forward_only: bool = False,
    ) -> None:
        """As the base class has it, on the last stage. `logits` are this rank's columns and, under context parallelism,
        its tokens, padding included; `ctx` has `batch`, `rows` (see `batches.Rows`), and `steps`, whose
        `logprobs(logits, rows)` gives whole log-probabilities. Under enable_mtp it is for going forward only."""
        if not forward_only:
            mtp.check_own_loss(self.config)
        with self._computing() as compute:
            process = compute.together.held(process_output_fn)

            def of_rows(logits: Tensor, rows: Rows) -> Tensor | None:
                return process(logits, {"batch": rows.batch, "rows": rows, "steps": compute.steps})

            compute.run(mb_list, of_rows, forward_only=forward_only)

    @contextmanager
    def _computing(self) -> Iterator[Compute]:
        """What breaks inside is told to the other ranks. An engine that is offloaded is refused where they meet."""
        compute = made(self._compute)
        with compute.together.working():
            with compute.together.holding():
                self._offloader.check_here()
            yield compute

    @_with_megatron
    def optimizer_zero_grad(self) -> None:
        if self._offloader.away:  # they come back as zeros
            return
        for chunk in self._wrapped:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()  # type: ignore[operator]
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    @_with_megatron
    def optimizer_step(self) -> dict[str, float]:
        self._offloader.check_here()
        lr = self.lr
        fine, norm = optim.step(self._optimizer(), lr)
        made(self._compute).biases.settle(taken=fine)
        self.optimizer_zero_grad()
        return {"update_successful": float(fine), "grad_norm": norm, "lr": lr}

    def lr_scheduler_step(self) -> None:
        self._optimizer()
        self.lr_step += 1

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        self._optimizer()
        return made(self.schedule).at(self.lr_step)

    def _optimizer(self) -> Any:
        if self.optimizer is None:
            raise ConfigError(
                "optimizer: none is configured, this engine only evaluates.", hint="Set config.optimizer."
            )
        return self.optimizer

    # -------------------------------------------------------------------------------------------- state and weights

    def _read_weights(self, checkpoint: Checkpoint) -> dict[Tensor, Tensor] | None:
        """Fill the parameters; the values that they were rounded from, where masters want them."""
        masters = self.config.optimizer is not None and self.config.dtype != "float32" and self.lora is None
        self.loaded, kept = weights.load(self.model, checkpoint, self.mesh, self.rank, masters=masters)
        return kept

    @_with_megatron
    def save(self, meta: SaveLoadMeta) -> None:
        self.gather_parameters()
        if meta.weight_format == "hf":
            if self.lora is not None and not meta.merge_adapters:
                self.lora.save(meta, self.cpu_group)
                return
            held = self._whole_weights() if self.lora is None else self.lora.merged()
            weights.save_hf(held, meta, made(self.checkpoint), self.mesh, self.rank, self.cpu_group)
            return
        from . import checkpoint

        checkpoint.save(self, meta)

    def _whole_weights(self) -> list[dict[str, Tensor]]:
        """What is saved: the masters, where the files are to hold fp32, as the checkpoint's do."""
        if self.optimizer is None or self.config.dtype == "float32" or not weights.stored_wide(made(self.checkpoint)):
            return weights.state_dicts(self.model)
        return weights.with_masters(self.model, optim.whole_masters(self.optimizer))

    @_with_megatron
    def load(self, meta: SaveLoadMeta) -> None:
        self._offloader.check_here()
        if meta.weight_format == "hf":
            masters = None
            if self.lora is not None and self.lora.is_saved_at(meta.path):
                self.lora.load(meta.path, self.cpu_group)
            else:
                masters = self._read_weights(weights.open_model(meta.path))
            if self.optimizer is not None:
                optim.fill_masters(self.optimizer, masters)
            return
        from . import checkpoint

        checkpoint.load(self, meta)

    def train_state(self) -> Any:
        from . import checkpoint

        return checkpoint.state_of(self)
