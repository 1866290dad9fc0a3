"""The command `serve`: a model behind OpenAI's API, into which new weights are pushed while it answers."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import cli_options as given

if TYPE_CHECKING:
    from .sync.server.app import EmbeddedServer, Settings

POLICIES = ("finish", "wait", "abort", "keep")
"""As in `sync.server.generation`, which is too heavy to import for `--help`; a test compares the two."""

_NETWORK = given.group(
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; loopback by default."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free port."),
    click.option(
        "--token",
        envvar="AREAL_SERVE_TOKEN",
        show_envvar=True,
        metavar="TEXT",
        help="Bearer token for everything but /health and the status page. In the environment nobody else sees it.",
    ),
)
_MODEL = given.group(
    click.option("--dtype", metavar="NAME", help="Cast weights (bfloat16, float16, float32); default: the config's."),
    click.option("--device", default="auto", show_default=True, metavar="NAME", help="cpu, cuda, cuda:1; auto: a GPU."),
    click.option("--tokenizer", type=given.PLACE, metavar="DIR", help="Tokenizer, where MODEL has none."),
    click.option(
        "--served-model-name", "names", multiple=True, metavar="NAME",
        help="Name in the API (repeatable); default: the directory's."
    ),
    click.option("--max-model-len", "max_len", type=given.COUNT, metavar="N", help="Context; default: the config's."),
    click.option("--attention", metavar="NAME", help="transformers' attention: sdpa, eager, flash_attention_2, …"),
    click.option("--weight-version", "version", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
                 help="Version of the weights in MODEL."),
)  # fmt: skip
_ROOM = given.group(
    click.option("--in-flight", type=click.Choice(POLICIES), default="finish", show_default=True,
                 help="Running requests at a commit: finish on the old weights, be waited for, be refused (503), or "
                 "keep going on the new ones."),
    click.option("--max-batch", type=given.COUNT, default=32, show_default=True, metavar="N",
                 help="Sequences at a time."),
    click.option("--max-queue", type=given.COUNT, default=512, show_default=True, metavar="N",
                 help="Sequences that wait; more are refused (429)."),
    click.option("--max-tokens", type=given.COUNT, metavar="N", help="Tokens that a request may generate at most."),
    click.option("--max-body", type=given.size, default="8MiB", show_default=True, help="Bytes of a request's body."),
    click.option("--grace", type=given.Seconds(), default=5.0, show_default=True, metavar="S",
                 help="Seconds that running requests get when the server is stopped."),
)  # fmt: skip


@click.command(short_help="Serve a model; weights can be pushed into it.")
@click.argument("source", metavar="MODEL", type=given.PLACE)
@_NETWORK
@_MODEL
@_ROOM
@given.OPENING
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="What is said on standard error.",
)
@given.JSON
def serve(source: str | Path, as_json: bool, log_level: str, **values: Any) -> None:
    """Serve MODEL (any format, or hf://org/name) behind OpenAI's API: completions, chat completions, models.

    New weights are pushed into it with `areal-convert sync` or `WeightSync`, while it answers: every answer comes from
    one version of the weights, and says from which. / is a status page, /metrics is for Prometheus.

    When it is ready, one line on standard output says where. Ctrl-C or SIGTERM ends it.
    """
    _need_packages()
    import logging

    from .sync.server.app import serve as serving

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s", stream=sys.stderr)
    settings = _settings(source, values)
    if settings.token is None and not is_loopback(settings.host):
        click.echo(
            f"warning: {settings.host} can be reached from other machines, and there is no --token: whoever reaches it "
            "may ask the model and replace its weights.",
            err=True,
        )
    serving(settings, lambda url, server: _ready(url, server, as_json), log_level=log_level)


def _settings(source: str | Path, values: dict[str, Any]) -> Settings:
    from .sync.server.app import Settings
    from .sync.server.generation import Room

    names = (
        "host",
        "port",
        "dtype",
        "device",
        "tokenizer",
        "max_len",
        "attention",
        "version",
        "in_flight",
        "max_tokens",
    )
    return Settings(
        source,
        **{name: values[name] for name in (*names, "max_body", "grace")},
        token=values["token"] or None,
        names=tuple(values["names"]),
        room=Room(rows=values["max_batch"], queue=values["max_queue"]),
        opening={name: value for name, value in given.opening(values).items() if value not in (None, ())},
    )


def _ready(url: str, server: EmbeddedServer, as_json: bool) -> None:
    from .cli import show_json

    about = {"url": url, **server.about()}
    for note in server.served.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        show_json(about)
    else:
        click.echo(f"Serving {about['model']}, weight version {about['weight_version']}, at {url}")
    sys.stdout.flush()


def _need_packages() -> None:
    """Raises ConfigError that names the extra where one of its packages is missing."""
    from importlib.util import find_spec

    from .errors import ConfigError

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`serve` needs packages that are not installed: {', '.join(missing)}.",
            hint="pip install 'areal-convert[serve]'",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
