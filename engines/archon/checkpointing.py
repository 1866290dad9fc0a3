"""What of a block's activations is kept for the backward pass, and what is computed again; and compiled blocks.

`gradient_checkpointing` turns it on, `archon.ac_mode` says how:

| mode                      | kept                                                                                 |
|---------------------------|--------------------------------------------------------------------------------------|
| `none`                    | everything                                                                           |
| `full`                    | what goes into a block                                                               |
| `selective`, option `op`  | that, what attention gave, and every second matrix product                           |
| `selective`, option n     | of every n-th block what goes into it, of the others everything                      |
| `memory_budget`           | of every compiled graph what the compiler chooses, a share of `ac_memory_budget`     |

Inside compiled graphs single products cannot be kept: there `op` keeps what attention gave, which is outside of them.
Where a schedule runs backward passes in two halves, each half computes again what it needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ...converter.errors import ConfigError
from ..api.backends import ArchonEngineConfig
from .attention import Attention
from .model import Decoder

_PRODUCTS = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2")
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def compile_blocks(model: Decoder, config: ArchonEngineConfig) -> None:
    """torch.compile for every block, below FSDP's hooks, and without a name in the state dict. All blocks share their
    graphs; attention over packed sequences and the dispatch to experts are left out of them."""
    if not config.enable_compile:
        return
    for block in model.layers.values():
        block.forward = torch.compile(block.forward)


def checkpoint_blocks(
    model: Decoder, config: ArchonEngineConfig, *, compute_again: bool, splits_backward: bool = False
) -> None:
    """Change the blocks' forwards in place, around what `compile_blocks` made of them.

    compute_again    `gradient_checkpointing`: False leaves everything as it is
    splits_backward  backward passes come in two halves

    Random numbers are the same again where `ac_preserve_rng_state` says so, and wherever attention drops: with another
    mask the gradients would be those of another function.

    Raises ConfigError for an option that is none, for a budget without a compiler, and for `ac_debug` where torch has
    nothing to record.
    """
    if not compute_again or config.ac_mode == "none":
        return
    if config.ac_mode == "memory_budget":
        _set_budget(config)
        return
    every, by_op = _selection(config)
    if by_op and config.ac_debug:
        what = "ac_debug: torch records nothing where single operations are chosen (ac_mode=selective, op)."
        raise ConfigError(what, hint="archon.ac_mode=full records.")
    random = config.ac_preserve_rng_state or _drops(model)
    options: dict[str, Any] = {"preserve_rng_state": random, "debug": config.ac_debug}
    if by_op:
        options["context_fn"] = partial(selected_operations, splits_backward)
    for number, block in enumerate(model.layers.values()):
        if number % every == 0:
            block.forward = _again(block.forward, options)


def _selection(config: ArchonEngineConfig) -> tuple[int, bool]:
    """Every how many blocks are computed again, and whether by operation."""
    option = config.selective_ac_option
    if config.ac_mode == "full":
        return 1, False
    if option == "op":
        return 1, True
    if not option.isdecimal() or int(option) < 1:
        raise ConfigError(f"selective_ac_option: {option!r}, expected op, or a number of blocks of at least 1.")
    return int(option), False


def _drops(model: nn.Module) -> bool:
    return any(isinstance(module, Attention) and module.dropout > 0 for module in model.modules())


def _again(inner: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args)
        return checkpoint(inner, *args, use_reentrant=False, **options)

    return forward


# ------------------------------------------------------------------------------------------------ single operations


def selected_operations(keep: bool = False) -> tuple[_Keep, _Give]:
    """The contexts of one checkpointed block, forward and again: attention and every second product, the first one
    included, are kept. `keep`: the block is computed again more than once."""
    kept: dict[Any, list[Any]] = defaultdict(list)
    return _Keep(kept), _Give(kept, keep)


class _Watch(TorchDispatchMode):
    """Sees every operation below autograd. torch's own modes (`create_selective_checkpoint_contexts`) want the same
    ones both times, and FSDP's hooks inside a block, those of experts, gather only where they have to."""

    def __init__(self, kept: dict[Any, list[Any]]) -> None:
        super().__init__()
        self.kept, self.counts = kept, Counter[Any]()
        self.products, self.attention = _overloads(_PRODUCTS), _overloads(_ATTENTION)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch: compile what is below, rather than leave it because of this mode."""
        return True

    def chosen(self, op: Any) -> bool:
        """Whether this call's result is one that is kept."""
        if op in self.products:
            self.counts["products"] += 1
            return self.counts["products"] % 2 == 1
        return op in self.attention


class _Keep(_Watch):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if self.chosen(op):
            self.kept[op].append(_alias(result))  # the tensor itself is about to get a graph, and would keep it
        return result


class _Give(_Watch):
    def __init__(self, kept: dict[Any, list[Any]], keep: bool) -> None:
        super().__init__(kept)
        self.keep = keep

    def __enter__(self) -> Any:
        self.counts.clear()
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.chosen(op):
            return op(*args, **(kwargs or {}))
        number = self.counts[op]
        self.counts[op] += 1
        found = self.kept[op][number]
        if not self.keep:
            self.kept[op][number] = None
        return _alias(found)


def _alias(result: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result)


@cache
def _overloads(names: tuple[str, ...]) -> frozenset[Any]:
    """Those of the operations that this torch has, and flash attention's own."""
    found = {getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)}
    if names is _ATTENTION:
        for space, name in (("torch_attn", "_varlen_attn"), ("flash_attn", "_flash_attn_varlen_forward")):
            packets = getattr(torch.ops, space)
            found |= {getattr(packets, name).default} if hasattr(packets, name) else set()
    return frozenset(found)


# ------------------------------------------------------------------------------------------------ the compiler's choice


def _set_budget(config: ArchonEngineConfig) -> None:
    """torch has one budget for all graphs of the process, which are compiled as they are first run."""
    if not config.enable_compile:
        what = "ac_mode=memory_budget is the compiler's choice, and archon.enable_compile is false."
        raise ConfigError(what, hint="Set archon.enable_compile, or archon.ac_mode=selective.")
    functorch: Any = import_module("torch._functorch.config")
    functorch.activation_memory_budget = config.ac_memory_budget
    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):
        functorch.unsafe_treat_script_objects_as_zero_size = True  # those in these graphs are process groups
