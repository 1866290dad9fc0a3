"""The process group in which a server of others takes tensors: this process is rank 0, its workers are 1, 2, ….

Both ends broadcast bytes. Nothing tells the ranks what a collective is for: names and shapes go over HTTP at the same
time, and when that call fails the group is aborted, so that nobody waits for a server that has given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ...codecs import Array
from ...errors import ChannelError, ConvertError
from ..channel import Channel, open_channel, open_store, own_address

_FIRST_DEVICE = {"gloo": "cpu", "nccl": "cuda"}


def torch_prefix(store: Any, group: str, backend: str) -> tuple[Any, str]:
    """The store and the name under which `torch.distributed` meets in a group that was made by
    `_new_process_group_helper` on PrefixStore(group), as SGLang and AReaL do it."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"{group}/", PrefixStore(group, store)), f"{_FIRST_DEVICE[backend]}/"


class Group:
    """One server's group. After any error it is of no more use: close it, and make another under another name."""

    def __init__(self, url: str, backend: str, world: int, timeout: float) -> None:
        self.backend, self.world, self.timeout = backend, world, timeout
        self.host = own_address(urlsplit(url).hostname or "127.0.0.1")
        self._store = open_store(self.host, 0, timeout, serve=True)
        self.port = int(self._store.port)
        self._channel: Channel | None = None
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="areal-sync-dialect")

    def open(self, name: str, invite: Any, *, as_torch: bool = True) -> None:
        """Meet the server's workers while `invite` (the HTTP call that makes them come) is under way."""
        store, prefix = torch_prefix(self._store, name, self.backend) if as_torch else (self._store, name)
        call = self._pool.submit(invite)
        meeting = self._pool.submit(
            open_channel, self.backend, self.host, self.port, prefix, 0, self.world, self.timeout, store=store
        )
        wait([call, meeting], return_when=FIRST_EXCEPTION)
        _reason_first(call)  # whoever refused does not come: the meeting ends by its timeout
        self._channel = meeting.result()
        call.result()

    def send(self, call: Any, buffers: Iterable[Array]) -> Any:
        """Broadcast buffers while the server, by the HTTP call, receives them. Returns the call's answer."""
        channel = self._channel
        if channel is None:
            raise ChannelError("The group is not open.")
        future: Future[Any] = self._pool.submit(call)
        future.add_done_callback(lambda f: channel.abort("the server gave up") if f.exception() else None)
        try:
            for buffer in buffers:
                channel.broadcast(np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)).wait()
        except ChannelError:
            _reason_first(future)
            raise
        return future.result()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._pool.shutdown(wait=False)


def _reason_first(call: Future[Any]) -> None:
    """A broken group is often what follows from a refused call, which says why."""
    if call.done() and isinstance(error := call.exception(), ConvertError):
        raise error


def with_last(buckets: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each with whether it is the last one."""
    held: list[Any] = []
    for bucket in buckets:
        if held:
            yield held.pop(), False
        held.append(bucket)
    for bucket in held:
        yield bucket, True
