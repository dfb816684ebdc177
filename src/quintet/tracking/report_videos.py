"""Robots in the report: videos of the first and the last rollout, and the success in each task."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from quintet.tracking.atomic_files import translate_os_errors
from quintet.tracking.chart_svg import number_text

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


def tasks_html(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the section with the success in each task before and after training, empty if there are no tasks."""
    validations = [line for line in lines if any(map(TASK_SUCCESS.fullmatch, line))]
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
