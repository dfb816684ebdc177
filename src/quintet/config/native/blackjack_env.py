"""Configuration of the card game blackjack."""

from typing import ClassVar

from quintet.config.native.env_section import InteractiveEnvSection, Rendered, register_env


@register_env("blackjack:Blackjack", "play blackjack against a dealer")
class BlackjackConfig(InteractiveEnvSection, name="blackjack"):
    """Play blackjack with the rules of Gymnasium's Blackjack-v1 and cards that have suits, as in VAGEN."""

    has_expert: ClassVar[bool] = True

    natural: bool = False
    """A win with an ace and a card of 10 gives a reward of 1.5."""
    sab: bool = False
    """Rules of Sutton and Barto: an ace and a card of 10 win unless the dealer has them too. `natural` has no effect
    with it."""
    render: Rendered = "text"
    """`text` names the cards and the sum of the hand; `vision` shows a picture of the cards."""

    @property
    def rendered_size(self) -> tuple[int, int]:
        return 300, 300
