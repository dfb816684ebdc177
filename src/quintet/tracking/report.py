"""`report.html`: a self-contained page with learning curves and episodes of a run."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from quintet.errors import MachineError
from quintet.tracking.atomic_files import translate_os_errors
from quintet.tracking.chart_svg import Chart, Series, number_text
from quintet.tracking.episode_html import Episode, EpisodePair, choose_episodes, episodes_html, read_asset
from quintet.tracking.episode_words import success_word
from quintet.tracking.grid_svg import GridSheet
from quintet.tracking.image_files import read_png
from quintet.tracking.metric_columns import MetricColumns, read_columns
from quintet.tracking.metrics import describe, healthy_text
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.timing_tree import TimedPhase, timing_tree, total_times
from quintet.tracking.trajectories import IMAGE_FILES, read_trajectories

MAX_DAMAGE = 5
"""Damaged lines and files that the page names."""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A value before and after training; None or NaN if unknown."""

    label: str
    before: float | None
    after: float | None
    share: bool = False
    """Whether the value is shown in percent."""


def write_report(
    directory: Path,
    title: str,
    config_summary: Mapping[str, object],
    closing_table: Sequence[ComparisonRow],
    episodes: int = 12,
    videos: Sequence[Path] = (),
) -> Path:
    """Write the report of the run in `directory` and return its path.

    Curves come from `metrics.jsonl` and `warm_start.jsonl`, episodes from the first and last file of
    `trajectories/validation/`; missing files are skipped. `episodes` is the number of episodes shown; of `videos` the
    first and the last are. Text from the policy is escaped, and the Content-Security-Policy allows only the page's
    script.

    Raises:
        MachineError: The page cannot be written, or a video cannot be read.
    """
    run = RunDirectory(directory)
    script = read_asset("report.js")
    boards = GridSheet()
    damage: list[str] = []
    metrics = read_columns(run.metrics, damage.append)
    robots_section = tasks_html(metrics) + videos_html(videos)
    episodes_section = robots_section + _episodes(run, episodes, boards, damage)
    page = Template(read_asset("report.html")).substitute(
        title=escape(title),
        style=read_asset("report.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        hero=_headline_figures(closing_table),
        curves=_curves(metrics, read_columns(run.warm_start)),
        episodes=episodes_section + _damage_note(damage),
        settings=_settings(config_summary),
        tiles=boards.definitions(read_asset("tiles.svg")),
    )
    run.write_text(run.report.name, page)
    return run.report


def _headline_figures(rows: Sequence[ComparisonRow]) -> str:
    return "".join(
        f'<div class="figure"><dt>{escape(row.label)}</dt><dd><span class="before">'
        f'{number_text(row.before, row.share)}</span><i aria-label="became">→</i>'
        f'<span class="now">{number_text(row.after, row.share)}</span></dd></div>'
        for row in rows
    )


def _settings(summary: Mapping[str, object]) -> str:
    return "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>" for key, value in summary.items())


def _series(metrics: MetricColumns, name: str, label: str, tone: str = "main", *, dots: bool = False) -> Series:
    """Return the curve of one metric; steps without a value are skipped."""
    values = metrics.values(name)
    numbers = np.flatnonzero(~np.isnan(values) | np.isin(metrics.steps, metrics.null_steps(name)))
    points = ((float(metrics.steps[number]), float(values[number])) for number in numbers)
    return Series(label, tuple(points), tone, dots)


def _validation(metrics: MetricColumns, part: str, label: str) -> list[Series]:
    """Return one curve of `val/{env}/<part>` per environment."""
    names = [name for name in metrics.names if name.startswith("val/") and name.endswith(f"/{part}")]
    labels = {name: label if len(names) == 1 else f"{label}, {name.split('/')[1]}" for name in names}
    return [_series(metrics, name, text, dots=True) for name, text in labels.items()]


def _per_env(metrics: MetricColumns, part: str) -> list[Series]:
    """Return one curve of `train/{env}/<part>` per environment, if there are several."""
    names = [name for name in metrics.names if name.startswith("train/") and name.endswith(f"/{part}")]
    return [_series(metrics, name, f"training, {name.split('/')[1]}", "second", dots=True) for name in names]


def _single_metric_chart(metrics: MetricColumns, title: str, name: str, *, percent: bool = False) -> Chart:
    """Return the chart of one metric with its meaning and healthy range."""
    metric = describe(name)
    unit = "" if percent else f", in {metric.unit}"
    caption = f"{metric.meaning}{unit}. Healthy: {healthy_text(metric.healthy)}."
    return Chart(title, caption, (_series(metrics, name, name),), percent)


def _curves(metrics: MetricColumns, warm_start: MetricColumns) -> str:
    single = partial(_single_metric_chart, metrics)
    charts = [
        Chart(
            "Success",
            "Share of episodes solved: held-out episodes are decoded greedily, training episodes are sampled.",
            (
                _series(metrics, "trajectory/success_rate", "training", "second"),
                _series(metrics, "env/success_once", "training", "second"),
                *_validation(metrics, "success_rate", "held-out"),
                *_per_env(metrics, "success_rate"),
            ),
            percent=True,
            wide=True,
            bounds=(0.0, 1.0),
        ),
        Chart(
            "Reward",
            "Mean reward of an episode: of training episodes, and of held-out ones.",
            (_series(metrics, "critic/score/mean", "training", "second"), *_validation(metrics, "reward", "held-out")),
        ),
        single("Return", "env/return"),
        single("Entropy", "actor/entropy"),
        single("Policy change", "actor/ppo_kl"),
        single("Valid format", "response/valid_format", percent=True),
        single("Tokens per response", "response_length/mean"),
        single("Turns per episode", "num_turns/mean"),
        single("Critic", "critic/vf_explained_var"),
        single("Throughput", "perf/throughput"),
        _single_metric_chart(warm_start, "Warm start", "sft/loss"),
    ]
    drawn = "".join(chart.html() for chart in charts) + _timing(metrics)
    return drawn or '<p class="note">No metrics were logged.</p>'


def _timing(metrics: MetricColumns) -> str:
    """Return the tree of phases with their share of the run's time, and a bar of the phases without parts."""
    run = timing_tree(total_times(metrics))
    if run.seconds <= 0.0:
        return ""
    tones = {id(leaf): f"tone{n % 8}" for n, leaf in enumerate(run.leaves())}
    bars = "".join(
        f'<i class="{tones[id(leaf)]}" style="flex-grow:{leaf.seconds / run.seconds:.4f}"></i>' for leaf in run.leaves()
    )
    return (
        '<figure class="chart wide timing"><figcaption><h3>Where the time went</h3></figcaption>'
        f'<div class="bar" aria-hidden="true">{bars}</div>{_phases(run, run.seconds, tones)}</figure>'
    )


def _phases(phase: TimedPhase, total: float, tones: Mapping[int, str]) -> str:
    """Return the parts of a phase as a nested list."""
    items = "".join(
        f'<li class="{tones.get(id(part), "whole")}">{escape(part.name)} <output>{part.seconds:,.1f} s</output> '
        f"<small>{number_text(part.seconds / total, percent=True)}</small>{_phases(part, total, tones)}</li>"
        for part in phase.parts
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def _damage_note(damage: Sequence[str]) -> str:
    """Return a paragraph that names the lines and files that the page leaves out; empty if there are none."""
    if not damage:
        return ""
    others = f" and {len(damage) - MAX_DAMAGE} more" if len(damage) > MAX_DAMAGE else ""
    return f'<p class="note">Left out as damaged: {escape("; ".join(damage[:MAX_DAMAGE]))}{others}.</p>'


def _read_episodes(run: RunDirectory, file: Path, damage: list[str]) -> list[Episode]:
    """Return the episodes of a file; lines that are damaged, or the whole file, are left out and named."""
    try:
        stored = read_trajectories(file, directory=run.path)
    except MachineError as error:
        damage.append(error.message)
        return []
    damage += stored.damage
    return list(stored.by_line.values())


def _episodes(run: RunDirectory, count: int, boards: GridSheet, damage: list[str]) -> str:
    files = sorted(run.trajectories("validation", 0).parent.glob("step_*.jsonl"))
    if not files or count == 0:
        return ""
    last = _read_episodes(run, files[-1], damage)
    first = _read_episodes(run, files[0], damage) if len(files) > 1 else []
    load = partial(_load_images, files[-1].parent, damage)
    chosen = [
        EpisodePair(load(pair.after), pair.before and load(pair.before))
        for pair in choose_episodes(_with_images(last), first, count)
    ]
    if not chosen:
        return ""
    solved = sum(bool(episode["success"]) for episode in last)
    intro = f"{len(chosen)} of the {len(last)} held-out episodes of the last validation"
    if word := success_word(chosen[0].after):
        before = f" Episodes {word} only after training come first, marked ✗ → ✓." if first else ""
        intro += (
            f", {solved} of which were {word}. The selection is not random: about a third are failures, if there are"
            f" enough.{before}"
        )
    else:
        intro += ", with their rewards."
    return (
        f'<section id="episodes"><h2>Episodes</h2><p class="lead">{intro}</p>{episodes_html(chosen, boards)}</section>'
    )


def _with_images(episodes: Sequence[Episode]) -> Sequence[Episode]:
    """Return the episodes whose images are stored, all if none are."""
    stored = [episode for episode in episodes if any("image_files" in turn for turn in episode["turns"])]
    return stored or episodes


def _load_images(directory: Path, damage: list[str], episode: Episode) -> Episode:
    """Return the episode with the contents of its image files; missing ones are left out, and damaged ones named."""

    def read(name: str) -> bytes | None:
        try:
            return read_png(directory, name)
        except MachineError as error:
            damage.append(error.message)
            return None

    turns = []
    for turn in episode["turns"]:
        files = {name: [read(file) for file in turn[name]] for name in IMAGE_FILES if name in turn}
        turns.append({**turn, **{name: [png for png in images if png] for name, images in files.items()}})
    return {**episode, "turns": turns}


MAX_VIDEO_BYTES = 6 << 20
"""Size up to which a video becomes part of the report."""
TASK_SUCCESS = re.compile(r"val/[^/]+/task/([^/]+)/success_once")


def videos_html(videos: Sequence[Path]) -> str:
    """Return the section with the first and the last video, empty without videos.

    Videos of more than `MAX_VIDEO_BYTES` are named instead.

    Raises:
        MachineError: A video cannot be read.
    """
    if not videos:
        return ""
    shown = {"Last recorded rollout": videos[-1]}
    if len(videos) > 1:
        shown = {"First recorded rollout": videos[0], **shown}
    figures = "".join(_figure(label, path) for label, path in shown.items())
    return f'<section id="videos"><h2>Videos</h2><div class="charts">{figures}</div></section>'


def _figure(label: str, path: Path) -> str:
    with translate_os_errors(path):
        is_large = path.stat().st_size > MAX_VIDEO_BYTES
        data = "" if is_large else base64.b64encode(path.read_bytes()).decode()
    if is_large:
        video = f'<p class="note">{escape(str(path))} is too large for this page.</p>'
    elif path.suffix == ".gif":
        video = f'<img alt="" src="data:image/gif;base64,{data}">'
    else:
        video = f'<video controls loop muted playsinline src="data:video/mp4;base64,{data}"></video>'
    return (
        f'<figure class="chart video"><figcaption><h3>{label}</h3><p>{escape(path.stem)}</p></figcaption>'
        f"{video}</figure>"
    )


def tasks_html(metrics: MetricColumns) -> str:
    """Return the section with the success in each task before and after training, empty if there are no tasks."""
    validations = list(metrics.lines_with(lambda name: TASK_SUCCESS.fullmatch(name) is not None))
    if not validations:
        return ""
    first, last = validations[0], validations[-1]
    rows = "".join(
        f"<div><dt>{escape(match[1])}</dt><dd>{number_text(first.get(name), True)} → {number_text(last[name], True)}"
        "</dd></div>"
        for name in sorted(last)
        if (match := TASK_SUCCESS.fullmatch(name))
    )
    lead = '<p class="lead">Share of held-out episodes solved in the first and in the last validation.</p>'
    return f'<section id="tasks"><h2>Tasks</h2>{lead}<dl class="settings">{rows}</dl></section>'
