"""Progress bars on a terminal; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]


@contextmanager
def bars() -> Iterator[Progress | None]:
    """A callback (phase, bytes done, bytes in all) that draws a bar for each phase on stderr, with bytes/s and the time
    left; None when stderr is no terminal. The bars are gone at the end."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, object] = {}

        def advance(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase, total=total)
            shown.update(tasks[phase], completed=done, total=total)  # type: ignore[arg-type]

        yield advance
