"""Filter, order and count the episodes of a run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quintet.tracking.atomic_files import translate_os_errors
from quintet.viewer.trajectory_index import EpisodeSummary

SORT_KEYS: Mapping[str, Callable[[EpisodeSummary], object]] = {
    "step": lambda episode: (episode.step, episode.line),
    "reward": lambda episode: episode.reward,
    "turns": lambda episode: episode.turns,
    "response_tokens": lambda episode: episode.response_tokens,
    "seed": lambda episode: (episode.seed, episode.step),
    "group": lambda episode: (episode.step, episode.group, episode.sample),
}
FACETS = ("split", "step", "env", "outcome", "stop_reason", "failure")
"""Fields whose values are counted for menus."""
_TEXTS = re.compile(rb'"(?:observation|text)": "((?:[^"\\]|\\.)*)"')
"""Values of these keys in a line of JSON."""


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Conditions that an episode must meet, and the order of the result; unset ones accept all."""

    split: str | None = None
    step: int | None = None
    env: str | None = None
    outcome: str | None = None
    stop_reason: str | None = None
    failure: str | None = None
    success: bool | None = None
    seed: int | None = None
    group: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    text: str = ""
    """Text that observations or responses contain; case does not matter."""
    sort: str = ""
    """A key of `SORT_KEYS`; empty keeps the order of the index, the newest step first."""
    descending: bool = False

    def apply(self, episodes: Sequence[EpisodeSummary], path: Callable[[str, int], Path]) -> list[EpisodeSummary]:
        """Return the episodes that meet all conditions; `path` returns the file of a split and step, for its text."""
        exact = [
            (name, value)
            for name in (*FACETS, "success", "seed", "group")
            if (value := getattr(self, name)) is not None
        ]
        accepted = [summary for summary in episodes if all(getattr(summary, name) == value for name, value in exact)]
        for minimum, maximum, field in (
            (self.min_reward, self.max_reward, "reward"),
            (self.min_tokens, self.max_tokens, "response_tokens"),
        ):
            if minimum is not None:
                accepted = [summary for summary in accepted if getattr(summary, field) >= minimum]
            if maximum is not None:
                accepted = [summary for summary in accepted if getattr(summary, field) <= maximum]
        if self.text:
            accepted = list(_containing(accepted, self.text, path))
        if key := SORT_KEYS.get(self.sort):
            accepted.sort(key=key, reverse=self.descending)  # type: ignore[arg-type]  # keys of one field compare
        return accepted


def _containing(
    episodes: Iterable[EpisodeSummary], text: str, path: Callable[[str, int], Path]
) -> Iterable[EpisodeSummary]:
    """Yield the episodes with `text`, as JSON writes it, in an observation or response."""
    pattern = json.dumps(text, ensure_ascii=False)[1:-1].lower().encode(errors="replace")
    by_file: dict[tuple[str, int], list[EpisodeSummary]] = {}
    for episode in episodes:
        by_file.setdefault((episode.split, episode.step), []).append(episode)
    for (split, step), members in by_file.items():
        file = path(split, step)
        with translate_os_errors(file):
            content = file.read_bytes().lower()
        for episode in members:
            end = content.find(b"\n", episode.offset)
            # the whole line first, which is fast; keys and other values of the line may match, too
            if content.find(pattern, episode.offset, end) >= 0 and any(
                pattern in match[1] for match in _TEXTS.finditer(content, episode.offset, end)
            ):
                yield episode


def count_facets(episodes: Iterable[EpisodeSummary]) -> dict[str, list[tuple[str | int, int]]]:
    """Return the values of each facet and their number of episodes, frequent ones first, steps in order."""
    columns = dict(zip(EpisodeSummary._fields, zip(*episodes, strict=True), strict=False))
    counts = {name: Counter(columns.get(name, ())) for name in (*FACETS, "success")}
    for counter in counts.values():
        counter.pop(None, None)
    return {
        name: sorted(counter.items()) if name == "step" else counter.most_common() for name, counter in counts.items()
    }
