"""If these fail, a run plays or learns another number of times than it says, or an impossible one starts."""

from __future__ import annotations

import pytest

from quintet.config.compose import load_experiment
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.config.plan.model_shapes import PRESET_CONTEXTS, PRESET_SHAPES
from quintet.config.plan.run_plan import plan_run
from quintet.errors import ConfigError


def test_the_plan_by_hand() -> None:
    words = ["training.steps=10", "validation.every_steps=4", "checkpoint.every_steps=5", "training.epochs=3"]
    sizes = ["training.groups_per_step=6", "training.samples_per_group=5", "training.mini_batches=2"]
    numbers = compute_batch_arithmetic(load_experiment(None, [*words, *sizes, "warm_start.updates=7"]))
    assert numbers.episodes_per_step == 30
    assert numbers.episodes == 300
    assert numbers.groups_per_mini_batch == 3
    assert numbers.episodes_per_mini_batch == 15
    assert numbers.optimizer_steps == 60  # 10 steps of 3 epochs of 2 mini-batches
    assert numbers.warm_start_updates == 7
    assert numbers.validations == 4  # before, 4, 8, after
    assert numbers.checkpoints == 3  # before, 5, 10


@pytest.mark.parametrize(("steps", "every", "times"), [(0, 5, 1), (3, 0, 2), (3, 1, 4), (3, 9, 2), (4, 2, 3)])
def test_validations_at_the_edges(steps: int, every: int, times: int) -> None:
    words = [f"training.steps={steps}", f"validation.every_steps={every}", "warm_start=null"]
    numbers = compute_batch_arithmetic(load_experiment(None, words))
    assert (numbers.validations, numbers.warm_start_updates) == (times, 0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["training.mini_batches=5"],
            ["training.mini_batches = 5 (command line)", "= 32 (default)", "mini_batches=4", "step=30", "step=35"],
        ),
        (["training.groups_per_step=2", "training.mini_batches=9"], ["mini_batches=8", "groups_per_step=9"]),
        (["training.groups_per_step=1000000007", "training.mini_batches=999"], ["mini_batches=16,", "999999999"]),
        (
            ["training.groups_per_step=5", "training.samples_per_group=6", "training.mini_batches=4"],
            ["the 30 episodes of a step", "mini_batches=3", "groups_per_step=4", "groups_per_step=6"],
        ),
        (
            ["training.samples_per_group=1"],
            ["training.samples_per_group = 1", "samples_per_group=2", "advantage.name=gae"],
        ),
        (["rollout.max_prompt_tokens=4000"], ["= 4000 (command line)", "2048 tokens", "max_prompt_tokens=2024"]),
        (["rollout.max_response_tokens=4000"], ["= 4000 (command line)", "max_response_tokens=1536"]),
        (
            ["actor.optimizer.warmup_ratio=0.1"],
            ["warmup_ratio = 0.1 (command line)", "warmup_steps = 5 (default) takes precedence", "warmup_steps=0"],
        ),
        (["warm_start.optimizer.warmup_ratio=0.1"], ["warm_start.optimizer.warmup_steps=0, or"]),
        (["policy.preset=grid-1n"], ["policy.preset = 'grid-1n'", "did you mean policy.preset=grid-1m?", "grid-3m"]),
    ],
)
def test_the_impossible_is_refused_with_the_nearest_possible(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as fault:
        load_experiment(None, overrides)
    for word in words:
        assert word in str(fault.value), str(fault.value)


def test_mini_batches_may_cut_through_groups() -> None:
    """Eight episodes from each of three starts make twelve optimizer steps of two episodes."""
    words = ["training.groups_per_step=3", "training.samples_per_group=8", "training.mini_batches=12"]
    numbers = compute_batch_arithmetic(load_experiment(None, words))
    assert (numbers.episodes_per_mini_batch, numbers.groups_per_mini_batch) == (2, 0.25)


@pytest.mark.parametrize(("share", "updates"), [(0.25, 2), (0.3, 2), (0.5, 2), (0.7, 3), (1, 4)])
def test_mini_batches_of_groups_that_are_filtered_out_are_not_counted(share: float, updates: int) -> None:
    """Of 10 groups of 4 episodes, 3, 3, 5, 7 or 10 are kept, in mini-batches of 10 episodes."""
    words = ["training.groups_per_step=10", "training.samples_per_group=4", "training.mini_batches=4"]
    composed = load_experiment(None, [*words, "training.steps=5", f"algorithm.filter.keep_share={share}"])
    assert plan_run(composed).numbers["optimizer_steps_per_step"] == updates
    assert compute_batch_arithmetic(composed).optimizer_steps == 5 * updates


@pytest.mark.parametrize(
    ("words", "validations", "optimizer_steps"),
    [
        (["validation.before_training=false"], 3, 560),
        (["validation.only=true"], 1, 0),
        (["validation.only=true", "validation.before_training=false"], 1, 0),
    ],
)
def test_validations_that_are_left_out_or_stand_alone(words: list[str], validations: int, optimizer_steps: int) -> None:
    numbers = compute_batch_arithmetic(load_experiment(None, words))
    assert (numbers.validations, numbers.optimizer_steps) == (validations, optimizer_steps)


def test_contradictions_come_in_one_message() -> None:
    with pytest.raises(ConfigError) as fault:
        load_experiment(None, ["training.mini_batches=5", "training.samples_per_group=1", "policy.preset=x"])
    for key in ("training.mini_batches", "training.samples_per_group", "policy.preset"):
        assert f"{key} = " in str(fault.value)


def test_one_episode_a_start_is_legal_where_a_critic_judges() -> None:
    words = ["training.samples_per_group=1", "algorithm.advantage.name=gae"]
    assert compute_batch_arithmetic(load_experiment(None, words)).episodes_per_step == 32


def test_preset_contexts_are_the_presets_own() -> None:
    from quintet.policies.tiny_models import PRESETS

    assert {name: shape.context for name, shape in PRESETS.items()} == PRESET_CONTEXTS


def test_preset_shapes_are_the_presets_own() -> None:
    """Else the memory of a policy made on the spot is that of another one."""
    from quintet.policies.tiny_models import PRESETS

    for name, made in PRESETS.items():
        shape = PRESET_SHAPES[name]
        assert (shape.layers, shape.hidden, shape.mlp) == (made.layers, made.hidden, made.mlp)
        assert (shape.heads, shape.kv_heads, shape.vocabulary) == (made.heads, made.kv_heads, made.vocabulary)
        assert shape.head_dim == made.hidden // made.heads
