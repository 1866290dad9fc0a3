"""Servers of others: which one it is, what it is told in which order, and what is left of it when something fails.

The stand-ins (`sync_standins`) take the documented forms only, and real tensors over real groups; what they answer is a
digest of every bit they hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from areal_convert.converter import Mesh, WeightSync, convert
from areal_convert.converter.errors import ConfigError, ServerRefused, ServerUnreachable, SyncError
from areal_convert.converter.sync.client import Client
from areal_convert.converter.sync.dialects import probe
from areal_convert.converter.sync.dialects.base import Oracle, detect
from areal_convert.converter.sync.sink import Wanted
from sync_standins import KINDS, Kind, StandIn, greedy, standing

pytestmark = pytest.mark.timeout(120)
PROMPT = [3, 1, 4]

Weights = dict[str, torch.Tensor]
Model = Callable[..., Path]
GROUPS: tuple[Kind, ...] = ("vllm-0.30", "sglang-0.5.23", "areal-vllm")


class Feed:
    """Whole tensors in memory."""

    def __init__(self, state: Weights) -> None:
        self.state = state

    def wanted(self, dtype: str | None = None) -> list[Wanted]:
        return [Wanted(k, tuple(v.shape), dtype or "BF16") for k, v in self.state.items()]

    def tensors(self, wanted: Any) -> Iterator[tuple[Wanted, Any]]:
        for want in wanted:
            yield want, self.state[want.name].contiguous().view(torch.int16).numpy().view("u2")


@pytest.fixture(scope="module")
def a() -> Weights:
    return weights(1)


@pytest.fixture(scope="module")
def b() -> Weights:
    return weights(2)


def weights(seed: int) -> Weights:
    g = torch.Generator().manual_seed(seed)
    shapes = {f"layers.{i}.{n}": s for i in range(5) for n, s in (("w", (48, 32)), ("n", (32,)))}
    return {k: torch.randn(s, generator=g).to(torch.bfloat16) for k, s in shapes.items()}


def sink_of(server: StandIn, timeout: float = 10.0, **options: Any) -> Any:
    return probe(Client(server.url, timeout=timeout), "hub", {"group_bytes": 4000, **options})


def oracle(state: Weights) -> Oracle:
    return Oracle(PROMPT, *greedy(state, PROMPT, 6))


def same(found: Weights, wanted: Weights) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def push(sink: Any, state: Weights, version: int) -> Any:
    feed = Feed(state)
    sink.check(feed.wanted(), version)
    sink.load(feed, version)
    return sink.commit(version, "root")


# ------------------------------------------------------------------------------------------------ which server


@pytest.mark.parametrize("kind", KINDS)
def test_every_server_is_known_by_its_endpoints(kind: Kind, a: Weights) -> None:
    with standing(kind, a) as server:
        assert detect(Client(server.url)).kind == kind
        sink = sink_of(server)
        assert sink.tier == "fenced" and sink.status().state == "serving" and sink.status().version == 0
        assert not [c for c in server.calls if not c.startswith("GET ")], "asking changes nothing"
        assert same(server.weights, a)


def answering(paths: dict[str, tuple[int, str]]) -> HTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = paths.get(self.path, (404, "{}"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ({"/version": (200, '{"version": "0.33.0"}')}, "a vLLM 0.33.0 without the endpoints that take weights"),
        ({"/v1/models": (200, '{"data": [{"owned_by": "me"}]}')}, r"OpenAI-compatible server \(models owned by me\)"),
        ({}, "no inference server that is known here"),
    ],
)
def test_a_wrong_server_is_called_by_what_it_is(paths: dict[str, tuple[int, str]], said: str) -> None:
    server = answering(paths)
    try:
        with pytest.raises(ServerRefused, match=said) as caught:
            detect(Client(f"http://127.0.0.1:{server.server_port}"))
        assert caught.value.code == "wrong_dialect" and caught.value.hint
    finally:
        server.shutdown()
        server.server_close()


def test_a_token_that_is_refused_and_a_server_that_is_not_there() -> None:
    server = answering({"/areal_init_weights_update_group": (401, "{}")})
    with pytest.raises(ServerRefused) as caught:
        detect(Client(f"http://127.0.0.1:{server.server_port}"))
    assert caught.value.code == "unauthorized"
    server.shutdown()
    server.server_close()
    with pytest.raises(ServerUnreachable):
        detect(Client(f"http://127.0.0.1:{server.server_port}"))


def test_options_that_cannot_be(a: Weights) -> None:
    with standing("vllm-0.30", a) as server, pytest.raises(ConfigError, match="in_flight"):
        sink_of(server, in_flight="perhaps")


# ------------------------------------------------------------------------------------------------ what arrives


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_again(kind: Kind, a: Weights, b: Weights) -> None:
    """A → B → A: byte equality each time, over one group; the version is set after all else, and then it opens."""
    with standing(kind, a) as server:
        sink = sink_of(server, in_flight="abort")
        for version, state in enumerate((b, a, b), 1):
            server.calls.clear()
            receipt = push(sink, state, version)
            assert same(server.weights, state) and not server.paused and not server.open
            assert (receipt.version, receipt.root) == (version, "root") and receipt.pause_s > 0
            assert sink.status().version == version and sink.status().state == "serving"
            posts = [c.removeprefix("POST ") for c in server.calls if c.startswith("POST")]
            updates = [i for i, c in enumerate(posts) if "update_weights" in c and "init" not in c]
            pause, resume = (
                next(i for i, c in enumerate(posts) if w in c)
                for w in (
                    "pause",
                    "/areal_continue" if "areal-v" in kind else "/resume" if "vllm" in kind else "/continue",
                )
            )
            assert len(updates) > 3 and pause < updates[0] and resume == len(posts) - 1
            if sink.sees_version:
                assert posts[-2] == "/update_weight_version"
        assert sum("init_weight" in c or "init_weights" in c for c in server.calls) == 0, "the group is kept"
        sink.close()


@pytest.mark.parametrize("kind", KINDS)
def test_from_disk(kind: Kind, a: Weights, b: Weights, tmp_path: Path) -> None:
    save_file(b, tmp_path / "model.safetensors")
    with standing(kind, a) as server:
        sink = sink_of(server, path=lambda version: tmp_path, oracle=oracle(b), drained=True)
        push(sink, b, 1)
        assert same(server.weights, b) and not server.groups and not server.paused


def test_what_becomes_of_requests_in_flight(a: Weights, b: Weights) -> None:
    for given, vllm_mode, sglang_mode in (("finish", "wait", "abort"), ("keep", "keep", "retract")):
        with standing("vllm-0.30", a) as one, standing("sglang-0.5.23", a) as two:
            for server in (one, two):
                sink = sink_of(server, in_flight=given)
                push(sink, b, 1)
                sink.close()
            assert one.forms == [vllm_mode] and two.forms[0].mode == sglang_mode


def test_a_tensor_larger_than_a_bucket_is_sent_whole_and_told(a: Weights, b: Weights) -> None:
    with standing("sglang-0.5.23", a) as server:
        sink = sink_of(server, group_bytes=1000)
        receipt = push(sink, b, 1)
        assert same(server.weights, b)
        assert any("more than a bucket" in note for note in receipt.notes)
        sink.close()


@pytest.mark.parametrize("fmt", ["hf", "torch_dist"])
def test_a_hub_pushes_any_format_to_two_of_them(model: Model, tmp_path: Path, fmt: str) -> None:
    path = model("qwen3_moe", dtype="bfloat16", layers=2)
    state = load_file(path / "model.safetensors")
    zero = {k: torch.zeros_like(v) for k, v in state.items()}
    source = path
    if fmt != "hf":
        source = tmp_path / "c"
        convert(path, source, fmt, Mesh(tp=2))
    with standing("vllm-0.30", zero) as one, standing("sglang-0.5.23", zero) as two:
        options = {"oracle": oracle(state), "group_bytes": 1 << 15}
        with WeightSync(source, [one.url, two.url], in_flight="abort", timeout=10, options=options) as sync:
            report = sync.push()
        assert report.version == 1 and same(one.weights, state) and same(two.weights, state)
        assert one.version == two.version == "1" and not one.paused and not two.paused


# ------------------------------------------------------------------------------------------------ what fails


def test_problems_are_told_before_anything_moves(a: Weights) -> None:
    with standing("vllm-0.30", a) as server:
        sink = sink_of(server)
        with pytest.raises(ServerRefused, match="is wanted twice") as caught:
            sink.check([Wanted("x", (2,), "F32"), Wanted("x", (2,), "F32"), Wanted("y", (0, 2), "F32")], 1)
        assert len(caught.value.problems) == 2
        assert not server.paused and same(server.weights, a)


@pytest.mark.parametrize("kind", ["vllm-0.19", "vllm-0.30", "areal-vllm"])
def test_a_server_that_is_asleep_is_left_alone(kind: Kind, a: Weights, b: Weights) -> None:
    """Before a push, between the check and the load, between the load and the commit: nothing is sent to it, nor is it
    opened; when it is awake again it goes on."""
    with standing(kind, a) as server:
        sink = sink_of(server, in_flight="abort")
        server.asleep = True
        with pytest.raises(ServerRefused, match="is asleep") as caught:
            sink.check(Feed(b).wanted(), 1)
        assert [p.what for p in caught.value.problems] == ["is asleep"] and "/wake_up" in caught.value.problems[0].hint
        server.asleep = False
        sink.check(Feed(b).wanted(), 1)
        server.asleep = True
        server.calls.clear()
        with pytest.raises(ServerRefused, match="is asleep") as caught:
            sink.load(Feed(b), 1)
        assert caught.value.code == "asleep" and caught.value.retryable
        assert not [c for c in server.calls if c.startswith("POST")] and sink.status().state == "serving"
        server.asleep = False
        sink.load(Feed(b), 1)
        server.asleep = True
        with pytest.raises(ServerRefused, match="is asleep"):
            sink.commit(1, "root")
        assert server.paused and same(server.weights, b)
        server.asleep = False
        assert sink.commit(1, "root").version == 1 and not server.paused
        sink.close()


def test_a_server_that_somebody_has_paused_is_not_asleep(a: Weights, b: Weights) -> None:
    """vLLM's endpoint says so of both; as after a push that has failed, the next one goes on."""
    with standing("vllm-0.30", a) as server:
        server.paused = True
        sink = sink_of(server, in_flight="abort")
        sink.check(Feed(b).wanted(), 1)
        sink.load(Feed(b), 1)
        assert sink.commit(1, "root").version == 1 and not server.paused and same(server.weights, b)
        sink.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_fails_once_is_sent_again(kind: Kind, a: Weights, b: Weights) -> None:
    with standing(kind, a, fail_at=5) as server:
        sink = sink_of(server, in_flight="abort")
        receipt = push(sink, b, 1)
        assert same(server.weights, b) and not server.paused
        assert sink.resent == 1 and any("a second time" in note for note in receipt.notes)
        sink.close()


@pytest.mark.parametrize("kind", GROUPS)
def test_one_that_fails_twice_stays_fenced(kind: Kind, a: Weights, b: Weights) -> None:
    """500 at tensor 5 of 10: nobody gets an answer from what is there, an abort does not open it, a whole push does."""
    with standing(kind, a, fail_at=5, times=2) as server:
        sink = sink_of(server, in_flight="abort")
        with pytest.raises(ServerRefused, match="stays paused") as caught:
            push(sink, b, 1)
        assert caught.value.code == "fenced" and server.paused and not same(server.weights, b)
        assert sink.status().state == "failed" and sink.status().version == 0
        with pytest.raises(ServerRefused, match="stays paused"):
            sink.abort(1, "called off")
        with pytest.raises(ServerRefused, match="does not have version 1"):
            sink.commit(1, "root")
        assert server.paused
        push(sink, b, 2)
        assert same(server.weights, b) and not server.paused and sink.status().state == "serving"
        sink.close()


@pytest.mark.parametrize("kind", GROUPS)
def test_a_server_that_says_200_and_takes_nothing(kind: Kind, a: Weights, b: Weights) -> None:
    """By the digest of vLLM's engine, SGLang's checksums (from the second push on), or an oracle."""
    with standing(kind, a) as server:
        sink = sink_of(server, timeout=1.0, in_flight="abort", oracle=lambda v: oracle((a, b, a)[v]), drained=True)
        push(sink, b, 1)
        server.faults.no_transfer = True
        with pytest.raises(ServerRefused) as caught:
            push(sink, a, 2)
        assert caught.value.code == "fenced" and server.paused and sink.status().version in (0, 1)
        sink.close()


def test_without_an_oracle_it_is_said_to_be_unverified(a: Weights, b: Weights) -> None:
    with standing("sglang-0.5.10", a) as server:
        sink = sink_of(server)
        assert any("unverified" in note for note in push(sink, b, 1).notes)
        sink.close()


def test_wrong_answers_after_opening_close_it_again(a: Weights, b: Weights) -> None:
    with standing("sglang-0.5.10", a) as server:
        sink = sink_of(server, oracle=oracle(a))
        with pytest.raises(ServerRefused, match="was expected"):
            push(sink, b, 1)
        assert server.paused and sink.status().state == "failed"
        sink.close()


@pytest.mark.parametrize("kind", GROUPS)
def test_an_answer_to_pause_that_is_lost(kind: Kind, a: Weights, b: Weights) -> None:
    """It is asked again; and when no answer comes at all the server, which may be paused, is opened as it was."""
    with standing(kind, a, lost_pause=1) as server:
        sink = sink_of(server, in_flight="abort")
        push(sink, b, 1)
        assert same(server.weights, b) and not server.paused
        server.faults.lost_pause = 3
        with pytest.raises(ServerUnreachable):
            push(sink, a, 2)
        assert same(server.weights, b) and not server.paused and sink.status().state == "serving"
        sink.abort(2, "called off")
        sink.close()


def test_a_lost_answer_to_the_last_call_is_asked_for_again(a: Weights, b: Weights) -> None:
    """Once within a call; and a commit that failed altogether may be repeated."""
    for kind in ("vllm-0.30", "sglang-0.5.23"):
        with standing(kind, a, lost_commit=4) as server:
            sink = sink_of(server, in_flight="abort")
            with pytest.raises(ServerUnreachable):
                push(sink, b, 1)
            assert sink.commit(1, "root").version == 1 and sink.commit(1, "root").version == 1
            assert same(server.weights, b) and server.version == "1" and not server.paused
            sink.close()


@pytest.mark.parametrize("kind", ["vllm-0.19", "sglang-0.5.23"])
def test_a_server_that_was_restarted(kind: Kind, a: Weights, b: Weights) -> None:
    """Between pushes: it is at version 0 and takes the next one. Between loading and commit: it is not opened as what
    it is not."""
    with standing(kind, a) as server:
        sink = sink_of(server, in_flight="abort")
        push(sink, b, 1)
        server.restart(a)
        assert not sink.sees_version or sink.status().version == 0
        push(sink, b, 2)
        assert same(server.weights, b) and not server.paused
        sink.load(Feed(a), 3)
        server.restart(b)
        with pytest.raises(ServerRefused, match="restarted"):
            sink.commit(3, "root")
        sink.close()


def test_a_restart_before_any_version_was_set(a: Weights, b: Weights) -> None:
    """The version tells nothing then; the checksums do."""
    with standing("sglang-0.5.23", a) as server:
        sink = sink_of(server, in_flight="abort")
        sink.load(Feed(b), 1)
        server.restart(a)
        with pytest.raises(ServerRefused, match="restarted"):
            sink.commit(1, "root")
        assert server.version == "default"
        sink.close()


def test_a_server_that_a_dead_hub_left_fenced(a: Weights, b: Weights) -> None:
    """The next hub does not open it when its own push fails early; a whole push does."""
    with standing("vllm-0.30", a) as server:
        server.paused = True
        sink = sink_of(server, in_flight="abort")
        server.faults.lost_pause = 3
        with pytest.raises(ServerUnreachable):
            push(sink, b, 1)
        assert server.paused and sink.status().state == "failed"
        with pytest.raises(ServerRefused, match="stays paused"):
            sink.abort(1, "called off")
        push(sink, b, 1)
        assert not server.paused and same(server.weights, b)
        sink.close()


def test_a_slow_server_is_waited_for_and_a_stuck_one_is_not(a: Weights, b: Weights) -> None:
    with standing("sglang-0.5.23", a, slow=0.1) as server:
        sink = sink_of(server, in_flight="abort", group_bytes=1 << 20)
        push(sink, b, 1)
        server.faults.slow = 2.5
        slow = sink_of(server, timeout=1.0, in_flight="abort", group_bytes=1 << 20)
        slow._version = 1
        start = time.monotonic()
        with pytest.raises(SyncError):
            push(slow, a, 2)
        assert time.monotonic() - start < 20 and server.paused
        sink.close()
        slow.close()


def test_nobody_sees_anything_but_a_version(a: Weights, b: Weights) -> None:
    """Requests without a pause while versions come, fail and come again: every answer is A's or B's."""
    known = {tuple(greedy(s, PROMPT, 6)[0]): name for name, s in (("A", a), ("B", b))}
    counts: dict[str, int] = {}
    over = threading.Event()

    def ask(url: str) -> None:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 6},
            "return_logprob": True,
        }
        with requests.Session() as session:
            while not over.is_set():
                reply = session.post(f"{url}/generate", json=body, timeout=10)
                whose = "503"
                if reply.ok:
                    tokens = tuple(r[1] for r in reply.json()["meta_info"]["output_token_logprobs"])
                    whose = known.get(tokens, "neither")
                counts[whose] = counts.get(whose, 0) + 1

    with standing("sglang-0.5.23", a, slow=0.01) as server:
        hammer = threading.Thread(target=ask, args=(server.url,))
        hammer.start()
        sink = sink_of(server, in_flight="abort")
        try:
            for version, state in enumerate((b, a, b), 1):
                push(sink, state, version)
                time.sleep(0.05)
            server.faults.fail_at, server.faults.times, server.tensors = 5, 2, 0
            with pytest.raises(ServerRefused):
                push(sink, a, 4)
            time.sleep(0.1)
        finally:
            over.set()
            hammer.join(15)
            sink.close()
    assert counts.get("neither", 0) == 0 and counts["A"] > 0 and counts["B"] > 0 and counts["503"] > 0
