"""The channel: bytes arrive, and whatever breaks frees everybody who waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from areal_convert.converter.errors import ChannelError
from areal_convert.converter.sync.channel import Channel, open_channel, open_store, own_address

HOST = "127.0.0.1"


def group(world: int, timeout: float = 20, name: str = "g") -> list[Channel]:
    """Both ends of one group, in threads of this process."""
    store = open_store(HOST, 0, timeout, serve=True)
    found: dict[int, Channel] = {}

    def join(rank: int) -> None:
        own = store if rank == 0 else None
        found[rank] = open_channel("gloo", HOST, store.port, name, rank, world, timeout, store=own)

    run([lambda r=r: join(r) for r in range(world)])
    return [found[r] for r in range(world)]


def run(actions: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def three() -> Iterator[list[Channel]]:
    channels = group(3)
    yield channels
    for channel in channels:
        channel.close()


def test_two_servers_get_the_bytes_in_order(three: list[Channel]) -> None:
    sent = [np.full(n, n % 251, np.uint8) for n in (64, 1, 100_000, 0, 3_000_001)]
    got: dict[int, list[np.ndarray]] = {1: [], 2: []}

    def send() -> None:
        for work in [three[0].broadcast(array) for array in sent]:
            work.wait()

    def receive(rank: int) -> None:
        for array in sent:
            got[rank].append(np.empty(array.size, np.uint8))
            three[rank].broadcast(got[rank][-1]).wait()

    run([send, lambda: receive(1), lambda: receive(2)])
    for rank in (1, 2):
        assert all(np.array_equal(a, b) for a, b in zip(sent, got[rank], strict=True))


def test_only_contiguous_bytes_travel(three: list[Channel]) -> None:
    for wrong in (np.zeros(4, np.float32), np.zeros((4, 4), np.uint8)[:, 1]):
        with pytest.raises(ValueError, match="contiguous uint8"):
            three[0].broadcast(wrong)


def test_an_abort_frees_the_thread_that_waits(three: list[Channel]) -> None:
    """At once, not when gloo's timeout is over; and nothing can be sent afterwards."""
    waiting = three[1].broadcast(np.empty(64, np.uint8))
    threading.Timer(0.2, three[1].abort, ["the lease is over"]).start()
    begin = time.monotonic()
    with pytest.raises(ChannelError, match="aborted: the lease is over"):
        waiting.wait()
    assert time.monotonic() - begin < 5
    with pytest.raises(ChannelError, match="aborted"):
        three[1].broadcast(np.empty(1, np.uint8))


def test_a_close_frees_the_other_side(three: list[Channel]) -> None:
    waiting = [three[rank].broadcast(np.empty(64, np.uint8)) for rank in (1, 2)]
    begin = time.monotonic()
    three[0].close()
    for work in waiting:
        with pytest.raises(ChannelError, match="gone"):
            work.wait()
    assert time.monotonic() - begin < 5


def test_silence_ends_with_the_timeout() -> None:
    channels = group(2, timeout=1)
    begin = time.monotonic()
    with pytest.raises(ChannelError, match="nothing came within 1 s"):
        channels[1].broadcast(np.empty(64, np.uint8)).wait()
    assert time.monotonic() - begin < 10
    for channel in channels:
        channel.close()


def test_who_does_not_come_is_told() -> None:
    store = open_store(HOST, 0, 1, serve=True)
    with pytest.raises(ChannelError, match="rank 0 did not meet the other 1"):
        open_channel("gloo", HOST, store.port, "alone", 0, 2, 1, store=store)
    with pytest.raises(ChannelError, match="There is no backend 'mpi'"):
        open_channel("mpi", HOST, store.port, "x", 0, 2, 1, store=store)


def test_a_rendezvous_that_is_not_there() -> None:
    store = open_store(HOST, 0, 1, serve=True)
    port = store.port
    del store
    with pytest.raises(ChannelError, match=f"{port} does not answer"):
        open_store(HOST, port, 1)


def test_a_second_epoch_meets_under_another_name(three: list[Channel]) -> None:
    store = open_store(HOST, 0, 20, serve=True)
    got = np.empty(3, np.uint8)

    def join(rank: int) -> None:
        own = store if rank == 0 else None
        for epoch in (1, 2):
            channel = open_channel("gloo", HOST, store.port, f"e{epoch}", rank, 2, 20, store=own)
            buffer = got if rank else np.full(3, epoch, np.uint8)
            channel.broadcast(buffer).wait()
            channel.close()

    run([lambda: join(0), lambda: join(1)])
    assert got.tolist() == [2, 2, 2]


def test_the_way_to_a_host() -> None:
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"
    with pytest.raises(ChannelError, match="There is no way"):
        own_address("no-such-host.invalid")


SINK = """
import sys, time
import numpy as np
from areal_convert.converter.sync.channel import open_channel
channel = open_channel("gloo", "127.0.0.1", int(sys.argv[1]), "killed", 1, 3, 30)
channel.broadcast(np.empty(64, np.uint8)).wait()
time.sleep(60)
"""


@pytest.mark.multiprocess
def test_a_killed_server_frees_the_sender() -> None:
    store = open_store(HOST, 0, 30, serve=True)
    child = subprocess.Popen([sys.executable, "-c", SINK, str(store.port)])
    found: dict[int, Channel] = {}

    def join(rank: int) -> None:
        found[rank] = open_channel("gloo", HOST, store.port, "killed", rank, 3, 30, store=store if not rank else None)

    try:
        run([lambda: join(0), lambda: join(2)])
        works = [found[0].broadcast(np.ones(64, np.uint8)), found[2].broadcast(np.empty(64, np.uint8))]
        for work in works:
            work.wait()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        begin = time.monotonic()
        with pytest.raises(ChannelError):
            for _ in range(64):  # the kernel takes some megabytes for a process that is gone
                found[0].broadcast(np.ones(1 << 20, np.uint8)).wait()
        assert time.monotonic() - begin < 10
    finally:
        child.kill()
        child.wait()
        for channel in found.values():
            channel.close()


def test_a_gpus_broadcast_is_looked_at_until_it_is_over() -> None:
    """NCCL's future is there at once, and waiting for the work would make the device wait: neither is asked before the
    work says that it is over."""

    class Work:
        over = waited = False

        def is_completed(self) -> bool:
            return self.over

        def wait(self) -> None:
            assert self.over
            self.waited = True

    class Group:
        def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
            tensor.fill_(7)
            return work

        def abort(self) -> None: ...

    work, buffer = Work(), np.zeros(8, np.uint8)
    server = Channel(Group(), "nccl", "g", 1, 2, 20, torch.device("cpu"))
    coming = server.broadcast(buffer)
    threading.Timer(0.1, setattr, [work, "over", True]).start()
    assert not coming.settled(0) and not buffer.any()
    coming.wait()
    assert coming.settled(0) and work.waited and buffer.tolist() == [7] * 8
    work.over, left = False, server.broadcast(buffer)
    server.abort("the lease is over")
    with pytest.raises(ChannelError, match="the lease is over"):
        left.wait()
    assert not left.settled(0.01)
