"""Keys by which ROLL's files choose what is learnt from what: its reference leaves them out, few files are without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quintet.config.dialects.chosen import choosing
from quintet.config.dialects.ledger import Row, row
from quintet.config.dialects.takes import (
    BOOLEAN,
    COUNT,
    FREE,
    NUMBER,
    POSITIVE,
    POSITIVE_NUMBER,
    SHARE,
    Takes,
    choice,
    integer,
    list_of,
    number,
    optional,
)

__all__ = [
    "ADVANTAGES",
    "CORRECTION",
    "ESTIMATORS",
    "LEVELS",
    "PG_WORKERS",
    "POLICY",
    "ROLL_ALGORITHM_KEYS",
    "VARIANTS",
]

PROOF = "tests/unit/config/dialects/test_roll_newer_keys.py::test_a_key_reaches_the_run"
POLICY = "actor_train."
CORRECTION = "train_infer_correction."

ADVANTAGES: Mapping[str, str] = {name: name for name in ("gae", "reinforce", "grpo", "gigpo")}
"""Its estimators. `step_reinforce` and `agentic_reinforce` return steps of games played by its own environments."""
VARIANTS: Mapping[str | None, str] = {
    None: "ppo",
    "ppo": "ppo",
    "vanilla": "reinforce",
    "tis": "cispo",
    "topr": "topr",
    "cispo": "cispo",
    "kimi15": "kimi",
}
"""Its variants of the policy's loss. `tis` is `cispo` with other bounds on the same weight."""
ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2"}
"""Its estimates of a divergence; its `full` doesn't sum over the vocabulary."""
LEVELS = {"token": "token", "geometric": "sequence_mean", "sequence": "sequence_sum"}
"""Over what its filters of words look at a ratio."""
PG_WORKERS = (
    "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
    "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker",
)
"""Classes of its policy's worker that ask `pg_variant`."""
_PPO_WORKERS = (
    "roll.pipeline.rlvr.actor_worker.ActorWorker",
    "roll.pipeline.agentic.agentic_actor_worker.ActorWorker",
    "roll.pipeline.base_worker.ActorWorker",
)
_OVER = optional(choice("batch", "group"))
_TOKEN_KL, _KL_LOSS = ("add_token_level_kl", True), ("use_kl_loss", True)
_WEIGHTED = (f"{CORRECTION}is_weight.enabled", True)
_FILTER = ("enabled", "agg_type", "ratio_enabled", "ratio_low", "ratio_high", "diff_enabled", "diff_low", "diff_high")
_RATIOS = "sections with enabled, agg_type (token, geometric or sequence), ratio_low > 0 and ratio_high"


def _is_filter(value: Any) -> bool:
    if not FREE.accepts(value) or not value or not set(value) <= set(_FILTER):
        return False
    flags = all(BOOLEAN.accepts(value[key]) for key in _FILTER if key.endswith("enabled") and key in value)
    low, high = value.get("ratio_low", 0.8), value.get("ratio_high", 1.2)
    bounds = POSITIVE_NUMBER.accepts(low) and POSITIVE_NUMBER.accepts(high) and low < high
    return flags and bounds and value.get("agg_type", "token") in LEVELS and not value.get("diff_enabled", False)


def _key(key: str, takes: Takes, default: Any, effect: str, native: str, **options: Any) -> Row:
    """A row that these tests prove; `computed` unless it says otherwise."""
    return row(key, takes, default, effect, native=native, proof=PROOF, **{"computed": True, **options})


_ADVANTAGE: tuple[Row, ...] = (
    _key(
        "adv_estimator",
        choosing(*ADVANTAGES),
        "gae",
        "Estimator of advantages. Where nobody gives it, a `critic` section makes it gae, and it is grpo without one.",
        "algorithm.advantage.name",
    ),
    _key("gamma", SHARE, 1.0, "Discount a token, in every estimator but gigpo.", "algorithm.advantage.gamma"),
    _key("lambd", SHARE, 0.95, "Weight of longer returns (λ) in gae.", "algorithm.advantage.lam"),
    _key(
        "whiten_advantages",
        BOOLEAN,
        False,
        "Advantages are brought to mean 0 and deviation 1 over the tokens of the batch.",
        "algorithm.advantage.whiten",
    ),
    _key(
        "step_reward_gamma",
        SHARE,
        0.95,
        "Discount a turn of a game, in gigpo.",
        "algorithm.advantage.turn_gamma",
        only_if=("adv_estimator", "gigpo"),
    ),
    _key(
        "episode_reward_weight",
        NUMBER,
        1.0,
        "Weight of comparing whole games, in gigpo.",
        "algorithm.advantage.game_weight",
        only_if=("adv_estimator", "gigpo"),
    ),
    _key(
        "step_reward_weight",
        NUMBER,
        1.0,
        "Weight of comparing turns that saw the same, in gigpo.",
        "algorithm.advantage.turn_weight",
        only_if=("adv_estimator", "gigpo"),
    ),
    _key(
        "norm_mean_type",
        _OVER,
        None,
        "Over what the mean of rewards is taken off them: the batch or each prompt's group; grpo always takes groups.",
        "algorithm.shaping.center",
    ),
    _key(
        "norm_std_type",
        _OVER,
        None,
        "Over what rewards are divided by their deviation: the batch or each prompt's group; grpo always takes groups.",
        "algorithm.shaping.divide",
    ),
    _key(
        "reward_clip",
        optional(POSITIVE_NUMBER),
        None,
        "Rewards of replies are held within ± this once they are normalised; null for no bound.",
        "algorithm.shaping.clip",
    ),
)

_LOSS: tuple[Row, ...] = (
    _key(
        "ppo_epochs",
        POSITIVE,
        1,
        "Passes over the sequences of a step.",
        "training.epochs",
        computed=False,
        unit="passes",
    ),
    _key(
        "pg_clip",
        number(above=0, below=1),
        0.2,
        "The probability ratio is clipped this far below and above 1; also sets the bound of `dual_clip_loss`.",
        "algorithm.loss.clip_low",
    ),
    _key(
        "use_pg_clip_range",
        BOOLEAN,
        False,
        "`pg_clip_low` and `pg_clip_high` clip the ratio in place of `pg_clip`.",
        "algorithm.loss.clip_low",
    ),
    _key(
        "pg_clip_low",
        number(above=0, below=1),
        0.2,
        "The probability ratio is clipped this far below 1.",
        "algorithm.loss.clip_low",
        only_if=("use_pg_clip_range", True),
    ),
    _key(
        "pg_clip_high",
        POSITIVE_NUMBER,
        0.2,
        "The probability ratio is clipped this far above 1.",
        "algorithm.loss.clip_high",
        only_if=("use_pg_clip_range", True),
    ),
    _key(
        "dual_clip_loss",
        BOOLEAN,
        False,
        "Where the advantage is negative, ratio × advantage is held above (1 + 2 × `pg_clip`) × advantage.",
        "algorithm.loss.clip_dual",
    ),
    _key(
        "importance_sampling",
        choice("token", "seq"),
        "token",
        "One probability ratio for each token, or one for each reply: the geometric mean of its tokens' (GSPO).",
        "algorithm.loss.name",
    ),
    _key(
        "loss_agg_mode",
        choice("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        "seq-mean-token-mean",
        "How token losses become one number: mean over all tokens, or over sequences of their sums or means.",
        "algorithm.aggregation",
        computed=False,
    ),
    _key(
        "entropy_loss_coef",
        number(least=0),
        0.0,
        "Weight of the entropy that the loss rewards.",
        "algorithm.entropy_coefficient",
        computed=False,
    ),
    _key(
        "value_clip",
        optional(POSITIVE_NUMBER),
        None,
        "New values stay within this distance of the old ones in the critic's loss; null doesn't clip.",
        "critic.value_clip",
        computed=False,
    ),
    _key(
        "critic_warmup",
        COUNT,
        0,
        "Steps in which only the critic learns.",
        "critic.warmup_steps",
        computed=False,
        unit="steps",
    ),
)


def _variant(name: str) -> dict[str, Any]:
    return {"only_if": (f"{POLICY}pg_variant", name)}


_PG: tuple[Row, ...] = (
    _key(
        f"{POLICY}worker_cls",
        optional(choice(*_PPO_WORKERS, *PG_WORKERS)),
        None,
        "ROLL's class of the worker that learns; those for policy gradients ask `actor_train.pg_variant` which loss.",
        "algorithm.loss.name",
    ),
    _key(
        f"{POLICY}pg_variant",
        optional(choice(*filter(None, VARIANTS))),
        None,
        "The policy's loss: plain (vanilla), clipped (ppo), weighted by a clipped ratio without gradient (tis, cispo, "
        "topr) or with a quadratic pull (kimi15); null is ppo.",
        "algorithm.loss.name",
    ),
    _key(
        f"{POLICY}tis_lower_bound",
        number(least=0, below=1),
        0.0,
        "Least weight of a token in the loss of tis.",
        "algorithm.loss.clip_low",
        **_variant("tis"),
    ),
    _key(
        f"{POLICY}tis_upper_bound",
        number(least=1),
        1.0,
        "Largest weight of a token in the loss of tis.",
        "algorithm.loss.clip_high",
        **_variant("tis"),
    ),
    _key(
        f"{POLICY}cispo_epsilon_low",
        number(above=0, below=1),
        0.1,
        "How far below 1 a token's weight may be in the loss of cispo.",
        "algorithm.loss.clip_low",
        **_variant("cispo"),
    ),
    _key(
        f"{POLICY}cispo_epsilon_high",
        POSITIVE_NUMBER,
        0.1,
        "How far above 1 a token's weight may be in the loss of cispo.",
        "algorithm.loss.clip_high",
        **_variant("cispo"),
    ),
    _key(
        f"{POLICY}topr_positive_weight",
        number(least=0),
        1.0,
        "Weight of tokens with a positive advantage in the loss of topr, where ROLL looks at the reward.",
        "algorithm.loss.positive_weight",
        **_variant("topr"),
    ),
    _key(
        f"{POLICY}topr_negative_weight",
        number(least=0),
        1.0,
        "Weight of tokens with a negative advantage in the loss of topr, where ROLL looks at the reward.",
        "algorithm.loss.negative_weight",
        **_variant("topr"),
    ),
    _key(
        f"{POLICY}kimi15_tau",
        POSITIVE_NUMBER,
        0.1,
        "Weight of the pull of the log-ratio to 0 in the loss of kimi15.",
        "algorithm.loss.tau",
        **_variant("kimi15"),
    ),
)

_KL: tuple[Row, ...] = (
    _key(
        "add_token_level_kl",
        BOOLEAN,
        False,
        "The divergence from the reference comes off each token's reward, `init_kl_coef` times; without it, it is only "
        "measured.",
        "algorithm.kl.place",
    ),
    _key(
        "init_kl_coef",
        number(least=0),
        0.2,
        "Weight of that penalty, the first one where `target_kl` steers it.",
        "algorithm.kl.coefficient",
        only_if=_TOKEN_KL,
    ),
    _key(
        "kl_penalty",
        choice(*ESTIMATORS),
        "kl",
        "How the divergence is estimated for that penalty.",
        "algorithm.kl.estimator",
        only_if=_TOKEN_KL,
    ),
    _key(
        "target_kl",
        optional(POSITIVE_NUMBER),
        None,
        "Divergence towards which the weight of that penalty is steered; null leaves it fixed.",
        "algorithm.kl.target",
        only_if=_TOKEN_KL,
        unit="nats",
    ),
    _key(
        "kl_horizon",
        POSITIVE,
        10000,
        "Sequences over which that weight is steered.",
        "algorithm.kl.horizon",
        only_if=_TOKEN_KL,
        unit="sequences",
    ),
    _key(
        "use_kl_loss",
        BOOLEAN,
        False,
        "The divergence from the reference, by `k3`, is a term of the loss.",
        "algorithm.kl.place",
    ),
    _key(
        "kl_loss_coef",
        number(least=0),
        0.0,
        "Weight of that term.",
        "algorithm.kl.coefficient",
        only_if=_KL_LOSS,
    ),
)

_CORRECTION: tuple[Row, ...] = (
    _key(
        f"{CORRECTION}is_weight.enabled",
        BOOLEAN,
        False,
        "Tokens weigh as much likelier the learner holds them than the engine that wrote them.",
        "algorithm.correction.level",
    ),
    _key(
        f"{CORRECTION}is_weight.weight_type",
        choice("token", "sequence"),
        "token",
        "One such weight for each token, or one for each reply, the product over its tokens.",
        "algorithm.correction.level",
        only_if=_WEIGHTED,
    ),
    _key(
        f"{CORRECTION}is_weight.upper_bound",
        POSITIVE_NUMBER,
        1.2,
        "Larger weights are cut to this.",
        "algorithm.correction.upper",
        only_if=_WEIGHTED,
    ),
    _key(
        f"{CORRECTION}is_weight.detach",
        choice(True),
        True,
        "The weights have no gradient of their own.",
        "algorithm.correction.level",
        only_if=_WEIGHTED,
    ),
    _key(
        f"{CORRECTION}filters",
        list_of(Takes(_RATIOS, _is_filter)),
        [],
        "Words whose ratio of learner to engine is outside ratio_low … ratio_high aren't learnt from.",
        "algorithm.correction.reject",
    ),
)

_SAMPLING: tuple[Row, ...] = (
    _key(
        "actor_infer.generating_args.top_p",
        number(above=0, most=1),
        0.7,
        "Tokens are sampled from the likeliest that together reach this probability; 1 keeps all.",
        "rollout.top_p",
        computed=False,
    ),
    _key(
        "actor_infer.generating_args.top_k",
        integer(least=-1),
        50,
        "Tokens are sampled from this many of the likeliest; -1 and 0 keep all.",
        "rollout.top_k",
        computed=False,
        words={-1: 0, 0: 0},
        unit="tokens",
    ),
)

ROLL_ALGORITHM_KEYS: tuple[Row, ...] = (*_ADVANTAGE, *_LOSS, *_PG, *_KL, *_CORRECTION, *_SAMPLING)
