"""Mirrors that nobody opened for a month go when a new one is made: a cache that only grows fills somebody's disk."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

MONTH = 30 * 24 * 3600.0
"""Seconds."""

STAMP = "used"
"""A file beside a mirror's `files` and `have`; its time says when the mirror was opened last."""


def used(base: Path) -> bool:
    """Note that a mirror is opened now. Returns whether it is a new one."""
    new = not (base / STAMP).exists()
    (base / STAMP).touch()
    return new


def clean(cache: Path) -> list[Path]:
    """Remove the mirrors below `cache` that were last opened more than a month ago; returns where they were. What
    cannot be removed stays: it is in nobody's way."""
    removed: list[Path] = []
    before = time.time() - MONTH
    for place, folders, names in os.walk(cache):
        folders[:] = [folder for folder in folders if folder not in ("files", "have")]
        base = Path(place)
        try:
            if STAMP in names and (base / STAMP).stat().st_mtime < before:
                _remove(base, cache)
                removed.append(base)
        except OSError:
            continue
    return removed


def _remove(base: Path, cache: Path) -> None:
    """The notes first: bytes without a note are fetched again, a note without its bytes would be believed."""
    shutil.rmtree(base / "have", ignore_errors=True)
    shutil.rmtree(base / "files", ignore_errors=True)
    (base / STAMP).unlink()
    while base != cache and not any(base.iterdir()):
        base.rmdir()
        base = base.parent
