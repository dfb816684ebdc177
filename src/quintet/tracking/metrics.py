"""What every number that a run writes means: its unit, its healthy range, how it is computed.

Names are those that verl's users know. A name that is not defined here can't be logged, so the
table in the documentation is complete by construction. A part in braces stands for one path
component: `val/{world}/success_rate` defines `val/frozenlake/success_rate`. With a `*` it may hold `/`,
as names of data sources do.
"""

from __future__ import annotations

from quintet.tracking.metric import (
    Metric,
    Range,
    all_metrics,
    define,
    describe,
    healthy_text,
    markdown_table,
    reproducible,
)

__all__ = ["Metric", "Range", "all_metrics", "define", "describe", "healthy_text", "markdown_table", "reproducible"]


def _define_spread(prefix: str, meaning: str, unit: str, healthy: Range | str, over: str) -> None:
    """Mean, largest and smallest of one quantity."""
    define(f"{prefix}/mean", f"Mean {meaning}", unit, healthy, f"mean over {over}")
    define(f"{prefix}/max", f"Largest {meaning}", unit, "near the mean's order of magnitude", f"maximum over {over}")
    define(f"{prefix}/min", f"Smallest {meaning}", unit, "near the mean's order of magnitude", f"minimum over {over}")


def _define_outcomes() -> None:
    games = "the step's games"
    _define_spread(
        "critic/score",
        "reward of a game as the world gave it, format penalties included",
        "reward",
        "rises; a flat line means that nothing is learnt",
        games,
    )
    define(
        "critic/rewards/mean",
        "Mean reward of a game as it is trained on, penalties for leaving the reference included",
        "reward",
        "rises with critic/score/mean",
        f"mean over {games}",
    )
    define(
        "trajectory/success_rate",
        "Share of training games that the world calls solved",
        "share",
        (0.0, 1.0),
        f"mean over {games}, which are sampled, so it lies below the greedy validation rate",
    )
    define(
        "trajectory/failed",
        "Games whose world or engine failed; they are left out of the update",
        "games",
        (0.0, 0.0),
        f"count over {games}",
    )
    define(
        "trajectory/failures/{where}/{kind}",
        "Games that failed there and so: `start`, `reset` and `step` are the world's, `engine` the engine's, `reward` "
        "the judge's; `Timeout`, `ProcessDied`, `Rubbish`, `EngineFault`, … or the name of what was raised",
        "games",
        (0.0, 0.0),
        f"count over {games}; there only where one did",
    )
    define(
        "trajectory/outcome/{outcome}",
        "Share of games that ended in this way: success, terminated, truncated, max_turns, max_actions, max_tokens, "
        "context, failed or aborted",
        "share",
        (0.0, 1.0),
        f"share of {games}; the outcomes sum to 1",
    )
    define(
        "response/stop_reason/{reason}",
        "Share of turns that stopped for this reason: stop, length, context, abort or failed",
        "share",
        "stop near 1; much length means that max_response_tokens is too small",
        "share of the step's turns; the reasons sum to 1",
    )
    define(
        "response/valid_format",
        "Share of turns whose text could be parsed and named a legal action",
        "share",
        (0.9, 1.0),
        "mean over the step's turns",
    )
    define(
        "response/empty",
        "Share of turns that the policy ended without a word",
        "share",
        (0.0, 0.01),
        "mean over the step's turns",
    )
    _define_spread("num_turns", "number of turns in a game", "turns", "falls as the policy learns short ways", games)
    _define_spread(
        "response_length",
        "number of tokens that the policy wrote in a turn",
        "tokens",
        "steady; a collapse or a climb to the limit is a warning",
        "the step's turns",
    )
    define(
        "response_length/clip_ratio",
        "Share of turns cut off at max_response_tokens",
        "share",
        (0.0, 0.1),
        "mean over the step's turns",
    )
    _define_spread(
        "prompt_length",
        "number of tokens in the context of a turn",
        "tokens",
        "below max_prompt_tokens",
        "the step's turns",
    )


def _define_play() -> None:
    turns = "count over the step's turns"
    for change, what in {
        "observation_cut": "Observations longer than max_observation_tokens, which lost their end",
        "start_cut": "First prompts longer than max_start_tokens, which lost their beginning",
        "window": "Prompts without the earliest turns, because there are more than window_size",
        "control_as_text": "Observations that spell a control token, which is written as letters",
        "reply_closed": "Replies without their end token, which was put behind them",
    }.items():
        define(f"prompt/{change}", what, "turns", "as the limits are meant", turns)
    define(
        "engine/restarts",
        "Engines that were opened anew because the one before died",
        "engines",
        (0.0, 0.0),
        "count over the step",
    )


def _define_groups_and_rewards() -> None:
    games = "the step's games"
    define(
        "training/groups_with_signal",
        "Share of groups whose games differ in reward; the others give no gradient under GRPO",
        "share",
        (0.1, 1.0),
        "mean over the step's groups",
    )
    define(
        "training/groups_kept",
        "Share of groups that the filter leaves to learn from",
        "share",
        "as `algorithm.filter` asks",
        "mean over the step's groups",
    )
    define("training/groups_drawn", "Groups played for the step, replaced ones included", "groups", "steady", "count")
    define(
        "training/refill_rounds",
        "Further rounds played to replace groups without signal",
        "rounds",
        "below filter.refill_rounds",
        "count",
    )
    define(
        "reward/{part}/mean",
        "Mean of one part of the reward, by the name under which the reward function gives it",
        "reward",
        "rises",
        f"mean over {games}",
    )
    define(
        "reward/failed",
        "Answers whose judgement raised, hung, died or gave no finite number; they count as wrong",
        "answers",
        (0.0, 0.0),
        f"count over {games}",
    )


def _define_learning() -> None:
    tokens = "the tokens that the policy wrote"
    batches = "mean over the step's mini-batches"
    _define_spread("critic/advantages", "advantage of a token", "reward or deviations", "mean near 0", tokens)
    define(
        "critic/returns/mean",
        "Mean return that the critic learns",
        "reward",
        "near critic/values/mean",
        f"mean over {tokens}",
    )
    define(
        "critic/values/mean",
        "Mean estimate of the critic before the update",
        "reward",
        "follows critic/returns/mean",
        f"mean over {tokens}",
    )
    define("critic/vf_loss", "Half the squared error of the critic, clipped", "reward²", "falls, then steady", batches)
    define(
        "critic/vf_clipfrac", "Share of tokens whose value moved further than value_clip", "share", (0.0, 0.3), batches
    )
    define(
        "critic/vf_explained_var",
        "Share of the variance of the returns that the critic explains",
        "share",
        (0.0, 1.0),
        f"1 - var(returns - values) / var(returns) over {tokens}",
    )
    for part in ("actor", "critic"):
        define(
            f"{part}/grad_norm",
            f"Norm of the {part}'s gradient before clipping",
            "norm",
            "steady; spikes beyond 10 times the median are a warning",
            batches,
        )
        define(f"{part}/lr", f"Learning rate of the {part}", "1", "as scheduled", "value after the step")


def _define_policy() -> None:
    tokens = "the tokens that the policy wrote"
    batches = "mean over the step's mini-batches"
    define("actor/pg_loss", "Policy loss, clipped", "advantage", "near 0; its size says little", batches)
    define(
        "actor/entropy",
        "Uncertainty of the policy about the next token",
        "nats",
        "falls slowly; a fall to 0 early ends exploration",
        f"mean over {tokens}",
    )
    define(
        "actor/ppo_kl",
        "How far the update moved the policy from the one that played",
        "nats",
        (-0.01, 0.1),
        f"mean of old minus new log-prob over {tokens}, {batches}",
    )
    define(
        "actor/kl_loss",
        "Divergence of the policy from its reference, as the loss has it",
        "nats",
        "rises slowly; a jump says that the coefficient is too small",
        batches,
    )
    define(
        "actor/reward_kl_penalty",
        "Divergence of the policy from its reference, as it comes off the rewards",
        "nats",
        "near the target, where there is one",
        "mean over games of the mean over their tokens",
    )
    define("actor/reward_kl_penalty_coeff", "Weight of that divergence", "1", "steady", "value before it is steered")
    define("actor/pg_clipfrac", "Share of tokens whose probability ratio was clipped", "share", (0.0, 0.3), batches)
    define(
        "actor/pg_clipfrac_lower",
        "Share of tokens held by the dual clip (negative advantage, large ratio)",
        "share",
        (0.0, 0.01),
        batches,
    )
    for part in ("actor", "critic"):
        define(
            f"{part}/skipped_updates",
            f"Optimizer steps of the {part} left out because their gradient was not finite",
            "updates",
            (0.0, 0.0),
            "count over the step",
        )
    define(
        "actor/stopped_updates",
        "Optimizer steps left out because the mean probability ratio passed algorithm.stop_ratio",
        "updates",
        (0.0, 0.0),
        "count over the step",
    )
    define("actor/ratio", "Mean probability ratio of new to old policy", "1", (0.9, 1.1), batches)
    define(
        "rollout_corr/{statistic}",
        "Gap between engine and learner, and the weights and rejections that correct it, under verl's names",
        "as named",
        "steady and small",
        f"over {tokens}",
    )


def _define_gauges() -> None:
    tokens = "the tokens that the policy wrote"
    define("training/global_step", "Steps done", "steps", "rises by 1", "value after the step")
    define(
        "training/rollout_probs_diff_max",
        "Largest gap between a token's probability in the engine and in the learner",
        "probability",
        (0.0, 0.05),
        f"maximum over {tokens}",
    )
    define(
        "training/rollout_probs_diff_mean",
        "Mean gap between a token's probability in the engine and in the learner",
        "probability",
        (0.0, 0.005),
        f"mean over {tokens}",
    )
    define(
        "training/rollout_probs_diff_std",
        "Spread of the gap between a token's probability in the engine and in the learner",
        "probability",
        (0.0, 0.01),
        f"standard deviation over {tokens}, where the learner's log-probs are computed anew",
    )
    define(
        "training/rollout_probs_diff_beyond",
        "Share of tokens whose log-probs in engine and learner are further apart than rounding explains: 1e-4 nats in "
        "float32, 0.2 in bfloat16",
        "share",
        (0.0, 0.01),
        f"share of {tokens}",
    )


def _define_streaming() -> None:
    groups = "the step's groups, where games outlast their step"
    define("rollout/staleness/mean", "Weight updates since a group's first game began", "updates", "low", groups)
    define("rollout/staleness/max", "As `rollout/staleness/mean`", "updates", "at most max_staleness", groups)
    define(
        "rollout/groups_in_flight",
        "Groups that go on into the next step",
        "groups",
        "async_ratio times a step's",
        groups,
    )
    define(
        "rollout/games_played_anew",
        "Games begun again because weights changed or they were too old",
        "games",
        "low",
        "count",
    )
    define("rollout/groups_dropped", "Groups without signal that others took the place of", "groups", "low", "count")
    define(
        "rollout/tokens_of_older_weights",
        "Share of tokens that weights before the present ones wrote",
        "share",
        (0.0, 1.0),
        "share of the step's tokens, where games outlast their step",
    )


def _define_validation() -> None:
    games = "mean over the held-out games, played greedily"
    define(
        "val/{world}/success_rate",
        "Held-out games solved; `all` is several worlds together",
        "share",
        (0.0, 1.0),
        games,
    )
    define("val/{world}/reward", "Reward of a held-out game", "reward", "rises", games)
    define("val/{world}/turns", "Turns in a held-out game", "turns", "falls towards the shortest solution", games)
    define("val/{world}/failed", "Held-out games whose world or engine failed", "games", (0.0, 0.0), "count")
    define(
        "val/{world}/valid_format",
        "Share of turns of held-out games that could be parsed and named a legal action",
        "share",
        (0.95, 1.0),
        "mean over the turns of the held-out games, played greedily",
    )

    games = "mean over the world's games of the step"
    define("train/{world}/success_rate", "Of several worlds, games of one that were solved", "share", (0.0, 1.0), games)
    define("train/{world}/reward", "Of several worlds, reward of a game of one", "reward", "rises", games)
    define("train/{world}/failed", "Games of one of several worlds that failed", "games", (0.0, 0.0), "count")
    define(
        "train/{world}/groups",
        "Groups of one of several worlds among those that a step has",
        "groups",
        "on average as `worlds.*.share` says; where groups without signal are replaced, fewer of a world that has none",
        "count",
    )
    define(
        "train/{world}/valid_format",
        "Share of turns in games of one of several worlds that could be parsed and named a legal action",
        "share",
        (0.95, 1.0),
        "mean over the turns of the world's games of the step",
    )

    for level, what in (("core", "the main score"), ("aux", "a further number")):
        define(
            f"val-{level}/{{source*}}/{{part}}/{{statistic*}}",
            f"Held-out answers to questions of one source, {what}: mean@N and std@N over N answers a question, "
            "pass@k, best@k, worst@k and maj@k of k of them",
            "reward or share",
            "rises",
            "mean over the questions of the source",
        )


def _define_warm_start() -> None:
    batch = "mean over the update's target tokens"
    define("sft/loss", "Cross-entropy of the demonstrations", "nats", "falls", batch)
    define(
        "sft/token_accuracy",
        "Share of demonstration tokens whose probability is above one half",
        "share",
        (0.0, 1.0),
        batch,
    )
    define("sft/grad_norm", "Norm of the gradient before clipping", "norm", "falls, then steady", "value of the update")
    define("sft/lr", "Learning rate of the warm start", "1", "as scheduled", "value of the update")


def _define_fine_tuning() -> None:
    tokens = "mean over the step's learnt tokens"
    define("train/loss", "Cross-entropy of the replies that are imitated", "nats", "falls", tokens)
    define(
        "train/token_accuracy",
        "Share of learnt tokens whose probability is above one half",
        "share",
        (0.0, 1.0),
        tokens,
    )
    define("train/grad_norm", "Norm of the gradient before clipping", "norm", "steady", "value of the step")
    define("train/lr", "Learning rate of fine-tuning", "1", "as scheduled", "value of the step")
    define(
        "train/skipped_updates",
        "Whether the step was left out because its gradient wasn't finite",
        "updates",
        (0.0, 0.0),
        "count",
    )
    define(
        "val/loss",
        "Cross-entropy of held-out replies",
        "nats",
        "falls; a rise while train/loss falls is overfitting",
        "mean over the learnt tokens of all held-out rows",
    )
    define("training/epoch", "Passes over the rows that lie behind", "passes", "rises", "value after the step")


_PHASES = {
    "step": "the whole step",
    "gen": "writing the policy's tokens",
    "engine": "the engine, while it wrote them",
    "world": "worlds, or waiting for them while the engine was idle",
    "loop": "writing and reading turns between the engine and worlds",
    "old_log_prob": "the policy's own log-probs before the update, where the engine's aren't used",
    "values": "the critic's estimates before the update",
    "ref": "the reference's log-probs",
    "adv": "advantages and returns",
    "update_actor": "learning of the policy",
    "update_critic": "learning of the critic",
    "save_checkpoint": "handing over the checkpoint behind the step before, which is written while learning goes on",
    "testing": "validation",
}


def _define_performance() -> None:
    for phase, what in _PHASES.items():
        define(f"timing_s/{phase}", f"Time taken by {what}", "s", "steady", "sum over the step", clock=True)
    define(
        "perf/throughput",
        "Tokens trained on in a second, prompts included",
        "tokens/s",
        "steady",
        "perf/total_num_tokens / perf/time_per_step",
        clock=True,
    )
    define("perf/total_num_tokens", "Tokens of the step, prompts included", "tokens", "steady", "sum over the step")
    define(
        "perf/time_per_step",
        "Wall time of the step without validation and checkpoint",
        "s",
        "steady",
        "value of the step",
        clock=True,
    )
    define(
        "perf/tflops/actor",
        "Operations a second of the policy's updates on each device, where `tracking.flops` asks for them",
        "10¹²/s",
        "steady",
        "counted operations of all passes / timing_s/update_actor / devices",
        clock=True,
    )
    define(
        "perf/mfu/actor",
        "Their share of the device's peak, where that is known",
        "share",
        "steady",
        "perf/tflops/actor / peak in bfloat16",
        clock=True,
    )
    define(
        "perf/max_memory_rss_gb",
        "Largest resident memory so far",
        "GB",
        "flat after the first steps",
        "maximum since the start of the process",
        clock=True,
    )


_define_outcomes()
_define_play()
_define_groups_and_rewards()
_define_learning()
_define_policy()
_define_gauges()
_define_streaming()
_define_validation()
_define_warm_start()
_define_fine_tuning()
_define_performance()
