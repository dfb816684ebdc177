"""The last words of a run: one table, before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quintet.config.native.mixture import ALL_WORLDS
from quintet.tracking.loggers import read_metrics
from quintet.tracking.report import ClosingRow

if TYPE_CHECKING:
    from rich.table import Table

    from quintet.config.native import Experiment
    from quintet.pipelines.run import Run

__all__ = ["closing_rows", "config_summary", "rich_table"]

ROWS = (
    ("success_rate", "success", True),
    ("reward", "reward", False),
    ("turns", "turns", False),
    ("valid_format", "valid format", True),
)


def closing_rows(run: Run) -> list[ClosingRow]:
    """Before and after, from the first and last validation of the run."""
    world = ALL_WORLDS if run.config.worlds else run.config.world.name
    lines = [line for line in read_metrics(run.directory.metrics) if f"val/{world}/success_rate" in line]
    nothing: dict[str, float] = {}
    before = next((line for line in lines if line["step"] == 0), nothing)
    after = next((line for line in reversed(lines) if line["step"] > 0), nothing)
    names = [(f"val/{world}/{key}", label, share) for key, label, share in ROWS]
    names += [(f"val/{name}/success_rate", f"success, {name}", True) for name in run.config.worlds]
    return [ClosingRow(label, before.get(name), after.get(name), share) for name, label, share in names if lines]


def rich_table(run: Run, rows: list[ClosingRow]) -> Table:
    """The closing table for a terminal."""
    from rich.table import Table

    table = Table(title=f"{_worlds(run.config)}: {_held_out(run.config)}")
    for column, align in (("", "left"), ("before RL", "right"), ("after RL", "right"), ("change", "right")):
        table.add_column(column, justify=align)  # type: ignore[arg-type]
    for row in rows:
        change = "" if row.before is None or row.after is None else f"{row.after - row.before:+.3f}"
        table.add_row(row.label, _number(row.before), _number(row.after), change)
    return table


def _worlds(config: Experiment) -> str:
    return ", ".join(one.name for one in config.played)


def _held_out(config: Experiment) -> str:
    games = "held-out questions" if config.data else f"{config.held_out_starts} held-out games"
    return games if config.validation.sampling.do_sample else f"{games}, greedy"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def config_summary(config: Experiment) -> dict[str, str]:
    """The few settings that a report's head shows."""
    training = config.training
    return {
        "policy": config.policy.preset or str(config.policy.path),
        "world": _worlds(config),
        "advantage": config.algorithm.advantage.name,
        "games a step": f"{training.groups_per_step} × {training.samples_per_group}",
        "steps": str(training.steps),
        "learning rate": f"{config.actor.optimizer.learning_rate:g}",
        "seed": str(config.seed),
    }
