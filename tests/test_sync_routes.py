"""`/ws/*` over real HTTP, and real gloo groups: the server's side of the protocol, mounted in a FastAPI application."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import requests

from areal_convert.converter.errors import LeaseHeld, ServerRefused
from areal_convert.converter.sync.client import Client
from areal_convert.converter.sync.commits import Commit
from areal_convert.converter.sync.protocol_sink import ProtocolSink
from areal_convert.converter.sync.receiver import Receiver
from areal_convert.converter.sync.routes import MESSAGE_BYTES, router
from areal_convert.converter.sync.transport import Place
from areal_convert.converter.sync.transport_groups import GroupTransport
from areal_convert.converter.sync.wire import Header
from sync_parts import HUB, Values, halves, manifest_of, same, tiny_state

BASE, CONFIG = tiny_state(1)
NEW = tiny_state(2)[0]


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def served(**options: Any) -> Iterator[tuple[str, Receiver]]:
    """A receiver behind uvicorn, in a thread of this process."""
    import uvicorn
    from fastapi import FastAPI

    settings: dict[str, Any] = {"timeout": 10.0, **options}
    receiver = Receiver(copy.deepcopy(BASE), CONFIG, **settings)
    app = FastAPI()
    app.include_router(router(receiver))

    @app.get("/alive")
    async def alive() -> dict[str, bool]:
        return {"alive": True}

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < end and thread.is_alive()
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", receiver
    finally:
        receiver.close()
        server.should_exit = True
        thread.join(10)


def error_of(answer: requests.Response, status: int, code: str) -> dict[str, Any]:
    """The JSON error, which has to have its form whatever went wrong."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code and error["message"] and isinstance(error["hint"], str), error
    assert isinstance(error["retryable"], bool)
    return error


def values_of(receiver: Receiver, target: Any = NEW, two: bool = False, **fields: Any) -> Values:
    layout = receiver.stage.layout
    return Values(target, CONFIG, manifest_of(layout, halves(layout) if two else None, **fields))


def test_a_push_over_http_with_buckets_in_the_bodies() -> None:
    with served(token="secret") as (url, receiver):
        sink = ProtocolSink(Client(url, "secret"), HUB)
        assert sink.status().state == "serving" and sink.layout().model["family"] == "llama"
        sink.lease(HUB, 30)
        sink.run = "run"
        sink.join(1, {"kind": "inline"})
        values = values_of(receiver, two=True)
        sink.prepare(values.manifest)
        with ThreadPoolExecutor(2) as pool:
            sent = [pool.submit(sink.client.post_bytes, "/ws/bucket", h.pack() + p) for h, p in values.buckets()]
            assert all(one.result()["applied"] for one in sent)
        assert sink.seal(1, values.root) == values.root
        assert sink.status().staged == (1, values.root)
        receipt = sink.commit(1, values.root)
        assert receipt.version == 1 and receipt.pause_s < 1 and sink.commit(1, values.root).root == values.root
        assert same(receiver.current(), NEW)
        assert sink.digests() == receiver.stage.digests()
        assert list(sink.client.get("/ws/digests?name=embed&name=head&version=1")["atoms"]) == ["embed", "head"]
        sink.abort(None, "nothing to abort")
        sink.release()
        assert sink.status().lease is None


@pytest.mark.parametrize("senders", [1, 2])
def test_a_push_over_gloo(senders: int) -> None:
    """Two servers, real groups; then a bad bucket, which is drained so that nobody hangs, and a new epoch."""
    with served() as (url, one), served() as (url2, two):
        sinks = [ProtocolSink(Client(u), HUB) for u in (url, url2)]
        for epoch, flips in ((1, False), (2, True), (3, False)):
            values = values_of(one, NEW if epoch != 3 else BASE, senders == 2, epoch=epoch, version=epoch)
            hub = Gloo(sinks, epoch, values, senders)
            hub.send(flip=flips)
            if flips:
                with pytest.raises(ServerRefused, match="is damaged: its bytes are not those that were sent"):
                    sinks[0].seal(epoch, values.root)
                assert sinks[1].status().state == "failed" and "damaged" in str(sinks[1].status().error)
                for sink in sinks:
                    sink.abort(epoch, "damaged")
                hub.close()
                assert same(one.current(), NEW) and one.version == 1
                continue
            for sink in sinks:
                assert sink.seal(epoch, values.root) == values.root
                sink.commit(epoch, values.root)
            hub.close()
            for receiver in (one, two):
                assert same(receiver.current(), NEW if epoch == 1 else BASE) and receiver.version == epoch


class Gloo:
    """A hub with all of its senders in this process."""

    def __init__(self, sinks: list[ProtocolSink], epoch: int, values: Values, senders: int) -> None:
        self.values = values
        clients = [sink.client for sink in sinks]
        places = [Place("run", epoch, s, senders, clients, "127.0.0.1", 256, 10.0) for s in range(senders)]
        self.senders = [GroupTransport("gloo", place) for place in places]
        offer = self.senders[0].offer()
        for n, sink in enumerate(sinks):
            sink.lease(HUB, 30)
            sink.run = "run"
            sink.join(epoch, {**offer, "rank": n + 1, "world": len(sinks) + 1})
        for sender in self.senders:
            sender.open(offer)
        for sink in sinks:
            sink.prepare(values.manifest)

    def send(self, flip: bool) -> None:
        def run(sender: int) -> None:
            transport = self.senders[sender]
            transport.begin(self.values.manifest.version)
            for header, payload in self.values.buckets():
                if header.sender == sender:
                    buffer = transport.buffer()[: len(payload)]
                    buffer[:] = np.frombuffer(payload, np.uint8)
                    if flip and header.number == 1:
                        buffer[-1] ^= 1
                    transport.send(header, buffer)
            transport.finish()

        with ThreadPoolExecutor(len(self.senders)) as pool:
            list(pool.map(run, range(len(self.senders))))

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


def test_a_header_that_lies_closes_the_groups() -> None:
    """How much comes next cannot be known then: the server leaves, and the hub learns of it at once."""
    with served() as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        values = values_of(receiver)
        hub = Gloo([sink], 1, values, 1)
        transport = hub.senders[0]
        transport.begin(1)
        transport.send(Header(9, 9, 9, 9, 0, 0, bytes(16)), transport.buffer()[:0])
        with pytest.raises(ServerRefused, match="epoch 9; 1 was expected"):
            sink.seal(1, values.root)
        assert receiver.state == "failed" and same(receiver.current(), BASE)
        sink.abort(1, "failed")
        assert receiver.state == "serving"
        hub.close()


def test_a_hub_that_dies_in_the_middle() -> None:
    with served() as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        values = values_of(receiver)
        hub = Gloo([sink], 1, values, 1)
        transport = hub.senders[0]
        transport.begin(1)
        header, payload = next(iter(values.buckets()))
        buffer = transport.buffer()[: len(payload)]
        buffer[:] = np.frombuffer(payload, np.uint8)
        transport.send(header, buffer)
        transport.finish()
        hub.close()
        end = time.monotonic() + 8
        while receiver.state != "failed":
            assert time.monotonic() < end, receiver.status()
            time.sleep(0.01)
        assert same(receiver.current(), BASE) and receiver.status()["error"]
        sink.abort(1, "it died")


def test_a_hub_that_says_nothing_can_be_aborted() -> None:
    """Threads that wait in a collective are freed, and a new epoch begins while the old group is still there."""
    with served() as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        silent = Gloo([sink], 1, values_of(receiver), 1)
        start = time.monotonic()
        sink.abort(1, "it says nothing")
        assert time.monotonic() - start < 3 and receiver.state == "serving"
        values = values_of(receiver, epoch=2)
        hub = Gloo([sink], 2, values, 1)
        hub.send(flip=False)
        sink.seal(1, values.root)
        sink.commit(1, values.root)
        assert same(receiver.current(), NEW)
        hub.close()
        silent.close()


def test_a_join_that_nobody_meets(unused_tcp_port: int) -> None:
    with served(timeout=15.0) as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        sink.lease(HUB, 30)
        sink.run = "run"
        transport = {
            "kind": "gloo",
            "host": "127.0.0.1",
            "port": unused_tcp_port,
            "names": ["a"],
            "rank": 1,
            "world": 2,
        }
        sink.join(1, {**transport, "timeout": 1.0})
        with pytest.raises(ServerRefused, match="does not answer") as refused:
            sink.prepare(values_of(receiver).manifest)
        assert refused.value.code == "join_failed" and receiver.state == "serving"


# ------------------------------------------------------------------------------------------------ who may, and how


def test_a_page_in_a_browser_may_not_push() -> None:
    """A site somewhere posts to a server on loopback, without a preflight (text/plain), as its visitor's browser."""
    with served() as (url, receiver):
        page = {"origin": "https://example.org", "content-type": "text/plain"}
        body = '{"hub": "page", "ttl": 30}'
        error_of(requests.post(f"{url}/ws/lease", data=body, headers=page, timeout=5), 403, "browser")
        assert receiver.status()["lease"] is None
        for name in ("status", "layout", "digests"):
            error_of(requests.get(f"{url}/ws/{name}", headers={"origin": "null"}, timeout=5), 403, "browser")


def test_tokens() -> None:
    def check(token: str) -> str | None:
        return None if token == "new" else "it expired yesterday" if token == "old" else "nobody knows it"

    paths = [("GET", p) for p in ("status", "layout", "digests")] + [("DELETE", "lease")]
    paths += [("POST", p) for p in ("lease", "join", "prepare", "bucket", "load", "seal", "commit", "abort")]
    with served(token="secret") as (url, _):
        for method, path in paths:
            answer = requests.request(method, f"{url}/ws/{path}", json={}, timeout=5)
            error_of(answer, 401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
        wrong = {"Authorization": "Bearer secret2"}
        assert (
            "not this server's"
            in error_of(requests.get(f"{url}/ws/status", headers=wrong, timeout=5), 401, "unauthorized")["message"]
        )
        error_of(
            requests.get(f"{url}/ws/status", headers={"Authorization": "Basic secret"}, timeout=5), 401, "unauthorized"
        )
        assert Client(url, "secret").get("/ws/status")["state"] == "serving"
    with served(token=check) as (url, _):
        assert Client(url, "new").get("/ws/status")["state"] == "serving"
        for token, code in (("old", "expired_token"), ("x", "unauthorized")):
            with pytest.raises(ServerRefused) as refused:
                Client(url, token).get("/ws/status")
            assert refused.value.code == code


def test_bodies_that_are_nothing() -> None:
    with served() as (url, receiver):
        post = f"{url}/ws/"
        for data in (b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000):
            error_of(requests.post(post + "lease", data=data, timeout=5), 422, "bad_request")
        error_of(requests.post(post + "lease", data=b" " * (MESSAGE_BYTES + 1), timeout=5), 413, "too_large")
        chunks = (b" " * 65536 for _ in range(MESSAGE_BYTES // 65536 + 2))
        error_of(requests.post(post + "seal", data=chunks, timeout=5), 413, "too_large")
        for body in ({}, {"hub": 5}, {"hub": "a", "ttl": -1}, {"hub": "a", "ttl": "x"}, {"hub": "a" * 2000}):
            error_of(requests.post(post + "lease", json=body, timeout=5), 422, "bad_request")
        requests.post(post + "lease", json={"hub": HUB}, timeout=5).raise_for_status()
        for epoch in (0, -1, 1.5, True, "1", 1 << 80, None):
            body = {"hub": HUB, "run": "r", "epoch": epoch, "transport": {"kind": "inline"}}
            error_of(requests.post(post + "join", json=body, timeout=5), 422, "bad_request")
        error_of(requests.post(post + "prepare", json={"protocol": 1}, timeout=5), 422, "bad_manifest")
        error_of(requests.get(post + "digests?version=x", timeout=5), 422, "bad_request")
        error_of(requests.get(post + "digests?version=3", timeout=5), 409, "other_version")
        octets = {"Content-Type": "application/octet-stream"}
        error_of(requests.post(post + "bucket", data=b"x" * 100, headers=octets, timeout=5), 409, "no_push")
        assert receiver.state == "serving" and receiver.version == 0


def test_a_body_that_breaks_off(caplog: pytest.LogCaptureFixture) -> None:
    with served() as (url, receiver):
        host, port = url.removeprefix("http://").split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=5) as s:
                s.sendall(b"POST /ws/prepare HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert requests.get(f"{url}/ws/status", timeout=5).json()["state"] == receiver.state == "serving"
    assert not caplog.records


def test_errors_have_figures_and_all_problems() -> None:
    with served(free=lambda device: 10) as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        sink.lease(HUB, 30)
        with pytest.raises(LeaseHeld, match=HUB) as held:
            ProtocolSink(Client(url), "other").lease("other", 3)
        assert held.value.retryable and held.value.facts["hub"] == HUB
        sink.run = "run"
        sink.join(1, {"kind": "inline"})
        values = values_of(receiver)
        with pytest.raises(ServerRefused) as refused:
            sink.prepare(values.manifest)
        assert refused.value.code == "memory" and refused.value.facts["free"] == 10
        atoms = values.manifest.atoms
        values.manifest.atoms = [a if n > 2 else type(a)(f"x{n}", a.shape, a.dtype) for n, a in enumerate(atoms)]
        with pytest.raises(ServerRefused) as refused:
            sink.prepare(values.manifest)
        assert refused.value.code == "mismatch" and len(refused.value.problems) == 6


def test_nothing_blocks_the_event_loop() -> None:
    """Forty requests that wait, and the loop still answers; and so does a commit."""
    inside, go = threading.Event(), threading.Event()

    def before(commit: Commit) -> None:
        inside.set()
        go.wait(10)

    with served(before_install=before) as (url, receiver):
        sink = ProtocolSink(Client(url), HUB)
        sink.lease(HUB, 30)
        sink.run = "run"
        sink.join(1, {"kind": "inline"})
        values = values_of(receiver)
        sink.prepare(values.manifest)
        for header, payload in values.buckets():
            sink.client.post_bytes("/ws/bucket", header.pack() + payload)
        sink.seal(1, values.root)
        with ThreadPoolExecutor(4) as pool:
            commits = [pool.submit(sink.commit, 1, values.root) for _ in range(4)]
            assert inside.wait(5)
            start = time.monotonic()
            assert requests.get(f"{url}/alive", timeout=5).json() == {"alive": True}
            assert sink.status().state == "committing"
            assert time.monotonic() - start < 1
            go.set()
            assert {one.result().version for one in commits} == {1}


def test_a_fault_of_the_server_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    with served() as (url, receiver):
        receiver.stage.layout.to_json = lambda: {}["nothing"]
        error = error_of(requests.get(f"{url}/ws/layout", timeout=5), 500, "internal")
        assert "KeyError" in error["message"]
        assert json.loads(requests.get(f"{url}/ws/status", timeout=5).text)["state"] == "serving"
    assert "GET /ws/layout failed" in caplog.text
