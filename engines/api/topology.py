"""Which sizes a run has: those of the backend's allocation, of `parallel_strategy` and of Megatron's fields, joined.

A size may be said in any of the three places, in several when they agree. What nobody says is 1, except for data
parallelism, which takes the ranks that are left when neither an allocation nor a `parallel_strategy` is given.
"""

from __future__ import annotations

import math
from dataclasses import fields

from ...converter.errors import ConfigError, Problems
from .allocation import INFERENCE, TRAINING, ModelAllocation
from .configs import TrainEngineConfig
from .fields import nearest
from .parallel import ParallelStrategy

__all__ = ["backend_of", "least_ranks", "resolve"]

_MEGATRON = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size",
    "expert_tensor_parallel_size",
)  # fmt: skip
_DP = "data_parallel_size"


def backend_of(config: TrainEngineConfig) -> str:
    """The backend that `config.backend` names, "" when it names none. Raises ConfigError for one that cannot train."""
    if not config.backend or config.backend in TRAINING:
        return config.backend
    problems = Problems()
    try:
        name = ModelAllocation.from_str(config.backend).backend
    except ConfigError as error:
        found = nearest(config.backend, TRAINING) if ":" not in config.backend else ""
        for problem in error.problems:
            problems.add("backend", f"{problem.about}: {problem.what}", found or problem.hint)
        name = ""
    if name in INFERENCE:
        problems.add("backend", f"{name} serves models, it does not train them", f"known: {', '.join(TRAINING)}")
    problems.raise_as(ConfigError, "The backend cannot be read.")
    return name


def resolve(
    config: TrainEngineConfig, backend: str, world_size: int, parallel_strategy: ParallelStrategy | None = None
) -> ParallelStrategy:
    """The sizes of this run. `parallel_strategy` takes the place of `config.parallel_strategy`.

    Raises ConfigError when two places say different sizes, the backend is not the one that the configuration names, or
    the sizes do not make up `world_size`.
    """
    problems = Problems()
    sizes = joined_sizes(config, backend, world_size, parallel_strategy, problems)
    problems.raise_as(ConfigError, "The parallel sizes contradict each other.")
    strategy = ParallelStrategy(**sizes)
    check_world(strategy, world_size, problems)
    problems.raise_as(ConfigError, "The parallel sizes do not fit the number of ranks.")
    return strategy


def least_ranks(config: TrainEngineConfig, backend: str) -> int:
    """Ranks that the sizes in the configuration make up, data parallelism being 1 where nobody says it.

    Raises ConfigError when two places say different sizes.
    """
    problems = Problems()
    sizes = joined_sizes(config, backend, 1, None, problems)
    problems.raise_as(ConfigError, "The parallel sizes contradict each other.")
    return ParallelStrategy(**sizes).world_size


def joined_sizes(
    config: TrainEngineConfig,
    backend: str,
    world_size: int,
    given: ParallelStrategy | None,
    problems: Problems,
) -> dict[str, int]:
    """Every size by its field's name. Contradictions are reported; the first that was said then counts."""
    said: dict[str, tuple[int, str]] = {}

    def say(name: str, size: int, where: str) -> None:
        before, place = said.setdefault(name, (size, where))
        if before != size:
            problems.add(where, f"{name} is {size}, and {before} in {place}", "say it once")

    given = given or config.parallel_strategy
    stated = _strategies(config, backend, given, problems)
    for where, strategy in stated:
        for field in fields(strategy):
            size = getattr(strategy, field.name)
            if size > 1 or field.name == _DP:
                say(field.name, size, where)
    for name in _MEGATRON:
        if (size := getattr(config.megatron, name)) is not None:
            if size == 1 and name not in said:
                continue
            say(name, size, f"megatron.{name}")
    sizes = {name: size for name, (size, _) in said.items()}
    if _DP not in sizes:
        others = math.prod(sizes.get(name, 1) for name in _MEGATRON[:3])
        sizes[_DP] = max(world_size // others, 1)
    return sizes


def _strategies(
    config: TrainEngineConfig, backend: str, given: ParallelStrategy | None, problems: Problems
) -> list[tuple[str, ParallelStrategy]]:
    """Whole sets of sizes, with the place that says them."""
    found = []
    try:
        named = backend_of(config)
    except ConfigError as error:
        problems.found += error.problems
        named = ""
    if named and named != backend:
        hint = f"take the {named} engine, or backend={backend}"
        problems.add("backend", f"{config.backend!r} was configured, and this is the {backend} engine", hint)
    elif named and ":" in config.backend:
        found.append((f"backend={config.backend}", ModelAllocation.from_str(config.backend).parallel))
    if given is not None:
        found.append(("parallel_strategy", given))
    return found


def check_world(strategy: ParallelStrategy, world_size: int, problems: Problems) -> None:
    """Report a strategy that makes up another number of ranks than there are."""
    if strategy.world_size == world_size:
        return
    parts = f"dp{strategy.dp_size}·cp{strategy.cp_size}·tp{strategy.tp_size}·pp{strategy.pp_size}"
    others = strategy.cp_size * strategy.tp_size * strategy.pp_size
    fits = world_size % others == 0
    hint = f"data_parallel_size={world_size // others} would fit" if fits else f"start {strategy.world_size} ranks"
    problems.add("world_size", f"{parts} = {strategy.world_size} ranks were configured, {world_size} are there", hint)
