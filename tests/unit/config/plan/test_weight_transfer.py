"""If these fail, the plan names another weight transfer than the run uses, or a key is ignored."""

from __future__ import annotations

import pytest

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.plan.run_plan import plan_run
from quintet.config.plan.weight_transfer import weight_transfer_problems, weight_transfers

TWO_NODES = ("placement.nodes=2", "placement.devices_per_node=2", "placement.actor.devices=[0]")


def load(*words: str) -> ComposedConfig:
    return load_experiment(None, words)


def test_engines_on_the_controllers_node_share_memory_and_others_join_a_process_group() -> None:
    composed = load(*TWO_NODES, "placement.rollout.devices=[1,2,3]")
    chosen = {each.ranks: each.transfer for each in weight_transfers(composed.experiment)}
    assert chosen == {(1,): "shared_memory", (2, 3): "process_group"}
    transfers = plan_run(composed).to_json()["placement"]["weight_transfers"]
    assert [each["reason"] for each in transfers] == ["on the controller's node", "on other nodes"]


def test_the_key_decides_for_all_engines() -> None:
    config = load(*TWO_NODES, "placement.rollout.devices=[1,2,3]", "placement.weight_transfer=tcp").experiment
    assert {each.transfer for each in weight_transfers(config)} == {"tcp"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("placement.weight_transfer=tcp",), "every engine is in the process of a learner"),
        (
            (*TWO_NODES, "placement.rollout.devices=[1,2,3]", "placement.weight_transfer=shared_memory"),
            "the engines of ranks 2, 3 are not on the controller's node",
        ),
    ],
)
def test_a_transfer_that_cannot_be_used_is_refused(words: tuple[str, ...], problem: str) -> None:
    (found,) = weight_transfer_problems(load(*words))
    assert problem in found.message
    assert found.hint == "set placement.weight_transfer=auto"
    assert not list(weight_transfer_problems(load(*words, "placement.weight_transfer=auto")))
