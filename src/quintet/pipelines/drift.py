"""The drift gauge by itself: a few games, and how far engine and learner are apart on what was written in them.

Measured as the engine was loaded, and again after the learner's weights were changed and handed over: what goes wrong
there goes wrong in silence. Beside it, what would differ if somebody decoded a game's tokens and encoded their text
again, and where the chat template isn't followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import torch
from torch import Tensor

from quintet.algorithms.drift import TOLERATED, Drift, drift
from quintet.config import Composed
from quintet.config.native import Experiment, RolloutConfig
from quintet.data.book import PromptBook, texts_of
from quintet.envs.catalogue import make_world
from quintet.errors import ConfigError, MachineError
from quintet.pipelines.evaluate import model_of
from quintet.pipelines.warm_start import corpus, lessons
from quintet.policies.causal_lm import load_tokenizer
from quintet.policies.tiny import make_policy
from quintet.records import UNPLAYED, Batch, Trajectory
from quintet.rollout.agent_loop import AgentLoop, Game, Sampling, derive_seed
from quintet.rollout.assemble import assemble
from quintet.rollout.dialogue import PART, ChatFormat, Dialogue
from quintet.rollout.parity import Departure, Respelling, respellings
from quintet.rollout.templates import TemplateReport
from quintet.runtime.engines import engine_dtype
from quintet.runtime.local import Components, build
from quintet.runtime.megatron import Weighing
from quintet.tracking.run_directory import RunDirectory
from quintet.training.handles import Actor
from quintet.training.learner import ActorLearner

__all__ = ["Checked", "Found", "Respelled", "Round", "Templated", "Worst", "check_drift"]

VOCABULARY_TEXTS, VOCABULARY_GAMES = 4000, 100
"""From which a made policy learns its vocabulary."""
SHAKEN: Final = 0.1
"""By up to which share each weight tensor is made larger or smaller before it is handed over."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What is to be checked."""

    games: int = 16
    """Games to play, or questions to answer."""
    updates: int = 1
    """How often new weights are handed to the engine before the second measurement; 0 measures but once."""
    limit: float | None = None
    """Nats; None takes that of the numbers' type."""
    share: float | None = None
    """Of the tokens, that may be beyond the limit; None takes that of the numbers' type."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The token whose log-probabilities are furthest apart."""

    token: int
    text: str
    game: int
    turn: int
    learner: float
    """Nats."""
    engine: float

    def as_json(self) -> dict[str, Any]:
        """By name; what isn't finite is null."""
        return {
            name: value if isinstance(value, str) or isfinite(value) else None for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement."""

    name: str
    drift: Drift
    worst: Worst


@dataclass(frozen=True, slots=True)
class Respelled:
    """What would become of the games' tokens if their text were encoded again."""

    turns: int
    """Turns in which the policy's own words would be spelled otherwise."""
    of_turns: int
    own_tokens: int
    """The policy's own tokens that would be lost."""
    context_tokens: int
    """Tokens of prompts alone that would be."""
    example: Respelling | None = None
    text: str = ""
    """Of the example, as its tokens are and as they would be."""
    again: str = ""


@dataclass(frozen=True, slots=True)
class Templated:
    """How the games were held against the chat template."""

    report: TemplateReport
    departures: Mapping[str, int]
    """Places in which a game's text isn't the template's, by the rule that says why."""
    examples: Mapping[str, Departure]
    rebuilt: int
    """Turns whose tokens follow from what was said, as they must."""
    of_turns: int


@dataclass(frozen=True, slots=True)
class Found:
    """What the check found."""

    policy: str
    engine: str
    engine_dtype: str
    learner_dtype: str
    games: int
    limit: float
    share: float
    rounds: tuple[Round, ...]
    respelled: Respelled
    templated: Templated | None = None
    """None where no dialogue is played."""

    @property
    def passed(self) -> bool:
        """Whether few enough tokens are beyond the limit, and every prompt is what it must be."""
        as_told = self.templated is None or self.templated.rebuilt == self.templated.of_turns
        return as_told and all(one.drift.beyond <= self.share for one in self.rounds)

    def as_json(self) -> dict[str, Any]:
        """All of it by name; what isn't finite is null."""
        rounds = [{"name": one.name, "drift": one.drift.as_json(), "worst": one.worst.as_json()} for one in self.rounds]
        return asdict(self) | {"rounds": rounds, "passed": self.passed}


def check_drift(composed: Composed, checked: Checked) -> Found:
    """Play some games of the configuration, and hold engine against learner. Nothing is written into the run.

    Raises:
        ConfigError: the model, the world, the data or the engine isn't as the configuration says.
        MachineError: a model can't be read, or no game could be played.
    """
    config = composed.experiment
    with _opened(config) as (components, policy, told):
        kind = str(engine_dtype(config, policy)).removeprefix("torch.")
        limit, share = _allowed(config, kind, checked)
        rounds = [_measured(components, "as loaded", checked.games, limit)]
        if checked.updates:
            _hand_over(components, checked.updates)
            name = f"after {checked.updates} update{'s' * (checked.updates > 1)}"
            rounds.append(_measured(components, name, checked.games, limit))
        games = [game for one in rounds for game in one.games]
        return Found(
            policy=told,
            engine=config.rollout.engine,
            engine_dtype=kind,
            learner_dtype=config.policy.dtype,
            games=len(games),
            limit=limit,
            share=share,
            rounds=tuple(one.told for one in rounds),
            respelled=_respelled(components.tokenizer, games),
            templated=_templated(components, games),
        )


def _allowed(config: Experiment, engine: str, checked: Checked) -> tuple[float, float]:
    """Limit and share: those of the coarser of both types where they aren't given."""
    types = (engine, config.policy.dtype)
    limit, share = max(TOLERATED.get(name, TOLERATED["bfloat16"]) for name in types)
    return (
        limit if checked.limit is None else checked.limit,
        share if checked.share is None else checked.share,
    )


@contextmanager
def _opened(config: Experiment) -> Iterator[tuple[Components, Path, str]]:
    """Components around the configuration's policy, where that lies and what it is."""
    with TemporaryDirectory(prefix="quintet-drift-") as made:
        policy, told = _policy(config, Path(made) / "policy")
        book = _book(config, policy)
        try:
            components = build(config, policy, book)
            try:
                components.sync_weights(0)
                yield components, policy, told
            finally:
                components.close()
        finally:
            if book is not None:
                book.close()


def _policy(config: Experiment, place: Path) -> tuple[Path, str]:
    """The run's last checkpoint, the model that is named, or a preset's, made anew at `place`."""
    begun = config.resume != "never" and RunDirectory.of(config).checkpoints.is_dir()
    if config.policy.path is not None or begun or config.resume not in ("auto", "never"):
        found = model_of(config)
        return found, str(found)
    seed = derive_seed(config.seed, "policy")
    make_policy(str(config.policy.preset), place, _texts(config), seed)
    return place, f"a new {config.policy.preset}"


def _texts(config: Experiment) -> Iterator[str]:
    if config.world.name == "prompts":
        if config.data is None:
            raise ConfigError("no data to ask from", key="data", hint="name files: data.train_files")
        return islice(texts_of(config.data), VOCABULARY_TEXTS)
    return corpus(lessons(config, VOCABULARY_GAMES))


def _book(config: Experiment, policy: Path) -> PromptBook | None:
    if config.world.name != "prompts":
        return None
    trusted = config.policy.trust_remote_code or config.policy.trust_tokenizer_code
    return PromptBook.of(config, load_tokenizer(config.policy.tokenizer or policy, trust_remote_code=trusted))


def _hand_over(components: Components, updates: int) -> None:
    """Change every weight tensor of the learner a little, and give them to the engine, so often."""
    generator = torch.Generator().manual_seed(derive_seed(components.experiment.seed, "drift"))
    for version in range(1, updates + 1):
        _shake(components.actor, lambda: 1.0 + SHAKEN * (2.0 * float(torch.rand((), generator=generator)) - 1.0))
        components.sync_weights(version)


@torch.no_grad()
def _shake(actor: Actor, factor: Callable[[], float]) -> None:
    """Multiply every weight tensor by what is drawn for it."""
    if isinstance(actor, ActorLearner):
        for parameter in actor.model.parameters():
            parameter.mul_(factor())
    else:
        cast("Weighing", actor).load_weights({name: weight * factor() for name, weight in actor.weights()})


@dataclass(frozen=True, slots=True)
class _Measured:
    told: Round
    games: list[Trajectory]


def _measured(components: Components, name: str, games: int, limit: float) -> _Measured:
    """Play, and compare."""
    played = _played(components, games)
    batch = assemble(played)
    own = batch.loss_mask
    learner, engine = components.actor.scorer.logprobs(batch)[own], batch.logprobs[own]
    worst = _worst(components.tokenizer, batch, learner, engine)
    return _Measured(Round(name, drift(learner, engine, limit), worst), played)


def _played(components: Components, count: int) -> list[Trajectory]:
    """Games from starts that are neither trained on nor held out, drawn as in training."""
    config = components.experiment
    rollout = config.rollout
    seed = derive_seed(config.seed, "drift")
    sampling = Sampling(rollout.temperature, rollout.top_k, rollout.top_p, seed)
    games = [Game(start, number, 0) for number, start in enumerate(components.starts.trials(count))]
    played = sorted(components.games.play(games, sampling), key=lambda game: game.group)
    whole = [game for game in played if game.outcome not in UNPLAYED and any(t.tokens for t in game.turns)]
    if not whole:
        failure = next((game.failure for game in played if game.failure is not None), None)
        told = f"{failure.where}: {failure.kind}: {failure.message}" if failure else "no prompt fits"
        raise MachineError(f"no game could be played ({told})", "mend that, then check again")
    return whole


def _worst(tokenizer: Any, batch: Batch, learner: Tensor, engine: Tensor) -> Worst:
    apart = (learner - engine).abs()
    at = int(torch.where(apart.isnan(), torch.inf, apart).argmax())
    place = int(batch.loss_mask.nonzero().squeeze(-1)[at])
    token = int(batch.tokens[place])
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    game, turn = int(batch.token_trajectory[place]), int(batch.turn[place])
    return Worst(token, text, game, turn, float(learner[at]), float(engine[at]))


def _respelled(tokenizer: Any, games: Sequence[Trajectory]) -> Respelled:
    """Every sequence of every game, decoded and encoded again."""
    batch = assemble(games)
    found: list[tuple[int, Respelling]] = []
    columns = [column.tolist() for column in (batch.tokens, batch.turn, batch.loss_mask)]
    at = 0
    for length, game in zip(batch.lengths.tolist(), batch.trajectory.tolist(), strict=True):
        tokens, turns, own = (column[at : at + length] for column in columns)
        found += [(game, fault) for fault in respellings(tokenizer, tokens, turns, own)]
        at += length
    mine = [fault for _, fault in found if fault.own]

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    def telling(fault: Respelling) -> tuple[bool, int]:
        """Whole letters, and few tokens."""
        return PART in text(fault.tokens), len(fault.tokens)

    example = min(mine or [fault for _, fault in found], key=telling, default=None)
    return Respelled(
        turns=len({(game, fault.turn) for game, fault in found if fault.own}),
        of_turns=sum(len(game.turns) for game in games),
        own_tokens=sum(len(fault.tokens) for fault in mine),
        context_tokens=sum(len(fault.tokens) for _, fault in found if not fault.own),
        example=example,
        text="" if example is None else text(example.tokens),
        again="" if example is None else text(example.again),
    )


def _templated(components: Components, games: Sequence[Trajectory]) -> Templated | None:
    """Every game's dialogue, built anew from what was said and held against the template."""
    if not isinstance(components.games, AgentLoop):
        return None
    config, chat = components.experiment, components.chat
    played = {one.name: (one.rollout, make_world(one.config).instruction()) for one in config.played}
    counts: Counter[str] = Counter()
    examples: dict[str, Departure] = {}
    rebuilt = 0
    for game in games:
        dialogue, right = _rebuilt(*played[game.world], chat, game)
        rebuilt += right
        for departure in dialogue.compare().departures:
            counts[str(departure.rule)] += 1
            examples.setdefault(str(departure.rule), departure)
    return Templated(chat.report, dict(counts), examples, rebuilt, sum(len(game.turns) for game in games))


def _rebuilt(rollout: RolloutConfig, system: str, chat: ChatFormat, game: Trajectory) -> tuple[Dialogue, int]:
    """The dialogue of a game, and how many of its prompts came out as they were."""
    dialogue, right = Dialogue.under(rollout, chat, system), 0
    for turn in game.turns:
        _, new, continues = dialogue.observe(turn.observation)
        right += (new, continues) == (turn.prompt, turn.continues)
        dialogue.reply(turn.tokens)
    return dialogue, right
