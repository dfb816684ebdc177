"""Episodes as HTML, turn by turn: those of the report, and pages with drawn observations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from quintet.envs.env import IMAGE
from quintet.envs.service.png import encode_png
from quintet.records import Trajectory, Turn
from quintet.tracking.atomic_files import translate_os_errors, write_atomic
from quintet.tracking.chart_svg import number_text
from quintet.tracking.episode_words import answers_prompt, checks_format, outcome_text, success_word
from quintet.tracking.grid_svg import GridSheet, visible

Episode = Mapping[str, Any]
"""A stored trajectory. The report replaces the names of its image files by their contents, bytes."""

_ARROWS: Mapping[str, str] = {"up": "↑", "down": "↓", "left": "←", "right": "→"}
_TAGS = re.compile(r"(</?(?:think|answer)>)")


def read_asset(name: str) -> str:
    """Return the contents of a file of the report's pages."""
    return Path(__file__).with_name("assets").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class EpisodePair:
    """Start state played by the trained policy and, if known, by the policy before training."""

    after: Episode
    before: Episode | None


def choose_episodes(after: Sequence[Episode], before: Sequence[Episode], count: int) -> list[EpisodePair]:
    """Select `count` episodes, about a third of them failures if there are enough.

    Solved episodes that were not solved before training come first.
    """
    earlier = {_identity(episode): episode for episode in before}
    pairs = [EpisodePair(episode, earlier.get(_identity(episode))) for episode in after if episode["turns"]]
    lost = [pair for pair in pairs if not pair.after["success"]]
    won = [pair for pair in pairs if pair.after["success"]]
    won.sort(key=lambda pair: pair.before is None or pair.before["success"])
    failures = min(len(lost), max(count // 3, count - len(won)))
    return won[: count - failures] + lost[:failures]


def _identity(episode: Episode) -> tuple[object, ...]:
    return episode["env"], episode["seed"], episode["sample"]


def _kind(episode: Episode) -> str:
    """Return the environment type, if it differs from the configured name."""
    return str(episode.get("env_type") or episode["env"])


def episodes_html(episodes: Sequence[EpisodePair], boards: GridSheet) -> str:
    """Return the episode selector and all episodes; the page's script shows one turn at a time."""
    chips = "".join(_selector_button(index, pair, boards) for index, pair in enumerate(episodes))
    panels = "".join(_panel(index, pair, boards) for index, pair in enumerate(episodes))
    return f'<nav class="chooser" aria-label="Episodes">{chips}</nav>{panels}'


def _mark(episode: Episode) -> str:
    if not success_word(episode):
        return f"<b>{number_text(episode['reward'])}</b>"
    return '<b class="won">✓</b>' if episode["success"] else '<b class="lost">✗</b>'


def _selector_button(index: int, pair: EpisodePair, boards: GridSheet) -> str:
    change = f"{_mark(pair.before)}<i>→</i>" if pair.before is not None else ""
    board = observation_html(_kind(pair.after), pair.after["turns"][0], boards)[0]
    return (
        f'<button type="button" class="chip" data-episode="{index}" aria-label="Episode {index + 1}">'
        f'{board}<span class="marks">{change}{_mark(pair.after)}</span></button>'
    )


def _panel(index: int, pair: EpisodePair, boards: GridSheet) -> str:
    plays = [("after", pair.after)] if pair.before is None else [("after", pair.after), ("before", pair.before)]
    labels = {"after": "After training", "before": "Before training"}
    tabs = "".join(
        f'<button type="button" data-when="{when}">{labels[when]} {_mark(episode)}</button>' for when, episode in plays
    )
    bodies = "".join(_play(when, labels[when], episode, boards) for when, episode in plays)
    start = "row" if answers_prompt(pair.after) else "map"
    return (
        f'<article class="episode" data-episode="{index}"><header>'
        f'<h3>{visible(str(pair.after["env"]))} <span class="seed">{start} {int(pair.after["seed"])}</span></h3>'
        f'<div class="tabs">{tabs}</div></header>{bodies}</article>'
    )


def _play(when: str, label: str, episode: Episode, boards: GridSheet) -> str:
    turns = episode["turns"]
    outcome = outcome_text(episode)
    count = f"{len(turns)} turn" + ("" if len(turns) == 1 else "s")
    frames_html = "".join(
        f'<button type="button" data-turn="{number}" aria-label="Turn {number + 1}">'
        f"{observation_html(_kind(episode), turn, boards)[0]}</button>"
        for number, turn in enumerate(turns)
    )
    slides = "".join(_slide(number, episode, boards) for number in range(len(turns)))
    return (
        f'<section class="play" data-when="{when}"><p class="outcome"><span class="when">{label}: </span>'
        f"{_mark(episode)} {visible(outcome)} · {count} · reward {number_text(episode['reward'])}</p>"
        f'<div class="film">{frames_html}</div>{_failure(episode)}{slides}'
        '<div class="steps"><button type="button" data-go="-1">‹ Back</button>'
        '<button type="button" data-go="play">Play</button>'
        '<button type="button" data-go="1">Next ›</button></div></section>'
    )


def _failure(episode: Episode) -> str:
    failure = episode.get("failure")
    if not failure:
        return ""
    text = f"{failure.get('where')}: {failure.get('error_type')}: {failure.get('message')}"
    return f'<p class="failure">{visible(text)}</p>'


def _slide(number: int, episode: Episode, boards: GridSheet) -> str:
    turn = episode["turns"][number]
    shown = [*observation_html(_kind(episode), turn, boards), *_frames_html(_kind(episode), turn, boards)]
    row = '<i class="then" aria-hidden="true">→</i>'.join(shown)
    return (
        f'<div class="slide" data-turn="{number}"><div class="boards many{min(len(shown), 4)}">{row}</div>'
        f'<div class="said"><h4>Turn {number + 1} <span>of {len(episode["turns"])}</span></h4>'
        f"<blockquote>{_response_html(turn['text'])}</blockquote>{_facts(turn, episode)}"
        f"{_as_seen(turn)}</div></div>"
    )


def observation_html(kind: str, turn: Mapping[str, Any], boards: GridSheet) -> list[str]:
    """Return the observation of a turn: its images and the text around them, or its grid or text."""
    images = [boards.show_image(png) for png in turn.get("image_files", ())]
    text = turn["observation"].replace(IMAGE, "").strip() if images else turn["observation"]
    return [*images, *([boards.show(kind, text)] if text or not images else [])]


def _frames_html(kind: str, turn: Mapping[str, Any], boards: GridSheet) -> list[str]:
    """Return the env after each action, or its images after the last one."""
    images = [boards.show_image(png) for png in turn.get("image_files_after", ())]
    return images or [boards.show(kind, text) for text in turn["frames"]]


def _response_html(text: str) -> str:
    """Return the response as escaped HTML with its tags highlighted."""
    parts: list[str] = []
    inside = "plain"
    for piece in _TAGS.split(text):
        if _TAGS.fullmatch(piece):
            inside = "plain" if piece.startswith("</") else piece[1:-1]
            parts.append(f'<span class="tag">{visible(piece)}</span>')
        elif piece:
            parts.append(f'<span class="{inside}">{visible(piece)}</span>')
    return "".join(parts) or '<span class="tag">(empty)</span>'


def _as_seen(turn: Mapping[str, Any]) -> str:
    """Return the prompt of a turn with the texts of the chat template, folded."""
    if not turn.get("prompt_text"):
        return ""
    return f"<details><summary>As the model saw it</summary><pre>{visible(turn['prompt_text'])}</pre></details>"


def _facts(turn: Mapping[str, Any], episode: Episode) -> str:
    actions = " ".join(f"<kbd>{_action(action)}</kbd>" for action in turn["actions"])
    form = "valid" if turn["valid_format"] else '<b class="lost">not valid</b>'
    answer = {"Answer": actions} if actions else {}
    facts = {
        **(answer if answers_prompt(episode) else {"Action": actions or "none"}),
        "Reward": number_text(turn["reward"]),
        **({"Format": form} if checks_format(episode) else {}),
        "Stop reason": visible(str(turn["finish_reason"])),
        "Tokens": number_text(turn.get("response_tokens")),
    }
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items()) + "</dl>"


def _action(action: object) -> str:
    arrow = _ARROWS.get(str(action).lower())
    return (f"{arrow} " if arrow else "") + visible(str(action))


def write_episode_pages(directory: Path, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Write one self-contained page per episode, `trajectory_data_I.html` (RAGEN's file names), and remove the pages
    of an earlier run of the step.

    Raises:
        MachineError: A file cannot be written.
    """
    with translate_os_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for page in directory.glob("trajectory_data_*.html"):
            page.unlink()
    for number, episode in enumerate(trajectories):
        page_html = _page(episode, f"Step {step}, episode {number}: {episode.env}, map {episode.seed}")
        path = directory / f"trajectory_data_{number}.html"
        write_atomic(path, page_html.encode(errors="backslashreplace"), flush=False)


def _page(episode: Trajectory, title: str) -> str:
    boards = GridSheet()
    turns = "\n".join(_turn(number, turn, episode, boards) for number, turn in enumerate(episode.turns, 1))
    fields = {"env": episode.env, "env_type": episode.env_type, "outcome": episode.outcome.value}
    outcome = outcome_text({**fields, "measures_success": episode.measures_success})
    return Template(read_asset("episode.html")).substitute(
        title=visible(title),
        outcome=visible(f"{outcome}, reward {episode.reward:g}"),
        style=read_asset("report.css"),
        tiles=boards.definitions(read_asset("tiles.svg")),
        turns=turns,
    )


def _turn(number: int, turn: Turn, episode: Trajectory, boards: GridSheet) -> str:
    """Return the state before a response, drawn, and the response."""
    shown = {"observation": turn.observation, "image_files": [encode_png(image) for image in turn.images]}
    state = "".join(observation_html(episode.env_type or episode.env, shown, boards))
    return (
        f"<li><h2>Step {number}</h2><div><h3>State</h3>{state}</div>"
        f"<div><h3>Model Response</h3><pre>{visible(turn.text)}</pre></div></li>"
    )
