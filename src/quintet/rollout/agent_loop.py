"""Games: many worlds and one engine. A finished turn steps its world at once and queues the next
turn; nobody waits at a turn's end for the others."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from quintet.config.native import RolloutConfig
from quintet.envs.world import World
from quintet.records import Failure, Generation, Observation, Outcome, Request, StopReason, Trajectory, Turn
from quintet.rollout.dialogue import ChatFormat, Dialogue
from quintet.rollout.engine import Engine
from quintet.rollout.replies import ReplyFormat

__all__ = ["AgentLoop", "Game", "Sampling", "derive_seed"]


def derive_seed(*parts: int | str) -> int:
    """A non-negative 63-bit seed that follows from its parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class Game:
    """A game to be played: the world's seed, its group, the sample's number within the group."""

    seed: int
    group: int
    sample: int
    again: int = 0
    """How often the step has played that start before, so that other words are drawn."""

    def draws(self, sampling: Sampling, turn: int) -> int:
        """The seed of what is drawn in a turn."""
        repeated = (self.again,) if self.again else ()
        return derive_seed(sampling.seed, self.seed, self.sample, turn, *repeated)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn in a round of games. Temperature 0 is greedy."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(slots=True)
class _Player:
    """A game in progress."""

    id: int
    game: Game
    world: World
    dialogue: Dialogue
    replies: ReplyFormat
    observation: str = ""
    new: tuple[int, ...] = ()
    continues: bool = False
    turns: list[Turn] = field(default_factory=list)


class AgentLoop:
    """Plays rounds of games with one engine."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        make_world: Callable[[], World],
        config: RolloutConfig,
        world_name: str,
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._make_world = make_world
        self._config = config
        self._world_name = world_name
        self.world_seconds = 0.0
        """Time spent in worlds, over all rounds."""

    def play(self, games: Sequence[Game], sampling: Sampling) -> Iterator[Trajectory]:
        """Play all games; trajectories come as they end, in no particular order. A round's numbers are
        its own, to the last bit: what the engine knows from earlier rounds is forgotten first.

        A world that raises costs its own trajectory: the fault is in `Trajectory.failure`.
        """
        players: dict[int, _Player] = {}
        self._engine.forget()
        for number, game in enumerate(games):
            world = self._make_world()
            dialogue = Dialogue.under(self._config, self._chat, world.instruction())
            player = players[number] = _Player(number, game, world, dialogue, self._replies(world.actions))
            if ended := self._begin(player, sampling):
                yield ended
        while self._engine.busy:
            for generation in self._engine.step():
                if ended := self._continue(players[generation.id], generation, sampling):
                    yield ended

    def _replies(self, actions: tuple[str, ...]) -> ReplyFormat:
        config = self._config
        return ReplyFormat(
            actions, think=config.think, separator=config.action_separator, max_actions=config.max_actions_per_turn
        )

    def _begin(self, player: _Player, sampling: Sampling) -> Trajectory | None:
        started = time.perf_counter()
        try:
            observation = player.world.reset(player.game.seed)
        except Exception as error:  # noqa: BLE001 - whatever a world raises is kept as data
            return self._fail(player, "reset", error)
        finally:
            self.world_seconds += time.perf_counter() - started
        return self._ask(player, observation, sampling)

    def _ask(self, player: _Player, observation: Observation, sampling: Sampling) -> Trajectory | None:
        """Queue the next turn, or end the game where its prompt is too long."""
        prompt, player.new, player.continues = player.dialogue.observe(observation.text)
        player.observation = observation.text
        if len(prompt) > self._config.max_prompt_tokens:
            return self._end(player, Outcome.CONTEXT)
        self._engine.submit(
            Request(
                id=player.id,
                prompt=prompt,
                max_tokens=self._config.max_response_tokens,
                seed=player.game.draws(sampling, len(player.turns)),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                stop_ids=(self._chat.end_id,),
            )
        )
        return None

    def _continue(self, player: _Player, generation: Generation, sampling: Sampling) -> Trajectory | None:
        """Execute a reply and go on, or end."""
        player.dialogue.reply(generation.tokens)
        started = time.perf_counter()
        try:
            turn, observation, outcome = self._execute(player, generation)
        except Exception as error:  # noqa: BLE001 - whatever a world raises is kept as data
            return self._fail(player, "step", error)
        finally:
            self.world_seconds += time.perf_counter() - started
        player.turns.append(turn)
        if outcome is None and len(player.turns) >= self._config.max_turns:
            outcome = Outcome.MAX_TURNS
        if outcome is not None:
            return self._end(player, outcome)
        return self._ask(player, observation, sampling)

    def _execute(self, player: _Player, generation: Generation) -> tuple[Turn, Observation, Outcome | None]:
        """Step the world by each action of the reply until the game ends."""
        text = self._chat.decode(generation.tokens)
        parsed = player.replies.parse(text)
        valid = parsed.valid and generation.stop is StopReason.STOP
        binary = self._config.binary_reward
        reward = 0.0 if valid or binary else self._config.format_penalty
        observation = Observation(player.observation)
        outcome: Outcome | None = None
        frames: list[str] = []
        for action in parsed.actions:
            step = player.world.step(action)
            success = bool(step.info.get("success"))
            reward += (float(success) if step.terminated or step.truncated else 0.0) if binary else step.reward
            observation = step.observation
            frames.append(observation.text)
            if step.terminated or step.truncated:
                outcome = _outcome(success, terminated=step.terminated)
                break
        turn = Turn(
            observation=player.observation,
            prompt=player.new,
            continues=player.continues,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            weight_version=generation.weight_version,
            text=text,
            actions=parsed.actions[: len(frames)],
            valid_format=valid,
            reward=reward,
            stop=generation.stop,
            frames=tuple(frames),
        )
        return turn, observation, outcome

    def _fail(self, player: _Player, where: str, error: Exception) -> Trajectory:
        failure = Failure(where, type(error).__name__, str(error))
        return self._end(player, Outcome.FAILED, failure)

    def _end(self, player: _Player, outcome: Outcome, failure: Failure | None = None) -> Trajectory:
        player.world.close()
        game = player.game
        return Trajectory(
            world=self._world_name,
            seed=game.seed,
            group=game.group,
            sample=game.sample,
            turns=tuple(player.turns),
            outcome=outcome,
            failure=failure,
        )


def _outcome(success: bool, *, terminated: bool) -> Outcome:
    if success:
        return Outcome.SUCCESS
    return Outcome.TERMINATED if terminated else Outcome.TRUNCATED
