"""The last words of a run: one table, before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    world = run.config.world.name
    lines = [line for line in read_metrics(run.directory.metrics) if f"val/{world}/success_rate" in line]
    if not lines:
        return []
    first, last = lines[0], lines[-1]
    return [
        ClosingRow(label, float(first[f"val/{world}/{key}"]), float(last[f"val/{world}/{key}"]), share)
        for key, label, share in ROWS
    ]


def rich_table(run: Run, rows: list[ClosingRow]) -> Table:
    """The closing table for a terminal."""
    from rich.table import Table

    table = Table(title=f"{run.config.world.name}: {run.config.validation.games} held-out games, greedy")
    for column, align in (("", "left"), ("before RL", "right"), ("after RL", "right"), ("change", "right")):
        table.add_column(column, justify=align)  # type: ignore[arg-type]
    for row in rows:
        before, after = row.before or 0.0, row.after or 0.0
        table.add_row(row.label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    return table


def config_summary(config: Experiment) -> dict[str, str]:
    """The few settings that a report's head shows."""
    training = config.training
    return {
        "policy": config.policy.preset or str(config.policy.path),
        "world": config.world.name,
        "advantage": config.algorithm.advantage.name,
        "games a step": f"{training.groups_per_step} × {training.samples_per_group}",
        "steps": str(training.steps),
        "learning rate": f"{config.actor.optimizer.learning_rate:g}",
        "seed": str(config.seed),
    }
