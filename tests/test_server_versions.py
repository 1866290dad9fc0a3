"""New weights while requests run: each policy, demands of versions, pushes that fail, adapters; in a real server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from areal_convert.converter.sync.homes import describe_server
from areal_convert.converter.sync.server.batch import Copy, Model
from areal_convert.converter.sync.server.generation import Engine
from areal_convert.converter.sync.server.metrics import Metrics
from areal_convert.converter.sync.server.sequences import Demand, Event, Sampling, Sequence_
from areal_convert.converter.sync.wire import HEADER_BYTES
from sync_parts import HUB, Values, config_of, manifest_of, module_of
from sync_server import RunningServer, generate, greedy, hammer, logprobs_of, running_server, tokens_of, wrong

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]

LONG = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def where() -> Path:
    import models

    return models.cached_model("qwen3", side_files=True)


@pytest.fixture(scope="module")
def modules(where: Path) -> dict[str, Any]:
    """The weights that are pushed, by name; `a` are those that the server starts with."""
    return {"a": module_of(where), "b": module_of(where, scale=1.5)}


@pytest.fixture(scope="module")
def server(where: Path) -> Iterator[RunningServer]:
    with running_server(where, names=("policy",)) as running:
        yield running


class Pusher:
    """A hub by hand, over HTTP alone: every push under the next epoch and version."""

    def __init__(self, server: RunningServer, where: Path) -> None:
        self.server, self.config = server, config_of(where)
        status = server.get("/ws/status")
        self.epoch, self.version, self.root = status["epoch"], status["version"], ""

    def call(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.server.post(f"/ws/{path}", body)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer.json()

    def stage(self, module: Any, *, damaged: bool = False, status: int = 200) -> Any:
        self.epoch, self.version = self.epoch + 1, self.version + 1
        layout = describe_server(module, self.config)
        sizes: dict[str, Any] = {"block": 1 << 16, "bucket": 1 << 20}
        manifest = manifest_of(layout, version=self.version, epoch=self.epoch, **sizes)
        values = Values(module, self.config, manifest)
        self.root = values.root
        self.call("lease", {"hub": HUB, "ttl": 30})
        self.call("join", {"hub": HUB, "run": "run", "epoch": self.epoch, "transport": {"kind": "inline"}})
        self.call("prepare", manifest.to_json())
        for header, payload in values.buckets():
            raw = bytearray(header.pack() + payload)
            if damaged:
                raw[HEADER_BYTES + 5000] ^= 1
            headers = {"Content-Type": "application/octet-stream"}
            url = f"{self.server.url}/ws/bucket"
            answer = requests.post(url, data=bytes(raw), headers=headers, timeout=20)
            assert damaged or answer.status_code == 200, answer.text
        return self.call("seal", self._names(), status)

    def commit(self, policy: str | None = None, status: int = 200) -> Any:
        return self.call("commit", self._names() | ({"in_flight": policy} if policy else {}), status)

    def _names(self) -> dict[str, Any]:
        return {"hub": HUB, "epoch": self.epoch, "version": self.version, "root": self.root}


@pytest.fixture
def pusher(server: RunningServer, where: Path, modules: dict[str, Any]) -> Pusher:
    """The server has the weights `a` when a test begins."""
    pusher = Pusher(server, where)
    if server.version != 0:
        pusher.stage(modules["a"])
        pusher.commit("abort")
    return pusher


class Stream:
    """A streamed request, read in a thread; `begun` once the first tokens are there."""

    def __init__(self, url: str, prompt: list[int] = PROMPT, **more: Any) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.error: dict[str, Any] | None = None
        self._enough = threading.Event()
        body = {**LONG, "prompt": prompt, "stream": True, **more}
        self._thread = threading.Thread(target=self._read, args=(f"{url}/v1/completions", body), daemon=True)
        self._thread.start()
        assert self._enough.wait(20)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with requests.post(url, json=body, stream=True, timeout=60) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix(b"data: ")
                if not data or data == b"[DONE]":
                    continue
                found = json.loads(data)
                if "error" in found:
                    self.error = found["error"]
                    continue
                choice = found["choices"][0]
                self.tokens += choice["token_ids"]
                self.logprobs += choice["logprobs"]["token_logprobs"]
                self.versions += [s["version"] for s in choice["weight_versions"] for _ in range(s["start"], s["end"])]
                if len(self.tokens) >= 3:
                    self._enough.set()
        self._enough.set()

    def end(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def continued(module: Any, tokens: list[int], start: int) -> tuple[list[int], list[float]]:
    """What the weights choose, position by position, after the tokens that really stand there."""
    with torch.inference_mode():
        scores = module(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return scores[start - 1 : -1].argmax(-1).tolist(), [
        float(scores[n - 1, t]) for n, t in enumerate(tokens[start:], start)
    ]


# ------------------------------------------------------------------------------------------------ policies


def test_finish_ends_on_the_old_weights_while_new_requests_get_the_new_ones(
    server: RunningServer, pusher: Pusher, modules: dict[str, Any]
) -> None:
    pusher.stage(modules["b"])
    old = pusher.version - 1
    running = Stream(server.url)
    receipt = pusher.commit("finish")
    assert receipt["in_flight"] == {"policy": "finish", "finishing": 1} and receipt["pause_s"] < 0.5
    fresh = server.generate(PROMPT, 6)
    assert len(running.tokens) < 200, "the old request should still run: it shows nothing otherwise"
    assert server.get("/stats")["old_copies"] == 1
    running.end()
    assert (fresh["weight_version"], tokens_of(fresh)) == (pusher.version, greedy(modules["b"], PROMPT, 6)[0])
    assert set(running.versions) == {old} and running.tokens == greedy(modules["a"], PROMPT, 200)[0]
    assert running.tokens[:6] != tokens_of(fresh)
    assert server.get("/stats")["old_copies"] == 0 and server.get("/ws/status")["readers"]["previous"] == 0


def test_the_memory_of_the_old_weights_is_written_only_when_nobody_needs_it(
    server: RunningServer, pusher: Pusher, modules: dict[str, Any]
) -> None:
    pusher.stage(modules["b"])
    running = Stream(server.url)
    pusher.commit("finish")
    pusher.stage(modules["a"])  # prepare waits for the old copy
    assert len(running.tokens) == 200
    running.end()
    assert running.tokens == greedy(modules["a"], PROMPT, 200)[0]
    pusher.commit()


def test_wait_drains_first_and_keeps_new_requests_out(
    server: RunningServer, pusher: Pusher, modules: dict[str, Any]
) -> None:
    pusher.stage(modules["b"])
    old, found = pusher.version - 1, []
    running = Stream(server.url)
    thread = threading.Thread(target=lambda: found.append(pusher.commit("wait")))
    thread.start()
    time.sleep(0.03)
    queued = server.generate(PROMPT, 6)  # comes while the commit waits
    running.end()
    thread.join()
    assert found[0]["in_flight"] == {"policy": "wait", "waited": 1} and found[0]["pause_s"] > 0.03
    assert set(running.versions) == {old} and running.tokens == greedy(modules["a"], PROMPT, 200)[0]
    assert (queued["weight_version"], tokens_of(queued)) == (pusher.version, greedy(modules["b"], PROMPT, 6)[0])


def test_abort_refuses_what_runs_and_says_that_it_may_be_sent_again(
    server: RunningServer, pusher: Pusher, modules: dict[str, Any]
) -> None:
    pusher.stage(modules["b"])
    found: list[requests.Response] = []
    body = {**LONG, "prompt": [9, 9]}
    thread = threading.Thread(target=lambda: found.append(server.post("/v1/completions", body)))
    thread.start()
    running = Stream(server.url)
    end = time.monotonic() + 5
    while server.get("/stats")["running"] < 2 and time.monotonic() < end:
        time.sleep(0.002)
    assert pusher.commit("abort")["in_flight"] == {"policy": "abort", "aborted": 2}
    running.end()
    thread.join()
    assert running.error is not None and (running.error["code"], running.error["retryable"]) == ("aborted", True)
    assert found[0].status_code == 503 and found[0].json()["error"]["retryable"]
    assert server.generate(PROMPT, 2)["weight_version"] == pusher.version


def test_keep_goes_on_with_the_new_weights_and_says_where(
    server: RunningServer, pusher: Pusher, modules: dict[str, Any]
) -> None:
    pusher.stage(modules["b"])
    running, picky = Stream(server.url), Stream(server.url, [11, 12], weight_version=pusher.version - 1)
    assert pusher.commit("keep")["in_flight"] == {"policy": "keep", "recomputed": 1, "refused": 1}
    running.end()
    picky.end()
    assert picky.error is not None and picky.error["code"] == "weight_version"
    assert len(running.tokens) == 200 and running.versions == sorted(running.versions)
    change = running.versions.index(pusher.version)
    assert 3 <= change < 200 and set(running.versions) == {pusher.version - 1, pusher.version}
    whole, start = [*PROMPT, *running.tokens], len(PROMPT)
    tokens, logprobs = continued(modules["a"], whole[: start + change], start)
    assert running.tokens[:change] == tokens and running.logprobs[:change] == pytest.approx(logprobs, abs=1e-4)
    tokens, logprobs = continued(modules["b"], whole, start + change)
    assert running.tokens[change:] == tokens and running.logprobs[change:] == pytest.approx(logprobs, abs=1e-4)
    assert running.tokens != greedy(modules["a"], PROMPT, 200)[0]


def test_the_servers_own_policy_counts_where_a_commit_says_nothing(where: Path, modules: dict[str, Any]) -> None:
    with running_server(where, in_flight="abort") as server:
        pusher = Pusher(server, where)
        pusher.stage(modules["b"])
        running = Stream(server.url)
        assert pusher.commit()["in_flight"] == {"policy": "abort", "aborted": 1}
        running.end()
        assert running.error is not None


# ------------------------------------------------------------------------------------------------ all or nothing


def test_there_and_back_under_a_hammer(server: RunningServer, pusher: Pusher, modules: dict[str, Any]) -> None:
    prompts = [[5, 6], [7, 8, 9], list(range(20, 40)), [400]]
    known = {name: {tuple(p): greedy(module, p, 6) for p in prompts}.__getitem__ for name, module in modules.items()}
    oracles = {pusher.version: known["a"]}
    before = server.get("/ws/digests")["atoms"]
    with hammer(server.url, prompts) as answers:
        for name, policy in (("b", "finish"), ("a", "wait"), ("b", "keep"), ("a", "finish")):
            answers.wait_for(5)
            pusher.stage(modules[name])
            pusher.commit(policy)
            oracles[pusher.version] = known[name]
            digests = server.get("/ws/digests")["atoms"]
            assert (digests == before) == (name == "a") and digests.keys() == before.keys()
        answers.wait_for(5)
    whole = [a for a in answers.ok if len(a.spans) == 1]
    answers.found = whole  # those that went on over a change are another test's
    assert wrong(answers, oracles) == [] and not answers.failed
    assert answers.versions == oracles.keys() and len(whole) >= 20
    assert all(known["a"](tuple(p))[0] != known["b"](tuple(p))[0] for p in prompts)


def test_a_push_that_is_damaged_changes_nothing(server: RunningServer, pusher: Pusher, modules: dict[str, Any]) -> None:
    version = server.version
    with hammer(server.url, [PROMPT], clients=2) as answers:
        answers.wait_for(3)
        error = pusher.stage(modules["b"], damaged=True, status=409)["error"]
        assert error["code"] == "failed" and server.get("/ws/status")["state"] == "failed"
        assert pusher.commit(status=409)["error"]["code"] == "not_staged"
        answers.wait_for(3)
        pusher.call("abort", {"hub": HUB, "epoch": pusher.epoch, "reason": "damaged"})
        answers.wait_for(3)
    oracle = {tuple(PROMPT): greedy(modules["a"], PROMPT, 6)}.__getitem__
    assert wrong(answers, {version: oracle}) == [] and not answers.failed and server.version == version
    latest = server.get("/stats")["pushes"][0]
    assert (latest["outcome"], latest["version"]) == ("aborted", pusher.version)


def test_versions_are_demanded_across_a_commit(server: RunningServer, pusher: Pusher, modules: dict[str, Any]) -> None:
    pusher.stage(modules["b"])

    def status(**demand: int) -> int:
        return server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **demand}).status_code

    old, new = pusher.version - 1, pusher.version
    wanted: list[dict[str, int]] = [{"min_weight_version": new}, {"weight_version": new}, {"weight_version": old}]
    assert [status(**demand) for demand in wanted] == [409, 409, 200]
    pusher.commit()
    assert [status(**demand) for demand in wanted] == [200, 200, 409]
    assert server.get("/v1/models")["data"][0]["root"] == pusher.root


def test_metrics_and_statistics_tell_of_pushes(server: RunningServer, pusher: Pusher, modules: dict[str, Any]) -> None:
    pusher.stage(modules["b"])
    receipt = pusher.commit()
    stats = server.get("/stats")
    latest = stats["pushes"][0]
    assert (latest["outcome"], latest["version"], latest["root"]) == ("committed", pusher.version, pusher.root)
    assert latest["pause_s"] == pytest.approx(receipt["pause_s"]) and latest["seconds"] > 0
    size = sum(p.numel() * 4 for p in modules["a"].parameters())
    assert size <= latest["bytes"] < size * 1.02
    assert stats["sync"]["state"] == "joined" and stats["weight_version"] == pusher.version
    text = requests.get(f"{server.url}/metrics", timeout=10).text
    assert f"areal_weight_version {float(pusher.version)}" in text and 'areal_pushes_total{outcome="committed"}' in text


# ------------------------------------------------------------------------------------------------ the worker alone


class Counting:
    """A worker over modules that count how often they are let go."""

    def __init__(self, first: Any) -> None:
        self.released: list[int] = []
        self.engine = Engine(Model(torch.device("cpu"), (), "cache"), self.copy(first, 0), Metrics())
        self.events: list[Event] = []

    def copy(self, module: Any, version: int) -> Copy:
        return Copy(module, version, f"root {version}", lambda: self.released.append(version))

    def submit(self, **how: Any) -> Sequence_:
        sampling = Sampling(temperature=0.0, ignore_eos=True, **how)
        sequence = Sequence_(0, PROMPT, sampling, Demand(), self.events.append)
        self.engine.submit([sequence])
        end = time.monotonic() + 10
        while not sequence.out and time.monotonic() < end:
            time.sleep(0.001)
        return sequence


@pytest.fixture
def counting(modules: dict[str, Any]) -> Iterator[Counting]:
    made = Counting(modules["a"])
    yield made
    made.engine.close(0)


def test_an_install_that_fails_leaves_the_old_version_at_work(counting: Counting, modules: dict[str, Any]) -> None:
    running = counting.submit(max_tokens=60)

    def broken() -> Copy:
        raise MemoryError("no")

    for policy in ("finish", "keep"):
        with pytest.raises(MemoryError):
            counting.engine.swap(1, broken, policy)
    assert counting.engine.current.version == 0 and counting.released == []
    while not running.done:
        time.sleep(0.005)
    assert running.error is None and running.out == greedy(modules["a"], PROMPT, 60)[0]


def test_a_wait_that_takes_too_long_is_given_up_and_the_gate_opens(counting: Counting, modules: dict[str, Any]) -> None:
    running = counting.submit(max_tokens=200)
    with pytest.raises(TimeoutError, match="1 sequences still ran"):
        counting.engine.swap(1, lambda: counting.copy(modules["b"], 1), "wait", timeout=0.05)
    assert not running.done and counting.engine.current.version == 0
    assert counting.submit(max_tokens=2).out  # taken in again
    assert counting.engine.swap(1, lambda: counting.copy(modules["b"], 1), "abort").version == 1
    assert running.error is not None and counting.released == [0]


def test_several_changes_while_one_request_runs_hold_every_copy_that_is_needed(
    counting: Counting, modules: dict[str, Any]
) -> None:
    first = counting.submit(max_tokens=150)
    counting.engine.swap(1, lambda: counting.copy(modules["b"], 1))
    second = counting.submit(max_tokens=150)
    counting.engine.swap(2, lambda: counting.copy(modules["a"], 2))
    assert counting.engine.old_copies() == 2 and counting.released == []
    while not (first.done and second.done):
        time.sleep(0.005)
    assert first.out == greedy(modules["a"], PROMPT, 150)[0] and second.out == greedy(modules["b"], PROMPT, 150)[0]
    end = time.monotonic() + 5
    while len(counting.released) < 2 and time.monotonic() < end:
        time.sleep(0.005)
    assert counting.released == [0, 1] and counting.engine.old_copies() == 0


def test_hammer_of_the_tests_finds_wrong_answers(server: RunningServer, modules: dict[str, Any]) -> None:
    """What all sync tests count with: an oracle that is not the server's must be noticed."""
    with hammer(server.url, [PROMPT], clients=1) as answers:
        answers.wait_for(2)
    right = tokens_of(generate(server.url, PROMPT, 6)), logprobs_of(generate(server.url, PROMPT, 6))
    version = server.version
    assert wrong(answers, {version: lambda _: right}) == []
    other = greedy(modules["a" if right[0] != greedy(modules["a"], PROMPT, 6)[0] else "b"], PROMPT, 6)
    assert len(wrong(answers, {version: lambda _: other})) == len(answers.ok)
    assert len(wrong(answers, {version: lambda _: (right[0], [x + 1e-3 for x in right[1]])})) == len(answers.ok)
    assert len(wrong(answers, {version + 1: lambda _: right})) == len(answers.ok)
