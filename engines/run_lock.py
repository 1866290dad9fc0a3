"""One run at a time in a directory: two of them would write the same states and mix their lines."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..converter.errors import TargetError

__all__ = ["only_run_in"]


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Nobody else trains in this directory meanwhile. Leaves no file behind, whatever ends the process.

    Raises TargetError when another run does. A file system without locks is trusted.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TargetError(f"{error.filename or folder}: cannot be written: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TargetError(
                f"{folder}: another run is training in this directory.",
                hint="Wait for it, or give this one a directory of its own (dir=…).",
            ) from None
        except OSError:  # no locks here (some network file systems)
            pass
        yield
    finally:
        os.close(held)
