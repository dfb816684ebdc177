"""If these fail, components run on other devices than the configuration says, or the controller has no learner."""

from __future__ import annotations

import pytest

from quintet.config.compose import load_experiment
from quintet.config.plan.process_layout import ProcessLayout, process_layout

KL = "algorithm.kl={}"


def layout(*words: str) -> ProcessLayout:
    return process_layout(load_experiment(None, [f"placement.{word}" for word in words]).experiment)


def test_all_components_share_the_devices_of_a_run_without_placement() -> None:
    placed = layout("nodes=2", "devices_per_node=4")
    assert placed.devices == tuple(range(8))
    assert placed.learner_ranks == tuple(range(8))
    assert placed.standalone_ranks == ()


def test_fine_tuning_has_the_devices_of_its_stage() -> None:
    placed = process_layout(load_experiment(None, ["sft={episodes: {}, devices: 3}"]).experiment)
    assert placed.devices == placed.learner_ranks == (0, 1, 2)


def test_the_controller_has_a_device_of_the_actor_wherever_that_is() -> None:
    placed = layout("devices_per_node=4", "rollout.devices=[0,1]", "actor.devices=[2,3]")
    assert placed.devices == (2, 3, 0, 1)
    assert placed.learner_ranks == (0, 1)
    assert placed.standalone == {"rollout": (2, 3)}
    assert [placed.local_device(rank).number for rank in range(4)] == [2, 3, 0, 1]


def test_the_node_of_the_actor_comes_first() -> None:
    placed = layout("nodes=2", "devices_per_node=2", "rollout.devices=[0,1]", "actor.devices=[2,3]")
    assert placed.devices == (2, 3, 0, 1)
    assert placed.local_device(0).number == 0
    assert (placed.num_nodes, placed.per_node) == (2, 2)


def test_learners_of_two_nodes_are_not_adjacent_ranks() -> None:
    placed = layout("nodes=2", "devices_per_node=4", "actor.devices=[0,1,4,5]", "rollout.devices=[2,3,6,7]")
    assert placed.learner_ranks == (0, 1, 4, 5)
    assert placed.standalone == {"rollout": (2, 3, 6, 7)}


def test_engines_may_use_devices_of_the_actor_and_others() -> None:
    placed = layout("devices_per_node=3", "actor.devices=[0,1]", "rollout.devices=[1,2]")
    assert [placed.has_engine(rank) for rank in range(3)] == [False, True, True]
    assert placed.standalone == {"rollout": (2,)}


def test_components_with_the_same_devices_have_the_same_processes() -> None:
    words = ["devices_per_node=4", "actor.devices=[0]", "rollout.devices=[1,2]", "critic.devices=[3]"]
    words += ["reference.devices=[1,2]"]
    config = load_experiment(
        None, [*(f"placement.{word}" for word in words), "algorithm.kl={}", "algorithm.advantage={name: gae}"]
    ).experiment
    placed = process_layout(config)
    assert [(each.components, each.ranks) for each in placed.standalone_learners] == [
        (("reference",), (1, 2)),
        (("critic",), (3,)),
    ]
    assert placed.standalone_learners_of(0) is None
    shared = config.model_copy(
        update={"placement": config.placement.model_copy(update={"critic": config.placement.reference})}
    )
    (both,) = process_layout(shared).standalone_learners
    assert both.shard_writer(2) == "2 (reference and critic)"


def test_log_prob_workers_have_processes_of_their_own_only_if_they_compute_something() -> None:
    words = ["placement.devices_per_node=4", "placement.actor.devices=[0,1]", "placement.rollout.devices=[0,1]"]

    def standalone(devices: str, *more: str) -> dict[str, tuple[int, ...]]:
        overrides = [*words, f"placement.logprobs.devices={devices}", *more]
        return dict(process_layout(load_experiment(None, overrides).experiment).standalone)

    recompute = "rollout.recompute_logprobs=true"
    for needed in (recompute, "algorithm.correction={}", "algorithm.advantage.name=optimal_token_baseline"):
        assert standalone("[2,3]", needed) == {"logprobs": (2, 3)}, needed
    assert standalone("[2,3]") == standalone("null", recompute) == standalone("[0,1]", recompute) == {}
    config = load_experiment(
        None, [*words, recompute, *(f"placement.{name}.devices=[2,3]" for name in ("logprobs", "reference")), KL]
    ).experiment
    (both,) = process_layout(config).standalone_learners
    assert both.name == "log-prob workers and reference"
    assert process_layout(config).restartable_ranks == frozenset()


def test_env_hosts_take_their_devices_from_the_actor_and_the_engines() -> None:
    placed = layout("devices_per_node=4", "envs.devices=[0,3]")
    assert placed.devices == (1, 2, 0, 3)
    assert placed.standalone == {"envs": (2, 3)}
    assert (placed.learner_ranks, placed.engine_ranks) == ((0, 1), {0, 1})
    assert placed.restartable_ranks == {2, 3}
    assert layout("devices_per_node=2", "envs.devices=[0,1]").standalone == {}
    explicit = layout("devices_per_node=4", "actor.devices=[0]", "rollout.devices=[1,2]", "envs.devices=[3]")
    assert explicit.standalone == {"rollout": (1, 2), "envs": (3,)}


def test_ranks_are_named_by_their_components_where_these_differ() -> None:
    assert layout("devices_per_node=2").describe_rank(1) == "rank 1"
    words = ["devices_per_node=3", "actor.devices=[0]", "rollout.devices=[1]", "envs.devices=[2]"]
    placed = layout(*words)
    assert [placed.describe_rank(rank) for rank in range(3)] == [
        "rank 0 (actor)",
        "rank 1 (engines)",
        "rank 2 (environments)",
    ]
    named = layout(*words, "rollout.group=Samplers", "envs.group=Worlds")
    assert [named.components_of(rank) for rank in range(3)] == ["actor", "Samplers", "Worlds"]
    together = layout("devices_per_node=2", "actor.group=Trainers", "envs.group=Worlds")
    assert [together.components_of(rank) for rank in range(2)] == [
        "Trainers and engines and Worlds",
        "Trainers and engines",
    ]
    assert together.standalone_ranks == ()


def test_a_device_has_several_engines_or_env_hosts() -> None:
    words = ["devices_per_node=6", "actor.devices=[0,1]", "rollout.devices=[2,5]", "rollout.processes_per_device=2"]
    placed = layout(*words, "envs.devices=[3]", "envs.processes_per_device=3")
    assert placed.devices == (0, 1, 2, 2, 3, 3, 3, 5, 5)
    assert placed.learner_ranks == (0, 1)
    assert placed.standalone == {"rollout": (2, 3, 7, 8), "envs": (4, 5, 6)}
    assert placed.restartable_ranks == set(range(2, 9))
    assert placed.cpu_ranks == {4, 5, 6}
    # both engines of a device see its GPU, whether the node shows all GPUs or only those in use
    assert [(each.number, each.index, each.num_used) for each in map(placed.local_device, (2, 3, 8))] == [
        (2, 2, 5),
        (2, 2, 5),
        (5, 4, 5),
    ]


def test_a_device_that_is_listed_twice_has_two_engines() -> None:
    placed = layout("devices_per_node=3", "actor.devices=[0]", "rollout.devices=[1,1,2]")
    assert (placed.devices, placed.standalone) == ((0, 1, 1, 2), {"rollout": (1, 2, 3)})


def test_a_critic_shares_the_process_of_one_of_the_engines_on_its_device() -> None:
    words = ["devices_per_node=2", "actor.devices=[0]", "rollout.devices=[1]", "rollout.processes_per_device=2"]
    words = [f"placement.{word}" for word in (*words, "critic.devices=[1]")]
    placed = process_layout(load_experiment(None, [*words, "algorithm.advantage={name: gae}"]).experiment)
    assert placed.standalone == {"rollout": (1, 2), "critic": (1,)}
    assert placed.restartable_ranks == {2}


def test_a_node_with_fewer_processes_has_idle_ones_without_a_learner() -> None:
    words = ["nodes=2", "devices_per_node=2", "actor.devices=[0,1]", "rollout.devices=[2,3]"]
    placed = layout(*words, "rollout.processes_per_device=2")
    assert placed.devices == (0, 1, 1, 1, 2, 2, 3, 3)
    assert (placed.learner_ranks, placed.standalone) == ((0, 1), {"rollout": (4, 5, 6, 7)})
    assert placed.cpu_ranks == {2, 3}
    assert placed.used_devices_per_node == 2


def test_idle_devices_have_no_process() -> None:
    assert layout("devices_per_node=8", "actor.devices=[0]", "rollout.devices=[3]").devices == (0, 3)


def test_nodes_have_as_many_processes_as_each_other() -> None:
    placed = layout("nodes=2", "devices_per_node=2", "actor.devices=[0,1]", "rollout.devices=[2]")
    assert placed.devices == (0, 1, 2, 3)
    assert placed.standalone_ranks == (2,)


@pytest.mark.parametrize("size", [1, 4])
def test_an_engine_of_several_devices_in_one_process_needs_no_other_process(size: int) -> None:
    words = ["rollout.engine=vllm", f"rollout.engine_options.tensor_parallel={size}"]
    placed = process_layout(load_experiment(None, words).experiment)
    assert placed.size == 1


@pytest.mark.parametrize(("colocated", "on_actor"), [("true", True), ("false", False)])
def test_engines_without_devices_of_their_own_use_those_of_the_actor_unless_configured(
    colocated: str, *, on_actor: bool
) -> None:
    placed = layout("devices_per_node=2", "actor.devices=[0]", f"colocated={colocated}")
    assert (placed.has_engine(0), placed.has_engine(1)) == (on_actor, True)
