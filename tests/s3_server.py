"""An S3 for tests: moto's server on loopback, and the environment that leads the AWS tools to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

BUCKET = "bucket"


@dataclass
class S3:
    """A running server with one bucket. `env`: what a process needs to reach it; `fs`: s3fs on it."""

    url: str
    env: Mapping[str, str]

    @cached_property
    def fs(self) -> Any:
        import s3fs

        how: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        return s3fs.S3FileSystem(key="test", secret="test", endpoint_url=self.url, **how)

    def put(self, directory: Any, prefix: str) -> str:
        """Upload a directory; its URL."""
        fs = self.fs
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                fs.put_file(str(path), f"{BUCKET}/{prefix}/{path.relative_to(directory)}")
        return f"s3://{BUCKET}/{prefix}"

    def files(self, prefix: str) -> dict[str, bytes]:
        """Every object below a prefix."""
        fs, root = self.fs, f"{BUCKET}/{prefix}/"
        return {name.removeprefix(root): fs.cat_file(name) for name in fs.find(root)}


@contextmanager
def running() -> Iterator[S3]:
    """A server until the block ends."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=url, **keys)
    client.create_bucket(Bucket=BUCKET)
    client.close()
    try:
        yield S3(url, env_of(url))
    finally:
        server.stop()


def env_of(url: str) -> dict[str, str]:
    """What leads the AWS tools to a server, and to nothing of this machine's user."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def settle(monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str]) -> None:
    """Put the environment in place, and forget file systems that were made for another one."""
    import s3fs
    from fsspec.asyn import sync

    from areal_convert.converter.remote import fetch, fs_directory, s3_place
    from areal_convert.converter.remote.mounts import unmount_all

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for fs in list(s3fs.S3FileSystem._cache.values()):
        if fs._s3 is not None:  # s3fs would wait a tenth of a second for it, and leave sockets open on a busy machine
            sync(fs.loop, fs._s3.close, timeout=30)
    s3fs.S3FileSystem.clear_instance_cache()
    s3_place.client.cache_clear()
    unmount_all()
    monkeypatch.setattr(fetch, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(fs_directory, "pause", lambda *_: None)
