"""Users written for verl: subclasses of its BaseInteraction."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.tools.interaction import UserReply
from quintet.tools.tool import ToolEpisode, result_text

INSTANCE = "episode"
"""Instance id; each episode has an object of its own."""


class VerlInteraction:
    """Calls the coroutines of an object of verl's interface, all in one event loop."""

    def __init__(self, interaction: Any) -> None:
        self._interaction = interaction
        self._loop = asyncio.new_event_loop()
        self._arguments: dict[str, Any] = {}

    def create(self, episode: ToolEpisode) -> None:
        """Start the interaction with the row's arguments."""
        self._arguments = dict(episode.arguments)
        self._loop.run_until_complete(self._interaction.start_interaction(INSTANCE, **self._arguments))

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """Return the reply of `generate_response`: whether the conversation ends, the text, and the reward."""
        response = self._interaction.generate_response(INSTANCE, list(messages), **self._arguments)
        ended, text, reward, _ = self._loop.run_until_complete(response)
        return UserReply(result_text(text), None if reward is None else float(reward), bool(ended))

    def close(self) -> None:
        """End the event loop. verl's loop does not call `finalize_interaction` either."""
        self._loop.close()
