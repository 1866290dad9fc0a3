"""`TrainEngine`: what every training engine can do, after AReaL's API.

A *batch* is a dict. Packed: 1-D tensors of T tokens (`input_ids`, `loss_mask`, and whatever the loss needs, each with a
value per token), `cu_seqlens` (int32, sequences + 1) and `max_seqlen`. Padded: 2-D tensors (B, S) with
`attention_mask`. Engines take both, and lists of either, and pack them. Every data parallel rank passes its own part;
ranks that share a sequence or the model (context, tensor, pipeline) pass the same.

The life of an engine:

    create_process_group → initialize → (train_batch, lr_scheduler_step, save, …)* → destroy
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ...converter.errors import ConfigError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from .configs import TrainEngineConfig
    from .metas import DeviceStats, FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
    from .parallel import ParallelStrategy

    Batch = dict[str, Any]
    LossFn = Callable[..., torch.Tensor]
    """`loss_fn(logprobs, entropy, input_data)`, or `loss_fn(values, input_data)` for a critic: packed 1-D tensors and
    the micro-batch; a scalar, the mean over the micro-batch's own weight."""
    LossWeightFn = Callable[[Mapping[str, Any]], torch.Tensor]
    """The weight of a (micro-)batch's loss, as a rule the number of tokens that count."""

T = TypeVar("T")

__all__ = ["TrainEngine", "made"]


def made(value: T | None) -> T:
    """Something that `create_process_group` or `initialize` makes. Raises ConfigError before they have."""
    if value is None:
        raise ConfigError("The engine is not ready.", hint="Call create_process_group() and initialize() first.")
    return value


class TrainEngine(ABC):
    """The abstract engine. What is wrong with a configuration is raised (ConfigError) before any process group."""

    backend: str = ""
    """fsdp, megatron or archon."""

    lora: Any = None
    """The adapters, where `use_lora` is set and the model is made."""

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = config
        self.lr_step = 0
        """Steps of the learning rate's schedule so far; travels with the training state."""
        self._version = 0
        self._sync: Any = None
        self._stats: dict[str, tuple[float, float]] = {}

    # -------------------------------------------------------------------------------------------- lifecycle

    @abstractmethod
    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join torch.distributed (unless somebody already has) and make every group.

        `parallel_strategy` takes the place of the configuration's. Raises ConfigError, before anything is made, for
        all that the backend, the model or the world cannot hold.
        """

    @abstractmethod
    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Build the model, load this rank's part of the checkpoint, make optimizer and schedule.

        `addr` is there for AReaL's sake and must be None. `ft_spec` gives the length of the training, which the
        schedule needs; without it there is no warm-up and no decay to know the end of.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Let go of model, optimizer and groups. A second call does nothing."""

    @property
    @abstractmethod
    def initialized(self) -> bool:
        """Whether `initialize` has succeeded and `destroy` was not called."""

    @abstractmethod
    def train(self, mode: bool = True) -> TrainEngine:
        """Training mode (dropout, gradients), or not."""

    def eval(self) -> TrainEngine:
        """`train(False)`."""
        return self.train(False)

    @abstractmethod
    def onload(self) -> None:
        """Bring back what `offload` moved away."""

    @abstractmethod
    def offload(self) -> None:
        """Move parameters, gradients and optimizer state out of device memory."""

    # -------------------------------------------------------------------------------------------- topology

    @property
    @abstractmethod
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that see different data and hold the same part of the model."""

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int:
        """This rank's place in `data_parallel_group`."""

    @property
    @abstractmethod
    def data_parallel_world_size(self) -> int:
        """Ranks in `data_parallel_group`."""

    @property
    @abstractmethod
    def context_and_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that see the same data."""

    @property
    @abstractmethod
    def cpu_group(self) -> dist.ProcessGroup:
        """All ranks, over gloo."""

    @abstractmethod
    def current_data_parallel_head(self) -> int:
        """Global rank of the first in `context_and_model_parallel_group`."""

    @abstractmethod
    def is_data_parallel_head(self) -> bool:
        """Whether this rank is that one."""

    # -------------------------------------------------------------------------------------------- compute

    @abstractmethod
    def train_batch(
        self, input_: list[Batch] | Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        """One optimizer step on this rank's part of the global batch.

        The batch is split into micro-batches (`config.mb_spec`); micro-batch i counts `loss_weight_fn(mb_i)` of the sum
        over all micro-batches of all data parallel ranks, so that the step equals that of the whole batch at once.
        `logprobs[t]` is the log-probability of token t+1 given those up to t, 0 at a sequence's end, `entropy[t]` that
        of the same distribution. The learning rate is not stepped.

        Returns `update_successful` (0.0 when the gradient norm was not finite and the step was skipped), `grad_norm`,
        `lr`, `num_micro_batches` and `loss` (weighted over the global batch), the same on every rank.
        """

    @abstractmethod
    def eval_batch(
        self, input_: list[Batch] | Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> torch.Tensor | None:
        """The weighted loss of the global batch, without gradients. None where the last stage is not."""

    @abstractmethod
    def forward_batch(
        self,
        input_: list[Batch] | Batch,
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Log-probabilities (values for a critic) of this rank's sequences, without gradients.

        `output_seqlens` are the lengths that the sequences of the result have (None: as they came in). The results of
        the sequences, in the order of the input, are given to `aggregate_fn` (None: torch.cat, one packed tensor).
        """

    def forward(
        self,
        input_: list[Batch] | Batch,
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """`forward_batch`, by its older name."""
        return self.forward_batch(input_, output_seqlens, aggregate_fn)

    @abstractmethod
    def forward_backward_batch(
        self,
        mb_list: Iterable[Batch],
        process_output_fn: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor | None],
        forward_only: bool = False,
    ) -> None:
        """Run packed micro-batches through the model.

        `process_output_fn(logits, ctx)` is called on the ranks that have the logits (T, vocabulary), `ctx` holding the
        micro-batch; the loss that it returns, when it does, is backpropagated unless `forward_only`.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Clip and step; skipped when the gradient norm is not finite.

        Returns `update_successful`, `grad_norm` (before clipping, the same on every layout) and `lr`.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> None:
        """One step of the learning rate's schedule. The trainer calls it, `train_batch` does not."""

    def step_lr_scheduler(self) -> None:
        """`lr_scheduler_step`, by its other name."""
        self.lr_scheduler_step()

    # -------------------------------------------------------------------------------------------- state and weights

    @abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Write a Hugging Face directory (`hf`) or the training state (`dcp`), every rank its own part."""

    @abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Read either back, on any topology."""

    def train_state(self) -> Any:
        """What a training state of this engine holds (`state.entries.TrainState`), where it is not what all have: the
        model or its adapters, and the optimizer, as `states.state_of` finds them (None)."""
        return None

    def connect_engine(self, engine: Any, meta: WeightUpdateMeta) -> None:
        """Make the way to inference servers that `update_weights` goes. Every rank calls it.

        engine  what knows the servers (looked at on rank 0): an inference engine of AReaL's, with its `addresses`; URLs
                or host:port; None: those that the environment's AREAL_LLM_SERVER_ADDRS names
        meta    `xccl`: the live weights, over a process group (or shared memory, on one host); `disk`: through a
                directory, which without any server is only written

        Raises ConfigError for another way, or no server; SyncError for servers that cannot be reached.
        """
        from ..syncing import connect

        self._disconnect()
        self._sync = connect(self, engine, meta)

    def update_weights(self, meta: WeightUpdateMeta) -> Any:
        """Bring the connected servers to the current weights, as `meta.version`: all of them, or none. Every rank calls
        it; returns when they answer with the new weights (a `PushReport`).

        By disk without a server the weights are written where somebody else reads them: a Hugging Face directory at
        `meta.path`, or with `meta.use_lora` the adapter.

        Raises ConfigError when nothing is connected, SyncError when servers keep their old weights.
        """
        from ..syncing import save_for_servers

        if self._sync is not None:
            return self._sync.update(meta)
        if meta.type != "disk":
            raise ConfigError(f"type: {meta.type} needs servers, and none is connected.", hint="connect_engine first.")
        save_for_servers(self, meta)
        return None

    def _disconnect(self) -> None:
        """Let go of the servers that are connected."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def set_version(self, version: int) -> None:
        """The number of the current weights, which travels with them and with the training state."""
        self._version = version

    def get_version(self) -> int:
        return self._version

    def rollout_batch(
        self,
        data: list[dict[str, Any]],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        group_size: int = 1,
        reward_normalization: bool = False,
        drop_incomplete_group: bool = False,
    ) -> list[Batch]:
        """Generate with the connected inference engine, wait for all of it. ConfigError when none is connected."""
        raise ConfigError("No inference engine is connected: there is nothing to generate with.")

    def prepare_batch(
        self,
        dataloader: Iterable[Any],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: Callable[[dict[str, Any]], bool] | str | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
        reward_normalization: bool = False,
        drop_incomplete_group: bool = False,
    ) -> list[Batch]:
        """The next batch of the connected inference engine's, generation going on meanwhile. ConfigError as above."""
        raise ConfigError("No inference engine is connected: there is nothing to generate with.")

    # -------------------------------------------------------------------------------------------- observability

    def record_stats(self, values: Mapping[str, float], weight: float = 1.0) -> None:
        """Add this rank's numbers to what `export_stats` averages."""
        for name, value in values.items():
            total, weights = self._stats.get(name, (0.0, 0.0))
            self._stats[name] = (total + float(value) * weight, weights + weight)

    def export_stats(self) -> dict[str, float]:
        """Averages since the last call, over the data parallel ranks; every rank of the group has to call it."""
        import torch
        import torch.distributed as dist

        mine, self._stats = self._stats, {}
        if not dist.is_initialized() or self.data_parallel_world_size == 1:
            return {name: total / weight for name, (total, weight) in mine.items() if weight}
        everyone: list[dict[str, tuple[float, float]]] = [{} for _ in range(self.data_parallel_world_size)]
        dist.all_gather_object(everyone, mine, group=self.data_parallel_group)
        names = sorted({name for stats in everyone for name in stats})
        sums = {n: torch.tensor([s.get(n, (0.0, 0.0)) for s in everyone], dtype=torch.float64).sum(0) for n in names}
        return {name: (total / weight).item() for name, (total, weight) in sums.items() if weight}

    def get_device_stats(self) -> DeviceStats:
        """Memory in use on this rank's device."""
        from .devices import device_stats

        return device_stats()

    def start_memory_profile(self, max_entries: int = 100_000) -> None:
        """Begin to record allocations (CUDA only; without it, does nothing)."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=max_entries)

    def stop_memory_profile(self, snapshot_dir: str) -> None:
        """Write what was recorded to `snapshot_dir`, a file a rank, and stop recording."""
        from .devices import write_memory_snapshot

        write_memory_snapshot(snapshot_dir)

    def config_perf_tracer(self, config: Any, rank: int, role: str) -> None:  # noqa: B027 (a hook, not a duty)
        """Take the settings of `save_perf_tracer`. An engine without a tracer has none to take."""

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:  # noqa: B027
        """Write the tracer's events, where the engine has one."""
