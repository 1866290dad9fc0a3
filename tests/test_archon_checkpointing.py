"""What is kept and what is computed again changes no number: every mode, with dropout, in halves, compiled."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import models
from areal_convert.converter.errors import ConfigError
from areal_convert.engines.api.configs import ArchonEngineConfig
from areal_convert.engines.archon.attention import Attention
from areal_convert.engines.archon.checkpointing import checkpoint_blocks, compile_blocks
from areal_convert.engines.archon.model import Decoder
from test_archon_models import LENGTHS, load, packed_tokens, packing_of

Gradients = dict[str, torch.Tensor]


def prepared(family: str = "qwen2_moe", layers: int = 2, *, halves: bool = False, **archon: Any) -> Decoder:
    model, config = load(models.cached_model(family, layers=layers)), ArchonEngineConfig(**archon)
    compile_blocks(model, config)
    checkpoint_blocks(model, config, compute_again=True, splits_backward=halves)
    return model


def trained(model: Decoder) -> Gradients:
    torch.manual_seed(0)
    model(packed_tokens(), *packing_of(LENGTHS)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Counting(TorchDispatchMode):
    """How often each operation is run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[op._opname] += 1
        return op(*args, **(kwargs or {}))


def counted(model: Decoder) -> Counter[str]:
    with Counting() as mode:
        trained(model)
    return mode.seen


def check(found: Gradients, expected: Gradients, tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max() / gradient.abs().max()) <= tolerance, name


MODES: list[dict[str, Any]] = [
    {"ac_mode": "full"},
    {"ac_mode": "full", "ac_preserve_rng_state": True},
    {"ac_mode": "selective"},
    {"ac_mode": "selective", "selective_ac_option": "2"},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_every_mode_gives_the_same_bits(family: str, mode: dict[str, Any]) -> None:
    check(trained(prepared(family, **mode)), trained(prepared(family, ac_mode="none")))


def test_a_record_of_operations_changes_nothing() -> None:
    options: dict[str, Any] = {"family": "qwen3", "layers": 1}
    check(trained(prepared(**options, ac_mode="full", ac_debug=True)), trained(prepared(**options, ac_mode="none")))


def test_what_is_computed_again_is_what_the_mode_says() -> None:
    """Of a dense layer: 7 products and one attention. The last product's result is needed by nobody."""

    def extra(**archon: Any) -> tuple[int, int]:
        found = counted(prepared("qwen3", layers=4, **archon)) - counted(prepared("qwen3", layers=4, ac_mode="none"))
        return found["mm"], found["_scaled_dot_product_flash_attention_for_cpu"]

    sequences = len(LENGTHS)
    assert extra(ac_mode="full") == (4 * 6, 4 * sequences)
    assert extra(ac_mode="selective") == (4 * 3, 0)
    assert extra(selective_ac_option="2") == (2 * 6, 2 * sequences)
    assert extra(selective_ac_option="4") == (6, sequences)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_dropout_drops_the_same(mode: Any) -> None:
    """Whatever `ac_preserve_rng_state` says: else the gradients would be of another function."""

    def dropping(**archon: Any) -> Gradients:
        model = load(models.cached_model("qwen3", layers=2))
        for module in model.modules():
            if isinstance(module, Attention):
                module.dropout = 0.5
        checkpoint_blocks(model, ArchonEngineConfig(**archon), compute_again=True)
        return trained(model)

    check(dropping(ac_mode=mode), dropping(ac_mode="none"))


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_backward_passes_in_two_halves(mode: Any) -> None:
    """As zero-bubble schedules run them: inputs first, weights later; here two micro-batches, one inside the other."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    whole, model = prepared("qwen3", ac_mode="none"), prepared("qwen3", ac_mode=mode, halves=True)
    hidden = torch.randn(1, sum(LENGTHS), 64, generator=torch.Generator().manual_seed(1))
    whole.tok_embeddings = model.tok_embeddings = None
    inputs = [hidden.clone().requires_grad_() for _ in range(4)]
    for x in inputs[:2]:
        whole(x, *packing_of(LENGTHS)).backward(torch.ones(1, sum(LENGTHS), models.VOCAB))
    outputs = [model(x, *packing_of(LENGTHS)) for x in inputs[2:]]
    later: list[Callable[[], Any]] = []
    for x, out in zip(inputs[2:], outputs, strict=True):
        grads, groups = stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
        torch.testing.assert_close(grads[0], inputs[0].grad, rtol=1e-6, atol=0)
        later.append(lambda groups=groups: stage_backward_weight(model.parameters(), groups))
    for half in later:
        half()
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, whole)]
    check(*gradients, tolerance=1e-6)


def test_nothing_is_kept_or_changed_where_it_is_off() -> None:
    model = load(models.cached_model("qwen3", layers=1))
    before = [block.forward for block in model.layers.values()]
    checkpoint_blocks(model, ArchonEngineConfig(ac_mode="full"), compute_again=False)
    checkpoint_blocks(model, ArchonEngineConfig(ac_mode="none"), compute_again=True)
    assert [block.forward for block in model.layers.values()] == before


@pytest.mark.parametrize(
    ("archon", "match"),
    [
        ({"ac_mode": "memory_budget"}, "enable_compile is false"),
        ({"ac_debug": True}, "ac_mode=full records"),
        ({"selective_ac_option": "0"}, "selective_ac_option: '0', expected op"),
        ({"selective_ac_option": "ops"}, "selective_ac_option: 'ops', expected op"),
    ],
    ids=["budget", "debug", "zero", "word"],
)
def test_what_cannot_be_is_refused(archon: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        prepared(layers=1, **archon)


compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
of_dynamo = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@compiler
@of_dynamo
def test_compiled_blocks_compute_the_same() -> None:
    """Up to the order of sums: 1e-5 of the largest gradient. Both layers share the graphs of one."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    model = prepared("qwen3", enable_compile=True)
    check(trained(model), trained(prepared("qwen3", ac_mode="none")), tolerance=1e-5)
    assert counters["frames"]["ok"] == counters["frames"]["total"] == 4


@compiler
@of_dynamo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"), [("qwen2_moe", "full"), ("qwen3", "selective"), ("qwen3", "memory_budget")]
)
def test_every_mode_compiled_computes_the_same(family: str, mode: Any) -> None:
    functorch: Any = import_module("torch._functorch.config")
    torch.compiler.reset()
    before = functorch.activation_memory_budget
    try:
        model = prepared(family, ac_mode=mode, ac_memory_budget=0.3, enable_compile=True)
        check(trained(model), trained(prepared(family, ac_mode="none")), tolerance=1e-5)
        assert functorch.activation_memory_budget == (0.3 if mode == "memory_budget" else before)
    finally:
        functorch.activation_memory_budget = before
