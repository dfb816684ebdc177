"""State rewards: how well the thoughts of a policy describe the state of its environment before and after its actions.

As in VAGEN (Wang et al. 2025, arXiv:2510.16907), relations to the player are extracted from the descriptions and
compared with the environment's relations.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from quintet.config.native.relations import RelationScoring
from quintet.config.native.state_reward import SECTIONS, StateRewardConfig
from quintet.package_files import read_yaml
from quintet.records import Failure, StateScore, Trajectory, Turn
from quintet.relations import Relation
from quintet.reward_sum import sum_rewards
from quintet.rewards.chat_endpoint import ChatEndpoint, EndpointError, shortened, with_retries
from quintet.rewards.request_threads import RequestThreads
from quintet.rewards.state_relations import extract_relations, relations_from_json
from quintet.rewards.thoughts import text_after_thoughts

DescriptionKind = Literal["grounding", "worldmodeling"]
UNKNOWN_STATE = Failure("reward", "NoRelations", "the observation of the environment has no relations")
PROMPT: Final[str] = read_yaml(__file__, "prompts.yaml")["relations"]

_BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Description:
    """Section of a response that describes a state."""

    kind: DescriptionKind
    text: str
    relations: tuple[Relation, ...] | None
    """Relations of the state."""
    scoring: RelationScoring


def descriptions(
    sections: Mapping[str, str],
    before: tuple[Relation, ...] | None,
    after: tuple[Relation, ...] | None,
    scoring: RelationScoring,
) -> tuple[Description, ...]:
    """Return the descriptions of the states before and after a turn in the sections of its thoughts."""
    states: Mapping[DescriptionKind, tuple[Relation, ...] | None] = {"grounding": before, "worldmodeling": after}
    return tuple(
        Description(kind, sections[SECTIONS[kind]], states[kind], scoring)
        for kind in get_args(DescriptionKind)
        if SECTIONS[kind] in sections
    )


def score_by_rules(description: Description) -> StateScore:
    """Return the score of a description by the relations that `extract_relations` finds in it."""
    true = description.relations
    if true is None:
        return StateScore(description.kind, description.text, 0.0, UNKNOWN_STATE)
    predicted = extract_relations(description.text, description.scoring, [relation.name for relation in true])
    return StateScore(description.kind, description.text, relation_score(predicted, true, description.scoring))


class StateJudge:
    """Scores descriptions by the relations that a model behind an endpoint extracts."""

    def __init__(self, config: StateRewardConfig, closed: threading.Event) -> None:
        """
        Raises:
            ValueError: the section has no judge.
        """
        if config.judge is None:
            raise ValueError("rollout.state_reward.judge is null")
        self._config = judge = config.judge
        self._closed = closed
        self._endpoint = ChatEndpoint.at(judge.url, judge.key_variable, judge.timeout_seconds)
        self._body = {"model": judge.model, **judge.sampling}

    def score(self, description: Description) -> StateScore:
        """Return the score, or 0 with the failure."""
        true = description.relations
        if true is None:
            return score_by_rules(description)
        try:
            predicted = with_retries(lambda: self._relations(description, true), self._config.retries, self._closed)
        except Exception as error:  # noqa: BLE001 - a description that cannot be judged only costs itself
            error_type = error.error_type if isinstance(error, EndpointError) else type(error).__name__
            failure = Failure("reward", error_type, str(error))
            return StateScore(description.kind, description.text, 0.0, failure)
        return StateScore(description.kind, description.text, relation_score(predicted, true, description.scoring))

    def _relations(self, description: Description, true: Sequence[Relation]) -> list[Relation]:
        objects = ", ".join(dict.fromkeys([*description.scoring.weights, *(relation.name for relation in true)]))
        values = {"text": description.text, "objects": objects}
        template = self._config.prompt or PROMPT
        prompt = re.sub(r"\{(text|objects)\}", lambda match: values[match[1]], template)
        reply = self._endpoint.complete({**self._body, "messages": [{"role": "user", "content": prompt}]})
        text = text_after_thoughts(reply.choice["message"]["content"] or "")
        blocks = [*reversed(_BLOCK.findall(text)), text]
        relations = next(filter(lambda found: found is not None, map(relations_from_json, blocks)), None)
        if relations is None:
            shown = shortened(text.encode(errors="replace"))
            raise EndpointError("NoRelations", f"no list of relations in the reply: {shown}", retryable=False)
        return relations


@dataclass(slots=True)
class _Unscored:
    trajectory: Trajectory
    scores: list[list[StateScore | None]]
    """By turn."""

    @property
    def is_complete(self) -> bool:
        return all(score is not None for turn in self.scores for score in turn)


_DescriptionIndex = tuple[int, int, int]
"""Episode, turn and description."""
_Item = tuple[_DescriptionIndex, Description]
_Result = tuple[_DescriptionIndex, StateScore]


class StateRewards:
    """Scores the descriptions of episodes that have ended, and adds the scores to the rewards of their turns.

    With a judge, several requests are in progress while other episodes run.
    """

    def __init__(self, config: StateRewardConfig) -> None:
        self._config = config
        self._unscored: dict[int, _Unscored] = {}
        self._ended: list[tuple[int, Trajectory]] = []
        self._requests: RequestThreads[_Item, _Result] | None = None
        if config.scorer == "judge" and config.judge is not None:
            closed = threading.Event()
            judge = StateJudge(config, closed)
            self._requests = RequestThreads(
                lambda item: (item[0], judge.score(item[1])), config.judge.concurrent, "state-judge", closed
            )

    @property
    def pending(self) -> bool:
        """Whether episodes have not been returned."""
        return bool(self._unscored or self._ended)

    def submit(self, number: int, trajectory: Trajectory, by_turn: Sequence[Sequence[Description]]) -> None:
        """Start to score an episode."""
        unscored = _Unscored(trajectory, [[None] * len(turn) for turn in by_turn])
        self._unscored[number] = unscored
        for turn, descriptions in enumerate(by_turn):
            for index, description in enumerate(descriptions):
                if self._requests is None:
                    unscored.scores[turn][index] = score_by_rules(description)
                else:
                    self._requests.submit(((number, turn, index), description))
        self._complete(number)

    def ready(self, *, wait: bool = False) -> list[tuple[int, Trajectory]]:
        """Return the episodes that have been scored since the last call; with `wait`, at least one if any is left."""
        if self._requests is not None:
            for result in self._requests.ready():
                self._record(*result)
            while wait and self._unscored and not self._ended:
                self._record(*self._requests.next())
        ended, self._ended = self._ended, []
        return ended

    def withdraw(self, numbers: Collection[int] | None = None, groups: Collection[int] = ()) -> list[Trajectory]:
        """Return episodes without their scores, by number or group, and forget them."""
        chosen = [
            number
            for number, unscored in self._unscored.items()
            if number in (numbers or ()) or unscored.trajectory.group in groups
        ]
        return [self._unscored.pop(number).trajectory for number in chosen]

    def close(self) -> None:
        """Abandon requests in progress."""
        if self._requests is not None:
            self._requests.close()

    def _record(self, position: _DescriptionIndex, score: StateScore) -> None:
        number, turn, index = position
        if number in self._unscored:
            self._unscored[number].scores[turn][index] = score
            self._complete(number)

    def _complete(self, number: int) -> None:
        """Return an episode by `ready` if all of its scores are there."""
        unscored = self._unscored[number]
        if not unscored.is_complete:
            return
        del self._unscored[number]
        scores = [[score for score in turn if score is not None] for turn in unscored.scores]
        self._ended.append((number, _with_scores(unscored.trajectory, scores, self._config)))


def _with_scores(
    trajectory: Trajectory, by_turn: Sequence[Sequence[StateScore]], config: StateRewardConfig
) -> Trajectory:
    turns = list(trajectory.turns)
    for index, scores in enumerate(by_turn):
        reward = sum_rewards((turns[index].reward, weighted_score(scores, config)))
        turns[index] = replace(turns[index], reward=reward, state_scores=tuple(scores))
    return replace(trajectory, turns=tuple(turns))


def weighted_score(scores: Sequence[StateScore], config: StateRewardConfig) -> float:
    """Return the state reward of a turn."""
    weights = {"grounding": config.grounding_weight, "worldmodeling": config.worldmodeling_weight}
    return sum_rewards(weights[score.kind] * score.score for score in scores)


def penalize_repeated(trajectories: Sequence[Trajectory], config: StateRewardConfig) -> list[Trajectory]:
    """Return the episodes of a step with `repeated_score` for low scores of the most frequent descriptions.

    Each kind of description is counted on its own. VAGEN counts over the whole run, in the order in which responses
    arrive; the descriptions of one step depend neither on that order nor on when a run was resumed.
    """
    if not config.repeated_texts:
        return list(trajectories)
    repeated = _repeated_texts(trajectories, config.repeated_texts)

    def penalized(score: StateScore) -> StateScore:
        is_low = score.failure is None and score.score < config.repeated_below
        return replace(score, score=config.repeated_score) if is_low and (score.kind, score.text) in repeated else score

    def changed(turn: Turn) -> Turn:
        scores = tuple(map(penalized, turn.state_scores))
        if scores == turn.state_scores:
            return turn
        terms = (turn.reward, weighted_score(scores, config), -weighted_score(turn.state_scores, config))
        return replace(turn, reward=sum_rewards(terms), state_scores=scores)

    return [replace(trajectory, turns=tuple(map(changed, trajectory.turns))) for trajectory in trajectories]


def _repeated_texts(trajectories: Sequence[Trajectory], count: int) -> set[tuple[DescriptionKind, str]]:
    """Return the `count` most frequent descriptions of each kind that occur more than once; ties in alphabetical
    order."""
    counts = Counter((score.kind, score.text) for score in _scores(trajectories))
    repeated: set[tuple[DescriptionKind, str]] = set()
    for kind in get_args(DescriptionKind):
        texts = [text for (score_kind, text), number in counts.items() if score_kind == kind and number > 1]
        repeated.update((kind, text) for text in sorted(texts, key=lambda text: -counts[kind, text])[:count])
    return repeated


def _scores(trajectories: Sequence[Trajectory]) -> Iterator[StateScore]:
    for trajectory in trajectories:
        for turn in trajectory.turns:
            yield from turn.state_scores


Directions = tuple[str | None, str | None]
"""Vertical and horizontal."""


def relation_score(predicted: Sequence[Relation], true: Sequence[Relation], scoring: RelationScoring) -> float:
    """Return the weighted mean F1 over the kinds of objects that the description or the state has, 0 to 1.

    As in VAGEN (Wang et al. 2025, arXiv:2510.16907): relations of one kind are assigned to each other by maximum
    bipartite matching, F1 = 2·m / (predicted + true) with m the matched relations. Objects without a weight do not
    count.
    """
    weights = scoring.weights or dict.fromkeys((relation.name for relation in true), 1.0)
    present = {relation.name for relation in (*predicted, *true)} & weights.keys()
    if not present:
        return float(not predicted and not true)
    total = sum(weights[name] for name in present)
    scores = {
        name: _f1([r for r in predicted if r.name == name], [r for r in true if r.name == name], scoring.partial)
        for name in present
    }
    return sum(weights[name] * score for name, score in scores.items()) / total


def _f1(predicted: Sequence[Relation], true: Sequence[Relation], partial: bool) -> float:
    matched = matched_relations(predicted, true, partial=partial)
    return 2 * matched / (len(predicted) + len(true))


def matched_relations(predicted: Sequence[Relation], true: Sequence[Relation], *, partial: bool) -> float:
    """Return the weight of a maximum matching, in which equal relations count 1 and, with `partial`, relations with
    one equal direction ½.

    Some maximum matching has all pairs of equal relations: to separate such a pair loses 1, and its parts can gain ½
    each. The others form a maximum matching by augmenting paths.
    """
    unmatched: Counter[Directions] = Counter((r.vertical, r.horizontal) for r in true)
    others = []
    for relation in predicted:
        if unmatched[relation.vertical, relation.horizontal] > 0:
            unmatched[relation.vertical, relation.horizontal] -= 1
        else:
            others.append(relation)
    num_equal = len(predicted) - len(others)
    if not partial:
        return float(num_equal)
    remaining = [directions for directions, count in unmatched.items() for _ in range(count)]
    return num_equal + _half_matches(others, remaining) / 2


def _half_matches(predicted: Sequence[Relation], true: Sequence[Directions]) -> int:
    """Return the number of pairs with an equal direction, by Kuhn's algorithm."""
    partner: dict[int, int] = {}

    def augment(number: int, visited: set[int]) -> bool:
        relation = predicted[number]
        for other, (vertical, horizontal) in enumerate(true):
            if other in visited or (relation.vertical != vertical and relation.horizontal != horizontal):
                continue
            visited.add(other)
            if other not in partner or augment(partner[other], visited):
                partner[other] = number
                return True
        return False

    return sum(augment(number, set()) for number in range(len(predicted)))
