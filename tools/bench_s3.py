#!/usr/bin/env python3
"""Measures our reader of S3 and HTTP against others on the same bytes, in one run: python tools/bench_s3.py --help

Two servers on loopback, each in a process of its own: the tests' file server (`tests/range_server.py`, which sends
files by `sendfile` and speaks enough of S3 to be read from), and moto. moto itself sends some 200 MiB/s, whoever reads:
its figures say only that nobody is slower. Both sides share the machine's cores.

    s3fs get         a plain download to the disk: what `ours` is compared with
    s3fs ranges      `cat_ranges`, 16 MiB each, four at a time
    obstore          `get` of ranges as a stream, where obstore is installed
    fsspec http      `cat_file` of ranges over plain HTTP
    ours             `Fetcher` over `FsspecStore`: s3:// and http://, 16 MiB, four threads, into memory
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
MIB = 1 << 20
STEP, THREADS = 16 * MIB, 4
BUCKET, KEY = "bench", "model/model.safetensors"
MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://127.0.0.1:%d" % server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def serving(*command: str) -> Iterator[str]:
    """A server in another process; its URL."""
    how: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, *command], **how)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def _spread(size: int, read: Callable[[int, int], Any]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda begin: read(begin, min(size, begin + STEP)), range(0, size, STEP)))


def s3fs_get(size: int, out: memoryview) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ["BENCH_DIR"]) as directory:
        _s3fs().get_file(f"{BUCKET}/{KEY}", f"{directory}/file")


def s3fs_ranges(size: int, out: memoryview) -> None:
    fs = _s3fs()
    starts = list(range(0, size, STEP))
    for n in range(0, len(starts), THREADS):
        group = starts[n : n + THREADS]
        ends = [min(size, begin + STEP) for begin in group]
        for begin, data in zip(group, fs.cat_ranges([f"{BUCKET}/{KEY}"] * len(group), group, ends), strict=True):
            out[begin : begin + len(data)] = data


def _s3fs() -> Any:
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True)


def obstore_stream(size: int, out: memoryview) -> None:
    import obstore
    from obstore.store import S3Store

    options: Any = {"allow_http": True}
    store = S3Store(BUCKET, endpoint=os.environ["AWS_ENDPOINT_URL"], region="us-east-1", client_options=options)

    def read(begin: int, end: int) -> None:
        for chunk in obstore.get(store, KEY, options={"range": (begin, end)}).stream(min_chunk_size=MIB):
            data = memoryview(chunk)
            out[begin : begin + len(data)] = data
            begin += len(data)

    _spread(size, read)


def fsspec_http(size: int, out: memoryview) -> None:
    import fsspec

    fs, url = fsspec.filesystem("http", skip_instance_cache=True), f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/{KEY}"

    def read(begin: int, end: int) -> None:
        out[begin:end] = fs.cat_file(url, begin, end)

    _spread(size, read)


def ours(url: str) -> Callable[[int, memoryview], None]:
    def action(size: int, out: memoryview) -> None:
        from areal_convert.converter.remote.fetch import Fetcher
        from areal_convert.converter.remote.fs_store import FsspecStore

        fetcher = Fetcher(FsspecStore(url.format(os.environ["AWS_ENDPOINT_URL"])))
        name = KEY.rpartition("/")[2]
        _spread(size, lambda begin, end: fetcher.read_into(name, begin, out[begin:end]))

    return action


READERS: dict[str, Callable[[int, memoryview], None]] = {
    "s3fs get": s3fs_get,
    "s3fs ranges": s3fs_ranges,
    "ours, s3://": ours(f"s3://{BUCKET}/{KEY}"),
    "obstore": obstore_stream,
    "fsspec http": fsspec_http,
    "ours, http://": ours(f"{{}}/{BUCKET}/{KEY}"),
}


def bench(label: str, size: int, repeat: int, data: bytes) -> None:
    """Every reader `repeat` times in turn; medians, and ratios to s3fs' plain download."""
    out = memoryview(bytearray(size))
    names = [n for n in READERS if n != "obstore" or find_spec("obstore")]
    names = [n for n in names if "http" not in n or label != "moto"]  # which wants signed requests
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeat + 1):  # the first warms up: imports, clients, the page cache
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            out[:: 1 << 16] = bytes(len(out[:: 1 << 16]))
            start = time.perf_counter()
            READERS[name](size, out)
            if turn:
                seconds[name].append(time.perf_counter() - start)
            if name != "s3fs get" and out != data:
                raise SystemExit(f"{label}: {name} read something else")
    base = statistics.median(seconds["s3fs get"])
    for name in names:
        middle = statistics.median(seconds[name])
        print(f"{label:12} {name:14} {size / MIB / middle:7.0f} MiB/s   {base / middle:5.2f} × s3fs get")


def main() -> None:
    """Serve, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, metavar="MIB", help="size of the file (default: 256)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="measured turns (default: 3)")
    parser.add_argument("--no-moto", action="store_true", help="the file server only")
    given = parser.parse_args()
    keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= keys
    size, data = given.size * MIB, os.urandom(given.size * MIB)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["BENCH_DIR"] = directory
        file = Path(directory) / BUCKET / KEY
        file.parent.mkdir(parents=True)
        file.write_bytes(data)
        with serving(str(TOOLS.parent / "tests" / "range_server.py"), directory) as url:
            os.environ["AWS_ENDPOINT_URL"] = url
            bench("file server", size, given.repeat, data)
        if not given.no_moto:
            with serving("-c", MOTO) as url:
                os.environ["AWS_ENDPOINT_URL"] = url
                _forget()
                _s3fs().mkdir(BUCKET)
                _s3fs().put_file(str(file), f"{BUCKET}/{KEY}")
                bench("moto", size, given.repeat, data)


def _forget() -> None:
    """Clients belong to the server that the environment named when they were made."""
    import s3fs

    from areal_convert.converter.remote.s3_place import client

    s3fs.S3FileSystem.clear_instance_cache()
    client.cache_clear()


if __name__ == "__main__":
    main()
