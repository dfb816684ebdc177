"""If these fail, robots start elsewhere than the configuration says, or training sees what validation starts from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quintet.config.native.envs import SimulatorConfig
from quintet.envs.simulators.start_states import RobotStartStates
from quintet.errors import ConfigError


def start_states(num_start_states: int = 90, group_size: int = 1, max_episodes: int = 1, **values: Any) -> Any:
    return RobotStartStates(SimulatorConfig(**values), num_start_states, group_size, max_episodes)


def test_the_robots_of_a_group_share_a_start_state_that_changes_with_every_epoch() -> None:
    states = start_states(group_size=4, epochs=2)
    first = states.training(0, 0, 16)
    assert first.shape == (16, 1)
    assert (first.reshape(4, 4) == first.reshape(4, 4)[:, :1]).all()
    assert len({states.training(step, epoch, 16).tobytes() for step in range(3) for epoch in range(2)}) == 6
    np.testing.assert_array_equal(start_states(group_size=4, epochs=2).training(0, 0, 16), first)
    assert (start_states(group_size=4, epochs=2, seed=1).training(0, 0, 16) != first).any()


def test_every_episode_has_its_own_start_state_if_they_are_not_fixed() -> None:
    states = start_states(10**9, group_size=4, max_episodes=5, fixed_start_states=False, auto_reset=True)
    drawn = states.training(0, 0, 8)
    assert drawn.shape == (8, 5)
    assert len(np.unique(drawn)) == 40
    fixed = start_states(10**9, group_size=4, max_episodes=5, auto_reset=True).training(0, 0, 8)
    assert fixed.shape == (8, 1)


def test_the_start_states_of_a_robot_do_not_depend_on_the_number_of_robots() -> None:
    states = start_states(10**9, fixed_start_states=False)
    np.testing.assert_array_equal(states.training(3, 0, 4), states.training(3, 0, 64)[:4])


def test_training_validation_and_demonstrations_share_no_start_state_unless_asked_to() -> None:
    states = start_states(30, start_state_order="ordered")
    used = [set(np.unique(array)) for array in _all_uses(states)]
    assert [len(each) for each in used] == [10, 10, 10]
    assert len(set.union(*used)) == 30
    for array in _all_uses(start_states(30, start_state_order="ordered", hold_out=False)):
        assert sorted(set(array.ravel().tolist())) == list(range(30))


def _all_uses(states: RobotStartStates) -> list[np.ndarray]:
    training = np.concatenate([states.training(step, 0, 10) for step in range(3)])
    return [training, states.validation(0, 30), states.demonstrations(0, 30)]


def test_ordered_start_states_are_all_used_before_one_repeats() -> None:
    states = start_states(12, group_size=2, hold_out=False, start_state_order="ordered", epochs=2)
    pass_of_all = np.concatenate([states.training(step, epoch, 6)[::2] for step in range(2) for epoch in range(2)])
    assert sorted(pass_of_all.ravel().tolist()) == list(range(12))
    assert pass_of_all.ravel().tolist() != list(range(12))
    next_pass = np.concatenate([states.training(step, epoch, 6)[::2] for step in (2, 3) for epoch in range(2)])
    assert sorted(next_pass.ravel().tolist()) == list(range(12))


def test_validation_continues_with_automatic_resets_where_the_batch_ends() -> None:
    plain = start_states(30, hold_out=False)
    resetting = start_states(30, hold_out=False, auto_reset=True, max_episodes=3)
    columns = resetting.validation(0, 10)
    assert columns.shape == (10, 3)
    np.testing.assert_array_equal(
        columns.T.ravel(), np.concatenate([plain.validation(at, 10).ravel() for at in (0, 10, 20)])
    )
    assert sorted(columns.ravel().tolist()) == list(range(30))


def test_one_start_state_can_be_chosen() -> None:
    states = start_states(30, start_state=7, fixed_start_states=False, auto_reset=True, max_episodes=2)
    assert set(states.training(0, 0, 4).ravel()) == set(states.validation(0, 4).ravel()) == {7}
    with pytest.raises(ConfigError, match=r"env.start_state = 30: libero has 30 start states\n  valid: 0 to 29"):
        start_states(30, start_state=30)


def test_a_simulator_with_too_few_start_states_to_hold_some_out_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"env.hold_out = true needs 3 start states; libero has 2\n  set env.hold_out=false"
    ):
        start_states(2)
    assert set(start_states(2, hold_out=False).training(0, 0, 64).ravel()) == {0, 1}
