"""Experts: rows sorted and put back, the grouped product, and balance by the router's bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_convert.engines.archon import moe as module
from areal_convert.engines.archon.args import MoeArgs
from areal_convert.engines.archon.moe import Experts, MoE, Permute, Router, _Spread, update_expert_biases


def made(args: MoeArgs, hidden: int = 8, seed: int = 0) -> MoE:
    layer = MoE(args, hidden)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
    return layer


def by_hand(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    weights, chosen = layer.router(x[0], layer.expert_bias)
    e = layer.experts
    out = torch.zeros_like(x[0])
    for token in range(x.shape[1]):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            y = x[0, token]
            inner = torch.nn.functional.silu(e.w1[expert] @ y) * (e.w3[expert] @ y)
            out[token] += weight * (e.w2[expert] @ inner)
    return out[None]


@given(st.integers(1, 17), st.integers(1, 6), st.data())
@settings(max_examples=25, deadline=None)
def test_a_layer_is_what_its_experts_say_by_hand(tokens: int, experts: int, data: st.DataObject) -> None:
    """Also where experts get nothing and where there are fewer tokens than experts."""
    args = MoeArgs(
        experts=experts, top_k=data.draw(st.integers(1, experts)), width=5, normalize=data.draw(st.booleans())
    )
    layer = made(args)
    x = torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(tokens))
    torch.testing.assert_close(layer(x), by_hand(layer, x), atol=1e-6, rtol=1e-5)


def test_gradients_go_back_to_each_row() -> None:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    inverse = order.argsort()
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: _Spread.apply(t, order, inverse, 2), (x,))
    rows = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: Permute.apply(t, inverse, order), (rows,))
    assert torch.equal(Permute.apply(_Spread.apply(x, order, inverse, 2), inverse, order), x.repeat_interleave(2, 0))


def test_the_grouped_product_is_the_loop() -> None:
    """bf16, experts without rows among them; forward and backward."""
    torch.manual_seed(0)
    experts = Experts(4, 16, 24).bfloat16()
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_().div_(4)
    rows, counts = torch.randn(40, 16).bfloat16().requires_grad_(), torch.tensor([13, 0, 20, 7])
    pull = torch.randn(40, 16).bfloat16()
    results = []
    for run in (module._grouped, module.one_by_one):
        experts.zero_grad()
        rows.grad = None
        out = run(rows, counts, experts.w1, experts.w3, experts.w2)
        out.backward(pull)
        results.append([out.detach(), rows.grad, *(p.grad for p in experts.parameters())])
    for grouped, looped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped, atol=2e-2, rtol=2e-2)
    assert experts.w1.grad is not None
    assert not experts.w1.grad[1].any()


def test_bf16_layers_take_the_grouped_product_and_fp32_ones_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def watched(name: str) -> Any:
        run = getattr(module, name)
        return lambda *given: (taken.append(name), run(*given))[1]

    for name in ("_grouped", "one_by_one"):
        monkeypatch.setattr(module, name, watched(name))
    layer = made(MoeArgs(experts=2, top_k=1, width=8))
    layer(torch.randn(1, 5, 8))
    layer.bfloat16()(torch.randn(1, 5, 8).bfloat16())
    assert taken == ["one_by_one", "_grouped"]


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    router = Router(MoeArgs(experts=4, top_k=2, width=1, score="sigmoid", normalize=False, bias=True), 4)
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(4))
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    weights, chosen = router(x, torch.zeros(4))
    assert sorted(chosen[0].tolist()) == [0, 1]
    weights, chosen = router(x, torch.tensor([0.0, -9.0, 0.0, 9.0]))
    assert sorted(chosen[0].tolist()) == [0, 3]
    torch.testing.assert_close(sorted(weights[0].tolist()), sorted(x[0, [0, 3]].sigmoid().tolist()))


def test_routers_work_in_fp32_or_as_the_activations_do() -> None:
    args = MoeArgs(experts=6, top_k=6, width=1)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    precise, plain = Router(args, 16).bfloat16(), Router(args, 16, None).bfloat16()
    plain.load_state_dict(precise.state_dict())
    w = precise.gate.weight
    for router, logits in ((precise, x.float() @ w.float().T), (plain, (x @ w.T).float())):
        weights, chosen = router(x, None)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights, logits.softmax(-1).gather(1, chosen), atol=1e-6, rtol=1e-6)
    assert not torch.equal(precise(x, None)[0], plain(x, None)[0])


def test_experts_are_chosen_within_the_best_groups() -> None:
    """Group 1 has the single best expert, group 0 the two best together."""
    args = MoeArgs(experts=4, top_k=2, width=1, score="sigmoid", groups=2, top_groups=1, bias=True)
    router = Router(args, 4)
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(4))
    _, chosen = router(torch.tensor([[1.0, 1.1, -3.0, 2.0]]), torch.zeros(4))
    assert sorted(chosen[0].tolist()) == [0, 1]


def test_updates_of_the_bias_balance_the_experts() -> None:
    args = MoeArgs(experts=4, top_k=1, width=4, score="sigmoid", bias=True)
    layer = made(args)
    x = torch.randn(1, 400, 8, generator=torch.Generator().manual_seed(1)) + 0.5
    spread: list[float] = []
    for _ in range(120):
        layer(x)
        assert int(layer.seen.sum()) == 400
        spread.append(float(layer.seen.max() - layer.seen.min()))
        update_expert_biases([layer], 0.005)
        assert not layer.seen.any()
    assert spread[-1] < spread[0] / 3
    assert layer.expert_bias is not None
    assert not layer.expert_bias.requires_grad


def test_only_balanced_layers_in_training_are_counted_and_moved() -> None:
    balanced, plain = made(MoeArgs(experts=4, top_k=1, width=4, bias=True)), made(MoeArgs(experts=4, top_k=1, width=4))
    x = torch.randn(1, 8, 8)
    balanced.eval()(x)
    plain(x)
    assert not balanced.seen.any()
    assert not plain.seen.any()
    update_expert_biases([plain], 0.1)
    assert plain.expert_bias is None
    assert "expert_bias" in balanced.state_dict()
    assert "seen" not in balanced.state_dict()
