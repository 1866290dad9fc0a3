"""The commands `train` and `plot`. As in `converter.cli`, importing this imports click and nothing heavier."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..converter.errors import ConfigError

if TYPE_CHECKING:
    from .api.run import RunConfig
    from .training import Prepared

BACKENDS = ("fsdp", "megatron", "archon")


@click.command(short_help="Train a model: SFT or policy gradient, on any of the engines.")
@click.option(
    "--engine", "backend", type=click.Choice(BACKENDS), help="The engine; default: engine.backend of the configuration."
)
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="YAML file of the run.")
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Ranks to start here; default: as configured.")
@click.option("--peak-tflops", type=float, metavar="X", help="Peak of one device in bf16, for the MFU.")
@click.option("--until", type=click.IntRange(min=1), metavar="STEP", help="Save and stop after this step.")
@click.option("--dry-run", is_flag=True, help="Check everything, read the data, print what would be done.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print the report as JSON.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def train(
    backend: str | None,
    config: Path | None,
    nproc: int | None,
    peak_tflops: float | None,
    until: int | None,
    dry_run: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Train as the configuration says; KEY=VALUE changes a field of it (engine.optimizer.lr=1e-5).

    Under torchrun this is one rank. Otherwise the ranks are started here, as many as --nproc or the parallel sizes say.
    The same command resumes a run that was stopped. Ctrl-C (SIGTERM) saves after the step; a second one does not wait.
    """
    run, name = _read(config, overrides, backend, peak_tflops)
    if dry_run:
        _show_plan(run, name, nproc or _ranks(run, name), as_json)
        return
    if "RANK" in os.environ:
        if nproc is not None and nproc != int(os.environ.get("WORLD_SIZE", "1")):
            raise ConfigError(f"--nproc is {nproc}, but torchrun has started {os.environ.get('WORLD_SIZE')} ranks.")
        code = _one_rank(run, name, until)
    else:
        code = _here(run, name, nproc or _ranks(run, name), until)
    click.get_current_context().exit(code)


def _read(
    config: Path | None, overrides: tuple[str, ...], backend: str | None, peak: float | None
) -> tuple[RunConfig, str]:
    """The configuration and its backend. Raises ConfigError."""
    from .api.reading import read_config
    from .api.topology import backend_of

    given = list(overrides) + ([f"log.peak_tflops={peak}"] if peak is not None else [])
    run = read_config(config, given)
    named = backend_of(run.engine)
    if backend and named and backend != named:
        raise ConfigError(f"--engine is {backend}, but engine.backend is {run.engine.backend!r}.", hint="Say it once.")
    if not (backend or named):
        raise ConfigError("No engine was given.", hint="--engine fsdp, or engine.backend=fsdp:d2")
    run.check()
    return run, backend or named


def _ranks(run: RunConfig, backend: str) -> int:
    """Ranks that the configuration asks for; 1 when it says nothing."""
    from .api.topology import least_ranks

    return least_ranks(run.engine, backend)


def _one_rank(run: RunConfig, backend: str, until: int | None) -> int:
    from .training import train as train_rank

    outcome = train_rank(run, backend, until)
    return 128 + outcome.signal if outcome.signal else 0


def _here(run: RunConfig, backend: str, ranks: int, until: int | None) -> int:
    """All ranks on this machine. Sizes that cannot be are found before the first one starts; torch is not needed."""
    if ranks == 1:
        return _one_rank(run, backend, until)
    from .api.checks import check
    from .api.reading import dump_config
    from .local_ranks import run_ranks
    from .model_files import model_config

    check(run.engine, model_config(run.engine.path), ranks, backend)
    folder = Path(run.dir)
    try:
        file = folder / "logs" / "config.yaml"  # for the ranks: the run's own is written by the one that has the lock
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dump_config(run), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"dir: {error.filename or folder} cannot be written: {error.strerror}.") from error
    return run_ranks(ranks, backend, file, folder / "logs", until)


def _show_plan(run: RunConfig, backend: str, ranks: int, as_json: bool) -> None:
    from .api.reading import dump_config, to_dict
    from .training import check_engine, prepare

    strategy = check_engine(run, backend, ranks)
    prepared = prepare(run)
    report = _report(prepared, backend, ranks, str(strategy))
    if as_json:
        click.echo(json.dumps({**report, "config": to_dict(run)}, indent=2))
        return
    click.echo(dump_config(run), nl=False)
    click.echo("---")
    for name, value in report.items():
        click.echo(f"{name}: {value}")


def _report(prepared: Prepared, backend: str, ranks: int, sizes: str) -> dict[str, Any]:
    data = prepared.data.counts
    report: dict[str, Any] = {"engine": backend, "ranks": ranks, "sizes": sizes, "steps": prepared.total}
    report |= {f"data {name}": count for name, count in data.items()}
    if prepared.eval_data is not None:
        report |= {f"eval_data {name}": count for name, count in prepared.eval_data.counts.items()}
    return report


@click.command(short_help="Draw the loss and the MFU of runs, or a pipeline schedule.")
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE", help="PNG, SVG or PDF; default: plot.png."
)
@click.option("--schedule", metavar="NAME|CSV", help="Draw this pipeline schedule: 1f1b, dual_pipe_v, …, or a file.")
@click.option("--pp", type=click.IntRange(min=2), metavar="N", help="Ranks of its pipeline.")
@click.option("--micro", type=click.IntRange(min=1), metavar="M", help="Its micro-batches; default: twice the ranks.")
@click.option("--layers", type=click.IntRange(min=1), metavar="L", help="Layers of the model, to check that they go.")
@click.option(
    "--measured", type=click.Path(path_type=Path), metavar="FILE", help="A run's profile/pipeline.json, drawn below."
)
def plot(
    runs: tuple[Path, ...],
    out: Path | None,
    schedule: str | None,
    pp: int | None,
    micro: int | None,
    layers: int | None,
    measured: Path | None,
) -> None:
    """Draw loss and MFU (tokens/s where there is no MFU) by step. RUN is a run's directory, or its metrics.jsonl.

    Places where a run was resumed are marked, with the engine's name where it changed.

    With --schedule (or --measured) the picture is a pipeline's: what every rank does when, ideally, and as a run
    measured it. The share of bubbles is printed.
    """
    if schedule or measured:
        if runs:
            raise ConfigError("RUN and --schedule are two pictures.", hint="Draw one after the other.")
        from .archon.charts import chart_of, draw_chart

        chart = chart_of(schedule, pp, micro, layers, measured)
        for line in chart.lines():
            click.echo(line)
        click.echo(str(draw_chart(chart, out or Path(f"{Path(chart.schedule).stem}.png"))))
        return
    lost = [f"--{name}" for name, value in (("pp", pp), ("micro", micro), ("layers", layers)) if value is not None]
    if lost or not runs:
        raise ConfigError(
            f"{lost[0]} belongs to --schedule." if lost else "There is nothing to draw.",
            hint="areal-convert plot RUN, or areal-convert plot --schedule 1f1b --pp 4",
        )
    from .plotting import draw

    first = runs[0] if runs[0].is_dir() else runs[0].parent
    click.echo(str(draw(runs, out or first / "plot.png")))
