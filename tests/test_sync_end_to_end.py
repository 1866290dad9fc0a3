"""Trainer ranks, the hub, and embedded servers, all of them real processes: after each push every server answers what
transformers computes from the new weights, and during a push nobody gets an answer that is neither version's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import sync_jobs
from areal_convert.converter import Mesh, convert
from areal_convert.converter.sync.hub import WeightSync
from engine_worker import run_ranks
from models import tensors
from sync_jobs import Pushed, other_weights
from sync_server import Answers, Oracle, RunningServer, hammer, oracle_of, start_server, wrong

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

Models = Callable[..., Path]
PROMPTS = [[5, 6, 7], [900, 3, 44], list(range(30, 50)), [11]]


class World:
    """Servers on the weights of one directory, hammered, and what transformers answers for every directory."""

    def __init__(self, base: Path, servers: list[RunningServer]) -> None:
        self.base, self.servers = base, servers
        self.urls = [server.url for server in servers]
        self.digests = servers[0].get("/ws/digests")["atoms"]
        self._oracles: dict[str, Oracle] = {}

    def oracle(self, source: str) -> Oracle:
        if source not in self._oracles:
            self._oracles[source] = oracle_of(source, PROMPTS)
        return self._oracles[source]

    def hammered(self, act: Callable[[], list[Pushed]]) -> tuple[list[Pushed], list[Answers]]:
        """Run pushes while every server is asked without a pause; a few more requests before and after."""
        with ExitStack() as stack:
            answers = [stack.enter_context(hammer(url, PROMPTS, clients=2)) for url in self.urls]
            for found in answers:
                found.wait_for(4)
            pushed = act()
            for found in answers:
                found.wait_for(4)
        return pushed, answers

    def check(self, pushed: Sequence[Pushed], answers: Sequence[Answers], senders: int) -> None:
        """What every push has to have done."""
        oracles = {0: self.oracle(str(self.base))} | {p.version: self.oracle(p.source) for p in pushed}
        assert [p.version for p in pushed] == list(range(1, len(pushed) + 1))
        for push in pushed:
            assert (push.complete, push.senders, push.answers.keys()) == (True, senders, set(self.urls))
            for url, found in push.answers.items():
                for prompt, (version, tokens, logprobs) in zip(PROMPTS, found, strict=True):
                    known = oracles[push.version](tuple(prompt))
                    assert (version, tokens) == (push.version, list(known[0])), (url, push.source)
                    assert logprobs == pytest.approx(known[1], abs=1e-4)
            assert all(pause < 1 for pause in push.pause_s)
        for found in answers:
            assert wrong(found, oracles) == [] and found.failed == []
            assert {0, pushed[-1].version} <= found.versions

    def check_there_and_back(self, pushed: Sequence[Pushed]) -> None:
        """Servers began with the base's weights: bytes are equal again when these come back, and only then."""
        for push in pushed:
            same = {name for name, digest in push.digests.items() if self.digests[name] == digest}
            assert push.digests.keys() == self.digests.keys()
            assert same == (self.digests.keys() if push.source == str(self.base) else set()), push.source
        by_source: dict[str, set[str]] = {}
        for push in pushed:
            by_source.setdefault(push.source, set()).add(push.root)
        assert all(len(roots) == 1 for roots in by_source.values())
        assert len({root for roots in by_source.values() for root in roots}) == len(by_source)
        first, second = (self.oracle(source) for source in list(by_source)[:2])
        assert all(first(tuple(p))[0] != second(tuple(p))[0] for p in PROMPTS)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:

        def make(base: Path, count: int) -> World:
            servers = [start_server(base, tmp_path / f"server-{n}.log") for n in range(count)]
            for server in servers:
                stack.callback(server.kill)
            return World(base, servers)

        yield make


def whole_digest(path: Path, name: str) -> str:
    return xxhash.xxh3_128(tensors(path)[name].contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("family", "servers"), [("qwen3", 3), ("llama_tied", 1)])
def test_two_fsdp_ranks_push_into_servers_under_load(
    family: str, servers: int, model: Models, world: Callable[..., World], tmp_path: Path
) -> None:
    a = model(family)
    b = other_weights(a, tmp_path / "b", 1)
    there, trained = world(a, servers), tmp_path / "trained"
    options: dict[str, Any] = {"transport": "gloo", "bucket": 1 << 18, "block": 1 << 14}
    sources = [str(b), str(a), str(b), str(a)]

    def act() -> list[Pushed]:
        return run_ranks(
            2, sync_jobs.fsdp, sources=sources, urls=there.urls, prompts=PROMPTS, trained=str(trained), options=options
        )[0]

    pushed, answers = there.hammered(act)
    there.check(pushed, answers, senders=2)
    there.check_there_and_back(pushed)
    assert pushed[-1].source == str(trained)
    assert pushed[0].digests["embed"] == whole_digest(b, "model.embed_tokens.weight")
    assert pushed[-1].digests["embed"] == whole_digest(trained, "model.embed_tokens.weight")


@pytest.mark.parametrize(("family", "servers"), [("qwen3_moe", 1), ("qwen2", 3)])
def test_four_megatron_ranks_push_their_shards(
    family: str, servers: int, model: Models, world: Callable[..., World], tmp_path: Path
) -> None:
    a = model(family)
    b = other_weights(a, tmp_path / "b", 2)
    mesh: dict[str, Any] = {"tp": 2, "pp": 2}
    convert(a, tmp_path / "shards", "mp_rank", Mesh(**mesh), verify=False)
    there = world(a, servers)
    options: dict[str, Any] = {"transport": "gloo", "bucket": 1 << 18, "block": 1 << 14}
    sources = [str(b), str(a), str(b)]

    def act() -> list[Pushed]:
        return run_ranks(
            4, sync_jobs.megatron, sources=sources, shards=str(tmp_path / "shards"), mesh=mesh, urls=there.urls,
            prompts=PROMPTS, options=options,
        )[0]  # fmt: skip

    pushed, answers = there.hammered(act)
    there.check(pushed, answers, senders=4)
    there.check_there_and_back(pushed)
    size = sum(t.nbytes for t in tensors(b).values())
    assert {(p.bytes, p.sent) for p in pushed} == {(size, size)}  # every byte once, and no padding


def test_a_checkpoint_of_another_format_is_pushed_and_later_only_what_changed(
    model: Models, world: Callable[..., World], tmp_path: Path
) -> None:
    """No trainer at all: the hub reads Megatron's files. Then another one takes over, with tensors in memory."""
    from safetensors.torch import save_file

    a = model("qwen3")
    b, c = other_weights(a, tmp_path / "b", 3), other_weights(a, tmp_path / "c", 3)
    convert(b, tmp_path / "megatron", "torch_dist", Mesh())
    state = tensors(b)
    there = world(a, 2)
    pushed: list[Pushed] = []

    def push(sync: WeightSync, source: Path) -> None:
        pushed.append(sync_jobs.pushed(sync.push(digests=True), str(source), there.urls, PROMPTS))

    def act() -> list[Pushed]:
        with WeightSync(tmp_path / "megatron", there.urls) as sync:
            push(sync, b)
        with WeightSync(state, there.urls, base=b, mode="delta", block=1 << 12) as sync:
            push(sync, b)
            state["model.norm.weight"] += 1
            save_file(state, c / "model.safetensors", metadata={"format": "pt"})
            push(sync, c)
        return pushed

    _, answers = there.hammered(act)
    there.check(pushed, answers, senders=1)
    assert pushed[0].digests == pushed[1].digests and pushed[0].root != pushed[1].root  # blocks of another size
    assert [p.sent for p in pushed] == [pushed[0].bytes, pushed[0].bytes, state["model.norm.weight"].nbytes]
    assert [n for n, d in pushed[2].digests.items() if d != pushed[1].digests[n]] == ["final_norm"]


def test_an_adapter_alone_is_pushed_beside_the_base_model(
    model: Models, world: Callable[..., World], tmp_path: Path
) -> None:
    """Answers under its name are those of the merged weights; the base model's stay as they were, also under load."""
    from safetensors.torch import save_file

    a = model("qwen3")
    there, merged = world(a, 2), tmp_path / "merged"
    shutil.copytree(a, merged)
    generator, whole, lora = torch.Generator().manual_seed(5), tensors(a), {}
    for name in [n for n in whole if n.endswith(("q_proj.weight", "o_proj.weight"))]:
        out, into = whole[name].shape
        halves = [torch.randn(shape, generator=generator) * 0.2 for shape in ((4, into), (out, 4))]
        for half, value in zip("AB", halves, strict=True):
            lora[f"base_model.model.{name.removesuffix('.weight')}.lora_{half}.weight"] = value
        whole[name] = whole[name] + 2 * halves[1] @ halves[0]
    save_file(whole, merged / "model.safetensors", metadata={"format": "pt"})
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "peft_type": "LORA"}

    def act() -> list[Pushed]:
        with WeightSync(a, there.urls) as sync:
            for _ in range(2):
                assert sync.push_adapter("mine", (config, lora)).complete
        return []

    _, answers = there.hammered(act)
    for found in answers:
        assert wrong(found, {0: there.oracle(str(a))}) == [] and found.failed == []
    oracle = oracle_of(merged, PROMPTS)
    for server in there.servers:
        for prompt in PROMPTS:
            found = server.generate(prompt, 6, model="mine")
            tokens, logprobs = oracle(tuple(prompt))
            assert (found["model"], found["weight_version"], found["adapter_version"]) == ("mine", 0, 2)
            assert found["choices"][0]["token_ids"] == tokens
            assert found["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert server.get("/ws/digests")["atoms"] == there.digests
