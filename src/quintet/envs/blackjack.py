"""Blackjack with the rules of Gymnasium's Blackjack-v1, and the cards, texts and rewards of VAGEN's environment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from gymnasium.utils.seeding import np_random
from PIL import Image, ImageDraw, ImageFont

from quintet.config.native.blackjack_env import BlackjackConfig
from quintet.envs.env import IMAGE, Env
from quintet.records import Observation, Step

DECK: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10)
"""Equally probable values of a card; an ace is 1. Cards are drawn with replacement."""
FACES, SUITS = ("J", "Q", "K"), ("C", "D", "H", "S")
STICK, HIT = "Stick", "Hit"
TARGET, DEALER_STANDS, BUST = 21, 17, 0
PENDING: Final = "\n\nYour goal: Get closer to 21 than the dealer without going over."

TABLE, WHITE, BLACK, RED, BACK = (53, 101, 77), (255, 255, 255), (20, 20, 20), (200, 30, 40), (40, 70, 150)
CARD: Final = (70, 98)
"""Width and height of a card, pixels."""


class Card(NamedTuple):
    """Playing card."""

    value: int
    face: str
    suit: str

    def __str__(self) -> str:
        return f"{self.suit}{self.face}"


class Blackjack(Env):
    """Game against a dealer that sticks at 17."""

    actions = (HIT, "Stand", STICK)

    def __init__(self, config: BlackjackConfig) -> None:
        self._config = config

    def instruction(self) -> str:
        natural = "gives 1.5x reward" if self._config.natural else "gives standard 1.0 reward"
        sab = " With a natural blackjack, you win unless the dealer has one too." if self._config.sab else ""
        return (
            "You play blackjack. Get a hand closer to 21 than the dealer without going over. Cards from 2 to 9 count"
            " their number, 10 and face cards 10, and an ace 1 or 11, whichever is better. The dealer shows one of two"
            " cards. Hit takes another card; over 21 you lose. With Stand, the dealer reveals the other card and takes"
            f" cards up to 17 or more. A natural blackjack (an ace and a card of 10) {natural}.{sab} Cards are named by"
            " suit (C, D, H, S) and face. Answer with Hit or Stand."
        )

    def reset(self, seed: int) -> Observation:
        """See `Env.reset`. The same seed deals the same cards as in VAGEN."""
        self._rng, _ = np_random(seed)
        self._dealer = [self._draw(), self._draw()]
        self._player = [self._draw(), self._draw()]
        self._rng.choice(SUITS)
        if self._dealer[0].value == 10:
            # VAGEN draws a suit and a face that it never shows
            self._rng.choice(FACES)
        self._ended = False
        return self._observation()

    def step(self, action: str) -> Step:
        """See `Env.step`; the reward is 1 for a win, -1 for a loss, 0 for a draw, and 1.5 for a win with a natural
        blackjack if it counts more."""
        if action == HIT:
            self._player.append(self._draw())
            self._ended = score(self._player) == BUST
            reward = -1.0 if self._ended else 0.0
        else:
            while total(self._dealer) < DEALER_STANDS:
                self._dealer.append(self._draw())
            self._ended, reward = True, self._outcome()
        return Step(self._observation(), reward, self._ended, False, {"success": reward > 0})

    def render(self) -> np.ndarray:
        image = Image.new("RGB", (self._config.rendered_size[1], self._config.rendered_size[0]), TABLE)
        draw = ImageDraw.Draw(image)
        dealer = [*self._dealer] if self._ended else [self._dealer[0], None]
        for name, cards, y in (("Dealer", dealer, 5), ("Player", self._player, 130)):
            draw.text((5, y), name, fill=WHITE, font=_font(16))
            spacing = min(CARD[0] + 4, (image.width - 10 - CARD[0]) // max(1, len(cards) - 1))
            for index, card in enumerate(cards):
                image.paste(_card_image(card), (5 + index * spacing, y + 20))
        return np.asarray(image)

    def expert_action(self) -> str:
        """Return the action of the highest expected reward; a tie sticks."""
        hard, has_ace = sum(card.value for card in self._player), any(card.value == 1 for card in self._player)
        shown = self._dealer[0].value
        return HIT if hit_value(hard, has_ace, shown) > stick_value(hard, has_ace, shown) else "Stand"

    def expert_thought(self) -> str:
        """Return both sums that the decision depends on."""
        soft = "soft " if usable_ace(self._player) else ""
        return f"{soft}{total(self._player)} against {self._dealer[0].value}"

    def _draw(self) -> Card:
        value = int(self._rng.choice(DECK))
        suit = str(self._rng.choice(SUITS))
        if value == 10:
            return Card(value, str(self._rng.choice(FACES)), suit)
        return Card(value, "A" if value == 1 else str(value), suit)

    def _outcome(self) -> float:
        player, dealer = score(self._player), score(self._dealer)
        reward = float(player > dealer) - float(player < dealer)
        if self._config.sab:
            return 1.0 if is_natural(self._player) and not is_natural(self._dealer) else reward
        return 1.5 if self._config.natural and is_natural(self._player) and reward == 1.0 else reward

    def _observation(self) -> Observation:
        if self._config.render == "vision":
            return Observation(IMAGE, (self.render(),))
        ace = "Yes" if usable_ace(self._player) else "No"
        hand = f"Your hand: {', '.join(map(str, self._player))} (Sum: {total(self._player)}, Usable Ace: {ace})"
        if self._ended:
            return Observation(f"{hand}\nDealer's hand: {', '.join(map(str, self._dealer))}")
        dealer = f"Dealer showing: {self._dealer[0]} (Value: {self._dealer[0].value})"
        return Observation(f"{hand}\n{dealer}\nDealer has one hidden card.{PENDING}")


def usable_ace(hand: Sequence[Card]) -> bool:
    """Return whether an ace counts 11."""
    return _count(sum(card.value for card in hand), any(card.value == 1 for card in hand))[1]


def total(hand: Sequence[Card]) -> int:
    """Return the sum of a hand, with an ace as 11 if it does not go over 21."""
    return _count(sum(card.value for card in hand), any(card.value == 1 for card in hand))[0]


def score(hand: Sequence[Card]) -> int:
    """Return the sum of a hand, `BUST` over 21."""
    return total(hand) if total(hand) <= TARGET else BUST


def is_natural(hand: Sequence[Card]) -> bool:
    """Return whether a hand is an ace and a card of 10."""
    return sorted(card.value for card in hand) == [1, 10]


def _count(hard: int, has_ace: bool) -> tuple[int, bool]:
    """Return the sum of a hand whose aces count 1 in `hard`, and whether one of them counts 11."""
    usable = has_ace and hard + 10 <= TARGET
    return hard + 10 * usable, usable


@cache
def dealer_scores(hard: int, has_ace: bool) -> dict[int, float]:
    """Return the probability of each final score of the dealer, who has this hand."""
    points, _ = _count(hard, has_ace)
    if points >= DEALER_STANDS:
        return {points if points <= TARGET else BUST: 1.0}
    scores: dict[int, float] = {}
    for value in DECK:
        for final, probability in dealer_scores(hard + value, has_ace or value == 1).items():
            scores[final] = scores.get(final, 0.0) + probability / len(DECK)
    return scores


@cache
def stick_value(hard: int, has_ace: bool, shown: int) -> float:
    """Return the expected reward of sticking against a dealer's card."""
    points, _ = _count(hard, has_ace)
    scores = dealer_scores(shown, shown == 1)
    return sum(share * (float(points > final) - float(points < final)) for final, share in scores.items())


@cache
def hit_value(hard: int, has_ace: bool, shown: int) -> float:
    """Return the expected reward of another card and optimal decisions after it (Bellman 1957)."""
    value = 0.0
    for card in DECK:
        new, ace = hard + card, has_ace or card == 1
        value += -1.0 if new > TARGET else max(stick_value(new, ace, shown), hit_value(new, ace, shown))
    return value / len(DECK)


@cache
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


@cache
def _card_image(card: Card | None) -> Image.Image:
    """Return a card, or the back of one."""
    image = Image.new("RGB", CARD, TABLE)
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((0, 0, CARD[0] - 1, CARD[1] - 1), 6, fill=WHITE if card else BACK, outline=BLACK)
    if card is None:
        draw.rounded_rectangle((6, 6, CARD[0] - 7, CARD[1] - 7), 4, outline=WHITE, width=2)
        return image
    color = RED if card.suit in "DH" else BLACK
    draw.text((6, 2), card.face, fill=color, font=_font(22))
    _draw_suit(draw, card.suit, 10, 32, 12, color)
    _draw_suit(draw, card.suit, 20, 50, 34, color)
    return image


def _draw_suit(draw: ImageDraw.ImageDraw, suit: str, x: int, y: int, size: int, color: tuple[int, int, int]) -> None:
    """Draw a suit into the square whose upper left corner is `(x, y)`."""

    def disc(column: float, row: float, radius: float) -> None:
        left = x + column * size
        top = y + row * size
        r = radius * size
        draw.ellipse((left - r, top - r, left + r, top + r), fill=color)

    def shape(*points: tuple[float, float]) -> None:
        draw.polygon([(x + column * size, y + row * size) for column, row in points], fill=color)

    if suit == "D":
        shape((0.5, 0), (0.9, 0.5), (0.5, 1), (0.1, 0.5))
    elif suit == "H":
        disc(0.27, 0.3, 0.26)
        disc(0.73, 0.3, 0.26)
        shape((0.04, 0.42), (0.96, 0.42), (0.5, 1))
    else:
        discs = [(0.27, 0.6, 0.25), (0.73, 0.6, 0.25)] + [(0.5, 0.25, 0.25)] * (suit == "C")
        for each in discs:
            disc(*each)
        if suit == "S":
            shape((0.06, 0.5), (0.94, 0.5), (0.5, 0))
        shape((0.5, 0.5), (0.7, 1), (0.3, 1))
