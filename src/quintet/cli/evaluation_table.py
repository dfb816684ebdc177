"""Table of an evaluation: mean, confidence interval and number of prompts of each estimate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from quintet.pipelines.evaluation_results import Evaluation
    from quintet.tracking.eval_statistics import Estimate, Estimates


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return the table of estimates by data source."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{evaluation.answers} answers")
    for column in ("", "", "mean", f"{evaluation.statistics.confidence:.0%} interval", "prompts"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, source in evaluation.sources.items():
        for row, (label, estimate) in enumerate(_rows(source)):
            # Text: names from data files must not be read as markup
            title = Text(name if row == 0 else "")
            table.add_row(title, label, f"{estimate.mean:.4g}", _interval(estimate), str(estimate.prompts))
        table.add_section()
    return table


def _rows(source: Estimates) -> Iterator[tuple[str, Estimate]]:
    """Yield the estimates of a data source with their labels; equal ones, as of one answer per prompt, share a row."""
    estimates = {"score": source.score, "acc": source.accuracy}
    estimates |= {f"pass@{k}": estimate for k, estimate in source.passed.items()}
    estimates |= {f"maj@{k}": estimate for k, estimate in source.majority.items() if k > 1}
    rows: list[tuple[list[str], Estimate]] = []
    for label, estimate in estimates.items():
        same = next((labels for labels, other in rows if other == estimate), None)
        if same is not None:
            same.append(label)
        elif estimate is not None:
            rows.append(([label], estimate))
    yield from ((", ".join(labels), estimate) for labels, estimate in rows)


def _interval(estimate: Estimate) -> str:
    return "–" if estimate.low is None else f"{estimate.low:.4g} … {estimate.high:.4g}"
