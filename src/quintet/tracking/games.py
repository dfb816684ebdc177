"""Played games for the report: which to show, and each turn by turn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.tracking.boards import BoardSheet, visible
from quintet.tracking.charts import number_text

__all__ = ["PlayedGame", "choose_games", "games_html"]

Game = Mapping[str, Any]

OUTCOMES: Mapping[str, str] = {
    "success": "solved",
    "terminated": "lost",
    "truncated": "out of steps",
    "max_turns": "out of turns",
    "max_actions": "out of actions",
    "max_tokens": "out of tokens",
    "context": "context full",
    "failed": "failed",
    "aborted": "given up",
}

_ARROWS: Mapping[str, str] = {"up": "↑", "down": "↓", "left": "←", "right": "→"}
_TAGS = re.compile(r"(</?(?:think|answer)>)")


@dataclass(frozen=True, slots=True)
class PlayedGame:
    """One map, played by the trained policy and, where it is known, by the policy before training."""

    after: Game
    before: Game | None


def choose_games(after: Sequence[Game], before: Sequence[Game], count: int) -> list[PlayedGame]:
    """`count` games, about a third of them failures where there are so many.

    Among the solved, those that were not solved before training come first.
    """
    earlier = {_identity(game): game for game in before}
    pairs = [PlayedGame(game, earlier.get(_identity(game))) for game in after if game["turns"]]
    lost = [pair for pair in pairs if not pair.after["success"]]
    won = [pair for pair in pairs if pair.after["success"]]
    won.sort(key=lambda pair: pair.before is None or pair.before["success"])
    failures = min(len(lost), max(count // 3, count - len(won)))
    return won[: count - failures] + lost[:failures]


def _identity(game: Game) -> tuple[object, ...]:
    return game["world"], game["seed"], game["sample"]


def _kind(game: Game) -> str:
    """Which world it is, where it has a name of its own."""
    return str(game.get("kind") or game["world"])


def games_html(games: Sequence[PlayedGame], boards: BoardSheet) -> str:
    """The chooser and every game; the page's script shows one game and one turn at a time."""
    chips = "".join(_chip(index, pair, boards) for index, pair in enumerate(games))
    panels = "".join(_panel(index, pair, boards) for index, pair in enumerate(games))
    return f'<nav class="chooser" aria-label="Games">{chips}</nav>{panels}'


def _mark(game: Game) -> str:
    return '<b class="won">✓</b>' if game["success"] else '<b class="lost">✗</b>'


def _chip(index: int, pair: PlayedGame, boards: BoardSheet) -> str:
    change = f"{_mark(pair.before)}<i>→</i>" if pair.before is not None else ""
    board = boards.show(_kind(pair.after), pair.after["turns"][0]["observation"])
    return (
        f'<button type="button" class="chip" data-game="{index}" aria-label="Game {index + 1}">'
        f'{board}<span class="marks">{change}{_mark(pair.after)}</span></button>'
    )


def _panel(index: int, pair: PlayedGame, boards: BoardSheet) -> str:
    plays = [("after", pair.after)] if pair.before is None else [("after", pair.after), ("before", pair.before)]
    labels = {"after": "After training", "before": "Before training"}
    tabs = "".join(
        f'<button type="button" data-when="{when}">{labels[when]} {_mark(game)}</button>' for when, game in plays
    )
    bodies = "".join(_play(when, labels[when], game, boards) for when, game in plays)
    return (
        f'<article class="game" data-game="{index}"><header>'
        f'<h3>{visible(str(pair.after["world"]))} <span class="seed">map {int(pair.after["seed"])}</span></h3>'
        f'<div class="tabs">{tabs}</div></header>{bodies}</article>'
    )


def _play(when: str, label: str, game: Game, boards: BoardSheet) -> str:
    turns = game["turns"]
    outcome = OUTCOMES.get(str(game["outcome"]), str(game["outcome"]))
    count = f"{len(turns)} turn" + ("" if len(turns) == 1 else "s")
    film = "".join(
        f'<button type="button" data-turn="{number}" aria-label="Turn {number + 1}">'
        f"{boards.show(_kind(game), turn['observation'])}</button>"
        for number, turn in enumerate(turns)
    )
    slides = "".join(_slide(number, game, boards) for number in range(len(turns)))
    return (
        f'<section class="play" data-when="{when}"><p class="outcome"><span class="when">{label}: </span>'
        f"{_mark(game)} {visible(outcome)} · {count} · reward {number_text(game['reward'])}</p>"
        f'<div class="film">{film}</div>{_failure(game)}{slides}'
        '<div class="steps"><button type="button" data-go="-1">‹ Back</button>'
        '<button type="button" data-go="play">Play</button>'
        '<button type="button" data-go="1">Next ›</button></div></section>'
    )


def _failure(game: Game) -> str:
    failure = game.get("failure")
    if not failure:
        return ""
    text = f"{failure.get('where')}: {failure.get('kind')}: {failure.get('message')}"
    return f'<p class="failure">{visible(text)}</p>'


def _slide(number: int, game: Game, boards: BoardSheet) -> str:
    turn = game["turns"][number]
    shown = [boards.show(_kind(game), text) for text in (turn["observation"], *turn["frames"])]
    row = '<i class="then" aria-hidden="true">→</i>'.join(shown)
    return (
        f'<div class="slide" data-turn="{number}"><div class="boards many{min(len(shown), 4)}">{row}</div>'
        f'<div class="said"><h4>Turn {number + 1} <span>of {len(game["turns"])}</span></h4>'
        f"<blockquote>{_words(turn['text'])}</blockquote>{_facts(turn)}</div></div>"
    )


def _words(text: str) -> str:
    """The policy's words, escaped piece by piece; its two tags stand out."""
    parts: list[str] = []
    inside = "plain"
    for piece in _TAGS.split(text):
        if _TAGS.fullmatch(piece):
            inside = "plain" if piece.startswith("</") else piece[1:-1]
            parts.append(f'<span class="tag">{visible(piece)}</span>')
        elif piece:
            parts.append(f'<span class="{inside}">{visible(piece)}</span>')
    return "".join(parts) or '<span class="tag">(no words)</span>'


def _facts(turn: Mapping[str, Any]) -> str:
    actions = " ".join(f"<kbd>{_action(action)}</kbd>" for action in turn["actions"]) or "none"
    form = "valid" if turn["valid_format"] else '<b class="lost">not valid</b>'
    facts = {
        "Action": actions,
        "Reward": number_text(turn["reward"]),
        "Format": form,
        "Stopped by": visible(str(turn["stop"])),
        "Tokens": number_text(turn.get("response_tokens")),
    }
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items()) + "</dl>"


def _action(action: object) -> str:
    arrow = _ARROWS.get(str(action).lower())
    return (f"{arrow} " if arrow else "") + visible(str(action))
