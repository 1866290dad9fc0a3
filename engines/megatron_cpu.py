"""Run Megatron-Core on the CPU, over gloo: everything that stands in the way, patched in one place.

Megatron-Core 0.16 and 0.19 take CUDA for granted: they ask torch for the current CUDA device when they allocate,
keep their random states in CUDA generators, and synchronise streams around communication. Nothing of that changes
what is computed. `enable()` replaces it for the rest of the process, `cpu_megatron()` for the length of a `with`
block. On a machine with CUDA both do nothing.

What no patch gives, so that a caller configures it instead (`CPU_CONFIG`): gloo has no coalesced point-to-point,
the all-to-all dispatcher keeps its split sizes in tensors unless they are on CUDA, fused kernels do not exist.
Context parallelism (needs Transformer Engine) and sequence parallelism (refused by the norm of the local layer spec)
run with the modules of `megatron.specs`; FP8 does not run on the CPU at all.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CPU_CONFIG", "cpu_megatron", "enable", "hush", "quiet"]

CPU = torch.device("cpu")

# Fields of TransformerConfig that have to have these values on the CPU.
CPU_CONFIG: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "batch_p2p_comm": False,  # gloo cannot coalesce sends and receives; they are ordered by rank instead
    "overlap_p2p_comm": False,
    "deallocate_pipeline_outputs": False,
    "moe_token_dispatcher_type": "allgather",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class _CudaMeansCpu(TorchFunctionMode):
    """Turn every request for a CUDA tensor (`device="cuda"`, `.to("cuda:0")`, `.cuda()`) into one for the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Optimizers and gradient clipping compare this string with 'torch.cuda.FloatTensor'.
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return func(*(CPU if _is_cuda(arg) else arg for arg in args), **kwargs)


class _Stream:
    """A stream or event of a device that runs everything in order: all waiting is over before it begins."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def wait(self, _stream: object = None) -> None: ...

    def record(self, _stream: object = None) -> None: ...

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: object) -> float:
        return 0.0


_STREAM = _Stream()


def _nothing(*_args: Any, **_kwargs: Any) -> None: ...


def _get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds the devices through this again


def _torch_patches() -> dict[str, Any]:
    """What is replaced in `torch.cuda`."""
    return {
        # Passed on as `device=` by nearly every allocation in Megatron-Core.
        "current_device": lambda: CPU,
        # The one generator of the CPU takes the place of the device's.
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _manual_seed,
        # There is one stream, and it is always done.
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda _stream: nullcontext(),
        "current_stream": lambda *_args: _STREAM,
        "default_stream": lambda *_args: _STREAM,
        "synchronize": _nothing,
    }


def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """torch's AdamW has a `step` beside the tensors, and main parameters that are leaves: the original (0.16.1, 0.19.2)
    looks for the one in what was saved, and copies into the other under autograd."""
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    with torch.no_grad():
        for name, value in {"param": main, **self.optimizer.state[main]}.items():
            if name in tensors:
                value.copy_(tensors[name])


@cache
def _megatron_patches() -> list[tuple[Any, str, Any]]:
    """What is replaced in Megatron-Core, as (module or class, attribute, stand-in)."""
    with quiet():
        return _find_patches()


def _find_patches() -> list[tuple[Any, str, Any]]:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    return [
        # They reach into torch's C layer, which a build without CUDA lacks.
        (random, "_get_cuda_rng_state", _get_rng_state),
        (random, "_set_cuda_rng_state", _set_rng_state),
        # 0.16.1 binds this name only where Transformer Engine is installed, and reads it everywhere: a NameError in
        # the router. None is what it then tests for.
        (moe_utils, "te_general_gemm", None),
        # It believes to have Transformer Engine, because importing Megatron's wrappers of it succeeds either way.
        (mla, "HAVE_TE", False),
        (optimizer, "_set_main_param_and_optimizer_states", _set_main_param_and_optimizer_states),
    ]


@contextmanager
def _replaced(module: Any, name: str, stand_in: Any) -> Iterator[None]:
    """`module.name` is `stand_in` inside the block; a name that was not there is removed again."""
    missing = object()
    original = getattr(module, name, missing)
    setattr(module, name, stand_in)
    try:
        yield
    finally:
        if original is missing:
            delattr(module, name)
        else:
            setattr(module, name, original)


@contextmanager
def quiet() -> Iterator[None]:
    """Import Megatron-Core inside: without Transformer Engine it warns of every fallback, on every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def hush() -> None:
    """Pass over what torch warns of in Megatron-Core's own code, where a user can change nothing."""
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    for old in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        warnings.filterwarnings("ignore", rf"`torch\.distributed\.{old}` is deprecated", FutureWarning)


_depth = 0


@contextmanager
def cpu_megatron() -> Iterator[None]:
    """Inside the block Megatron-Core runs on the CPU. Does nothing where CUDA is available, or inside another block."""
    global _depth
    if torch.cuda.is_available() or _depth:
        yield
        return
    patches = _megatron_patches()
    with ExitStack() as stack:
        _depth += 1
        stack.callback(_leave)
        for name, stand_in in _torch_patches().items():
            stack.enter_context(_replaced(torch.cuda, name, stand_in))
        for module, name, stand_in in patches:
            stack.enter_context(_replaced(module, name, stand_in))
        # Megatron-Core compiles many elementwise functions, which on the CPU means a C++ compiler and ten seconds each.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_CudaMeansCpu())
        yield


def _leave() -> None:
    global _depth
    _depth -= 1


_enabled = ExitStack()
_is_enabled = False


def enable() -> None:
    """Like `cpu_megatron()`, for the rest of the process. Calling it again changes nothing."""
    global _is_enabled
    if not _is_enabled:
        _enabled.enter_context(cpu_megatron())
        _is_enabled = True
