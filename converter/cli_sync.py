"""The command `sync`: new weights into running servers, once or whenever a training directory has new ones."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import cli_options as given

if TYPE_CHECKING:
    from .sync.hub import WeightSync
    from .sync.report import PushReport
    from .sync.watching import Appeared, Watch

TRANSPORTS = ("auto", "gloo", "nccl", "shm", "disk", "inline")
"""As in `sync.transport`, which is too heavy to import for `--help`; a test compares the two."""

MODES = ("auto", "full", "delta")
IN_FLIGHT = ("finish", "wait", "abort", "keep")

_SERVERS = given.group(
    click.option("--server", "servers", multiple=True, required=True, metavar="URL", help="A server (repeatable)."),
    click.option(
        "--token",
        envvar="AREAL_SERVE_TOKEN",
        show_envvar=True,
        metavar="TEXT",
        help="Bearer token of the servers. In the environment nobody else sees it.",
    ),
    click.option("--token-env", metavar="NAME", help="Environment variable that holds the token, if another one."),
)
_HOW = given.group(
    click.option("--transport", type=click.Choice(TRANSPORTS), default="auto", show_default=True, help="How bytes go."),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        default="auto",
        show_default=True,
        help="delta: only blocks that changed, where the servers hold what they changed from; auto: the same.",
    ),
    click.option("--anchor", type=click.IntRange(0), default=0, metavar="N", help="A whole push every N; 0: no need."),
    click.option("--bucket", type=given.size, default="16MiB", show_default=True, help="Bytes that travel at a time."),
    click.option(
        "--directory", type=click.Path(path_type=Path), metavar="DIR", help="disk: one that hub and servers both see."
    ),
    click.option(
        "--on-failure",
        type=click.Choice(["abort", "drop"]),
        default="abort",
        show_default=True,
        help="When a server fails: nothing changes anywhere, or the others get the version without it.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=1),
        default=60.0,
        show_default=True,
        metavar="SECONDS",
        help="For which a server may be silent.",
    ),
    click.option(
        "--journal",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Decisions are written there; after a kill the next `sync` with it completes what was decided.",
    ),
    click.option(
        "--in-flight",
        type=click.Choice(IN_FLIGHT),
        default="finish",
        show_default=True,
        help="What becomes of requests that run as the weights change.",
    ),
)
_OTHERS = given.group(
    click.option(
        "--server-path",
        metavar="DIR",
        help="vLLM, SGLang: have them read this directory, as they see it; nothing is sent.",
    ),
    click.option(
        "--fp8", type=click.Path(path_type=Path), metavar="DIR", help="vLLM, SGLang: the FP8 model that they serve."
    ),
    click.option("--drained", is_flag=True, help="vLLM, SGLang: no request reaches them until the push has ended."),
)
_WATCH = given.group(
    click.option("--watch", is_flag=True, help="Push every complete checkpoint that appears in SRC, until Ctrl-C."),
    click.option(
        "--interval",
        type=click.FloatRange(min=0.1),
        default=2.0,
        show_default=True,
        metavar="SECONDS",
        help="Between two looks at SRC.",
    ),
    click.option(
        "--settle",
        type=click.FloatRange(min=0),
        default=3.0,
        show_default=True,
        metavar="SECONDS",
        help="A directory without a marker is complete when it has not changed for so long.",
    ),
)


@click.command(short_help="Push new weights into running servers.")
@given.SOURCE
@_SERVERS
@click.option(
    "--version", type=click.IntRange(1), metavar="N", help="Of the weights; default: the servers' next, a step."
)
@_WATCH
@_HOW
@_OTHERS
@click.option("--adapter", metavar="NAME", help="SRC is a LoRA adapter (PEFT's files): push it alone, under this name.")
@given.OPENING
@given.JSON
@click.pass_context
def sync(ctx: click.Context, source: str | Path, as_json: bool, **values: Any) -> None:
    """Push the weights of SRC (a checkpoint of any format, here or elsewhere) into running servers.

    All servers change, or none: until every byte has arrived everywhere and its digest is right, all go on answering
    with the old weights. `areal-convert serve` is such a server; vLLM and SGLang are known by asking them.

    With --watch SRC is a training run's directory. What appears in it is pushed when it is complete, with its step as
    the version; a server that was restarted gets the last one again.
    """
    from .cli import DIFFERENT, OK

    _need_packages()
    if values["adapter"] and values["watch"]:
        raise click.UsageError("--adapter pushes one adapter; --watch is for whole checkpoints.")
    if values["watch"]:
        _watch(Path(source), as_json, values)
        ctx.exit(OK)
    adapter, version = values["adapter"], values["version"]
    with hub(None if adapter else source, values) as opened:
        report = opened.push_adapter(adapter, source, version) if adapter else opened.push(version)
    _show(report, as_json)
    ctx.exit(OK if report.complete else DIFFERENT)


@contextmanager
def hub(source: str | Path | None, values: dict[str, Any]) -> Iterator[WeightSync]:
    """The hub for these options, connected; progress is drawn on a terminal."""
    from .cli_progress import bars
    from .sync import WeightSync

    with bars() as progress:
        names = ("transport", "mode", "anchor", "bucket", "on_failure", "timeout", "journal", "in_flight")
        opened = WeightSync(
            source,
            list(values["servers"]),
            token=_token(values),
            on_progress=progress,
            options=_options(values),
            **{name: value for name, value in given.opening(values).items() if value not in (None, ())},
            **{name: values[name] for name in names},
        )
        with opened:
            yield opened


def _options(values: dict[str, Any]) -> dict[str, Any]:
    """For the transport (`directory`) and for servers of others, by the names that these have for them."""
    named = {"directory": "directory", "server_path": "path", "fp8": "fp8", "drained": "drained"}
    found = {name: values[option] for option, name in named.items() if values[option]}
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def _token(values: dict[str, Any]) -> str | None:
    import os

    if values["token_env"]:
        found = os.environ.get(values["token_env"])
        if not found:
            raise click.UsageError(f"--token-env: {values['token_env']} is not set.")
        return found
    return values["token"] or None


def _need_packages() -> None:
    """Raises ConfigError that names the extra where its package is missing."""
    from importlib.util import find_spec

    from .errors import ConfigError

    if find_spec("requests") is None:
        raise ConfigError("`sync` needs requests, which is not installed.", hint="pip install 'areal-convert[sync]'")


# ------------------------------------------------------------------------------------------------ what is shown


def _show(report: PushReport, as_json: bool, *, line: bool = False) -> None:
    if as_json:
        click.echo(json.dumps(report.report(), default=str, indent=None if line else 2, ensure_ascii=False))
        sys.stdout.flush()
        return
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    for text in report_lines(report):
        click.echo(text)


def report_lines(report: PushReport) -> Iterator[str]:
    """A push: what was sent, how fast, how long each phase took, and a line for each server."""
    from .cli_show import head
    from .human import plural, size_text

    sent = size_text(report.sent_bytes)
    if report.sent_bytes < report.bytes:
        sent += f" of {size_text(report.bytes)} ({report.sent_bytes / max(1, report.bytes):.1%})"
    yield f"{head(f'version {report.version}')}: {sent} to {plural(len(report.servers), 'server')}"
    times = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in report.seconds.items())
    yield f"  {report.mode} by {report.transport}, {report.gb_per_s:.2f} GB/s: {times}"
    width = max(map(len, report.servers), default=0)
    for url, outcome in report.servers.items():
        paused = f"pause {outcome.pause_s * 1000:.1f} ms" if outcome.kind == "committed" else outcome.why
        yield f"  {url.ljust(width)}  {outcome.kind}  {outcome.tier}  {paused}".rstrip()
        yield from (f"    note: {note}" for note in outcome.notes)
    yield f"  root {report.root}"


# ------------------------------------------------------------------------------------------------ watching


def _watch(source: Path, as_json: bool, values: dict[str, Any]) -> None:
    from .errors import SourceError
    from .sync.watching import Watch

    if not source.is_dir():
        raise SourceError(f"{source}: there is no such directory to watch.")
    watch = Watch(source, values["settle"])
    click.echo(f"Watching {source}; Ctrl-C ends it.", err=True)
    try:
        Watcher(watch, values, lambda report: _show(report, as_json, line=True)).run(threading.Event())
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)


class Watcher:
    """Pushes what a `Watch` finds, the newest only where several have come, and keeps servers at the last version.

    A push that fails is tried again until it succeeds or something newer has appeared; a checkpoint that has gone
    meanwhile is passed over.
    """

    def __init__(self, watch: Watch, values: dict[str, Any], show: Callable[[PushReport], None]) -> None:
        self.watch, self.values, self.show = watch, values, show
        self.version = 0
        self._next: int | None = values["version"]
        self._failed = ""

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set, or Ctrl-C."""
        waiting = self._first(stop)
        if waiting is None:
            return
        with hub(waiting.path, self.values) as opened:
            while not stop.is_set():
                found = self.watch.poll()
                waiting = found[-1] if found else waiting
                if waiting is not None and self._push(opened, waiting):
                    waiting = None
                elif waiting is None:
                    self._keep(opened)
                stop.wait(self.values["interval"])

    def _first(self, stop: threading.Event) -> Appeared | None:
        """The newest checkpoint that is there, or the first that comes."""
        while not stop.is_set():
            found = self.watch.poll()
            if found:
                return found[-1]
            stop.wait(self.values["interval"])
        return None

    def _push(self, opened: WeightSync, what: Appeared) -> bool:
        """Whether there is nothing more to do about it."""
        from .errors import RemoteError, SourceError, SyncError

        version = self._next if self._next is not None else what.number
        if version is not None and version <= self.version:
            self._say(
                f"{what.path.name} would be version {version}, and {self.version} was pushed: it gets the next one"
            )
            version = None
        try:
            report = opened.push(version, source=what.path)
        except RemoteError as error:
            return self._say(f"{what.path.name}: {error}; tried again")
        except SourceError as error:
            self._say(f"{what.path.name} was not pushed: {error}")
            return not what.path.exists()
        except SyncError as error:
            return self._say(f"{what.path.name} was not pushed: {error}; tried again")
        self.version, self._failed = report.version, ""
        self._next = None if self._next is None else report.version + 1
        click.echo(f"{what.path.name}:", err=True)
        self.show(report)
        return True

    def _keep(self, opened: WeightSync) -> None:
        """Bring servers that were restarted to the last version."""
        from .errors import SyncError

        try:
            late = opened.catch_up()
        except SyncError as error:
            self._say(str(error))
            return
        self._failed = ""
        for url in late:
            click.echo(f"{url} came back, and has version {self.version} again.", err=True)

    def _say(self, what: str) -> bool:
        """A warning, once for as long as it stays the same."""
        if what != self._failed:
            self._failed = what
            click.echo(f"warning: {what}", err=True)
        return False
