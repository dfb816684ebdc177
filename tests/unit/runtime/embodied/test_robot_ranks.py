"""If these fail, a policy of robots is trained differently on several devices, or is held near another reference after
a resume."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import robot_ranks
from robot_ranks import CASES, POLICIES, create_policies, experiment, work

from quintet.runtime.controller import Controller

Results = dict[str, dict[str, Any]]


def environment(rank: int, port: int) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    variables = {name: str(value) for name, value in values.items()}
    return {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies")
    create_policies(path)
    return path


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> Results:
    """What two ranks tell of each case."""
    with socket.socket() as actual:
        actual.bind(("127.0.0.1", 0))
        port = int(actual.getsockname()[1])
    command = [sys.executable, robot_ranks.__file__, str(directory)]
    ranks = [
        subprocess.Popen(
            command, env=environment(rank, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], answers[0][1][-2000:] + answers[1][1][-2000:]
    parsed: Results = json.loads(answers[0][0])
    return parsed


@pytest.fixture(scope="module")
def one_rank(directory: Path) -> Results:
    return {
        policy: work(Controller.in_process(), experiment(policy), directory / policy, directory / f"{policy} alone")
        for policy in POLICIES
    }


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_also_if_one_has_no_chunk_steps(
    two_ranks: Results, one_rank: Results, case: str
) -> None:
    actual, expected = two_ranks[case], one_rank[CASES[case][0]]
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("policy", POLICIES)
def test_the_reference_is_the_policy_at_the_start_also_after_updates_and_a_resume(
    one_rank: Results, policy: str
) -> None:
    actual = one_rank[policy]
    divergences = [
        actual[f"{name} {step}"]["actor/kl_loss"]
        for step in range(2)
        for name in ("chunk steps of one rank", "all chunk steps")
    ]
    assert divergences[0] == pytest.approx(0.0, abs=1e-9)
    assert min(divergences[1:]) > 1e-6
    assert actual["resumed"] == pytest.approx(actual["after saving"], rel=1e-6, abs=1e-9)
    assert actual["resumed"]["actor/kl_loss"] > 1e-6


@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed_log_probs_are_the_learners_before_the_updates_of_a_step(one_rank: Results, policy: str) -> None:
    actual = one_rank[policy]
    for step in range(2):
        first = actual[f"chunk steps of one rank {step}"]
        assert first["actor/ratio_abs"] == pytest.approx(0.0, abs=1e-6)
        # cloning, and the updates of the first step, have moved the policy away from the one that sampled
        assert abs(first["actor/behavior_kl"]) > 1e-4
        assert actual[f"all chunk steps {step}"]["actor/ratio_abs"] > 1e-6


@pytest.mark.parametrize("policy", POLICIES)
def test_updates_of_values_change_the_value_head_alone(one_rank: Results, policy: str) -> None:
    before, after = one_rank[policy]["weights"], one_rank[policy]["weights after an update of values"]
    changed = {name for name, value in after.items() if value != before[name]}
    assert changed
    assert all(name.startswith("value_head.") for name in changed)
