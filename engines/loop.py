"""The training loop, the same for every engine: steps, evaluation, saving, stopping in time.

Every rank runs it in step with the others. What one of them decides alone (a signal came, a step failed) is agreed upon
before it changes the course.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..converter.errors import ConvertError, RankError
from .api.base import TrainEngine
from .api.run import RunConfig
from .data.batches import lengths
from .data.loader import Loader
from .metrics import Meter, Reduce, StepTimes, alone
from .profiling import ProfilerWindow
from .tracking import Trackers
from .watchdog import Watchdog

__all__ = ["Diverged", "Evaluation", "Outcome", "States", "Trainer"]

Batch = dict[str, Any]


class Diverged(ConvertError):
    """The training does not go on: gradients have not been finite for several steps in a row."""


class States(Protocol):
    """Training states on disk. All methods are called on every rank."""

    def save(self, step: int, trainer: Mapping[str, Any]) -> Path:
        """Write engine, RNG and `trainer` as the state of this step; complete, or not there at all."""
        ...

    def load(self) -> Mapping[str, Any] | None:
        """Bring the engine to the state to resume from and return what the trainer saved; None when there is none."""
        ...

    def wait(self) -> None:
        """Until what is being written is complete."""
        ...


@dataclass
class Evaluation:
    """Batches of the evaluation data, this rank's parts; the same ones each time."""

    batches: Callable[[], Iterator[Batch]]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the last step, and the signal that ended it (None: all steps were taken)."""

    step: int
    signal: signal.Signals | None = None
    loss: float = math.nan


@dataclass
class Trainer:
    """Trains `engine` for `total` steps on `loader`'s batches.

    `prepare` completes a batch before it is learned from (advantages, say). `reduce` makes numbers of a rank those of
    the run. Call `run`; what it needs of the outside (models, files, groups) is made in `training`.
    """

    engine: TrainEngine
    config: RunConfig
    loader: Loader
    total: int
    loss: Callable[..., Any]
    weight: Callable[[Mapping[str, Any]], Any]
    evaluation: Evaluation | None = None
    states: States | None = None
    trackers: Trackers = field(default_factory=Trackers)
    meter: Meter = field(default_factory=Meter)
    profiler: ProfilerWindow | None = None
    watchdog: Watchdog | None = None
    prepare: Callable[[Batch], Batch] | None = None
    reduce: Reduce = alone
    step: int = 0
    """Steps taken, so the number of the last one counted from 1."""
    failed: int = 0
    """Steps in a row whose gradients were not finite."""
    last_loss: float = math.nan
    _signal: int = 0

    # ---------------------------------------------------------------------------------------- the whole run

    def run(self, until: int | None = None) -> Outcome:
        """Resume where there is something to resume, train, evaluate, save. `until` stops after that step, as a signal
        would.

        Raises Diverged, RankError (another rank failed), and whatever engine and data raise.
        """
        with ExitStack() as stack:
            stack.enter_context(self._signals())
            try:
                return self._run(until)
            except (RuntimeError, OSError, RankError) as error:
                told = isinstance(error, RankError) and error.__cause__ is None  # by the rank that failed itself
                found = self.watchdog.explain(error) if self.watchdog and not told else error
                if isinstance(found, RankError) and found is not error:
                    raise found from error
                raise
            finally:
                if self.profiler:
                    self.profiler.close()

    def _run(self, until: int | None) -> Outcome:
        self._resume()
        self.trackers.log("start", {"step": self.step, "backend": self.engine.backend, "total_steps": self.total})
        if self.evaluation and self.config.eval.at_start and self.step == 0:
            self._evaluate()
        stopped: signal.Signals | None = None
        while self.step < self.total:
            self._train_step()
            if poll := getattr(self.states, "poll", None):  # a save that runs beside training may have ended
                poll()
            if self._due(self.config.eval.every):
                self._evaluate()
            stopped = self._agreed_signal()
            if stopped or (until is not None and self.step >= until):
                break
            if self._due(self.config.save.every) and self.step < self.total:
                self._save()
        return self._finish(stopped)

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _finish(self, stopped: signal.Signals | None) -> Outcome:
        done = self.step >= self.total
        if done and self.evaluation and self.config.eval.at_end and not self._due(self.config.eval.every):
            self._evaluate()
        if not done or self.config.save.at_end:
            self._save()
        if self.states:
            self.states.wait()
        if stopped:
            said = f"{stopped.name} after step {self.step}: saved; the same command resumes."
            self.trackers.say(said, step=self.step)
        if done:
            self.trackers.log("end", {"step": self.step, "loss": self.last_loss, "tokens": self.meter.tokens})
        return Outcome(self.step, stopped, self.last_loss)

    # ---------------------------------------------------------------------------------------- a step

    def _train_step(self) -> None:
        number, times = self.step + 1, StepTimes()
        if self.profiler:
            self.profiler.before(number)
        with times.part("total"):
            with times.part("data"):
                batch = self.loader.next()
                if self.prepare:
                    batch = self.prepare(batch)
            with times.part("step"):
                self.engine.train()
                result = self.engine.train_batch(batch, self.loss, self.weight)
                self.engine.lr_scheduler_step()
        if self.profiler and (trace := self.profiler.after(number)):
            self.trackers.say(f"profiler: {trace}", step=number)
        self.step = number
        line = self.meter.record(number, result, lengths(batch), times.seconds, self.engine.get_device_stats().peak)
        line |= self._losses_own_stats()
        self.last_loss = line["loss"]
        if number % self.config.log.every == 0 or number in (1, self.total) or not result["update_successful"]:
            self.trackers.log("train", line)
        self._mind_failure(bool(result["update_successful"]), line)

    def _losses_own_stats(self) -> dict[str, float]:
        """What the loss function measured on the last micro-batch of this rank, if it does so."""
        stats = getattr(self.loss, "stats", None) or {}
        return {f"policy/{name}": value for name, value in stats.items()}

    def _mind_failure(self, successful: bool, line: Mapping[str, Any]) -> None:
        """A skipped step is counted; several in a row end the run before the log fills with them."""
        self.failed = 0 if successful else self.failed + 1
        if self.failed == 0:
            return
        self.trackers.say(
            f"step {self.step}: the gradient norm is {line['grad_norm']} (loss {line['loss']}), skipped", step=self.step
        )
        if self.failed >= self.config.max_failed_steps:
            raise Diverged(
                f"Step {self.step}: {self.failed} steps in a row had no finite gradient (loss {line['loss']}, gradient "
                f"norm {line['grad_norm']}).",
                hint="Lower engine.optimizer.lr, lengthen the warm-up, or look for odd samples. The last training "
                "state is from before.",
            )

    # ---------------------------------------------------------------------------------------- evaluation

    def _evaluate(self) -> None:
        """The mean loss over all evaluation data, each target counting once."""
        assert self.evaluation is not None
        self.engine.eval()
        total = weights = 0.0
        start = time.perf_counter()
        for batch in self.evaluation.batches():
            loss = self.engine.eval_batch(batch, self.loss, self.weight)
            # Pipeline stages before the last have no loss; on those that have one it is the same.
            value = self.reduce([-math.inf if loss is None else float(loss)], "max")[0]
            weight = self.reduce([float(self.weight(batch))], "sum")[0]
            if weight:
                total, weights = total + value * weight, weights + weight
        self.engine.train()
        line = {"step": self.step, "eval_loss": total / weights if weights else math.nan, "targets": int(weights)}
        self.trackers.log("eval", line | {"seconds": time.perf_counter() - start})

    # ---------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What the loop itself has to remember, as JSON."""
        return {
            "step": self.step,
            "total_steps": self.total,
            "data": self.loader.state_dict(),
            "meter": self.meter.state_dict(),
            "failed_in_a_row": self.failed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state["data"])
        self.meter.load_state_dict(state["meter"])
        self.step, self.failed = int(state["step"]), int(state["failed_in_a_row"])

    def _resume(self) -> None:
        state = self.states.load() if self.states else None
        if state is not None:
            self.load_state_dict(state)
            self.trackers.say(f"resumed after step {self.step}", step=self.step)
            for note in getattr(self.states, "notes", ()):
                self.trackers.say(note, step=self.step)

    def _save(self) -> None:
        if self.states:
            path = self.states.save(self.step, self.state_dict())
            self.trackers.say(f"step {self.step}: training state in {path}", step=self.step)

    # ---------------------------------------------------------------------------------------- signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT are remembered until the step is done; a second one ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def remember(number: int, frame: Any) -> None:
            if self._signal:
                raise KeyboardInterrupt
            self._signal = number

        before = {s: signal.signal(s, remember) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _agreed_signal(self) -> signal.Signals | None:
        """The signal that any rank has got: they stop after the same step."""
        number = int(self.reduce([float(self._signal)], "max")[0])
        return signal.Signals(number) if number else None
