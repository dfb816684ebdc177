"""If these fail, episodes that teach nothing take part in the update, or episodes that teach are left out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.algorithms.advantages.groups import trajectory_rewards
from quintet.algorithms.kl import KlControl
from quintet.algorithms.shaping import shape_rewards
from quintet.config.compose import load_experiment
from quintet.config.native.algorithm import AlgorithmConfig, KlConfig, ShapingConfig
from quintet.pipelines.experience import add_advantages, add_log_probs, collate_rollout
from quintet.pipelines.rollout_step import Rollout
from quintet.records import Batch, FinishReason, Outcome, Trajectory, Turn
from quintet.rollout.async_rollout import groups_with_signal
from quintet.rollout.collate import collate, train_on_observations
from quintet.runtime.calls.messages import NO_CODE
from quintet.runtime.calls.remote_call import _from_json, _to_json
from quintet.training.packing import select_trajectories


def batch(rewards: list[float], groups: list[int]) -> Batch:
    """Episodes of two tokens, the second one the policy's own."""
    count = len(rewards)
    own = torch.tensor([False, True]).repeat(count)
    return Batch(
        tokens=torch.arange(2 * count),
        positions=torch.tensor([0, 1]).repeat(count),
        lengths=torch.full((count,), 2),
        loss_mask=own,
        turn=torch.zeros(2 * count, dtype=torch.long),
        turn_end=own,
        trajectory=torch.arange(count),
        group=torch.tensor(groups),
        logprobs=torch.zeros(2 * count),
        rewards=torch.tensor(rewards).repeat_interleave(2) * own,
    )


EPISODES = batch([-0.8, -0.6, 10.0, -0.8, 1.0, 1.0], [0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("overrides", "kept", "signal"),
    [
        ([], [0, 1, 2, 3], 2 / 3),
        (["algorithm.signal_threshold=1.0"], [2, 3], 1 / 3),
        (["algorithm.drop_groups_without_signal=false"], [0, 1, 2, 3, 4, 5], 2 / 3),
        (["algorithm.signal_threshold=100.0"], [0, 1, 2, 3, 4, 5], 0.0),
    ],
)
def test_groups_that_hardly_differ_are_left_out(overrides: list[str], kept: list[int], signal: float) -> None:
    learnt, actual = add_advantages(EPISODES, load_experiment(None, overrides).experiment)
    assert learnt.trajectory.tolist() == kept
    assert actual["training/groups_with_signal"] == pytest.approx(signal)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.advantage={name: raw}"],
        ["algorithm.advantage={name: reinforce_plus_plus}"],
        ["algorithm.advantage={name: grpo, whiten: true}"],
        ["algorithm.loss={name: distillation}", "reference.path=teacher"],
        ["algorithm.shaping.length_penalty=0.1"],
    ],
)
def test_groups_of_equal_reward_stay_where_something_else_teaches(overrides: list[str]) -> None:
    learnt, _ = add_advantages(EPISODES, load_experiment(None, overrides).experiment)
    assert learnt.trajectory.tolist() == [0, 1, 2, 3, 4, 5]


def test_filtered_groups_do_not_enter_the_reward_mean() -> None:
    """By hand: without the group of mean 4.6 the others' mean is (-0.8 - 0.6 + 1 + 1) / 4 = 0.15."""
    overrides = ["algorithm.advantage={name: raw}", "algorithm.filter.max_mean=2.0", "algorithm.shaping.center=batch"]
    learnt, actual = add_advantages(EPISODES, load_experiment(None, overrides).experiment)
    assert learnt.trajectory.tolist() == [0, 1, 4, 5]
    assert learnt.advantages is not None
    assert learnt.advantages[learnt.loss_mask].tolist() == pytest.approx([-0.95, -0.75, 0.85, 0.85])
    assert actual["training/groups_kept"] == pytest.approx(2 / 3)


TOP_P = ["algorithm.filter.top_p=0.9", "algorithm.filter.scale_advantages=sqrt"]


@pytest.mark.parametrize(
    ("overrides", "advantages"),
    [
        # deviations 0.14, 7.64 and 0: the second group is 98 % of their sum, and one of three groups is kept
        ([], [5.4, -5.4]),
        (["algorithm.filter.after_advantages=true"], [5.4, -5.4]),
        # the rewards 10 and -0.8 less their mean of 4.6, or less that of all episodes, 1.6333
        (["algorithm.advantage={name: raw}", "algorithm.shaping.center=batch"], [5.4, -5.4]),
        (
            [
                "algorithm.advantage={name: raw}",
                "algorithm.shaping.center=batch",
                "algorithm.filter.after_advantages=true",
            ],
            [8.366667, -2.433333],
        ),
        (["algorithm.zero_advantages=true"], [0.0, 0.0]),
    ],
)
def test_the_advantages_of_kept_groups_are_scaled(overrides: list[str], advantages: list[float]) -> None:
    grpo = "algorithm.advantage={name: grpo, normalize_by_std: false}"
    learnt, actual = add_advantages(EPISODES, load_experiment(None, [grpo, *TOP_P, *overrides]).experiment)
    assert learnt.trajectory.tolist() == [2, 3]
    assert actual["training/groups_kept"] == pytest.approx(1 / 3)
    assert learnt.advantages is not None
    scaled = [advantage / 3**0.5 for advantage in advantages]
    assert learnt.advantages[learnt.loss_mask].tolist() == pytest.approx(scaled, abs=1e-5)


@pytest.mark.parametrize(
    "overrides", [[], ["algorithm.filter.after_advantages=true"], ["algorithm.mask_truncated=true"]]
)
def test_a_step_whose_groups_are_all_dropped_trains_nothing(overrides: list[str]) -> None:
    config = load_experiment(None, ["algorithm.filter.min_mean=100", *overrides]).experiment
    episodes = replace(EPISODES, ref_logprobs=torch.zeros(12))
    control = KlControl.from_config(KlConfig(apply_to="reward", coefficient=2.0, target=1.0))
    learnt, actual = add_advantages(episodes, config, control)
    assert not learnt.loss_mask.any()
    assert actual["training/groups_kept"] == 0
    assert all(value == value for value in actual.values())


def test_the_kl_penalty_is_subtracted_after_filtering() -> None:
    """By hand: k1 of one own token is logp - ref = 0.5, times 2."""
    episodes = replace(EPISODES, ref_logprobs=torch.full((12,), -0.5) * EPISODES.loss_mask)
    kl = KlConfig(apply_to="reward", coefficient=2.0, estimator="k1")
    _, actual = add_advantages(episodes, load_experiment(None).experiment, KlControl.from_config(kl))
    assert actual["training/groups_with_signal"] == pytest.approx(2 / 3)
    assert actual["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert actual["critic/rewards/mean"] == pytest.approx((-0.8 - 0.6 + 10.0 - 0.8 + 1.0 + 1.0) / 6 - 1.0)


def test_a_penalty_beside_a_divergence_in_the_loss_has_its_own_coefficient() -> None:
    """By hand: k1 of one own token is logp - ref = 0.5, times 2; groups of equal rewards stay."""
    overrides = [
        "algorithm.kl={coefficient: 9.0, estimator: k2}",
        "algorithm.reward_kl={coefficient: 2.0, target: 0.25}",
    ]
    run = load_experiment(None, [*overrides, "algorithm.advantage={name: raw}"]).experiment
    assert run.algorithm.kl_in_reward is not None
    control = KlControl.from_config(run.algorithm.kl_in_reward)
    episodes = replace(EPISODES, ref_logprobs=torch.full((12,), -0.5) * EPISODES.loss_mask)
    learnt, actual = add_advantages(episodes, run, control)
    assert learnt.advantages is not None
    assert learnt.advantages[learnt.loss_mask].tolist() == pytest.approx([-1.8, -1.6, 9.0, -1.8, 0.0, 0.0])
    assert actual["actor/reward_kl_penalty_coeff"] == 2.0
    # the divergence is twice the target: the coefficient grows by a fifth times six episodes of 10,000
    assert control.coefficient == pytest.approx(2.0 * (1.0 + 0.2 * 6 / 10000))


@pytest.mark.parametrize(("recomputed", "log_prob"), [(True, -0.25), (False, 0.0)])
def test_the_learners_log_probs_replace_the_engines_if_that_is_configured(recomputed: bool, log_prob: float) -> None:
    scorer = SimpleNamespace(compute_log_probs=lambda batch: torch.full((12,), -0.25), dtype=torch.float32)
    learners = SimpleNamespace(policy_scorer=lambda step: scorer, actor=SimpleNamespace(scorer=scorer))
    config = load_experiment(None, [f"rollout.recompute_logprobs={recomputed}"]).experiment
    components: Any = SimpleNamespace(config=config, learners=learners)
    scored, _ = add_log_probs(components, EPISODES, 1)
    assert scored.logprobs[scored.loss_mask].tolist() == [log_prob] * 6


REJECTING = "algorithm.correction={level: null, reject: [{upper: 2.0}]}"


@pytest.mark.parametrize(
    ("overrides", "advantages"),
    [
        # by hand: the rewards -0.8, -0.6, 10 and -0.8 are of groups of two, and the third episode's token is rejected
        (["algorithm.advantage={name: grpo, normalize_by_std: false}"], [-0.1, 0.1, -5.4]),
        # the mean of -0.1, 0.1, 5.4, -5.4 is 0 and their unbiased deviation √(58.34 / 3)
        (["algorithm.advantage={name: reinforce_plus_plus_baseline}"], [-0.022676, 0.022676, -1.224525]),
        # without the rejected token: the mean of -0.1, 0.1, -5.4 is -1.8, the deviation √(19.46 / 2)
        (
            [
                "algorithm.advantage={name: reinforce_plus_plus_baseline}",
                "algorithm.correction.reject_before_advantages=true",
            ],
            [0.544994, 0.609112, -1.154106],
        ),
    ],
)
def test_tokens_are_rejected_before_or_after_advantages(overrides: list[str], advantages: list[float]) -> None:
    episodes = batch([-0.8, -0.6, 10.0, -0.8], [0, 0, 1, 1])
    rejected = torch.ones(8, dtype=torch.bool)
    rejected[5] = False
    settings = ["rollout.recompute_logprobs=true", REJECTING, *overrides]
    trained, _ = add_advantages(replace(episodes, trained_mask=rejected), load_experiment(None, settings).experiment)
    assert trained.loss_mask.tolist() == [False, True, False, True, False, False, False, True]
    assert trained.advantages is not None
    assert trained.advantages[trained.loss_mask].tolist() == pytest.approx(advantages, abs=1e-5)


def test_advantages_are_clipped_after_they_were_computed() -> None:
    free, _ = add_advantages(EPISODES, load_experiment(None, []).experiment)
    clipped, _ = add_advantages(EPISODES, load_experiment(None, ["algorithm.advantage_clip=0.5"]).experiment)
    assert free.advantages is not None
    assert clipped.advantages is not None
    assert float(free.advantages.abs().max()) > 0.5
    assert torch.equal(clipped.advantages, free.advantages.clamp(-0.5, 0.5))


@pytest.mark.parametrize(("over_responses", "expected"), [(True, 0.5), (False, 0.25)])
def test_observations_are_steps_of_the_advantage_only_if_configured(*, over_responses: bool, expected: float) -> None:
    """The reward of the second response comes one response token later, or two tokens with the observation."""
    own = torch.tensor([False, True, False, True])
    episodes = replace(
        batch([0.0, 1.0], [0, 0]),
        positions=torch.arange(4),
        lengths=torch.tensor([4]),
        loss_mask=own,
        turn=torch.tensor([0, 0, 1, 1]),
        turn_end=own,
        trajectory=torch.tensor([0]),
        group=torch.tensor([0]),
        values=torch.zeros(4),
    )
    estimator = "algorithm.advantage={name: gae, gamma: 0.5, lam: 1.0, whiten: false}"
    settings = [estimator, f"algorithm.advantage_over_response_tokens={str(over_responses).lower()}"]
    trained, _ = add_advantages(episodes, load_experiment(None, settings).experiment)
    assert trained.advantages is not None
    assert trained.advantages[own].tolist() == [expected, 1.0]


def test_advantages_are_whitened_within_each_domain() -> None:
    """Rewards 0 and 2 of one domain, 10 and 30 of another: each domain has the deviation 1 after whitening."""
    config = load_experiment(None, ["algorithm.advantage={name: raw, whiten: true}"]).experiment
    episodes = replace(batch([0.0, 2.0, 10.0, 30.0], [0, 1, 2, 3]), domain=torch.tensor([0, 0, 1, 1]))
    learnt, _ = add_advantages(episodes, config)
    half = 0.5**0.5
    expected = torch.tensor([-half, half, -half, half])
    torch.testing.assert_close(learnt.advantages[learnt.loss_mask], expected, atol=1e-4, rtol=0)
    together, _ = add_advantages(replace(episodes, domain=None), config)
    assert not torch.allclose(together.advantages[together.loss_mask], expected, atol=0.1)


def episode(outcome: Outcome, *reasons: FinishReason, continues: bool = True, **fields: Any) -> Trajectory:
    """An episode with a response of two tokens per reason, behind three tokens of an observation."""
    turns = tuple(
        Turn("", (1, 2, 3), continues and number > 0, (4, 5), (0.0, 0.0), 0, "", (), True, 1.0, reason)
        for number, reason in enumerate(reasons)
    )
    return Trajectory("e", 0, 0, 0, turns, outcome, **fields)


STOP, LENGTH, FULL = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT
CUT_EPISODES = [
    episode(Outcome.TRUNCATED, LENGTH),
    episode(Outcome.SUCCESS, LENGTH),
    episode(Outcome.TERMINATED, LENGTH, STOP),
    episode(Outcome.TERMINATED, STOP, FULL, continues=False),
    episode(Outcome.MAX_TOKENS, STOP),
    episode(Outcome.CONTEXT, STOP, STOP),
    episode(Outcome.SUCCESS, STOP, replies_exceed_limit=True),
]
WHOLE_EPISODES = [
    episode(Outcome.TERMINATED, STOP),
    episode(Outcome.TRUNCATED, STOP, STOP),
    episode(Outcome.MAX_TURNS, STOP, STOP, continues=False),
    episode(Outcome.MAX_ACTIONS, STOP),
]


@pytest.mark.parametrize("domains", [False, True])
def test_episodes_that_a_limit_of_tokens_cut_count_in_their_group_but_not_in_the_loss(*, domains: bool) -> None:
    # a response of the maximum length that ends with an end token is not cut off
    overrides = ["rollout.max_response_tokens=2", "algorithm.mask_truncated=true", "algorithm.advantage={name: grpo}"]
    config = load_experiment(None, overrides).experiment
    episodes = [*CUT_EPISODES, *WHOLE_EPISODES]
    made = collate(replace(each, group=group) for group, each in enumerate(episodes))
    made = replace(made, group=torch.zeros_like(made.group))
    made = replace(made, domain=torch.arange(len(episodes)) % 2) if domains else made
    learnt, metrics = add_advantages(made, config)
    whole = set(range(len(CUT_EPISODES), len(episodes)))
    assert set(learnt.token_trajectory[learnt.loss_mask].tolist()) == whole
    assert int(learnt.loss_mask.sum()) == sum(each.response_tokens for each in WHOLE_EPISODES)
    assert metrics["training/truncated_episodes"] == pytest.approx(len(CUT_EPISODES) / len(episodes))
    everything, metrics = add_advantages(made, load_experiment(None, [*overrides[:1], *overrides[2:]]).experiment)
    assert torch.equal(everything.loss_mask, made.loss_mask)
    assert metrics["training/truncated_episodes"] == pytest.approx(len(CUT_EPISODES) / len(episodes))
    assert metrics["training/groups_with_signal"] == 1.0
    if not domains:
        # the rewards of cut episodes count in the group
        assert torch.equal(learnt.advantages[learnt.loss_mask], everything.advantages[learnt.loss_mask])


def test_a_group_with_cut_episodes_only_has_no_signal_where_they_are_masked() -> None:
    """The rewards of both groups differ; all episodes of the first one are cut, and one of the second."""
    groups = (CUT_EPISODES[0], CUT_EPISODES[2], CUT_EPISODES[0], WHOLE_EPISODES[1])
    episodes = [replace(each, group=number // 2) for number, each in enumerate(groups)]
    for masks, kept in ((True, [1]), (False, [0, 1])):
        overrides = [f"algorithm.mask_truncated={str(masks).lower()}", "algorithm.advantage={name: grpo}"]
        config = load_experiment(None, overrides).experiment
        assert groups_with_signal(episodes, config.algorithm) == kept
        learnt, metrics = add_advantages(collate(episodes), config)
        assert metrics["training/groups_with_signal"] == len(kept) / 2
        assert torch.unique(learnt.group[learnt.token_trajectory]).tolist() == kept


def test_cut_episodes_stay_marked_in_parts_of_a_batch_and_on_their_way_to_workers() -> None:
    made = collate([*CUT_EPISODES[:4], *WHOLE_EPISODES])
    part = select_trajectories(made, torch.tensor([False, True] * 4))
    tensors: list[torch.Tensor] = []
    sent = _from_json(_to_json(part, tensors), tensors, NO_CODE.check)
    present = torch.unique(sent.token_trajectory)
    assert sent.truncated[present].tolist() == [True, True, False, False]
    assert sent.response_tokens[present].tolist() == [2, 4, 4, 2]


@pytest.mark.parametrize("observations", [False, True])
def test_penalties_and_filters_by_length_count_sampled_tokens_only(*, observations: bool) -> None:
    """Six sampled tokens of three turns, with two observations between them, and eight of four turns."""
    three, four = episode(Outcome.TERMINATED, *[STOP] * 3), episode(Outcome.TERMINATED, *[STOP] * 4, continues=False)
    made = collate([three, replace(four, group=1)])
    made = train_on_observations(made) if observations else made
    shaped = shape_rewards(made, ShapingConfig(length_penalty=1.0, length_budget=2), 100)
    assert trajectory_rewards(replace(made, rewards=made.rewards - shaped.rewards)).tolist() == [2.0, 3.0]
    longest = load_experiment(None, ["algorithm.filter={keep_by: length, keep_share: 0.5}"]).experiment
    assert set(add_advantages(made, longest)[0].token_trajectory.tolist()) == {1}


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [("opo", [1 - 5 / 3, 2 - 5 / 3]), ("raw, length_weight: true", [1 * 3 / 2, 2 * 3 / 4])],
)
@pytest.mark.parametrize("observations", [False, True])
def test_weights_by_length_count_sampled_tokens_of_trained_episodes_only(
    advantage: str, expected: list[float], *, observations: bool
) -> None:
    """Two sampled tokens with reward 1 and four with reward 2, with three tokens of an observation in between; the
    third episode is truncated, and not trained on."""
    episodes = [*WHOLE_EPISODES[:2], episode(Outcome.TRUNCATED, LENGTH, LENGTH, LENGTH)]
    made = collate(episodes)
    made = train_on_observations(made) if observations else made
    overrides = [f"algorithm.advantage={{name: {advantage}}}", "algorithm.mask_truncated=true", "algorithm.filter={}"]
    learnt, _ = add_advantages(made, load_experiment(None, overrides).experiment)
    values = [learnt.advantages[learnt.loss_mask & (learnt.token_trajectory == number)][0] for number in range(2)]
    assert values == pytest.approx(expected)


def rewarded_episode(group: int, sample: int, rewards: list[float]) -> Trajectory:
    """An episode whose turns have these rewards; every second turn starts a new sequence, as after a sliding window."""
    turns = [
        Turn(
            observation="",
            prompt=(1,),
            continues=number % 2 == 1,
            tokens=(2, 3),
            logprobs=(-0.5, -0.5),
            weight_version=0,
            text="",
            actions=(),
            valid_format=True,
            reward=reward,
            finish_reason=FinishReason.STOP,
        )
        for number, reward in enumerate(rewards)
    ]
    return Trajectory("sokoban", 0, group, sample, tuple(turns), Outcome.TRUNCATED)


SAME_TOTALS = [[-0.1] * 3 + [1.0], [1.0] + [-0.1] * 3, [0.3, 0.4], [0.7], [-0.1, 0.9, -0.1]]
OTHER_TOTALS = [[-0.1] * 3, [-0.1] * 2]


@pytest.mark.parametrize("turn_rewards", [True, False])
@pytest.mark.parametrize(
    "advantage", ["{name: grpo}", "{name: rloo}", "{name: opo}", "{name: gpg}", "{name: grpo_passk}"]
)
def test_groups_with_the_same_rewards_in_another_order_teach_nothing(advantage: str, turn_rewards: bool) -> None:
    """Not sampled as a group with signal, not counted as one, and with advantages of exactly 0."""
    episodes = [rewarded_episode(0, sample, rewards) for sample, rewards in enumerate(SAME_TOTALS)]
    episodes += [rewarded_episode(1, sample, rewards) for sample, rewards in enumerate(OTHER_TOTALS)]
    assert groups_with_signal(episodes, AlgorithmConfig()) == [1]
    overrides = [f"algorithm.advantage={advantage}", f"algorithm.turn_rewards={turn_rewards}"]
    for drop in ("true", "false"):
        config = load_experiment(None, [*overrides, f"algorithm.drop_groups_without_signal={drop}"]).experiment
        learnt, metrics = add_advantages(collate_rollout(Rollout(episodes, {}), config), config)
        assert metrics["training/groups_with_signal"] == 0.5
        assert learnt.advantages is not None
        assert set(learnt.trajectory.tolist()) == ({5, 6} if drop == "true" else set(range(7)))
        assert not bool(learnt.advantages[learnt.token_trajectory < len(SAME_TOTALS)].any())
        assert bool(learnt.advantages[learnt.token_trajectory >= len(SAME_TOTALS)].any())


def test_optimal_token_baselines_keep_their_positions_if_first_tokens_are_rejected() -> None:
    """The second episode's first token is rejected: its second token is compared with second tokens.

    W is 0.5 per token. Position 1: returns 1 and 3, W 0.5 · 2 and 0.5, so the baseline is (1 · 1 + 3 · 0.5) / 1.5.
    """
    base = batch([1.0, 3.0], [0, 0])
    mask = torch.tensor([False, True, True]).repeat(2)
    kept = torch.tensor([True, True, True, True, False, True])
    rejected = replace(
        base,
        tokens=torch.arange(6),
        positions=torch.arange(3).repeat(2),
        lengths=torch.full((2,), 3),
        loss_mask=mask,
        turn=torch.zeros(6, dtype=torch.long),
        turn_end=torch.tensor([False, False, True]).repeat(2),
        logprobs=torch.full((6,), 0.5).log(),
        rewards=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 3.0]),
        sum_squared_probs=torch.full((6,), 0.5),
        trained_mask=kept,
    )
    overrides = [
        "algorithm.advantage={name: optimal_token_baseline, zero_tail: false}",
        REJECTING,
        "algorithm.correction.reject_before_advantages=true",
    ]
    learnt, _ = add_advantages(rejected, load_experiment(None, overrides).experiment)
    assert learnt.advantages is not None
    baseline = (1 * 1 + 3 * 0.5) / 1.5
    expected = torch.tensor([0.0, 0.0, 1 - baseline, 0.0, 0.0, 3 - baseline])
    torch.testing.assert_close(learnt.advantages, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("turn_rewards", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        ["algorithm.advantage={name: remax}"],
        ["algorithm.advantage={name: raw, whiten: true}"],
        ["algorithm.advantage={name: brpo}"],
        ["algorithm.advantage={name: raw}", "algorithm.shaping={center: batch}"],
        ["algorithm.advantage={name: raw}", "algorithm.shaping={center: batch, divide: batch, clip: 0.5}"],
    ],
)
def test_equal_rewards_of_different_groups_and_greedy_episodes_teach_nothing(
    options: list[str], turn_rewards: bool
) -> None:
    """Ten turns whose total is 0.1: the sum of their float32 numbers is not that of 0.1."""
    totals = [[-0.1] * 9 + [1.0], [0.1], [0.4, -0.3], [1.0] + [-0.1] * 9]
    episodes = [rewarded_episode(group, 0, rewards) for group, rewards in enumerate(totals)]
    config = load_experiment(None, [*options, f"algorithm.turn_rewards={turn_rewards}"]).experiment
    baseline = dict.fromkeys(range(4), 0.1) if config.algorithm.advantage.needs_greedy_baseline else None
    learnt, _ = add_advantages(collate_rollout(Rollout(episodes, {}, baseline), config), config)
    assert learnt.advantages is not None
    compared = learnt.turn == 0 if turn_rewards and "remax" in options[0] else learnt.loss_mask
    assert not bool(learnt.advantages[compared].any())


def test_whitened_returns_of_different_groups_are_compared_up_to_rounding() -> None:
    episodes = [
        rewarded_episode(group, 0, rewards) for group, rewards in enumerate([[-0.1] * 9 + [1.0], [0.1], [0.4, -0.3]])
    ]
    overrides = ["algorithm.advantage={name: reinforce_plus_plus}", "algorithm.turn_rewards=false"]
    config = load_experiment(None, overrides).experiment
    learnt, _ = add_advantages(collate_rollout(Rollout(episodes, {}), config), config)
    assert learnt.advantages is not None
    assert not bool(learnt.advantages.any())
