"""How `sync` ends: its exit codes, errors as JSON, and the signals that stop it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from .errors import ChannelError, ConvertError, InDoubt, ServerRefused, ServerUnreachable, SyncError, Unreachable

UNCONFIRMED, REFUSED, FAILED, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143

_CLOSING = "areal-sync-close"
"""Threads in which `sync.channel` gives up a process group."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came: whatever is under way is called off, as after Ctrl-C."""


@contextmanager
def ending(ctx: click.Context, as_json: bool) -> Iterator[None]:
    """The body of the command. What it raises becomes a message and an exit code, and with --json an object on standard
    output, too: whoever reads that finds one in any case."""
    try:
        with _terminable():
            yield
    except (click.exceptions.Exit, BrokenPipeError):
        raise
    except KeyboardInterrupt as stop:
        title, code = ("Terminated", TERMINATED) if isinstance(stop, Terminated) else ("Interrupted", INTERRUPTED)
        text = f"{title}. {stop}".strip()
        _tell(as_json, title, text)
        click.echo(text, err=True)
        ctx.exit(code)
    except ConvertError as error:
        from .cli_show import error_text

        _tell(as_json, type(error).__name__, error)
        click.echo(error_text(error), err=True)
        ctx.exit(code_of(error))
    except Exception as error:  # wrong usage, a bug: said by whoever says it for all commands
        _tell(as_json, type(error).__name__, str(error) or type(error).__name__)
        raise


def code_of(error: ConvertError) -> int:
    """Whether the same command may work later (FAILED), will not (REFUSED), or something was decided (UNCONFIRMED)."""
    cause = error.__cause__
    if isinstance(error, InDoubt):
        return UNCONFIRMED
    if isinstance(error, ServerRefused):
        return FAILED if error.retryable else REFUSED
    if isinstance(error, (ServerUnreachable, ChannelError, Unreachable)):
        return FAILED
    if isinstance(error, SyncError):  # called off, because of the source or of the servers; or several kinds at once
        return code_of(cause) if isinstance(cause, ConvertError) and not isinstance(cause, SyncError) else FAILED
    return REFUSED


def _tell(as_json: bool, kind: str, what: ConvertError | str) -> None:
    if not as_json:
        return
    if isinstance(what, str):
        what = ConvertError(what)
    told: dict[str, Any] = {"kind": kind, "code": getattr(what, "code", ""), "message": what.what, "hint": what.hint}
    told["problems"] = [{"about": p.about, "what": p.what, "hint": p.hint} for p in what.problems]
    click.echo(json.dumps({"error": told}, ensure_ascii=False))
    sys.stdout.flush()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises Terminated here; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def let_go(code: Any, patience: float = 2.0) -> None:
    """Before Python ends: a group that was called off may wait for operations in a thread of its own. It gets a moment;
    ended by force there it would take the process with it (SIGABRT, in the place of our exit code)."""
    waiting = [thread for thread in threading.enumerate() if thread.name == _CLOSING]
    for thread in waiting:
        thread.join(patience)
    if any(thread.is_alive() for thread in waiting):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else REFUSED)
