"""Rules about the texts of episodes, which metrics do not show: one response to everything, and degenerate text."""

from __future__ import annotations

import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from statistics import median

from quintet.diagnosis.episode_files import EpisodeFile
from quintet.diagnosis.findings import Finding
from quintet.diagnosis.rule_specs import Limits
from quintet.diagnosis.run_data import RunData
from quintet.diagnosis.series import percent

SHOWN_CHARACTERS = 80
SEQUENCE = 4
"""Words of the sequences whose repetition counts."""
UNREADABLE = ("Cc", "Co", "Cn", "Cs")
"""Unicode categories of control, private, unassigned and surrogate characters."""
MIN_WORDS = 40
MIN_CHARACTERS = 400
MIN_READABLE = 20
"""Shortest texts of which repetitions, compression and characters say something."""


def same_response(run: RunData, file: EpisodeFile, limits: Limits) -> Iterator[Finding]:
    """Report one text as the response to many different observations."""
    responses = [each for each in file.responses if each[2].strip()]
    if len(responses) < limits["turns"] or file.solved >= limits["solved"]:
        return
    text, count = Counter(response for _, _, response in responses).most_common(1)[0]
    share = count / len(responses)
    observations = {observation for _, observation, response in responses if response == text}
    limit = limits["long"] if len(text.split()) >= limits["words"] else limits["share"]
    if share > limit and len(observations) >= limits["observations"]:
        first = next(line for line, _, response in responses if response == text)
        yield run.finding(
            "same-response",
            f"{percent(share)} of {len(responses)} responses in {file.name}, to {len(observations)} different"
            f" observations, are {_quoted(text)} (line {first})",
            steps=(file.step, file.step),
        )


def degenerate_text(run: RunData, file: EpisodeFile, limits: Limits) -> Iterator[Finding]:
    """Report repetitions and unreadable text, above all where they are rewarded."""
    responses = file.responses
    if len(responses) < limits["turns"]:
        return
    lines = [line for line, _, text in responses if is_degenerate(text, limits)]
    rewarded = _rewarded_lines(file)
    best = [line for line in sorted(set(lines)) if line in rewarded]
    is_rewarded = len(best) > limits["share"] * len(rewarded) and len(best) >= 3
    if len(lines) <= limits["share"] * len(responses) and not is_rewarded:
        return
    first = (best if is_rewarded else lines)[0]
    example = next(text for line, _, text in responses if line == first and is_degenerate(text, limits))
    title = "Degenerate responses are rewarded" if is_rewarded else None
    best_text = f", in {len(best)} of the {len(rewarded)} episodes with the highest reward" if is_rewarded else ""
    yield run.finding(
        "degenerate-text",
        f"{len(lines)} of {len(responses)} responses in {file.name}{best_text}, for example {_quoted(example)}"
        f" (line {first})",
        steps=(file.step, file.step),
        critical=is_rewarded,
        title=title,
    )


def damaged_episodes(run: RunData, file: EpisodeFile, _: Limits) -> Iterator[Finding]:
    """Report lines that are not trajectories."""
    if file.damage:
        evidence = f"{len(file.damage)} of {len(file.damage) + len(file.by_line)} lines: {file.damage[0]}"
        yield run.finding("damaged-episodes", evidence, steps=(file.step, file.step))


def _rewarded_lines(file: EpisodeFile) -> set[int]:
    """Return the lines of the episodes whose reward is above the median; none if all rewards are equal."""
    by_line = {line: float(episode["reward"]) for line, episode in file.by_line.items()}
    rewards = list(by_line.values())
    middle = median(rewards) if rewards else 0.0
    limit = middle if max(rewards, default=0.0) > middle else min(rewards, default=0.0)
    return {line for line, reward in by_line.items() if reward > limit}


def is_degenerate(text: str, limits: Limits) -> bool:
    """Return whether a text repeats itself, or is no text."""
    words = text.split()
    if len(words) >= MIN_WORDS:
        sequences = [tuple(words[n : n + SEQUENCE]) for n in range(len(words) - SEQUENCE + 1)]
        if len(set(sequences)) < limits["distinct"] * len(sequences):
            return True
    data = text.encode(errors="replace")
    if len(data) >= MIN_CHARACTERS and len(zlib.compress(data, 6)) < limits["compressed"] * len(data):
        return True
    if len(text) < MIN_READABLE:
        return False
    return sum(map(_is_unreadable, text)) > limits["unreadable"] * len(text)


def _is_unreadable(character: str) -> bool:
    """Return whether a character is a control or private character, or one that stands for invalid bytes."""
    return character == "\ufffd" or (character not in "\n\t\r" and unicodedata.category(character) in UNREADABLE)


def _quoted(text: str) -> str:
    """Return the beginning of a response on one line."""
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]} …")
