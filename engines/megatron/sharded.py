"""What Megatron-Core saves of a model and its optimizer, and how an optimizer on other ranks takes it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...converter.errors import ConfigError
from ..state.entries import TrainState

OPTIMIZER, ADAPTERS = "optimizer", "adapters"


@dataclass
class MegatronState(TrainState):
    """What of the engine is saved. `parts` is empty: Megatron-Core names the tensors of `chunks` itself."""

    chunks: list[Any] = field(default_factory=list)
    optimizer: Any = None
    distributed: bool = False
    kind: str = "adam"
    lora: Any = None


def state_of(engine: Any) -> MegatronState:
    """Raises ConfigError when there is no base checkpoint to take the config from."""
    if engine.checkpoint is None:
        raise ConfigError("A model that was not loaded from a checkpoint has no base for its training states.")
    engine.gather_parameters()
    config, sizes = engine.config, engine.strategy
    names = ("dp_size", "cp_size", "tp_size", "pp_size", "ep_size", "etp_size")
    tracker = rng_tracker().get_states()
    return MegatronState(
        parts=[],
        base=engine.checkpoint,
        topology={**{name: getattr(sizes, name) for name in names}, "vpp_size": engine.vpp},
        rng={name: value.cpu() for name, value in tracker.items()},
        stream=engine.data_parallel_rank,
        group=engine.cpu_group,
        chunks=list(engine.model),
        optimizer=engine.optimizer,
        distributed=config.megatron.ddp.use_distributed_optimizer,
        kind=config.optimizer.type if config.optimizer is not None else "",
        lora=engine.lora,
    )


def content_metadata(state: MegatronState) -> dict[str, Any]:
    """What Megatron-LM has there: how keys are made, so that whoever loads asks for the same ones."""
    found = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return found | ({"distrib_optim_sharding_type": "fully_reshardable"} if state.distributed else {})


def sharded_state(state: MegatronState, *, loading: bool, optimizer: bool) -> dict[str, Any]:
    """Collective. Chunks and optimizer as Megatron-Core shards them."""
    replicas = replicas_group()
    metadata = {**content_metadata(state), "dp_cp_group": replicas}
    if state.lora is not None:  # then nothing else is trained: the base model stays where it is
        found: dict[str, Any] = {ADAPTERS: state.lora.sharded_state(replicas.rank())}
    else:
        found = {
            key: chunk.sharded_state_dict(metadata=metadata)
            for key, chunk in zip(chunk_keys(len(state.chunks)), state.chunks, strict=True)
        }
    if optimizer and state.optimizer is not None:
        _make_room(state.optimizer)
        # Of several chunks one mapping is made: only the tensors in it are looked at.
        model = next(iter(found.values())) if len(found) == 1 else dict(found)
        found[OPTIMIZER] = state.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return found


def chunk_keys(number: int) -> list[str]:
    """What Megatron-LM calls the chunks of a rank."""
    return ["model"] if number == 1 else [f"model{n}" for n in range(number)]


def optimizer_of(state: MegatronState) -> dict[str, Any]:
    """What of an optimizer has to be the same when it is loaded."""
    return {"type": state.kind, "distributed": state.distributed, "adapters": state.lora is not None}


def _own_torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """torch's optimizers inside; Transformer Engine's keep their states in another form, and need no help."""
    for part in optimizer.chained_optimizers:
        inner: Any = getattr(part, "optimizer", None)
        if not part.is_stub_optimizer and type(inner).__module__.startswith("torch.optim"):
            yield inner


def _make_room(optimizer: Any) -> None:
    """States before the first step: Megatron-Core takes it for granted that there are some."""
    for inner in _own_torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                if inner.state.get(parameter):
                    continue
                names = ("momentum_buffer",) if isinstance(inner, torch.optim.SGD) else ("exp_avg", "exp_avg_sq")
                inner.state[parameter] = {name: torch.zeros_like(parameter) for name in names}
                if "exp_avg" in names:
                    inner.state[parameter]["step"] = torch.tensor(0.0)


def counts(optimizer: Any) -> dict[str, Any]:
    """What is no tensor and not of the configuration: steps so far, and the loss scale of fp16."""
    found: dict[str, Any] = {"step": 0, "scaler": None}
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        inner = part.optimizer
        steps = [values["step"] for values in inner.state.values() if "step" in values]
        steps += [group["step"] for group in inner.param_groups if "step" in group]
        found["step"] = max([found["step"], *(int(step) for step in steps)])
        if getattr(part, "grad_scaler", None) is not None:
            found["scaler"] = {name: float(value) for name, value in part.grad_scaler.state_dict().items()}
    return found


def counted(state: Any, saved: Mapping[str, Any]) -> Any:
    """An optimizer's state dict (or several) with the saved `counts`, wherever Megatron-Core keeps them."""
    if not isinstance(state, dict):
        return [counted(one, saved) for one in state] if isinstance(state, list) else state
    found = {}
    for name, value in state.items():
        if name == "grad_scaler" and saved["scaler"] is not None:
            found[name] = {
                key: torch.full_like(old, saved["scaler"][key])
                if isinstance(old, torch.Tensor)
                else type(old)(saved["scaler"][key])
                for key, old in value.items()
            }
        elif name == "param_groups":
            found[name] = [group | ({"step": saved["step"]} if "step" in group else {}) for group in value]
        else:
            found[name] = counted(value, saved)
    if "state" in found and "param_groups" in found:
        found["state"] = {**found["state"], "common_step": torch.tensor(float(saved["step"]))}
    return found


def copied(state: Any) -> Any:
    """The dicts and lists of a state dict; loading changes them."""
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def filled(frame: Any, loaded: Any) -> Any:
    """What was asked for with what was loaded in its place: of it, loading returns tensors only."""
    if isinstance(frame, dict):
        return {name: filled(value, loaded[name]) if name in loaded else value for name, value in frame.items()}
    if isinstance(frame, list):
        return [filled(value, got) for value, got in zip(frame, loaded, strict=True)]
    return loaded


def part_steps(optimizer: Any) -> None:
    """Megatron-Core gives one and the same tensor to all parameters, each of which would count a step."""
    for inner in _own_torch_optimizers(optimizer):
        for values in inner.state.values():
            if isinstance(values.get("step"), torch.Tensor):
                values["step"] = values["step"].clone()


def rng_tracker() -> Any:
    """Megatron-Core's random states: of what differs by tensor parallel rank."""
    from megatron.core import tensor_parallel

    return tensor_parallel.get_cuda_rng_tracker()


def replicas_group() -> Any:
    """The ranks that hold the same part of the dense model."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)
