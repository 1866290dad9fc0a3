"""`sync --watch`: every checkpoint of a training run goes to the servers as it is completed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .errors import ConvertError
    from .sync.hub import WeightSync
    from .sync.report import PushReport
    from .sync.watching import Appeared, Watch

TRIES = 3
"""How often a checkpoint is tried that itself is to blame (it cannot be read, holds NaN, does not fit the servers)."""


def watch(source: Path, values: dict[str, Any], show: Callable[[PushReport], None]) -> None:
    """Until Ctrl-C or SIGTERM. Raises SourceError where there is nothing to watch."""
    from .errors import SourceError
    from .sync.watching import Watch

    if not source.is_dir():
        raise SourceError(f"{source}: there is no such directory to watch.")
    click.echo(f"Watching {source}; Ctrl-C ends it.", err=True)
    try:
        Watcher(Watch(source, values["settle"]), values, show).run(threading.Event())
    except KeyboardInterrupt as stop:
        click.echo(f"Stopped. {stop}".rstrip(), err=True)


class Watcher:
    """Pushes what a `Watch` finds, the newest only where several have come, and keeps servers at the last version.

    A push that a server fails is tried again until it succeeds or something newer has appeared. A checkpoint that is to
    blame itself is passed over after some tries, and at once when it has gone meanwhile.
    """

    def __init__(self, watch: Watch, values: dict[str, Any], show: Callable[[PushReport], None]) -> None:
        self.watch, self.values, self.show = watch, values, show
        self.version = 0
        self._next: int | None = values["version"]
        self._failed = ""
        self._tries = 0

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set, or Ctrl-C."""
        waiting = self._first(stop)
        if waiting is None:
            return
        from .cli_sync import hub

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
        from .errors import ConvertError

        version = self._next if self._next is not None else what.number
        if version is not None and version <= self.version:
            self._say(
                f"{what.path.name} would be version {version}, and {self.version} was pushed: it gets the next one"
            )
            version = None
        try:
            report = opened.push(version, source=what.path)
        except ConvertError as error:
            return self._pass_over(what, error)
        self.version, self._failed, self._tries = report.version, "", 0
        self._next = None if self._next is None else report.version + 1
        click.echo(f"{what.path.name}:", err=True)
        self.show(report)
        return True

    def _pass_over(self, what: Appeared, error: ConvertError) -> bool:
        """Whether a push that failed is not worth another try."""
        from .errors import ConvertError, RemoteError, SyncError

        cause = error.__cause__ if isinstance(error, SyncError) else error
        if cause is None or isinstance(cause, (SyncError, RemoteError)) or not isinstance(cause, ConvertError):
            self._say(f"{what.path.name} was not pushed: {error}; tried again")
            return False
        self._tries += 1
        if what.path.exists() and self._tries < TRIES:
            self._say(f"{what.path.name} was not pushed: {error}")
            return False
        self._tries = 0
        self._say(f"{what.path.name} is passed over until it changes: {error}")
        return True

    def _keep(self, opened: WeightSync) -> None:
        """Bring servers that were restarted to the last version."""
        from .errors import ConvertError

        try:
            late = opened.catch_up()
        except ConvertError as error:
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
