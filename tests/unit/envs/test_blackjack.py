"""If these fail, blackjack is not the game that VAGEN's policies are trained on."""

from __future__ import annotations

import numpy as np
import pytest

from quintet.config.native.envs import BlackjackConfig
from quintet.envs.blackjack import FACES, Blackjack, Card, hit_value, stick_value

ACE, TEN, SEVEN = Card(1, "A", "S"), Card(10, "K", "D"), Card(7, "7", "H")


def dealt(player: list[Card], dealer: list[Card], **options: bool) -> Blackjack:
    """A game with these hands."""
    env = Blackjack(BlackjackConfig.model_validate(options))
    env.reset(0)
    env._player, env._dealer = player, dealer
    return env


def test_a_seed_deals_the_cards_that_vagen_deals() -> None:
    """Recorded from VAGEN's environment: hands after one hit."""
    env = Blackjack(BlackjackConfig())
    dealer = "Dealer showing: HK (Value: 10)"
    assert env.reset(7).text.splitlines()[:2] == ["Your hand: CJ, D4 (Sum: 14, Usable Ace: No)", dealer]
    after = env.step("Hit").observation.text.splitlines()[:2]
    assert after == ["Your hand: CJ, D4, DA (Sum: 15, Usable Ace: No)", dealer]


@pytest.mark.parametrize(
    ("player", "dealer", "options", "reward"),
    [
        ([TEN, TEN], [TEN, SEVEN], {}, 1.0),
        ([TEN, SEVEN], [TEN, SEVEN], {}, 0.0),
        ([TEN, SEVEN], [TEN, TEN], {}, -1.0),
        ([ACE, TEN], [TEN, SEVEN], {}, 1.0),
        ([ACE, TEN], [TEN, SEVEN], {"natural": True}, 1.5),
        ([SEVEN, SEVEN, SEVEN], [TEN, SEVEN], {"natural": True}, 1.0),
        ([ACE, TEN], [SEVEN, SEVEN, SEVEN], {}, 0.0),
        ([ACE, TEN], [SEVEN, SEVEN, SEVEN], {"sab": True}, 1.0),
        ([ACE, TEN], [TEN, ACE], {"sab": True, "natural": True}, 0.0),
    ],
)
def test_a_stand_is_paid_by_the_rules_of_gymnasium(
    player: list[Card], dealer: list[Card], options: dict[str, bool], reward: float
) -> None:
    step = dealt(player, dealer, **options).step("Stand")
    assert (step.reward, step.terminated, step.info["success"]) == (reward, True, reward > 0)


def test_the_second_card_of_the_dealer_is_hidden_until_the_end() -> None:
    env = dealt([TEN, SEVEN], [ACE, SEVEN])
    assert env._observation().text == (
        "Your hand: DK, H7 (Sum: 17, Usable Ace: No)\nDealer showing: SA (Value: 1)\nDealer has one hidden card."
        "\n\nYour goal: Get closer to 21 than the dealer without going over."
    )
    assert env.step("Stick").observation.text.endswith("Dealer's hand: SA, H7")


def test_the_picture_shows_every_card_of_the_policy_and_one_of_the_dealer() -> None:
    env = Blackjack(BlackjackConfig(render="vision"))
    (before,) = env.reset(3).images
    env._dealer[1] = SEVEN
    hidden = env.render()
    assert np.array_equal(before, hidden)
    env._player = [*env._player, TEN]
    assert not np.array_equal(env.render(), hidden)
    env._player = [Card(10, face, suit) for suit in "CDHS" for face in FACES]
    assert env.render().shape == (300, 300, 3)


def test_the_expert_plays_basic_strategy() -> None:
    """The table for an infinite deck and a dealer that stands on soft 17."""

    def hits(hard: int, ace: bool) -> str:
        values = (2, 3, 4, 5, 6, 7, 8, 9, 10, 1)
        return "".join("H" if hit_value(hard, ace, card) > stick_value(hard, ace, card) else "S" for card in values)

    assert hits(11, False) == "HHHHHHHHHH"
    assert hits(12, False) == "HHSSSHHHHH"
    assert {hits(points, False) for points in range(13, 17)} == {"SSSSSHHHHH"}
    assert {hits(points, False) for points in range(17, 22)} == {"SSSSSSSSSS"}
    assert hits(7, True) == "HHHHHHHHHH"
    assert hits(8, True) == "SSSSSSSHHH"
    assert hits(9, True) == "SSSSSSSSSS"
    env = dealt([ACE, SEVEN], [TEN, SEVEN])
    assert (env.expert_action(), env.expert_thought()) == ("Hit", "soft 18 against 10")
