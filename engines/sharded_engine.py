"""`ShardedEngine`: what the engines share whose parameters are DTensors, or plain and whole, under torch's own FSDP.

An engine says how its model is made and sharded (`_make`), how a micro-batch goes through it, and which ranks share
what; splitting, weighing, clipping, stepping, saving and loading are here.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..converter.errors import ConfigError
from .api.base import TrainEngine, made
from .api.checks import check
from .api.configs import ParallelStrategy, TrainEngineConfig
from .data.batches import Batch, MicroBatches, fewest, joined, split_into
from .forward import Forward, Rows, reshard, resized
from .grad_norm import agreed, clip, gradient_norm
from .launching import device_of, start
from .offload import Offloader
from .optim import make_optimizer
from .schedule import Schedule
from .together import Together, check_weight, nothing_of
from .weights import open_model

if TYPE_CHECKING:
    from ..converter.checkpoint import Checkpoint
    from ..converter.loading import Loaded
    from .api.base import LossFn, LossWeightFn
    from .api.metas import FinetuneSpec, SaveLoadMeta
    from .sharded_optim import ShardedOptimizer, Streaming

Process = Callable[[Tensor, dict[str, Any]], Tensor | None]
"""Logits of a micro-batch and its context → what is backpropagated, if anything."""


class ShardedEngine(TrainEngine):
    """The common part of FSDPEngine and ArchonEngine; see `TrainEngine` for what its methods do."""

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self.device = torch.device("cpu")
        self.checkpoint: Checkpoint | None = None
        self.loaded: Loaded | None = None
        self.strategy: ParallelStrategy | None = None
        self.optimizer: ShardedOptimizer | None = None
        self.schedule: Schedule | None = None
        self._parts: list[nn.Module] = []
        self._forward: Forward | None = None
        self._offloader: Offloader | None = None
        self._cpu_group: dist.ProcessGroup | None = None
        self._together: Together | None = None
        self._owns_group = False

    # -------------------------------------------------------------------------------------------- what an engine says

    @abstractmethod
    def _prepare(self, strategy: ParallelStrategy) -> None:
        """Refuse, before any process group is made, what the common checks do not know."""

    @abstractmethod
    def _make_mesh(self, strategy: ParallelStrategy) -> None:
        """Make the groups."""

    @property
    @abstractmethod
    def _has_mesh(self) -> bool:
        """Whether there are groups."""

    @abstractmethod
    def _make(self) -> tuple[list[nn.Module], Forward]:
        """The model, or the parts of it that this rank has, sharded and filled."""

    @abstractmethod
    def _load(self, checkpoint: Checkpoint) -> None:
        """Fill the model again."""

    @property
    @abstractmethod
    def _loss_factor(self) -> int:
        """Gradients are averaged over so many ranks, of which each has the gradients of its own tokens."""

    _naming: str | None = None
    """Of the parameters, where the names do not say it."""

    def _streaming(self) -> tuple[Sequence[str], Streaming | None]:
        """Blocks whose optimizer states are streamed one after the other, and how; none."""
        return (), None

    def _plus(self, loss: Tensor, ctx: Mapping[str, Any]) -> Tensor:
        """What is backpropagated beside a micro-batch's loss: nothing."""
        return loss

    # -------------------------------------------------------------------------------------------- lifecycle

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        config = self.config
        self.device = device_of()
        self.checkpoint = open_model(config.path, with_weights=not config.init_from_scratch)
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        hf_config, kind = self.checkpoint.config, self.device.type
        strategy = check(config, hf_config, world, self.backend, parallel_strategy=parallel_strategy, device=kind)
        self._prepare(strategy)
        self._owns_group = start(self.device, strategy.world_size)
        self.strategy = strategy
        self._make_mesh(strategy)
        group: Any = dist.new_group(backend="gloo")
        self._cpu_group = group
        self._together = Together(self.device, group)

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        name, config = type(self).__name__, self.config
        if addr is not None:
            raise ConfigError(f"addr: {name} has no server to talk to; {addr!r} was given.", hint="Pass None.")
        if not self._has_mesh:
            raise ConfigError("The engine has no process groups yet.", hint="Call create_process_group() first.")
        self._parts, self._forward = self._make()
        if config.optimizer is not None:
            self.optimizer = make_optimizer(config.optimizer, self._named(), *self._streaming())
            self.schedule = Schedule.of(config.optimizer, ft_spec.total_train_steps if ft_spec else None)
        self._offloader = Offloader(self.model, self.optimizer, self.device)
        self.train(config.optimizer is not None)

    def destroy(self) -> None:
        self._disconnect()
        self.lora = None
        self._parts = []
        self._forward = self.optimizer = self._offloader = self._cpu_group = self._together = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    @property
    def initialized(self) -> bool:
        return bool(self._parts)

    @property
    def parts(self) -> list[nn.Module]:
        """The model, or the pipeline stages of it that this rank has. Raises ConfigError before `initialize`."""
        return self._parts or made(None)

    @property
    def model(self) -> nn.Module:
        """The sharded model; several stages as a ModuleList. Raises ConfigError before `initialize`."""
        return self.parts[0] if len(self.parts) == 1 else nn.ModuleList(self.parts)

    def _named(self) -> dict[str, nn.Parameter]:
        return {name: parameter for part in self.parts for name, parameter in part.named_parameters()}

    def train(self, mode: bool = True) -> ShardedEngine:
        self.model.train(mode)
        return self

    def offload(self) -> None:
        made(self._offloader).offload()

    def onload(self) -> None:
        made(self._offloader).onload()

    # -------------------------------------------------------------------------------------------- topology

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        return made(self._cpu_group)

    def current_data_parallel_head(self) -> int:
        return dist.get_global_rank(self.context_and_model_parallel_group, 0)

    def is_data_parallel_head(self) -> bool:
        return self.current_data_parallel_head() == dist.get_rank()

    # -------------------------------------------------------------------------------------------- compute

    def train_batch(
        self, input_: list[Batch] | Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        self._optimizer()
        self.optimizer_zero_grad()
        with made(self._together).working():
            parts = self._split(input_)
            loss = self._run(parts, loss_fn, loss_weight_fn, forward_only=False)
            stats = self.optimizer_step()
        return {**stats, "num_micro_batches": float(len(parts)), "loss": loss}

    @torch.no_grad()
    def eval_batch(
        self, input_: list[Batch] | Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> torch.Tensor | None:
        with made(self._together).working():
            parts = self._split(input_, forward_only=True)
            return torch.tensor(self._run(parts, loss_fn, loss_weight_fn, forward_only=True))

    @torch.no_grad()
    def forward_batch(
        self,
        input_: list[Batch] | Batch,
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        found: dict[int, Tensor] = {}

        def keep(logits: Tensor, ctx: dict[str, Any]) -> None:
            rows: Rows = ctx["rows"]
            forward: Forward = ctx["forward"]
            of_tokens = forward.values(logits, rows) if self.config.is_critic else forward.logprobs(logits, rows)[0]
            found[ctx["number"]] = of_tokens

        with made(self._together).working():
            parts = self._split(input_, forward_only=True)
            self._through_all(parts.parts, keep, forward_only=True)
            outputs = self._everywhere(found, [int(part["cu_seqlens"][-1]) for part in parts.parts])
        lengths = {item: length for part, order in zip(parts.parts, parts.order, strict=True)
                   for item, length in zip(order, part["cu_seqlens"].diff().tolist(), strict=False)}  # fmt: skip
        rows = parts.restore(outputs).split([lengths[i] for i in sorted(lengths)])
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
        vocabulary and of the tokens; `ctx` has `number` (of the micro-batch), `batch`, `rows` (see `forward.Rows`),
        `vocabulary` and `forward`, whose `logprobs(logits, rows)` gives whole log-probabilities on every rank."""
        together = made(self._together)
        with together.working():
            self._through_all(mb_list, together.held(process_output_fn), forward_only=forward_only)

    def _through_all(self, batches: Iterable[Batch], process: Process, *, forward_only: bool) -> None:
        """`forward_backward_batch` with a `process` that holds back what its user raises. Collective.

        Raises on every rank what went wrong on any: there are no gradients then, and the experts' counts begin anew.
        """
        together = made(self._together)
        rows: list[Rows] = []
        with together.holding():
            made(self._offloader).check_here()
            rows = self._rows(list(batches), forward_only)
        together.same_number(len(rows))
        self._passes(rows, process, forward_only)
        try:
            together.meet()
        except Exception:
            if not forward_only:
                self.optimizer_zero_grad()
                self._stepped(fine=False)
            raise

    def _rows(self, batches: Sequence[Batch], forward_only: bool) -> list[Rows]:
        """Micro-batches as this rank has them. Not collective."""
        forward = made(self._forward)
        return [forward.rows(batch) for batch in batches]

    def _passes(self, rows: Sequence[Rows], process: Process, forward_only: bool) -> None:
        """All of them through the model, forward and backward."""
        for number, one in enumerate(rows):
            with torch.set_grad_enabled(not forward_only):
                logits, extra = self._through(one)
                loss = process(logits, {**self._context(number, one), **extra})
            if not forward_only:
                # Without a loss there are the same collectives, and no gradient.
                (nothing_of(logits) if loss is None else loss).backward()
        if forward_only:
            reshard(self.parts)

    @abstractmethod
    def _through(self, rows: Rows) -> tuple[Tensor, dict[str, Any]]:
        """A micro-batch through the whole model: logits (rows, vocabulary), and what else `_plus` wants to know."""

    def _context(self, number: int, rows: Rows) -> dict[str, Any]:
        forward = made(self._forward)
        vocabulary = forward.vocabulary
        return {"number": number, "batch": rows.batch, "rows": rows, "vocabulary": vocabulary, "forward": forward}

    def _split(self, input_: list[Batch] | Batch, *, forward_only: bool = False) -> MicroBatches:
        """Micro-batches, as many as on the data-parallel rank that needs most. Collective."""
        together, spec = made(self._together), self.config.mb_spec
        batch, wanted = {}, 0
        with together.holding():
            batch = joined(input_)
            wanted = fewest(batch, spec)
        (most,) = together.meet(wanted)
        together.same_batch(batch, self.context_and_model_parallel_group)
        return split_into(batch, spec, self._number(int(most), forward_only))

    def _number(self, wanted: int, forward_only: bool) -> int:
        """How many micro-batches to make where `wanted` would do."""
        return wanted

    def _reduced(self, value: float, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
        """Over the data-parallel ranks."""
        if self.data_parallel_world_size == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(number, op, group=self.data_parallel_group)
        return float(number)

    def _everywhere(self, found: Mapping[int, Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """What was found for each micro-batch, on every rank; `sizes` are theirs."""
        return [found[number] for number in range(len(sizes))]

    def _summed(self, losses: Sequence[Tensor]) -> float:
        """The sum of the parts of the loss of the micro-batches, on every rank; those of one data-parallel rank."""
        return float(torch.stack(list(losses)).sum())

    def _run(self, parts: MicroBatches, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, forward_only: bool) -> float:
        """Forward (and backward) of all micro-batches; the weighted loss of the global batch.

        Raises SourceError when nothing in the global batch counts, or a weight is not finite.
        """
        together, weights = made(self._together), [0.0]
        with together.holding():
            weights = [float(loss_weight_fn(part)) for part in parts.parts]
        # Those with the same data count once.
        (total,) = together.meet(sum(weights) if self.is_data_parallel_head() else 0.0, op=dist.ReduceOp.SUM)
        check_weight(total)
        losses: list[Tensor] = []

        def process(logits: Tensor, ctx: dict[str, Any]) -> Tensor:
            rows: Rows = ctx["rows"]
            forward: Forward = ctx["forward"]
            share = weights[ctx["number"]] / total
            values = (forward.values(logits, rows),) if self.config.is_critic else forward.logprobs(logits, rows)
            loss = together.loss(loss_fn, *values, rows.batch)
            losses.append(loss.detach().double() * share)
            return self._plus(loss, ctx) * (share * self._loss_factor)

        self._through_all(parts.parts, process, forward_only=forward_only)
        return self._reduced(self._summed(losses))

    def optimizer_zero_grad(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def optimizer_step(self) -> dict[str, float]:
        optimizer, lr = self._optimizer(), self.lr
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = agreed(self._norm(gradients))
        fine = bool(torch.isfinite(norm))
        if fine:
            clip(gradients, norm, made(self.config.optimizer).gradient_clipping)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self._stepped(fine)
        self.optimizer_zero_grad()
        return {"update_successful": float(fine), "grad_norm": float(norm), "lr": lr}

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of the whole model's gradients."""
        return gradient_norm(gradients, self.device)

    def _stepped(self, fine: bool) -> None:
        """What comes after a step of the optimizer, or in its place when it was skipped."""

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
            from .export import save_hf

            if self.lora is not None and not meta.merge_adapters:
                self.lora.save(meta, self.cpu_group)
                return
            held = self.parts if self.lora is None else self.lora.merged()
            save_hf(held, meta, checkpoint, group=self.cpu_group, naming=self._naming)
            return
        from .states import save_state

        save_state(self, meta)

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.weight_format == "hf":
            if self.lora is not None and self.lora.is_saved_at(meta.path):
                self.lora.load(meta.path, self.cpu_group)
                return
            self._load(open_model(meta.path))
            return
        from .states import load_state

        load_state(self, meta)
