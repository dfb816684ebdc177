"""Games: many worlds and one engine. A finished turn steps its world at once and queues the next turn; nobody waits at
a turn's end for the others, and the engine goes on while worlds are at work."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Self

from quintet.config.native import Experiment, RolloutConfig
from quintet.envs.mixture import worlds_of
from quintet.envs.seeds import seed_of, world_of
from quintet.envs.world import World
from quintet.envs.worlds import Answered, LocalWorlds, Moved, Opened, Worlds
from quintet.records import Failure, Generation, Observation, Outcome, Request, Step, StopReason, Trajectory, Turn
from quintet.rollout.dialogue import ChatFormat, Dialogue, PromptChange
from quintet.rollout.engine import Engine
from quintet.rollout.replies import ParsedReply, ReplyFormat
from quintet.rollout.rules import GameLimits, Health, Rules, rules_of

__all__ = ["AgentLoop", "Game", "GameLimits", "Sampling", "derive_seed"]


UNEXPLAINED = Failure("engine", "Unexplained", "the engine stopped in the middle of a turn and didn't say why")
EMPTY = Failure("engine", "EmptyResponse", "the engine gave no token, not even one that ends the turn")
LOST = Failure("engine", "Lost", "the engine has no requests left and never answered this one")
REMEMBERED = 4096
"""Replies whose words are kept."""
NOTHING = ParsedReply((), valid=False)
UNSEEN = Observation("")


def derive_seed(*parts: int | str) -> int:
    """A non-negative 63-bit seed that follows from its parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class Game:
    """A game to be played: where it begins, its group, the sample's number within the group."""

    seed: int
    """The world's seed; of a further world of the run, with the world in it, see `quintet.envs.seeds.start_in`."""
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
    """How tokens are drawn in a round of games. Temperature 0 is greedy; see `Request` for the rest."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_end: bool = False
    """Replies go on to their longest, whatever tokens come; texts in `stop_texts` still end them."""
    end_ids: tuple[int, ...] | None = None
    """Tokens that end a reply in place of the tokenizer's own; None keeps those."""
    stop_texts: tuple[str, ...] = ()

    def request(
        self,
        number: int,
        prompt: tuple[int, ...],
        max_tokens: int,
        seed: int,
        ends: Sequence[int],
        *,
        keep: bool = False,
    ) -> Request:
        """A turn to be written under it; `ends` are the tokens by which the chat format ends one, `keep` says that a
        further one may follow it."""
        own = tuple(ends) if self.end_ids is None else self.end_ids
        return Request(
            id=number,
            prompt=prompt,
            max_tokens=max_tokens,
            seed=seed,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_tokens=min(self.min_tokens, max_tokens),
            stop_ids=() if self.ignore_end else own,
            stop_texts=self.stop_texts,
            keep=keep,
        )


@dataclass(frozen=True, slots=True)
class _Reply:
    """What the policy wrote in a turn, and what its world is to do."""

    generation: Generation
    text: str = ""
    parsed: ParsedReply = NOTHING

    @property
    def valid(self) -> bool:
        return self.parsed.valid and self.generation.stop is StopReason.STOP


@dataclass(slots=True)
class _Player:
    """A game in progress."""

    id: int
    game: Game
    sampling: Sampling
    rules: Rules
    dialogue: Dialogue | None = None
    format: ReplyFormat | None = None
    observation: Observation = UNSEEN
    new: tuple[int, ...] = ()
    continues: bool = False
    turns: list[Turn] = field(default_factory=list)
    reply: _Reply | None = None
    """What its world executes; None while the policy writes or the world begins."""
    writing: bool = False
    """The engine has its request."""
    actions: int = 0
    tokens: int = 0


class AgentLoop:
    """Plays games with one engine.

    `play` plays a round from start to end. `begin` and `advance` play the same games in pieces, so that they may be
    kept running over an update of the weights. A game's world or request that fails costs that game alone: it comes
    back as `Outcome.FAILED` with its `Failure`.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        worlds: Worlds | Callable[[], World],
        config: RolloutConfig,
        world_name: str,
        limits: GameLimits | None = None,
        rules: Sequence[Rules] = (),
    ) -> None:
        """`worlds` may be what makes a world, to be played in this process. Where there are several, `rules` are those
        of each, in place of one world's `config`, name and limits."""
        self._engine = engine
        self.chat = chat
        self._worlds: Worlds = LocalWorlds(worlds) if callable(worlds) else worlds
        self._rules = tuple(rules) or (Rules(world_name, config, limits or GameLimits()),)
        self._health = {rules.name: Health(rules.limits.failed_share, rules.key) for rules in self._rules}
        self._numbers = count()
        self._players: dict[int, _Player] = {}
        self._formats: dict[tuple[str, tuple[str, ...]], ReplyFormat] = {}
        # trained policies say the same again and again
        self._understood = lru_cache(maxsize=REMEMBERED)(self._understand)
        self._ended: list[tuple[int, Trajectory]] = []
        self._changes: Counter[PromptChange] = Counter()
        self.engine_seconds = 0.0
        """Time spent in the engine, over all games."""
        self.loop_seconds = 0.0
        """Time spent in neither the engine nor worlds."""
        self._measured = {"engine": 0.0, "world": 0.0, "loop": 0.0}

    @classmethod
    def of(cls, engine: Engine, chat: ChatFormat, config: Experiment) -> Self:
        """As an experiment wants it.

        Raises:
            ConfigError: a user's own world can't be loaded.
        """
        return cls.playing(engine, chat, worlds_of(config), rules_of(config))

    @classmethod
    def playing(cls, engine: Engine, chat: ChatFormat, worlds: Worlds, rules: Sequence[Rules]) -> Self:
        """One world or several, each by its rules."""
        return cls(engine, chat, worlds, rules[0].config, rules[0].name, rules=rules)

    @property
    def world_seconds(self) -> float:
        """Time spent in worlds, or with waiting for them while the engine had nothing to do, over all games."""
        return self._worlds.seconds

    @property
    def busy(self) -> bool:
        """Games run, or have ended and weren't taken yet."""
        return bool(self._players or self._ended)

    def play(self, games: Sequence[Game], sampling: Sampling) -> Iterator[Trajectory]:
        """Play all games; trajectories come as they end, in no particular order. Games that run already go on beside
        them; where none do, what the engine knows from earlier rounds is forgotten first, so that a round's numbers
        are its own, to the last bit.

        Raises:
            MachineError: more than `limits.failed_share` of the games failed.
        """
        own = self._begin(games, sampling)
        try:
            while own:
                self._advance()
                ended, self._ended = self._ended, []
                self._ended = [one for one in ended if one[0] not in own]
                for number, trajectory in ended:
                    if number in own:
                        own.remove(number)
                        yield trajectory
        finally:
            # whoever asked may have gone, or a fault ends the run
            self._abort(player for player in self._players.values() if player.id in own)
            self._ended = [one for one in self._ended if one[0] not in own]

    def begin(self, games: Sequence[Game], sampling: Sampling) -> None:
        """Start games beside those that run; `advance` plays them."""
        self._begin(games, sampling)

    def advance(self) -> list[Trajectory]:
        """Let engine and worlds go on by a step; the games that ended. Waits for worlds where the engine is idle.

        Raises:
            MachineError: more than `limits.failed_share` of the games side by side failed.
            EngineFault: the engine died, and nothing watches over it; see `Supervised`.
        """
        self._advance()
        ended, self._ended = self._ended, []
        return [trajectory for _, trajectory in ended]

    def abort(self, groups: Collection[int]) -> list[Trajectory]:
        """Give up the games of groups, as far as they were played: `Outcome.ABORTED`. Those that have ended and
        weren't taken yet are handed out beside them, as they ended."""
        through = [game for _, game in self._ended if game.group in groups]
        self._ended = [one for one in self._ended if one[1].group not in groups]
        return through + self._abort(player for player in self._players.values() if player.game.group in groups)

    def measures(self) -> dict[str, float]:
        """Metrics since this was asked last: seconds in the engine, in worlds and in between, and what became of the
        worlds' words in prompts."""
        seconds = {"engine": self.engine_seconds, "world": self.world_seconds, "loop": self.loop_seconds}
        spent = {f"timing_s/{name}": value - self._measured[name] for name, value in seconds.items()}
        changes, self._changes = self._changes, Counter()
        self._measured = seconds
        return spent | {f"prompt/{change}": changes[change] for change in PromptChange}

    def close(self) -> None:
        """Give up what runs and let go of the worlds' processes."""
        self._abort(self._players.values())
        self._worlds.close()

    def _begin(self, games: Sequence[Game], sampling: Sampling) -> set[int]:
        """The numbers of the games that were started."""
        if not self._players:
            self._engine.forget()
            for health in self._health.values():
                health.restart()
        begun: set[int] = set()
        for game in games:
            player = _Player(next(self._numbers), game, sampling, self._rules[world_of(game.seed)])
            self._players[player.id] = player
            self._worlds.open(player.id, game.seed)
            begun.add(player.id)
        for name, playing in Counter(player.rules.name for player in self._players.values()).items():
            self._health[name].widen(playing)
        return begun

    def _advance(self) -> None:
        started, before = time.perf_counter(), self.engine_seconds + self._worlds.seconds
        if self._engine.busy:
            for generation in self._step():
                self._wrote(generation)
        idle = not self._engine.busy and not self._ended
        for answer in self._worlds.answers(wait=idle):
            self._answered(answer)
        if self._players and not (self._engine.busy or self._worlds.asked or self._ended):
            self._lose()
        elsewhere = self.engine_seconds + self._worlds.seconds - before
        self.loop_seconds += time.perf_counter() - started - elsewhere

    def _step(self) -> list[Generation]:
        started = time.perf_counter()
        generations = self._engine.step()
        self.engine_seconds += time.perf_counter() - started
        return generations

    def _wrote(self, generation: Generation) -> None:
        """Have a reply's actions executed, or end its game."""
        player = self._players.get(generation.id)
        if player is None or not player.writing:
            return
        player.writing = False
        player.tokens += len(generation.tokens)
        if generation.stop is StopReason.FAILED:
            self._stopped(player, generation, Outcome.FAILED, generation.failure or UNEXPLAINED)
        elif generation.stop is StopReason.ABORT:
            self._stopped(player, generation, Outcome.ABORTED)
        elif not generation.tokens:
            full = generation.stop is StopReason.CONTEXT
            self._end(player, *((Outcome.CONTEXT, None) if full else (Outcome.FAILED, EMPTY)))
        else:
            self._act(player, generation)

    def _stopped(
        self, player: _Player, generation: Generation, outcome: Outcome, failure: Failure | None = None
    ) -> None:
        """End a game whose turn the engine left in the middle; what it wrote stays, nothing of it is executed."""
        player.turns.append(_turn(player, _Reply(generation, self.chat.decode(generation.tokens))))
        self._end(player, outcome, failure)

    def _act(self, player: _Player, generation: Generation) -> None:
        dialogue, replies = player.dialogue, player.format
        if dialogue is None or replies is None:
            raise AssertionError("a reply before its game began")
        dialogue.reply(generation.tokens)
        text, parsed = self._understood(generation.tokens, replies)
        most = player.rules.limits.actions
        if most is not None:
            left = most - player.actions
            parsed = ParsedReply(parsed.actions[:left], valid=parsed.valid)
        player.reply = _Reply(generation, text, parsed)
        if parsed.actions:
            self._worlds.move(player.id, parsed.actions)
        else:
            self._execute(player, ())

    def _understand(self, tokens: tuple[int, ...], replies: ReplyFormat) -> tuple[str, ParsedReply]:
        """A reply's words, and what they ask for."""
        text = self.chat.decode(tokens)
        return text, replies.parse(self.chat.begun + text)

    def _answered(self, answer: Answered) -> None:
        """Go on with a game whose world has answered."""
        player = self._players.get(answer.game)
        if player is None:
            return
        if isinstance(answer, Opened):
            player.dialogue = Dialogue.under(player.rules.config, self.chat, answer.instruction)
            player.format = self._format(player.rules, answer.actions)
            self._ask(player, answer.observation)
        elif isinstance(answer, Moved):
            self._execute(player, answer.steps)
        else:
            self._end(player, Outcome.FAILED, answer.failure)

    def _format(self, rules: Rules, actions: tuple[str, ...]) -> ReplyFormat:
        if (rules.name, actions) not in self._formats:
            special = sorted(self.chat.anatomy.control)
            self._formats[rules.name, actions] = ReplyFormat.under(rules.config, actions, special)
        return self._formats[rules.name, actions]

    def _ask(self, player: _Player, observation: Observation) -> None:
        """Queue the next turn, or end the game where there is no room for it."""
        dialogue, config, most = player.dialogue, player.rules.config, player.rules.limits.tokens
        if dialogue is None:
            raise AssertionError("a turn before its game began")
        prompt, player.new, player.continues = dialogue.observe(observation.text)
        player.observation = observation
        player.tokens += len(player.new)
        if dialogue.changes:
            self._changes.update(dialogue.changes)
        longest = config.max_response_tokens
        if most is not None:
            longest = min(longest, most - player.tokens)
        if len(prompt) > config.max_prompt_tokens:
            self._end(player, Outcome.CONTEXT)
        elif longest < 1:
            self._end(player, Outcome.MAX_TOKENS)
        else:
            self._submit(player, prompt, longest)

    def _submit(self, player: _Player, prompt: tuple[int, ...], longest: int) -> None:
        turn = len(player.turns)
        window, most = player.rules.config.window_size, player.rules.config.max_turns
        keep = turn + 1 < most and (window is None or turn + 1 < window)
        seed, ends = player.game.draws(player.sampling, turn), self.chat.end_ids
        request = player.sampling.request(player.id, prompt, longest, seed, ends, keep=keep)
        started = time.perf_counter()
        try:
            self._engine.submit(request)
            player.writing = True
        except ValueError:
            # longer than the engine can take
            self._end(player, Outcome.CONTEXT)
        finally:
            self.engine_seconds += time.perf_counter() - started

    def _execute(self, player: _Player, steps: Sequence[Step]) -> None:
        """Note what came of a turn, and go on or end."""
        if player.reply is None:
            raise AssertionError("a step before a reply")
        config = player.rules.config
        binary = config.binary_reward
        reward = 0.0 if player.reply.valid or binary else config.format_penalty
        outcome: Outcome | None = None
        for step in steps:
            won = bool(step.info.get("success"))
            ended = step.terminated or step.truncated
            reward += float(won and ended) if binary else step.reward
            if ended:
                outcome = _outcome(won, terminated=step.terminated)
        player.turns.append(_turn(player, player.reply, reward, steps))
        player.actions += len(steps)
        player.reply = None
        outcome = outcome or _out_of_bounds(player)
        if outcome is not None:
            self._end(player, outcome)
        else:
            self._ask(player, steps[-1].observation if steps else player.observation)

    def _lose(self) -> None:
        """Neither engine nor worlds know of the games that are left."""
        for player in list(self._players.values()):
            self._end(player, Outcome.FAILED, LOST)

    def _abort(self, players: Iterable[_Player]) -> list[Trajectory]:
        """End games in the middle."""
        chosen = {player.id: player for player in players}
        writing = [player.id for player in chosen.values() if player.writing]
        for generation in self._engine.abort(writing) if writing else ():
            player = chosen[generation.id]
            if generation.tokens:
                player.turns.append(_turn(player, _Reply(generation, self.chat.decode(generation.tokens))))
        for player in chosen.values():
            self._end(player, Outcome.ABORTED)
        aborted = [trajectory for number, trajectory in self._ended if number in chosen]
        self._ended = [one for one in self._ended if one[0] not in chosen]
        return aborted

    def _end(self, player: _Player, outcome: Outcome, failure: Failure | None = None) -> None:
        self._worlds.drop(player.id)
        del self._players[player.id]
        game = player.game
        trajectory = Trajectory(
            world=player.rules.name,
            seed=seed_of(game.seed),
            group=game.group,
            sample=game.sample,
            turns=tuple(player.turns),
            outcome=outcome,
            failure=failure,
            kind=player.rules.kind,
        )
        self._ended.append((player.id, trajectory))
        if outcome is not Outcome.ABORTED:
            self._health[player.rules.name].count(failure)


def _out_of_bounds(player: _Player) -> Outcome | None:
    """Which of the limits a game has reached, if any."""
    most = player.rules.limits.actions
    if len(player.turns) >= player.rules.config.max_turns:
        return Outcome.MAX_TURNS
    return Outcome.MAX_ACTIONS if most is not None and player.actions >= most else None


def _turn(player: _Player, reply: _Reply, reward: float = 0.0, steps: Sequence[Step] = ()) -> Turn:
    generation = reply.generation
    return Turn(
        observation=player.observation.text,
        prompt=player.new,
        continues=player.continues,
        tokens=generation.tokens,
        logprobs=generation.logprobs,
        weight_version=generation.weight_version,
        text=reply.text,
        actions=reply.parsed.actions[: len(steps)],
        valid_format=reply.valid,
        reward=reward,
        stop=generation.stop,
        frames=tuple(step.observation.text for step in steps),
        images=player.observation.images,
        switches=generation.switches,
    )


def _outcome(success: bool, *, terminated: bool) -> Outcome:
    if success:
        return Outcome.SUCCESS
    return Outcome.TERMINATED if terminated else Outcome.TRUNCATED
