"""If these fail, a batch from which episodes were dropped is compared with episodes that are gone, or breaks the
run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from quintet.algorithms.advantages.gae import critic_mask
from quintet.algorithms.advantages.groups import Groups, has_response, num_response_tokens
from quintet.config.compose import load_experiment
from quintet.config.native.advantages import ADVANTAGES, AdvantageConfig
from quintet.records import Batch
from quintet.training.packing import select_trajectories

MakeBatch = Callable[..., Batch]

CONFIG: TypeAdapter[Any] = TypeAdapter(AdvantageConfig)
NAMES = sorted(entry.name for entry in ADVANTAGES if entry.name != "custom")
MASKS = [[0, 1, 1], [0, 0, 1], [1, 1, 0, 1], [1], [0, 1, 1], [1, 1]]
REWARDS = [[0, 0, 1.0], [0, 0, 3.0], [0, 0.5, 0, 2.0], [4.0], [0, 1.0, -1.0], [0, 0.25]]
GROUPS = [0, 0, 1, 1, 1, 2]


def make(make_batch: MakeBatch, rows: list[int], dtype: torch.dtype = torch.float64) -> Batch:
    """The given rows of the above, as a batch of their own."""
    pick = lambda values: [values[row] for row in rows]  # noqa: E731
    masks = pick(MASKS)
    ends = [[int(own and not any(mask[place + 1 :][:1])) for place, own in enumerate(mask)] for mask in masks]
    values = [[0.1 * (row + 1) * (place + 1) for place in range(len(MASKS[row]))] for row in rows]
    batch = make_batch(masks, pick(REWARDS), ends=ends, values=values, group=pick(GROUPS), dtype=dtype)
    sizes = torch.tensor([[row, place] for row in rows for place in range(len(MASKS[row]))]).reshape(-1, 2)
    return dataclasses.replace(
        batch,
        logprobs=-0.2 - 0.1 * sizes.sum(1).to(dtype),
        sum_squared_probs=0.3 + 0.05 * sizes[:, 1].to(dtype),
        observation_group=sizes[:, 1] % 2 + 10 * torch.tensor([GROUPS[int(row)] for row in sizes[:, 0]]),
        turn=torch.cat([torch.tensor(mask).eq(0).cumsum(0) for mask in masks]),
        baseline=torch.tensor(pick([0.5, 0.1, 0.2, 0.3, 0.4, 0.6])).to(dtype),
        reward_components={"right": torch.tensor(pick([1.0, 0.0, 1.0, 0.5, 0.0, 2.0])).to(dtype)},
    )


@pytest.mark.parametrize("name", NAMES)
def test_dropped_episodes_do_not_affect_advantages(make_batch: MakeBatch, name: str) -> None:
    """What remains of a batch, whose trajectories keep their numbers, is estimated like a batch of its own."""
    rows = [0, 1, 3, 4]
    whole = make(make_batch, list(range(len(MASKS))))
    keep = torch.zeros(len(MASKS), dtype=torch.bool)
    keep[rows] = True
    rest = select_trajectories(whole, keep)
    assert len(rest.group) == len(MASKS)
    assert has_response(rest).tolist() == keep.tolist()
    estimate, config = ADVANTAGES.get(name).load(), CONFIG.validate_python({"name": name})
    expected = estimate(make(make_batch, rows), config)
    for found, told in zip(estimate(rest, config), expected, strict=True):
        torch.testing.assert_close(found, told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_advantages_keep_the_rewards_dtype_and_are_0_on_observations(
    make_batch: MakeBatch, name: str, dtype: torch.dtype
) -> None:
    batch = make(make_batch, list(range(len(MASKS))), dtype)
    advantages, returns = ADVANTAGES.get(name).load()(batch, CONFIG.validate_python({"name": name}))
    assert advantages.dtype == returns.dtype == dtype
    assert advantages.shape == returns.shape == batch.tokens.shape
    assert not advantages[~batch.loss_mask].any()
    assert not returns[~batch.loss_mask].any()
    assert torch.isfinite(advantages).all()
    assert advantages.any()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_has_empty_advantages(make_batch: MakeBatch, name: str) -> None:
    whole = make(make_batch, [0, 1, 2])
    nothing = select_trajectories(whole, torch.zeros(3, dtype=torch.bool))
    advantages, returns = ADVANTAGES.get(name).load()(nothing, CONFIG.validate_python({"name": name}))
    assert advantages.shape == returns.shape == (0,)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("turn_wise_gae",)])
def test_any_of_them_can_be_whitened(make_batch: MakeBatch, name: str) -> None:
    batch = make(make_batch, list(range(len(MASKS))))
    advantages, _ = ADVANTAGES.get(name).load()(batch, CONFIG.validate_python({"name": name, "whiten": True}))
    own = advantages[batch.loss_mask]
    assert abs(float(own.mean())) < 1e-9
    assert float(own.std()) == pytest.approx(1.0, abs=1e-5)


def test_every_estimator_of_the_schema_is_registered() -> None:
    """`none` waits for policies that are learnt without one."""
    schema = CONFIG.json_schema()
    assert {entry.name for entry in ADVANTAGES} | {"none"} == set(schema["discriminator"]["mapping"])


def test_excluded_episodes_do_not_enter_group_means() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 9.0])
    group = torch.tensor([5, 6, 6, 6])
    groups = Groups.from_ids(group, torch.tensor([True, True, True, False]))
    assert groups.mean(scores)[1:].tolist() == [1.5, 1.5, 1.5]
    assert groups.deviation(scores)[1:].tolist() == pytest.approx([0.5**0.5] * 3)


def test_response_tokens_are_counted_over_all_sequences_of_an_episode(make_batch: MakeBatch) -> None:
    batch = make_batch([[1, 0, 1], [0, 1]], [[0, 0, 0], [0, 0]], trajectory=[0, 0])
    assert num_response_tokens(batch).tolist() == [3]


def test_the_critic_learns_only_at_tokens_with_returns(make_batch: MakeBatch) -> None:
    batch = make_batch([[1, 1, 0, 1, 1]], [[0, 1.0, 0, 0, 2.0]], ends=[[0, 1, 0, 0, 1]], values=[[0.0] * 5])
    turn_wise = CONFIG.validate_python({"name": "turn_wise_gae"})
    assert critic_mask(batch, turn_wise).tolist() == [False, True, False, False, True]
    assert critic_mask(batch, CONFIG.validate_python({"name": "gae"})).tolist() == batch.loss_mask.tolist()
    _, returns = ADVANTAGES.get("turn_wise_gae").load()(batch, turn_wise)
    assert not returns[~critic_mask(batch, turn_wise)].any()


OUTSIDE = """
import torch

def centred(batch, options):
    values = batch.rewards - options["mean"]
    return values, values * 2

def broken(batch, options):
    return batch.rewards
"""


def test_a_custom_estimator_is_called_with_its_options(make_batch: MakeBatch, tmp_path: Path) -> None:
    from quintet.errors import ConfigError

    (tmp_path / "mine.py").write_text(OUTSIDE)
    batch = make_batch([[0, 1], [0, 1]], [[0, 1.0], [0, 3.0]])
    options = {"name": "custom", "function": f"{tmp_path}/mine.py:centred", "options": {"mean": 1.0}}
    estimate = ADVANTAGES.get("custom").load()
    advantages, returns = estimate(batch, CONFIG.validate_python(options))
    assert advantages.tolist() == [0.0, 0.0, 0.0, 2.0]
    assert returns.tolist() == [0.0, 0.0, 0.0, 4.0]
    whitened, _ = estimate(batch, CONFIG.validate_python({**options, "whiten": True}))
    assert whitened.tolist() == pytest.approx([0.0, -(0.5**0.5), 0.0, 0.5**0.5])
    options["function"] = f"{tmp_path}/mine.py:broken"
    with pytest.raises(ConfigError, match=r"broken.*must return") as caught:
        estimate(batch, CONFIG.validate_python(options))
    assert caught.value.key == "algorithm.advantage.function"
    assert "batch.rewards" in str(caught.value.hint)


@pytest.mark.parametrize("needed", [False, True])
def test_a_custom_estimator_has_a_critic_if_it_needs_one(*, needed: bool) -> None:
    options = f"{{name: custom, function: 'mine.py:centred', needs_critic: {str(needed).lower()}}}"
    config = load_experiment(None, [f"algorithm.advantage={options}"]).experiment
    assert config.needs_critic is needed
