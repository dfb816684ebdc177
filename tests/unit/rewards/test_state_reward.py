"""If these fail, descriptions of a state are read or scored differently from what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from judge_endpoint import Endpoint, endpoint

from quintet.config.native.envs import FrozenLakeConfig, SokobanConfig
from quintet.config.native.relations import RelationScoring
from quintet.config.native.state_reward import StateRewardConfig
from quintet.envs.frozenlake import FrozenLake
from quintet.envs.sokoban import Sokoban
from quintet.records import FinishReason, Outcome, StateScore, Trajectory, Turn
from quintet.relations import Relation
from quintet.rewards import chat_endpoint
from quintet.rewards.state_relations import extract_relations
from quintet.rewards.state_reward import (
    Description,
    StateRewards,
    descriptions,
    matched_relations,
    penalize_repeated,
    relation_score,
)

BOXES, LAKE = SokobanConfig.relation_scoring, FrozenLakeConfig.relation_scoring


def relation(name: str, vertical: str | None, horizontal: str | None) -> Relation:
    return Relation(name, vertical, horizontal)


TEXTS: list[tuple[str, list[tuple[str, str | None, str | None]]]] = [
    ("The player is left of and above the target", [("target", "below", "right")]),
    (
        "the player is left of the target and the box is below the player",
        [("target", None, "right"), ("box", "below", None)],
    ),
    (
        "The box is directly above me. The target is in the same row, to the right of me",
        [("box", "above", "same"), ("target", "same", "right")],
    ),
    ("box0 and box1 are both left of the player", [("box", None, "left"), ("box", None, "left")]),
    ("The target is above the player, slightly to the left", [("target", "above", "left")]),
    ("Target is below.", [("target", "below", None)]),
    ("The player is at the same position as the target", [("target", "same", "same")]),
    (
        "The player is on the same row as the box and above the target",
        [("box", "same", None), ("target", "below", None)],
    ),
    ("The box is right of the target, and the player is at the bottom", []),
    ("A hole is left of the player and another below", []),
    ("The player will be left", []),
    ("", []),
    (
        '{"player":(1,2),"box":[(3,2),(0,0)],"target":[1,4]}',
        [("box", "below", "same"), ("box", "above", "left"), ("target", "same", "right")],
    ),
    (
        'I see [{"object_id":"box0","vertical_relation":"above","horizontal_relation":"nowhere"}]',
        [("box", "above", None)],
    ),
    ("# # # #\n # P O #\n # X _ #\n # # # #", [("target", "same", "right"), ("box", "below", "same")]),
    ("####\n#√P#\n####", [("target", "same", "left"), ("box", "same", "left")]),
    ("[1, 2]", []),
    ("[[[[", []),
]


@pytest.mark.parametrize(("text", "expected"), TEXTS, ids=[text[:40] for text, _ in TEXTS])
def test_relations_are_read_from_sentences_json_and_grids(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert extract_relations(text, BOXES) == [relation(*entry) for entry in expected]


def test_names_of_other_objects_come_from_the_state() -> None:
    actual = extract_relations("The red cube is left of you.", RelationScoring(), ["red cube"])
    assert actual == [] or actual == [relation("red_cube", None, "left")]
    assert extract_relations("The cube is left of you.", RelationScoring(), ["cube"]) == [
        relation("cube", None, "left")
    ]


TARGET, BOX = relation("target", "above", "left"), relation("box", "below", "same")
HOLES = [relation("hole", "above", "left"), relation("hole", "below", "same"), relation("hole", "same", "right")]
SCORES: list[tuple[list[Relation], list[Relation], RelationScoring, float]] = [
    ([TARGET, BOX], [TARGET, BOX], BOXES, 1.0),
    ([], [TARGET, BOX], BOXES, 0.0),
    ([TARGET], [TARGET, BOX], BOXES, 0.5),
    # precision 1/2, recall 1: F1 2/3
    ([TARGET, BOX, relation("box", "above", "same")], [TARGET, BOX], BOXES, 0.5 + 0.5 * 2 / 3),
    # without a direction it is no match
    ([TARGET, relation("box", "below", None)], [TARGET, BOX], BOXES, 0.5),
    # 0.7 * 1 + 0.3 * F1 of (1 + ½) matches: 2 * 1.5 / (2 + 3)
    ([TARGET, HOLES[0], relation("hole", "below", None)], [TARGET, *HOLES], LAKE, 0.7 + 0.3 * 3 / 5),
    # a lake without holes: the target alone counts
    ([TARGET], [TARGET], LAKE, 1.0),
    # half of the target's relation: F1 ½
    ([relation("target", "above", "right")], [TARGET], LAKE, 0.5),
    ([], [], BOXES, 1.0),
    ([relation("cup", "same", "left")], [relation("cup", "same", "left")], RelationScoring(), 1.0),
]


@pytest.mark.parametrize(("predicted", "true", "scoring", "expected"), SCORES)
def test_scores_are_the_weighted_f1_of_a_maximum_matching(
    predicted: list[Relation], true: list[Relation], scoring: RelationScoring, expected: float
) -> None:
    assert relation_score(predicted, true, scoring) == pytest.approx(expected)


def test_half_matches_are_assigned_so_that_most_count() -> None:
    """The first prediction could take the only partner of the second."""
    predicted = [relation("hole", "above", "same"), relation("hole", "above", None)]
    true = [relation("hole", "above", "left"), relation("hole", "below", "same")]
    assert matched_relations(predicted, true, partial=True) == 1.0
    assert matched_relations(predicted, true, partial=False) == 0.0
    assert matched_relations([predicted[1], predicted[0]], true, partial=True) == 1.0


@pytest.mark.parametrize("render", ["text", "vision"])
def test_observations_of_both_envs_have_their_relations(render: Any) -> None:
    puzzle = Sokoban(SokobanConfig(boxes=2, render=render)).reset(3)
    assert puzzle.relations is not None
    assert sorted(relation.name for relation in puzzle.relations) == ["box", "box", "target", "target"]
    env = FrozenLake(FrozenLakeConfig(render=render))
    before = env.reset(3).relations
    after = next(
        step.observation.relations for step in map(env.step, env.actions * 4) if step.observation.relations != before
    )
    assert before is not None
    assert after is not None
    assert [relation.name for relation in before] == [relation.name for relation in after]
    text = FrozenLake(FrozenLakeConfig(observation="grid"))
    assert extract_relations(text.reset(3).text, LAKE) == list(before)


def turn(reward: float = 1.0, scores: tuple[StateScore, ...] = ()) -> Turn:
    return Turn("", (1,), False, (2,), (0.0,), 0, "", (), True, reward, FinishReason.STOP, state_scores=scores)


def episode(*turns: Turn, group: int = 0) -> Trajectory:
    return Trajectory("sokoban", 3, group, 0, turns, Outcome.MAX_TURNS)


def described(text: str, kind: str = "observation") -> tuple[Description, ...]:
    return descriptions({kind: text}, (TARGET, BOX), (BOX, TARGET), BOXES)


def test_both_kinds_of_descriptions_are_compared_with_their_own_state() -> None:
    rewards = StateRewards(StateRewardConfig(grounding_weight=2.0, worldmodeling_weight=0.5))
    sections = {
        "observation": "The target is above and left of the player",
        "reasoning": "-",
        "prediction": "box below",
    }
    both = descriptions(sections, (TARGET, BOX), (relation("box", "below", None),), BOXES)
    rewards.submit(7, episode(turn(), turn(reward=0.25)), [both, ()])
    ((number, scored),) = rewards.ready()
    assert number == 7
    assert [score.score for score in scored.turns[0].state_scores] == [0.5, 1.0]
    assert [one.reward for one in scored.turns] == [1.0 + 2.0 * 0.5 + 0.5 * 1.0, 0.25]
    assert not rewards.pending


def test_an_unknown_state_costs_the_score_and_not_the_run() -> None:
    rewards = StateRewards(StateRewardConfig())
    rewards.submit(0, episode(turn()), [descriptions({"prediction": "box below"}, None, None, BOXES)])
    (score,) = rewards.ready()[0][1].turns[0].state_scores
    assert (score.score, score.failure and score.failure.error_type) == (0.0, "NoRelations")


def judge_config(known: Endpoint, **options: Any) -> StateRewardConfig:
    judge = {"url": known.url, "model": "judge", "concurrent": 2, "retries": 1, "timeout_seconds": 5.0, **options}
    return StateRewardConfig.model_validate({"scorer": "judge", "judge": judge})


def as_reply(*relations: Relation) -> str:
    entries = [
        {"object_id": r.name, "vertical_relation": r.vertical, "horizontal_relation": r.horizontal} for r in relations
    ]
    return f"<think>[1]</think>Here it is [as asked]:\n```json\n{json.dumps(entries)}\n```"


def test_a_judge_extracts_the_relations_and_failures_cost_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 0.01)
    replies = {"fine": as_reply(TARGET, BOX), "half": as_reply(TARGET), "odd": "I cannot say.", "down": (500, b"busy")}
    replies["cut"] = f"<think>{as_reply(TARGET, BOX).partition('</think>')[2]}"

    with endpoint(lambda prompt: replies[prompt.rpartition("\n")[2]]) as known:
        rewards = StateRewards(judge_config(known))
        for number, text in enumerate(replies):
            rewards.submit(number, episode(turn(0.0), group=number), [described(text)])
        ended: dict[int, Trajectory] = {}
        while rewards.pending:
            ended |= dict(rewards.ready(wait=True))
        rewards.close()
    assert [ended[number].reward for number in range(5)] == [0.5, 0.25, 0.0, 0.0, 0.0]
    failures = [ended[number].turns[0].state_scores[0].failure for number in range(5)]
    kinds = [failure and failure.error_type for failure in failures]
    assert kinds == [None, None, "NoRelations", "Http500", "NoRelations"]
    assert "target, box" in known.seen[0]["messages"][0]["content"]
    assert known.seen[0]["model"] == "judge"


def test_a_prompt_of_the_users_gets_text_and_objects() -> None:
    with endpoint(lambda prompt: as_reply(BOX) if prompt == "{x} target, box: {objects}" else "no") as known:
        rewards = StateRewards(judge_config(known, prompt="{x} {objects}: {text}"))
        rewards.submit(0, episode(turn(0.0)), [described("{objects}")])
        ((_, scored),) = rewards.ready(wait=True)
        rewards.close()
    assert scored.reward == 0.25


def test_episodes_that_are_withdrawn_are_returned_without_scores() -> None:
    with endpoint(lambda prompt: as_reply(BOX)) as known:
        rewards = StateRewards(judge_config(known))
        rewards.submit(0, episode(turn(0.0), group=5), [described("a")])
        assert [one.group for one in rewards.withdraw(groups=[5])] == [5]
        assert not rewards.pending
        rewards.submit(1, episode(turn(0.0), group=6), [described("b")])
        assert [number for number, _ in rewards.ready(wait=True)] == [1]
        rewards.close()


def test_frequent_descriptions_that_score_low_are_penalized() -> None:
    config = StateRewardConfig(grounding_weight=0.5, repeated_texts=1)

    def scored(text: str, score: float) -> Trajectory:
        return episode(turn(1.0 + 0.5 * score, (StateScore("grounding", text, score),)))

    episodes = [scored("the same", 0.2), scored("the same", 0.2), scored("the same", 0.6), scored("once", 0.1)]
    changed = penalize_repeated(episodes, config)
    assert [one.reward for one in changed] == pytest.approx([0.95, 0.95, 1.3, 1.05])
    assert [one.turns[0].state_scores[0].score for one in changed] == [-0.1, -0.1, 0.6, 0.1]
    assert penalize_repeated(episodes, replace_config(config, repeated_texts=0)) == episodes
    assert penalize_repeated(list(reversed(episodes)), config) == list(reversed(changed))


def test_the_penalty_and_its_limit_are_those_of_the_configuration() -> None:
    """By hand: 1 + 0.5 × 0.4 becomes 1 + 0.5 × (-1); a score of 0.6 is not below 0.5."""
    config = StateRewardConfig(grounding_weight=0.5, repeated_texts=1, repeated_below=0.5, repeated_score=-1.0)
    episodes = [episode(turn(1.0 + 0.5 * score, (StateScore("grounding", "the same", score),))) for score in (0.4, 0.6)]
    assert [one.reward for one in penalize_repeated(episodes, config)] == pytest.approx([0.5, 1.3])


def replace_config(config: StateRewardConfig, **changes: Any) -> StateRewardConfig:
    return config.model_copy(update=changes)


def test_scores_of_failed_descriptions_are_no_repetition() -> None:
    failed = StateScore("grounding", "x", 0.0, None)
    config = StateRewardConfig(repeated_texts=5)
    episodes = [episode(turn(0.0, (replace(failed, text="x"),))) for _ in range(2)]
    assert [one.reward for one in penalize_repeated(episodes, config)] == [-0.05, -0.05]
