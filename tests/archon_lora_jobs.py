"""What ranks do in the tests of ArchonEngine's adapters: what they do in those of FSDPEngine's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import archon_jobs
import lora_jobs
from archon_jobs import Case


def train(cases: Sequence[Case], out: str, merge: bool = False) -> list[dict[str, Any]]:
    """Train every case; what it saves lies in `out`/number: `first`, `trained` and, if asked for, `merged`."""
    jobs: Any = lora_jobs
    jobs.make_engine = archon_jobs.make_engine  # in this process only, which ends with the job
    return [jobs._train(case, Path(out, str(number)), merge) for number, case in enumerate(cases)]


def resumed(case: Case, other: Case, out: str) -> dict[str, Any]:
    """A run that never stopped and one that did, and what another layout makes of the state."""
    jobs: Any = lora_jobs
    jobs.make_engine = archon_jobs.make_engine
    return {**jobs.resumed(case, out), "other": jobs.loaded_state(other, out)}


def refusals(cases: Sequence[Case]) -> list[str]:
    jobs: Any = lora_jobs
    jobs.make_engine = archon_jobs.make_engine
    return jobs.refusals(cases)
