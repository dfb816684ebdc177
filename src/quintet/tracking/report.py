"""`report.html`: one page that shows whether a run learned, and games it played. It needs nothing outside itself."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from quintet.tracking.boards import BoardSheet
from quintet.tracking.charts import Chart, Series, number_text
from quintet.tracking.games import choose_games, games_html
from quintet.tracking.loggers import read_metrics
from quintet.tracking.metrics import describe, healthy_text
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import read_trajectories

__all__ = ["ClosingRow", "write_report"]

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ClosingRow:
    """One line of the closing table: a number before and after training; None or NaN where unknown."""

    label: str
    before: float | None
    after: float | None
    share: bool = False
    """Shown in percent."""


def write_report(
    directory: Path,
    title: str,
    config_summary: Mapping[str, object],
    closing_table: Sequence[ClosingRow],
    games: int = 12,
) -> Path:
    """Write the report of the run in `directory` and return its path.

    Curves come from `metrics.jsonl` and `warm_start.jsonl`, games from the first and the last file of
    `trajectories/validation/`; what is missing is left out. `games` is how many are shown. Text from
    the policy is escaped, and the page's own policy (CSP) lets no script run but the page's.

    Raises:
        MachineError: a file can't be read or written.
    """
    run = RunDirectory(directory)
    script = _asset("report.js")
    boards = BoardSheet()
    played = _games(run, games, boards)
    page = Template(_asset("report.html")).substitute(
        title=escape(title),
        style=_asset("report.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        hero=_hero(closing_table),
        curves=_curves(read_metrics(run.metrics), read_metrics(run.warm_start)),
        games=played,
        settings=_settings(config_summary),
        tiles=boards.definitions(_asset("tiles.svg")),
    )
    run.write_text(run.report.name, page)
    return run.report


def _asset(name: str) -> str:
    return (resources.files("quintet.tracking") / "assets" / name).read_text(encoding="utf-8")


def _hero(rows: Sequence[ClosingRow]) -> str:
    return "".join(
        f'<div class="figure"><dt>{escape(row.label)}</dt><dd><span class="before">'
        f'{number_text(row.before, row.share)}</span><i aria-label="became">→</i>'
        f'<span class="now">{number_text(row.after, row.share)}</span></dd></div>'
        for row in rows
    )


def _settings(summary: Mapping[str, object]) -> str:
    return "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>" for key, value in summary.items())


def _value(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _series(lines: Lines, name: str, label: str, tone: str = "main", *, dots: bool = False) -> Series:
    """One metric's curve. A metric measured now and then has its points joined."""
    points = ((float(line["step"]), _value(line, name)) for line in lines if name in line)
    return Series(label, tuple(points), tone, dots)


def _validation(lines: Lines, part: str, label: str) -> list[Series]:
    """One curve a world of `val/{world}/<part>`."""
    found = sorted({key for line in lines for key in line if key.startswith("val/") and key.endswith(f"/{part}")})
    names = {name: label if len(found) == 1 else f"{label}, {name.split('/')[1]}" for name in found}
    return [_series(lines, name, text, dots=True) for name, text in names.items()]


def _of_worlds(lines: Lines, part: str) -> list[Series]:
    """One curve a world of `train/{world}/<part>`, where there are several."""
    found = sorted({key for line in lines for key in line if key.startswith("train/") and key.endswith(f"/{part}")})
    return [_series(lines, name, f"training, {name.split('/')[1]}", "second", dots=True) for name in found]


def _single(lines: Lines, title: str, name: str, *, percent: bool = False) -> Chart:
    """A chart of one metric, with what it means and what is healthy."""
    metric = describe(name)
    unit = "" if percent else f", in {metric.unit}"
    caption = f"{metric.meaning}{unit}. Healthy: {healthy_text(metric.healthy)}."
    return Chart(title, caption, (_series(lines, name, name),), percent)


def _curves(lines: Lines, warm_start: Lines) -> str:
    one = partial(_single, lines)
    charts = [
        Chart(
            "Success",
            "Share of games solved: held-out ones are played greedily, those of training with sampling.",
            (
                _series(lines, "trajectory/success_rate", "training", "second"),
                *_validation(lines, "success_rate", "held-out"),
                *_of_worlds(lines, "success_rate"),
            ),
            percent=True,
            wide=True,
            bounds=(0.0, 1.0),
        ),
        one("Reward", "critic/score/mean"),
        one("Entropy", "actor/entropy"),
        one("Policy change", "actor/ppo_kl"),
        one("Valid format", "response/valid_format", percent=True),
        one("Words a turn", "response_length/mean"),
        one("Turns a game", "num_turns/mean"),
        one("Critic", "critic/vf_explained_var"),
        one("Throughput", "perf/throughput"),
        _single(warm_start, "Warm start", "sft/loss"),
    ]
    drawn = "".join(chart.html() for chart in charts) + _timing(lines)
    return drawn or '<p class="note">No metrics were logged.</p>'


def _timing(lines: Lines) -> str:
    """Where the time of all steps went, one bar."""
    prefix = "timing_s/"
    names = sorted({key for line in lines for key in line if key.startswith(prefix)} - {f"{prefix}step"})
    sums = {name: math.fsum(value for line in lines if math.isfinite(value := _value(line, name))) for name in names}
    total = math.fsum(sums.values())
    if total <= 0.0:
        return ""
    ranked = sorted(sums.items(), key=lambda item: -item[1])
    bars = "".join(f'<i class="tone{n % 8}" style="flex-grow:{s / total:.4f}"></i>' for n, (_, s) in enumerate(ranked))
    items = "".join(
        f'<li class="tone{n % 8}">{escape(name.removeprefix(prefix))} <output>{seconds:,.1f} s</output> '
        f"<small>{number_text(seconds / total, percent=True)}</small></li>"
        for n, (name, seconds) in enumerate(ranked)
    )
    return (
        '<figure class="chart wide timing"><figcaption><h3>Where the time went</h3></figcaption>'
        f'<div class="bar" aria-hidden="true">{bars}</div><ul class="legend">{items}</ul></figure>'
    )


def _games(run: RunDirectory, count: int, boards: BoardSheet) -> str:
    files = sorted(run.trajectories("validation", 0).parent.glob("step_*.jsonl"))
    if not files or count == 0:
        return ""
    last = read_trajectories(files[-1])
    first = read_trajectories(files[0]) if len(files) > 1 else []
    chosen = choose_games(last, first, count)
    if not chosen:
        return ""
    solved = sum(bool(game["success"]) for game in last)
    before = " First come those lost before training and solved after; ✗ → ✓ marks them." if first else ""
    intro = (
        f"{len(chosen)} of the {len(last)} held-out games of the last validation, {solved} of which were solved. "
        f"They are chosen, not drawn at random: about a third are failures, where there are so many.{before}"
    )
    return f'<section id="games"><h2>Games</h2><p class="lead">{intro}</p>{games_html(chosen, boards)}</section>'
