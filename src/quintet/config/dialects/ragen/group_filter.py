"""RAGEN's filter of groups: a share of them in 2025, and several strategies since 2026."""

from collections.abc import Iterator, Mapping

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.ragen.key_values import TABLES
from quintet.config.dialects.verl.batches import ROLLOUT
from quintet.config.problems import ConfigProblem

GROUPS, SAMPLES = "es_manager.train.env_groups", "es_manager.train.group_size"
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_FILTER, _NATIVE = f"{ROLLOUT}.rollout_filter", "algorithm.filter"
RATIO, ORDER = "actor_rollout_ref.rollout.rollout_filter_ratio", "actor_rollout_ref.rollout.rollout_filter_type"
STRATEGY, AMOUNT, METRIC = (
    "actor_rollout_ref.rollout.rollout_filter_strategy",
    "actor_rollout_ref.rollout.rollout_filter_value",
    "actor_rollout_ref.rollout.rollout_filter_metric",
)
TOLERANCE = "actor_rollout_ref.rollout.rollout_filter_selection_eps"
WEIGHTS = "actor_rollout_ref.rollout.rollout_filter_top_p_prob_mode"
EMPTY_STEPS = "actor_rollout_ref.rollout.rollout_filter_empty_stop_steps"
SCORES: Mapping[str, str] = TABLES["filter_scores"]
"""Native score by metric; what RAGEN calls a variance is a standard deviation."""
ORDERS = {"std": "deviation", "std_rev": "least_deviation", "max_mean": "lead"}
"""Native order by the type of 2025, which names the score as well."""


def filters_by_ratio(values: ForeignValues, *, newer: bool) -> bool:
    """Whether `rollout_filter_ratio` decides: in releases of 2025, or where the value of 2026 is not set beside it."""
    return not newer or (values.is_set(RATIO) and not values.is_set(AMOUNT))


def num_selected_groups(values: ForeignValues, *, newer: bool) -> int:
    """Return the maximum number of groups of a step that the filter keeps."""
    groups, amount = int(values[GROUPS]), values[AMOUNT]
    if filters_by_ratio(values, newer=newer):
        # one group if that fills a mini-batch, where RAGEN would train on nothing
        return int(values[RATIO] * groups + 1e-9) or int(values[SAMPLES] >= values[MINI_BATCH])
    if values[STRATEGY] == "top_k_abs":
        return max(1, min(int(amount), groups))
    return max(1, min(int(amount * groups + 1e-9), groups)) if values[STRATEGY] == "top_k" else groups


def filter_to_native(values: ForeignValues, native: NativeBuilder, *, newer: bool) -> None:
    """Set the filter of groups."""
    by_ratio = filters_by_ratio(values, newer=newer)
    origins = (RATIO, GROUPS) if by_ratio else (STRATEGY, AMOUNT, GROUPS)
    native.set(f"{_NATIVE}.keep_share", num_selected_groups(values, newer=newer) / values[GROUPS], *origins)
    score = SCORES.get(values[METRIC], "deviation")
    named = {"largest": score, "smallest": f"least_{score}"}
    native.set(f"{_NATIVE}.keep_by", (ORDERS | named)[values[ORDER]], ORDER, METRIC)
    if by_ratio:
        if values[RATIO] * values[GROUPS] < 1:
            native.remarks.append(f"{values.describe(RATIO)} is less than one group: one is kept")
        return
    if values.is_set(RATIO):
        native.remarks.append(f"{values.describe(RATIO)} has no effect, because of {values.describe(AMOUNT)}")
    native.set(f"{_NATIVE}.stop_after_empty_steps", values[EMPTY_STEPS], EMPTY_STEPS)
    if values[STRATEGY] == "top_p":
        native.set(f"{_NATIVE}.top_p", min(1.0, float(values[AMOUNT])), AMOUNT, STRATEGY)
        native.set(f"{_NATIVE}.top_p_tolerance", float(values[TOLERANCE]), TOLERANCE)
        native.set(f"{_NATIVE}.top_p_softmax", values[WEIGHTS] == "softmax", WEIGHTS)
    elif values[STRATEGY] == "min_p":
        native.set(f"{_NATIVE}.min_p", float(values[AMOUNT]), AMOUNT, STRATEGY)


def filter_problems(values: ForeignValues, mini_batch: str, *, newer: bool) -> Iterator[ConfigProblem]:
    """Yield a problem if the share of 2025 keeps nothing, or less than `mini_batch`, the key of the mini-batch size."""
    if not filters_by_ratio(values, newer=newer):
        return
    num_selected = num_selected_groups(values, newer=newer)
    if num_selected < 1:
        least = round(1 / values[GROUPS] + 5e-5, 4)
        yield values.problem(
            RATIO, f"keeps none of the groups of {values.describe(GROUPS)}", f"at least: {RATIO}={least}"
        )
    elif num_selected * values[SAMPLES] < values[MINI_BATCH]:
        trained_episodes = num_selected * values[SAMPLES]
        problem = f"{values.describe(RATIO)} keeps {trained_episodes} episodes of a step, fewer than a mini-batch"
        yield values.problem(mini_batch, problem, f"at most: {mini_batch}={trained_episodes}, or {RATIO}=1")


def filter_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of 2025, or those of 2026 for a filter by shares of scores."""
    config = foreign.experiment.algorithm.filter
    least = config.keep_by.startswith("least_")
    score = config.keep_by.removeprefix("least_")
    if config.top_p == 1.0 and config.min_p is None:
        foreign.set(RATIO, config.keep_share)
        names = {native: order for order, native in ORDERS.items()}
        foreign.set(ORDER, names.get(config.keep_by, "std"))
        return
    by_share = config.min_p is None
    foreign.set(STRATEGY, "top_p" if by_share else "min_p")
    foreign.set(AMOUNT, config.top_p if by_share else config.min_p)
    foreign.set(ORDER, "smallest" if least else "largest")
    foreign.set(METRIC, next((metric for metric, name in SCORES.items() if name == score), "reward_variance"))
    foreign.set(TOLERANCE, config.top_p_tolerance)
    foreign.set(WEIGHTS, "softmax" if config.top_p_softmax else "linear")
    foreign.set(EMPTY_STEPS, config.stop_after_empty_steps)
