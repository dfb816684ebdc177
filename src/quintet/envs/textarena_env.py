"""Games of TextArena by name, for one player or against a random opponent, without downloads."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from quintet.config.native.package_envs import TextArenaConfig
from quintet.envs.env import TEXT
from quintet.errors import ConfigError, did_you_mean
from quintet.records import Observation, Step

MOVES = re.compile(r"^.*\b(?:available|valid|legal|possible) (?:moves|actions)\b[^\[\n]*(\[.*)$", re.I | re.M)
"""Line of an observation that lists legal moves in square brackets."""
MOVE = re.compile(r"\[[^\[\]]+\]")
MAX_OPPONENT_MOVES: Final = 1000
"""Moves of the opponent between two of the policy's, after which the game is considered stuck."""
NLTK_DATA = re.compile(r"(?:corpora|taggers|tokenizers)/\w+")
"""Data in nltk's message that it is missing."""
INVALID_MOVE_REWARD: Final = -1.0


class TextArenaEnv:
    """Game whose actions are any text; the game checks them itself."""

    actions = (TEXT,)

    def __init__(self, config: TextArenaConfig) -> None:
        self._config = config
        self._random_states: tuple[Any, Any] | None = None

    @staticmethod
    def check_config(config: TextArenaConfig) -> None:
        """Start the game once.

        Raises:
            ConfigError: there is no such game, data of nltk is missing, it has another number of players, or it lists
                no legal moves for the opponent.
        """
        env = TextArenaEnv(config)
        env.reset(0)
        if env.num_players == 2 and not _legal_moves(env.text):
            raise _config_error(
                config,
                "a game for two that lists no legal moves, so that there is no opponent",
                "use a game for one, or one that lists them, such as TicTacToe-v0 or Othello-v0",
            )

    def instruction(self) -> str:
        return f"You play {self._config.id}. Answer with your move in the notation of the game."

    def reset(self, seed: int) -> Observation:
        """See `Env.reset`.

        Raises:
            ConfigError: see `check_config`.
        """
        counts = (1, 2) if self._config.players is None else (self._config.players,)
        errors = []
        for self.num_players in counts:
            try:
                self._start(seed)
            except (AssertionError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
                # games refuse other numbers of players by various errors
                errors.append(error)
            else:
                return self._advance()
        problem = f"it cannot be started with {' or '.join(map(str, counts))} players: {errors[-1]}"
        hint = "use a game for one or two players that needs no API key"
        raise _config_error(self._config, problem, hint) from errors[-1]

    def step(self, action: str) -> Step:
        """See `Env.step`; the reward is the game's, given in its last step."""
        with self._game_randomness():
            done, _ = self._game.step(action)
        if not done:
            observation = self._advance()
            done = self._is_over
            if not done:
                return Step(observation, 0.0, False, False, {"success": False})
        rewards, info = self._game.close()
        final_reward = (rewards or {}).get(self._player, 0.0)
        # some games swap reward and reason of an invalid move
        reward = float(final_reward) if isinstance(final_reward, int | float) else INVALID_MOVE_REWARD
        entry = info.get(self._player, {})
        reason = str(entry.get("reason", ""))
        outcome = {"success": reward >= 1.0, "reason": reason, "invalid_move": bool(entry.get("invalid_move", False))}
        return Step(Observation(reason), reward, True, False, outcome)

    def close(self) -> None:
        """See `Env.close`."""

    def _start(self, seed: int) -> None:
        self._player = seed // 3 % self.num_players
        self._opponent = random.Random(seed)  # noqa: S311 - a game
        self._is_over = False
        random_state = random.getstate(), np.random.get_state()
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            with _no_downloads(self._config):
                self._game = _make(self._config)
                self._game.reset(num_players=self.num_players, seed=seed)
            self._random_states = random.getstate(), np.random.get_state()
        finally:
            random.setstate(random_state[0])
            np.random.set_state(random_state[1])

    def _advance(self) -> Observation:
        """Play the opponent's moves until it is the policy's turn or the game is over."""
        for _ in range(MAX_OPPONENT_MOVES):
            with self._game_randomness():
                player, observation = self._game.get_observation()
            self.text = _as_text(observation)
            if player == self._player:
                return Observation(self.text)
            moves = _legal_moves(self.text)
            if not moves:
                problem = "the game lists no legal moves for the opponent"
                raise _config_error(self._config, problem, "use another game, or one for one player")
            with self._game_randomness():
                self._is_over, _ = self._game.step(self._opponent.choice(moves))
            if self._is_over:
                return Observation(self.text)
        raise RuntimeError(f"the opponent made {MAX_OPPONENT_MOVES} moves without a turn of the policy")

    @contextmanager
    def _game_randomness(self) -> Iterator[None]:
        """Restore the state that the game left of the global random generators, which it draws from."""
        process_states = random.getstate(), np.random.get_state()
        if self._random_states is None:
            raise AssertionError("a step before the start of an episode")
        random.setstate(self._random_states[0])
        np.random.set_state(self._random_states[1])
        try:
            yield
        finally:
            self._random_states = random.getstate(), np.random.get_state()
            random.setstate(process_states[0])
            np.random.set_state(process_states[1])


def _make(config: TextArenaConfig) -> Any:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if config.id not in ENV_REGISTRY:
        hint = did_you_mean(config.id, ENV_REGISTRY, "{}") or "see textarena.pprint_registry_detailed()"
        raise _config_error(config, "TextArena has no such game", hint)
    try:
        return textarena.make(config.id, **config.kwargs)
    except TypeError as error:
        raise _config_error(config, f"it cannot be built: {error}", "correct env.kwargs", "env.kwargs") from error
    except (ImportError, OSError, SyntaxError) as error:
        problem = f"TextArena cannot load it: {error}"
        raise _config_error(config, problem, "install what it needs, or use another game") from error


@contextmanager
def _no_downloads(config: TextArenaConfig) -> Iterator[None]:
    """Replace downloads of nltk, so that games use its installed data.

    Raises:
        ConfigError: data of nltk is missing.
    """
    import nltk

    download, nltk.download = nltk.download, lambda *_, **__: True
    try:
        yield
    except LookupError as error:
        missing = NLTK_DATA.findall(str(error))
        if not missing:
            raise
        name = missing[0].rpartition("/")[2]
        problem = f"it needs nltk's {missing[0]}, and Quintet downloads nothing"
        hint = f"put it into ~/nltk_data (`python -m nltk.downloader {name}`), or set NLTK_DATA to its directory"
        raise _config_error(config, problem, hint) from error
    finally:
        nltk.download = download


def _config_error(config: TextArenaConfig, problem: str, hint: str, key: str = "env.id") -> ConfigError:
    return ConfigError(f"env.id = {config.id!r}: {problem}", key=key, value=config.id, hint=hint)


def _as_text(observation: Any) -> str:
    """Return an observation as text; games without wrappers return messages with sender, text and kind."""
    if isinstance(observation, str):
        return observation.strip()
    return "\n".join(str(message[1]) for message in observation or ()).strip()


def _legal_moves(text: str) -> list[str]:
    """Return the moves of the last list of legal moves in an observation."""
    lines = MOVES.findall(text)
    return MOVE.findall(lines[-1]) if lines else []
