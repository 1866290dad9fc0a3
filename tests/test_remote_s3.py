"""Checkpoints on S3, against moto's server: read in place, converted to and from, killed, resumed, refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import s3_server
from areal_convert.converter import Mesh, Options, convert, inspect, open_checkpoint, plan, verify
from areal_convert.converter.cli import cli
from areal_convert.converter.convert import run
from areal_convert.converter.errors import ConfigError, NoAccess, RemoteError, SourceError, TargetError
from areal_convert.converter.remote.fs_directory import Directory
from areal_convert.converter.remote.fs_store import UNFINISHED, FsspecStore
from range_server import RangeServer
from s3_server import BUCKET, S3

SHARD = Options(max_shard=150_000)
TARGETS: dict[str, tuple[str, Mesh]] = {
    "hf": ("hf", Mesh()),
    "torch_dist": ("torch_dist", Mesh(tp=2, pp=2)),
    "dcp": ("dcp", Mesh(dp_shard=2)),
    "mp_rank": ("mp_rank", Mesh(tp=2)),
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server.running() as s3:
        yield s3


@pytest.fixture
def s3(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server with nothing in its bucket."""
    s3_server.settle(monkeypatch, {**server.env, "AREAL_CACHE": str(tmp_path / "cache")})
    for name in server.fs.find(BUCKET):
        server.fs.rm_file(name)
    return server


@pytest.fixture
def small(model: Callable[..., Path]) -> Path:
    return model("qwen3", layers=2, max_shard_size="150KB", side_files=True)


# ------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("name", TARGETS)
def test_there_and_back_again_is_bitwise(name: str, s3: S3, small: Path, tmp_path: Path) -> None:
    to, mesh = TARGETS[name]
    result = convert(small, f"s3://{BUCKET}/out/{name}", to, mesh, SHARD)
    assert (result.verified, str(result.path)) == (True, f"s3://{BUCKET}/out/{name}")
    assert verify(small, f"s3://{BUCKET}/out/{name}").same

    local = convert(small, tmp_path / "local", to, mesh, SHARD)
    here = {str(p.relative_to(local.path)): p.read_bytes() for p in (tmp_path / "local").rglob("*") if p.is_file()}
    assert s3.files(f"out/{name}") == here

    back = convert(f"s3://{BUCKET}/out/{name}", tmp_path / "back", "hf", options=SHARD)
    assert verify(small, back.path).same
    assert not list((tmp_path / "cache" / "upload").glob("*/*"))


def test_every_report_takes_a_url(s3: S3, small: Path) -> None:
    url = s3.put(small, "models/q")
    assert inspect(url).ok
    assert plan(url, "torch_dist", Mesh(tp=2)).report()["source"]["path"].startswith("s3://bucket/models/q")
    for command in (
        ["inspect", url],
        ["plan", url, "--to", "dcp"],
        ["verify", str(small), url],
        ["diff", url, str(small)],
    ):
        ran = CliRunner().invoke(cli, command)
        assert ran.exit_code == 0, (command, ran.output)
        assert url in ran.output or command[0] in ("verify", "diff")


def test_one_file_is_a_checkpoint_too(s3: S3, model: Callable[..., Path]) -> None:
    whole = model("qwen3", layers=2)
    url = s3.put(whole, "single")
    assert verify(whole, f"{url}/model.safetensors").same


def test_one_rank_fetches_its_share(s3: S3, model: Callable[..., Path], tmp_path: Path) -> None:
    url = s3.put(model("qwen3", layers=4, hidden_size=256, intermediate_size=512), "wide")
    planned = plan(url, "dcp", Mesh(dp_shard=4), ranks=[1])
    wanted, whole = planned.moves.bytes_read, planned.plan.bytes_read
    result = convert(url, tmp_path / "one", "dcp", Mesh(dp_shard=4), ranks=[1])
    assert wanted < 0.4 * whole
    assert wanted <= result.fetched["bytes"] <= 1.1 * wanted + 64 * 1024


def test_an_object_that_changes_under_us_is_noticed(s3: S3, small: Path, tmp_path: Path) -> None:
    url = s3.put(small, "moving")
    planned = plan(url, "dcp", Mesh(dp_shard=2))
    name = "model-00002-of-00004.safetensors"
    s3.fs.pipe_file(f"{BUCKET}/moving/{name}", (small / name).read_bytes()[::-1])
    with pytest.raises(SourceError, match=r"changed while it was read"):
        run(planned, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.fixture
def faulty(model_copy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """An S3 to read from that can be told to misbehave: its bucket holds a model."""
    small = model_copy("qwen3", layers=2, max_shard_size="150KB")
    (tmp_path / "root" / BUCKET).mkdir(parents=True)
    small.rename(tmp_path / "root" / BUCKET / "q")
    with RangeServer(tmp_path / "root") as server:
        s3_server.settle(monkeypatch, {**s3_server.env_of(server.url), "AREAL_CACHE": str(tmp_path / "cache")})
        yield server


def test_reading_goes_on_after_drops_and_503(faulty: RangeServer, tmp_path: Path) -> None:
    here = tmp_path / "root" / BUCKET / "q"
    planned = plan(f"s3://{BUCKET}/q", "dcp", Mesh(dp_shard=2))
    faulty.reset()
    faulty.fault("*00001*.safetensors", drop_after=30_000, times=3)
    faulty.fault("*00002*.safetensors", drop_after=30_000, reset=True, times=2)
    faulty.fault("*00003*.safetensors", status=503, times=2)
    result = run(planned, tmp_path / "out")
    assert verify(here, tmp_path / "out").same
    assert result.fetched["retries"] >= 7
    spans = sorted(faulty.spans("*00001*.safetensors"))
    assert [begin for begin, _ in spans[1:4]] == [begin + 30_000 for begin, _ in spans[:3]]


def test_a_store_that_ignores_ranges(faulty: RangeServer) -> None:
    faulty.fault("*.safetensors", whole=True)
    with pytest.raises(SourceError, match="ignores ranges"):
        open_checkpoint(f"s3://{BUCKET}/q").check()


def test_what_is_not_there(s3: S3) -> None:
    with pytest.raises(NoAccess, match=r"s3://nobucket/x: there is no such bucket"):
        open_checkpoint("s3://nobucket/x")
    with pytest.raises(NoAccess, match=r"s3://bucket/none: there is nothing there"):
        open_checkpoint("s3://bucket/none")
    with pytest.raises(ConfigError, match="is no URL"):
        FsspecStore("s3:///x")


def test_credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3_server.settle(monkeypatch, {})
    with pytest.raises(NoAccess, match="there are no credentials"):
        open_checkpoint("s3://bucket/x")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    s3_server.settle(monkeypatch, {})
    with pytest.raises(NoAccess, match="nobody"):
        open_checkpoint("s3://bucket/x")


def test_a_profile_and_fsspec_s_configuration_are_honoured(
    s3: S3, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3.put(small, "models/q")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = a\naws_secret_access_key = b\n")
    env = {"AWS_PROFILE": "lab", "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials")}
    s3_server.settle(monkeypatch, env)
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"endpoint_url": s3.url})
    assert inspect(url).ok


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("AccessDenied", 403, "access is denied"),
        ("ExpiredToken", 400, "credentials have expired"),
        ("SignatureDoesNotMatch", 403, "credentials or the region are wrong"),
        ("PermanentRedirect", 301, "another region"),
        ("RequestTimeTooSkewed", 403, "Set this machine's clock"),
        ("InvalidObjectState", 403, "archived"),
    ],
)
def test_the_real_cause_is_said(code: str, status: int, said: str) -> None:
    from botocore.exceptions import ClientError

    from areal_convert.converter.remote.fs_errors import explain, explain_writing

    error = ClientError(
        {"Error": {"Code": code, "Message": "No."}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject"
    )
    read, written = explain(error, "s3://b/x"), explain_writing(error, "s3://b/x")
    assert isinstance(read, RemoteError) and said in str(read)
    assert isinstance(written, TargetError) and said in str(written) and "s3://b/x" in str(written)


def test_an_endpoint_that_refuses(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.settle(monkeypatch, {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    with pytest.raises(RemoteError, match=r"cannot be reached.*127\.0\.0\.1:1"):
        open_checkpoint("s3://bucket/x")
    with pytest.raises(TargetError, match=r"cannot be reached.*127\.0\.0\.1:1"):
        Directory("s3://bucket/x").files()


# ------------------------------------------------------------------------------------------------ targets


def test_a_target_that_is_in_the_way(s3: S3, small: Path) -> None:
    s3.fs.pipe_file(f"{BUCKET}/notes/todo.txt", b"milk")
    with pytest.raises(TargetError, match="not empty"):
        convert(small, f"s3://{BUCKET}/notes", "hf")
    with pytest.raises(TargetError, match="not a checkpoint"):
        convert(small, f"s3://{BUCKET}/notes", "hf", overwrite=True)
    with pytest.raises(TargetError, match="is a file"):
        convert(small, f"s3://{BUCKET}/notes/todo.txt", "hf")
    with pytest.raises(TargetError, match="whole bucket"):
        convert(small, f"s3://{BUCKET}", "hf")
    with pytest.raises(TargetError, match="no such bucket"):
        convert(small, "s3://nobucket/x", "hf")
    with pytest.raises(TargetError, match="areal-convert push SRC org/name"):
        convert(small, "hf://org/name", "hf")
    with pytest.raises(ConfigError, match="takes no files"):
        convert(small, "https://example.org/x", "hf")
    url = s3.put(small, "models/q")
    with pytest.raises(TargetError, match="lie inside each other"):
        convert(url, f"{url}/inside", "dcp")
    assert s3.files("notes") == {"todo.txt": b"milk"}


def test_overwriting_leaves_only_the_new_one(s3: S3, small: Path, model: Callable[..., Path]) -> None:
    url = s3.put(model("qwen3", layers=4, max_shard_size="100KB"), "q")
    s3.fs.pipe_file(f"{BUCKET}/q/extra.txt", b"old")
    convert(small, url, "hf", overwrite=True)
    assert verify(small, url).same
    assert "extra.txt" not in s3.files("q")
    assert {n for n in s3.files("q") if n.endswith(".safetensors")} == {p.name for p in small.glob("*.safetensors")}
    assert not s3.files("q.areal-partial")


def test_what_is_wrong_with_the_source_leaves_nothing(s3: S3, model_copy: Callable[..., Path]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    broken = model_copy("qwen3", layers=2)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(SourceError, match="NaN"):
        convert(broken, f"s3://{BUCKET}/out", "hf")
    assert not s3.files("out")


def test_a_damaged_upload_is_noticed(s3: S3, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Directory._put_file

    def damaged(self: Directory, path: str, file: Path, how: Any) -> None:
        real(self, path, file, how)
        self._fs.pipe_file(self._at(path), file.read_bytes()[::-1])

    monkeypatch.setattr(Directory, "_put_file", damaged)
    with pytest.raises(TargetError, match=r"model-00001-of-0000\d.safetensors is not what was sent"):
        convert(small, f"s3://{BUCKET}/out", "hf", options=SHARD)
    with pytest.raises(RemoteError, match="not whole"):
        open_checkpoint(f"s3://{BUCKET}/out")


def test_a_store_without_checksums_is_read_back(s3: S3, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_convert.converter.remote import fs_directory

    monkeypatch.setattr(fs_directory, "_claims", lambda info: set())
    read: list[str] = []
    real = Directory._read_back
    monkeypatch.setattr(Directory, "_read_back", lambda self, path, size: read.append(path) or real(self, path, size))
    convert(small, f"s3://{BUCKET}/out", "hf", options=SHARD)
    assert {p.name for p in small.glob("*.safetensors")} <= set(read)


def test_large_files_go_in_parts(s3: S3, small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from areal_convert.converter.remote import fs_directory

    monkeypatch.setattr(fs_directory, "PART", 5 << 20)
    monkeypatch.setattr(Directory, "_read_back", lambda *_: pytest.fail("its checksum is known"))
    big = tmp_path / "big.bin"
    big.write_bytes(os.urandom(11 << 20))
    sums = fs_directory.sums_of_file(big)
    assert Directory(f"s3://{BUCKET}/big").put("x", big, sums).etag == sums.parts
    assert sums.parts.endswith("-3")


def test_at_most_two_shards_lie_on_this_disk(
    s3: S3, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Directory.put, list[int]()

    def put(self: Directory, path: str, *rest: Any) -> Any:
        seen.append(len(list((tmp_path / "cache" / "upload").rglob("*.safetensors"))))
        return real(self, path, *rest)

    monkeypatch.setattr(Directory, "put", put)
    convert(small, f"s3://{BUCKET}/out", "hf", options=Options(max_shard=60_000))
    assert len(seen) > 6 and 1 <= max(seen) <= 2


def test_from_one_place_to_another_through_the_command(s3: S3, small: Path) -> None:
    url = s3.put(small, "models/q")
    ran = CliRunner().invoke(cli, ["convert", url, f"s3://{BUCKET}/out", "--to", "dcp", "--dp-shard", "2"])
    assert ran.exit_code == 0, ran.output
    assert f"s3://{BUCKET}/out (dcp" in ran.output and "made in" in ran.output
    ran = CliRunner().invoke(cli, ["convert", url, f"s3://{BUCKET}/copy", "--to", "hf", "--json"])
    assert ran.exit_code == 0, ran.output
    assert f'"path": "s3://{BUCKET}/copy"' in ran.output
    ran = CliRunner().invoke(cli, ["verify", f"s3://{BUCKET}/copy", f"s3://{BUCKET}/out"])
    assert ran.exit_code == 0, ran.output
    ran = CliRunner().invoke(cli, ["convert", url, f"s3://{BUCKET}/copy", "--to", "hf"])
    assert ran.exit_code == 2 and "--overwrite" in ran.output


def test_an_interrupted_upload_says_how_to_go_on(s3: S3, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Directory, "put", interrupted)
    ran = CliRunner().invoke(cli, ["convert", str(small), f"s3://{BUCKET}/out", "--to", "hf"])
    assert ran.exit_code == 130 and "--resume" in ran.output


# ------------------------------------------------------------------------------------------------ kill and resume

KILLED = """
import os, signal, sys
from areal_convert.converter import Mesh, Options, convert
from areal_convert.converter.remote.fs_directory import Directory
source, target, to, call, count, overwrite = sys.argv[1:]
real, left = getattr(Directory, call), [int(count)]
def counted(self, *args):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return real(self, *args)
setattr(Directory, call, counted)
mesh = Mesh(tp=2) if to == "mp_rank" else Mesh(dp_shard=2) if to == "dcp" else Mesh()
convert(source, target, to, mesh, Options(max_shard=150_000), overwrite=overwrite == "yes")
"""


def _killed(s3: S3, tmp_path: Path, *args: object) -> None:
    env = {**os.environ, **s3.env, "AREAL_CACHE": str(tmp_path / "cache")}
    ran = subprocess.run([sys.executable, "-c", KILLED, *map(str, args)], env=env, capture_output=True, timeout=60)
    assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sent: list[str] = []
    real = Directory.put

    def put(self: Directory, path: str, *rest: Any) -> Any:
        sent.append(path)
        return real(self, path, *rest)

    monkeypatch.setattr(Directory, "put", put)
    return sent


@pytest.mark.multiprocess
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_killed_upload_looks_like_nothing_and_is_resumed(
    to: str, s3: S3, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/out"
    _killed(s3, tmp_path, small, url, to, "put", 2, "no")
    left = set(s3.files("out"))
    arrived = left - {UNFINISHED}
    assert len(arrived) == 2 and not arrived & {"config.json", "model.safetensors.index.json", ".metadata"}
    with pytest.raises(RemoteError, match="not whole"):
        open_checkpoint(url)
    with pytest.raises(TargetError, match="unfinished"):
        convert(small, url, to, Mesh(dp_shard=2 if to == "dcp" else 1), SHARD)
    other = (Mesh(), Options(max_shard=77_000)) if to == "hf" else (Mesh(dp_shard=4), SHARD)
    with pytest.raises(TargetError, match="another source, other options"):
        convert(small, url, to, *other, resume=True)
    sent = _counted(monkeypatch)
    result = convert(small, url, to, Mesh(dp_shard=2 if to == "dcp" else 1), SHARD, resume=True)
    assert sent and not set(sent) & arrived
    assert result.verified and verify(small, url).same
    assert UNFINISHED not in s3.files("out")
    assert set(result.digests) == set(open_checkpoint(small).atoms)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("call", "count"), [("put", 2), ("copy_from", 1), ("copy_from", 9)])
def test_a_killed_overwrite_keeps_the_old_or_shows_nothing(
    call: str, count: int, s3: S3, small: Path, model: Callable[..., Path], tmp_path: Path
) -> None:
    old = model("qwen3", layers=3, max_shard_size="150KB")
    url = s3.put(old, "out")
    _killed(s3, tmp_path, small, url, "hf", call, count, "yes")
    if call == "put":
        assert verify(old, url).same
    else:
        with pytest.raises(RemoteError, match="not whole"):
            open_checkpoint(url)
        assert not {"config.json", "model.safetensors.index.json"} <= set(s3.files("out"))
    result = convert(small, url, "hf", options=SHARD, resume=True, overwrite=True)
    assert result.resumed and verify(small, url).same
    assert not s3.files("out.areal-partial") and UNFINISHED not in s3.files("out")


def test_starting_again_over_an_unfinished_one(
    s3: S3, small: Path, monkeypatch: pytest.MonkeyPatch, model: Callable[..., Path]
) -> None:
    url, real, left = f"s3://{BUCKET}/out", Directory.put, [2]

    def put(self: Directory, *args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Directory, "put", put)
    with pytest.raises(KeyboardInterrupt):
        convert(small, url, "hf", options=SHARD)
    monkeypatch.setattr(Directory, "put", real)
    other = model("qwen3", layers=3)
    convert(other, url, "hf", overwrite=True)
    assert verify(other, url).same and not [n for n in s3.files("out") if "-of-" in n]
