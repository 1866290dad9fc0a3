"""The command `sync`: new weights into running servers, once or whenever a training directory has new ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import cli_options as given

if TYPE_CHECKING:
    from .sync.hub import WeightSync
    from .sync.report import PushReport

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
        type=given.Seconds(1),
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
    click.option("--allow-nan", is_flag=True, help="Push weights that hold NaN; otherwise they are refused."),
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
        type=given.Seconds(0.1),
        default=2.0,
        show_default=True,
        metavar="SECONDS",
        help="Between two looks at SRC.",
    ),
    click.option(
        "--settle",
        type=given.Seconds(),
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

    \b
    Exit codes:
      0    every server has confirmed the version
      1    it was decided, and not all have confirmed it: one was left out
           (--on-failure drop), or did not answer any more
      2    refused: wrong usage, or something that does not fit
      3    failed: a server does not answer, another hub pushes to it, the push
           was called off on the way; the same command may work later
      130, 143  Ctrl-C, SIGTERM (0 with --watch)
    After 2 and 3, 130 and 143 no server has changed (in vLLM and SGLang, which
    cannot go back, one may stay paused; the message says so).
    """
    from .cli_sync_end import UNCONFIRMED, ending

    with ending(ctx, as_json):
        _need_packages()
        if values["watch"]:
            _watch(source, as_json, values)
            return
        adapter, version = values["adapter"], values["version"]
        with hub(None if adapter else source, values) as opened:
            report = opened.push_adapter(adapter, source, version) if adapter else opened.push(version)
            _show(report, as_json)  # now: an interruption from here on changes nothing about it
        ctx.exit(0 if report.complete else UNCONFIRMED)


def _watch(source: str | Path, as_json: bool, values: dict[str, Any]) -> None:
    from .cli_sync_watch import watch

    if values["adapter"]:
        raise click.UsageError("--adapter pushes one adapter; --watch is for whole checkpoints.")
    watch(Path(source), values, lambda report: _show(report, as_json, line=True))


@contextmanager
def hub(source: str | Path | None, values: dict[str, Any]) -> Iterator[WeightSync]:
    """The hub for these options, connected; progress is drawn on a terminal."""
    from .cli_progress import bars
    from .sync import WeightSync

    with bars() as progress:
        names = (
            "transport", "mode", "anchor", "bucket", "on_failure", "timeout", "journal", "in_flight", "allow_nan",
        )  # fmt: skip
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
            try:
                yield opened
            except KeyboardInterrupt as stop:  # before the leases are given back: nothing has moved on since
                stop.args = (opened.standing(),)
                raise


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
    times = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in report.seconds.items() if seconds >= 5e-4)
    how = "tensor by tensor" if report.transport == "none" else f"by {report.transport}"
    yield f"  {report.mode} {how}, {report.gb_per_s:.2f} GB/s: {times}"
    yield from (f"  cast {kind}: {plural(count, 'tensor')}" for kind, count in report.casts.items())
    width = max(map(len, report.servers), default=0)
    for url, outcome in report.servers.items():
        paused = f"pause {outcome.pause_s * 1000:.1f} ms" if outcome.kind == "committed" else outcome.why
        yield f"  {url.ljust(width)}  {outcome.kind}  {outcome.tier}  {paused}".rstrip()
        yield from (f"    note: {note}" for note in outcome.notes)
    yield f"  root {report.root}"
