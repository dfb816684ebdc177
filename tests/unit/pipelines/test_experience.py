"""If these fail, episodes that teach nothing take part in the update, or episodes that teach are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quintet.algorithms.kl import KlControl
from quintet.config.compose import load_experiment
from quintet.config.native.algorithm import KlConfig
from quintet.pipelines.experience import add_advantages, collate_rollout
from quintet.pipelines.rollout_step import Rollout
from quintet.records import Batch, FinishReason, Outcome, Trajectory, Turn
from quintet.rollout.async_rollout import groups_with_signal


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


def test_responses_of_the_maximum_length_count_in_their_group_but_not_in_the_loss() -> None:
    overrides = ["rollout.max_response_tokens=1", "algorithm.mask_truncated=true", "algorithm.advantage={name: grpo}"]
    config = load_experiment(None, overrides).experiment
    learnt, metrics = add_advantages(batch([0.0, 1.0], [0, 0]), config)
    assert not learnt.loss_mask.any()
    assert metrics["training/truncated_episodes"] == 1.0
    longer = load_experiment(None, [*overrides, "rollout.max_response_tokens=2"]).experiment
    learnt, metrics = add_advantages(batch([0.0, 1.0], [0, 0]), longer)
    assert learnt.loss_mask.sum() == 2
    assert metrics["training/truncated_episodes"] == 0.0


def episode(group: int, sample: int, rewards: list[float]) -> Trajectory:
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
    episodes = [episode(0, sample, rewards) for sample, rewards in enumerate(SAME_TOTALS)]
    episodes += [episode(1, sample, rewards) for sample, rewards in enumerate(OTHER_TOTALS)]
    assert groups_with_signal(episodes, 0.0) == [1]
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
    episodes = [episode(group, 0, rewards) for group, rewards in enumerate(totals)]
    config = load_experiment(None, [*options, f"algorithm.turn_rewards={turn_rewards}"]).experiment
    baseline = dict.fromkeys(range(4), 0.1) if config.algorithm.advantage.needs_greedy_baseline else None
    learnt, _ = add_advantages(collate_rollout(Rollout(episodes, {}, baseline), config), config)
    assert learnt.advantages is not None
    compared = learnt.turn == 0 if turn_rewards and "remax" in options[0] else learnt.loss_mask
    assert not bool(learnt.advantages[compared].any())


def test_whitened_returns_of_different_groups_are_compared_up_to_rounding() -> None:
    episodes = [episode(group, 0, rewards) for group, rewards in enumerate([[-0.1] * 9 + [1.0], [0.1], [0.4, -0.3]])]
    overrides = ["algorithm.advantage={name: reinforce_plus_plus}", "algorithm.turn_rewards=false"]
    config = load_experiment(None, overrides).experiment
    learnt, _ = add_advantages(collate_rollout(Rollout(episodes, {}), config), config)
    assert learnt.advantages is not None
    assert not bool(learnt.advantages.any())
