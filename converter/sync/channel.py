"""Bytes from one sender to all servers of an epoch, over a process group of their own (gloo on CPUs, NCCL on GPUs).

A sender is rank 0 of its group, the servers are ranks 1, 2, …; sender and server open it with the same call, in the
order of the senders. The groups are objects of their own: there is no default group, nothing is registered, so a
server may have process groups of its own.

    store = open_store("10.0.0.5", 0, 60, serve=True)             # the hub; everybody else: the port it got, no `serve`
    channel = open_channel("gloo", "10.0.0.5", store.port, "ac-run-e1-s0", 0, 3, 60, store=store)
    channel.broadcast(header).wait()

Nothing here is tried again. A collective carries no identity, and after a failure the ranks do not agree on what was
sent: whoever gets a ChannelError closes the channel, and a new epoch makes a new one, under another name.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codecs import Array
from ..errors import ChannelError

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

BACKENDS = ("gloo", "nccl")
_TICK = 0.5
"""Seconds after which a waiting thread looks whether the channel was aborted while nothing came."""
_LOOK = 0.0005
"""Seconds between two looks at a GPU's broadcast."""


CLOSING = "areal-sync-close"
"""Name of the threads in which groups are given up."""

LEAVING = 5.0
"""Seconds that a process which ends waits for them: one that is cut off inside of gloo ends the process by a signal."""

_closing: list[threading.Thread] = []


@atexit.register
def _leave() -> None:
    end = time.monotonic() + LEAVING
    for thread in _closing:
        thread.join(max(0.0, end - time.monotonic()))


class Pending:
    """A broadcast that is under way. The buffer belongs to it until `wait` returned or the channel is closed."""

    def __init__(self, channel: Channel, work: Any, finish: Callable[[], None], size: int) -> None:
        self._channel, self._work, self._finish, self._size = channel, work, finish, size
        self._done = threading.Event()
        if work is not None and not channel.looks:
            work.get_future().add_done_callback(lambda _: self._done.set())

    def wait(self) -> None:
        """Until the buffer is sent (rank 0: it may be used again) or filled. Raises ChannelError."""
        if self._work is None:
            return
        self._channel.check()
        end = time.monotonic() + self._channel.timeout + 5  # gloo's own timeout comes first, and says more
        while not self._over(self._work, _TICK):
            self._channel.check()
            if time.monotonic() > end:
                raise ChannelError(f"{self._channel}: nothing moved for {self._channel.timeout:g} s.")
        self._channel.check()
        try:
            self._work.wait()
            self._finish()
        except RuntimeError as error:
            raise ChannelError(_said(self._channel, error)) from error
        self._work = None

    def settled(self, timeout: float) -> bool:
        """Whether nobody reads or writes the buffer any more, however it ended; waits so long for it."""
        work = self._work
        return work is None or self._over(work, timeout)

    def _over(self, work: Any, timeout: float) -> bool:
        """NCCL's future is there at once, and its `wait` makes the device's stream wait, with all that others put into
        it: senders would wait for each other, and a server's requests for the hub. So one looks until it is over."""
        if not self._channel.looks:
            return self._done.wait(timeout)
        end = time.monotonic() + timeout
        while not work.is_completed():
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK)
        return True


class Channel:
    """One sender's group. `broadcast` is called alike on all ranks, from one thread at a time; `abort` from any."""

    def __init__(
        self, group: Any, backend: str, name: str, rank: int, world: int, timeout: float, device: torch.device | None
    ) -> None:
        self.backend, self.name, self.rank, self.world, self.timeout = backend, name, rank, world, timeout
        self._groups, self._device = [group], device
        self._aborted: str | None = None
        self._closed = False

    @property
    def looks(self) -> bool:
        """Whether broadcasts are on a GPU."""
        return self._device is not None

    def __str__(self) -> str:
        return f"Channel {self.name} ({self.backend}, rank {self.rank} of {self.world})"

    def check(self) -> None:
        """Raise ChannelError after an abort."""
        if self._aborted is not None:
            raise ChannelError(f"{self} was aborted: {self._aborted}.")

    def broadcast(self, buffer: Array) -> Pending:
        """Send `buffer` (uint8, contiguous) from rank 0 to all; everywhere else it is filled.

        Its size must be the same on all ranks: too long a buffer stays stale at its end, and one that is too short ends
        the process. So the size is said in a header first. An empty buffer moves nothing.
        """
        self.check()
        return self.post(buffer)

    def post(self, buffer: Array) -> Pending:
        """The same after an abort, too: for what belongs together."""
        if not buffer.size:
            return Pending(self, None, lambda: None, 0)
        if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
            raise ValueError(f"a channel carries contiguous uint8; this is {buffer.dtype}, {buffer.strides} apart")
        import torch

        tensor = torch.from_numpy(buffer)
        staged = tensor if self._device is None else self._staged(tensor)
        try:
            work = self._groups[0].broadcast(staged, 0)
        except RuntimeError as error:
            raise ChannelError(_said(self, error)) from error

        def finish() -> None:
            if staged is not tensor and self.rank:
                tensor.copy_(staged)
            elif staged is not tensor:
                torch.cuda.current_stream(self._device).synchronize()

        return Pending(self, work, finish, buffer.nbytes)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory on the GPU: a copy of what is to be sent, or room for what will come."""
        import torch

        return tensor.to(self._device) if self.rank == 0 else torch.empty_like(tensor, device=self._device)

    def abort(self, reason: str) -> None:
        """Free the threads that wait in this process. A buffer that a broadcast was to fill may still be written to
        until the other side is gone or the timeout is over: it is not to be used for anything else meanwhile."""
        self._aborted = self._aborted or reason
        if self.backend == "nccl" and self._groups:
            self._groups[0].abort()

    def close(self, promised: Sequence[Array] = ()) -> None:
        """Drop the connections: whoever waits on the other side gets a ChannelError at once. Idempotent.

        promised  what the other side has made room for already: gloo still sends it, after an abort, too. Otherwise
                  that room could not be used for anything else before the timeout is over
        """
        if self._closed:
            return
        self._closed = True
        self.abort("it was closed")
        with suppress(ChannelError):
            for buffer in promised if self.backend == "gloo" else ():
                self.post(buffer)
        # The group waits for operations that are still under way before it goes, up to their timeout.
        thread = threading.Thread(target=self._groups.clear, name=CLOSING, daemon=True)
        _closing[:] = [t for t in _closing if t.is_alive()] + [thread]
        thread.start()


def open_store(host: str, port: int, timeout: float, *, serve: bool = False) -> TCPStore:
    """The store at which the ranks of all groups of an epoch meet. `serve`: it is this process' own; port 0 picks one.

    Raises ChannelError when it cannot be made, or does not answer in time.
    """
    from torch.distributed import TCPStore

    wait = timedelta(seconds=timeout)
    try:
        return TCPStore(host, port, None, serve, wait, wait_for_workers=False)
    except RuntimeError as error:
        what = "cannot be served here" if serve else "does not answer"
        raise ChannelError(f"The rendezvous at {host}:{port} {what}: {_first_line(error)}") from error


def open_channel(
    backend: str, host: str, port: int, name: str, rank: int, world: int, timeout: float, *, store: Any = None
) -> Channel:
    """Join a sender's group; blocks until all of its ranks are there. Raises ChannelError when they do not come.

    host, port  of the store; `store` is one that is open already
    name        no other epoch or sender may have it
    world       the sender and all servers
    """
    from torch.distributed import PrefixStore

    if backend not in BACKENDS:
        raise ChannelError(f"There is no backend {backend!r}; known are {', '.join(BACKENDS)}.")
    store = store if store is not None else open_store(host, port, timeout)
    prefix = PrefixStore(name, store)
    device = None
    try:
        if backend == "gloo":
            group = _gloo(prefix, host, rank, world, timeout)
        else:
            group, device = _nccl(prefix, rank, world, timeout)
    except RuntimeError as error:
        raise ChannelError(
            f"{name}: rank {rank} did not meet the other {world - 1} at {host}:{port}: {_first_line(error)}",
            hint="A server did not come to the join, or a firewall lies between the hosts.",
        ) from error
    return Channel(group, backend, name, rank, world, timeout, device)


def _gloo(store: Any, host: str, rank: int, world: int, timeout: float) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 4  # each waits for one broadcast: a head, and the parts of two bodies
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface and not _loopback(host):
        options._devices = [ProcessGroupGloo.create_device(interface=interface.split(",")[0])]
    else:
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(host))]
    return ProcessGroupGloo(store, rank, world, options)


def _nccl(store: Any, rank: int, world: int, timeout: float) -> tuple[Any, torch.device]:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ChannelError("The backend nccl needs a GPU, and this process has none.", hint="transport=gloo does not.")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(store, rank, world, options), torch.device("cuda", torch.cuda.current_device())


def _loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def own_address(host: str) -> str:
    """This machine's address on the way to `host`: what the others are told to connect to. Nothing is sent."""
    if _loopback(host):
        return "127.0.0.1"
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect(where)
            return str(s.getsockname()[0])
    except OSError as error:
        raise ChannelError(f"There is no way from here to {host}: {error}.") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _said(channel: Channel, error: Exception) -> str:
    text = str(error)
    if "Timed out" in text or "timeout" in text.lower():
        return f"{channel}: nothing came within {channel.timeout:g} s."
    if "onnection" in text or "closed" in text.lower():
        return f"{channel}: a process on the other side is gone."
    return f"{channel}: {_first_line(error)}"
