"""If these fail, a run that torchrun started is refused without need, or computes on other devices than it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.cli.configuration import load_config
from quintet.config.checks.processes import planned_rank
from quintet.config.compose import load_experiment
from quintet.config.plan.placement import check_placement
from quintet.config.plan.process_layout import process_layout
from quintet.config.torchrun import RankInfo
from quintet.errors import ConfigError

Begin = Callable[..., None]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begin:
    def by_torchrun(size: int, local_size: int | None = None) -> None:
        told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local_size or size}
        for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))

    return by_torchrun


def written(path: Path, tree: dict[str, Any]) -> str:
    file = path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return str(file)


def refusal(*words: str, config: str | None = None, dialect: str | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(config, list(words), dialect, "refuse")
    return str(refused.value)


def test_as_many_processes_as_devices_need_no_cluster(begun: Begin) -> None:
    alone = refusal("placement.devices_per_node=8")
    assert "requires one process per device" in alone
    assert "torchrun --nproc-per-node 8 -m quintet train" in alone
    begun(8)
    words = ["placement.devices_per_node=8", "placement.actor.devices=[0,1,2,3,4,5,6,7]"]
    assert load_config(None, words, None, "refuse").experiment.placement.devices_per_node == 8
    begun(8, 4)
    words = ["placement.nodes=2", "placement.devices_per_node=4", "placement.join_timeout_seconds=20"]
    assert load_config(None, words, None, "refuse").experiment.placement.join_timeout_seconds == 20


def test_other_numbers_are_refused_with_the_right_command(begun: Begin) -> None:
    begun(2)
    told = refusal("placement.nodes=2", "placement.devices_per_node=8")
    assert "placement.devices_per_node = 8 (command line)" in told
    assert "16 devices, and torchrun started 2 processes" in told
    assert "torchrun --nnodes 2 --nproc-per-node 8 -m quintet train" in told
    assert "torchrun started 2 processes" in refusal("placement.devices_per_node=1", "placement.nodes=1")


def test_engines_with_devices_of_their_own_need_no_cluster(begun: Begin) -> None:
    begun(3)
    words = ["placement.devices_per_node=3", "placement.actor.devices=[0]", "placement.rollout.devices=[1,2]"]
    assert load_config(None, words, None, "refuse").experiment.placement.rollout.devices == (1, 2)
    without_list = [*words[:2], "placement.colocated=false"]
    layout = process_layout(load_config(None, without_list, None, "refuse").experiment)
    assert (layout.learner_ranks, layout.standalone["rollout"]) == ((0,), (1, 2))


def test_env_hosts_need_no_cluster(begun: Begin) -> None:
    begun(3)
    words = ["placement.devices_per_node=3", "placement.envs.devices=[1,2]"]
    assert load_config(None, words, None, "refuse").experiment.placement.envs.devices == (1, 2)


def test_a_process_has_an_engine_or_environments_and_prompts_have_none(begun: Begin) -> None:
    begun(2)
    words = ["placement.devices_per_node=2", "placement.actor.devices=[0]", "placement.envs.devices=[1]"]
    shared = refusal(*words, "placement.rollout.devices=[0,1]")
    assert "placement.rollout.devices has 1, too; a process hosts environments alone" in shared
    prompts = refusal(*words, "placement.rollout.devices=[0]", "env.name=prompts", "data.train_files=[rows.jsonl]")
    assert "placement.envs.devices = [1] (command line): a run that answers prompts has no environments" in prompts


def test_fine_tuning_without_a_number_of_devices_takes_those_of_the_placement() -> None:
    words = ["placement.nodes=2", "placement.devices_per_node=4"]
    for stage in ("sft={episodes: {}}", "sft={episodes: {}, then_reinforce: true}"):
        assert planned_rank(load_experiment(None, [stage, *words]).experiment) == RankInfo(0, 8, 0, 4)
    some = load_experiment(None, ["sft={episodes: {}, devices: 4}", "placement.nodes=2"]).experiment
    assert planned_rank(some) == RankInfo(0, 4, 0, 2)
    told = refusal("sft={episodes: {}}", *words)
    assert "--nnodes 2 --nproc-per-node 4 -m quintet sft …` or `quintet sft … --ray HOST:PORT`" in told


def test_critic_reference_and_reward_model_with_devices_of_their_own_need_no_cluster(begun: Begin) -> None:
    begun(3)
    words = ["placement.devices_per_node=3", "placement.actor.devices=[0]", "placement.critic.devices=[1]"]
    words += ["placement.reference.devices=[2]", "algorithm.kl={}", "algorithm.advantage={name: gae}"]
    layout = process_layout(load_config(None, words, None, "refuse").experiment)
    assert {name: layout.standalone[name] for name in ("critic", "reference")} == {"critic": (1,), "reference": (2,)}
    unequal = load_config(None, [*words, "placement.reference.devices=[1,2]"], None, "refuse")
    with pytest.raises(ConfigError, match="they share 1 with the reference, and must share all devices or none"):
        check_placement(unequal)
    full = refusal(*words, "algorithm.kl={estimator: full}")
    assert "placement.reference.devices = [2]" in full
    assert "a divergence over the whole vocabulary needs the reference on the devices of the actor" in full


def test_log_prob_workers_need_no_cluster_but_something_to_compute(begun: Begin) -> None:
    begun(2)
    words = ["placement.devices_per_node=2", "placement.actor.devices=[0]", "placement.rollout.devices=[0]"]
    words.append("placement.logprobs.devices=[1]")
    recompute = "rollout.recompute_logprobs=true"
    layout = process_layout(load_config(None, [*words, recompute], None, "refuse").experiment)
    assert layout.standalone == {"logprobs": (1,)}
    idle = refusal(*words)
    assert "placement.logprobs.devices = [1] (command line): the workers would have no log-probs to compute" in idle
    assert "rollout.recompute_logprobs = false" in idle
    begun(1)
    beside_actor = ["placement.actor.devices=[0]", "placement.logprobs.devices=[0]"]
    assert load_config(None, beside_actor, None, "refuse").experiment.placement.logprobs.devices == (0,)


def test_where_nobody_counts_devices_they_are_the_processes(begun: Begin) -> None:
    begun(4, 2)
    composed = load_config(None, ["sft={episodes: {}}"], None, "refuse")
    assert (composed.experiment.placement.nodes, composed.experiment.placement.devices_per_node) == (1, 1)
    assert composed.experiment.sft is not None
    assert composed.experiment.sft.devices == 4
    composed = load_config(None, ["seed=1"], None, "refuse")
    assert (composed.experiment.placement.nodes, composed.experiment.placement.devices_per_node) == (2, 2)
    assert composed.provenance["placement.nodes"] == "torchrun"


@pytest.mark.proves("ragen", "sft.training.num_gpus")
def test_fine_tuning_takes_as_many_processes_as_devices(begun: Begin, tmp_path: Path) -> None:
    tree = {"rl_or_sft": "sft", "sft": {"training": {"num_gpus": 2}}}
    config = written(tmp_path, tree)
    alone = refusal(config=config, dialect="ragen")
    assert "2 devices, and this is one process" in alone
    assert "torchrun --nproc-per-node 2 -m quintet sft" in alone
    begun(2)
    stage = load_config(config, [], "ragen", "refuse").experiment.sft
    assert stage is not None
    assert stage.devices == 2
    begun(4)
    assert "torchrun started 4 processes" in refusal(config=config, dialect="ragen")


def test_devices_of_a_foreign_trainer_are_processes(begun: Begin, tmp_path: Path) -> None:
    config = written(tmp_path, {"system": {"n_gpus": 2}})
    assert "system.n_gpus" in refusal(config=config, dialect="ragen")
    begun(2)
    assert load_config(config, [], "ragen", "refuse").experiment.placement.devices_per_node == 2
    begun(4)
    assert "torchrun started 4 processes" in refusal(config=config, dialect="ragen")
    # nobody says how many GPUs each machine has
    free = written(tmp_path, {"trainer": {"nnodes": 1}})
    assert load_config(free, [], "ragen", "refuse").experiment.placement.devices_per_node == 4


def test_a_foreign_file_for_many_devices_says_how_it_is_started() -> None:
    """verl's own files ask for 8 or 32 devices: "set it to 1" alone isn't what to do."""
    script = Path(__file__).parents[4] / "examples/verl/run_grpo_fsdp2_qwen2.5-14b_sp4.sh"
    told = refusal(config=str(script), dialect="verl")
    assert "trainer.n_gpus_per_node = 8" in told
    assert "start it with `torchrun --nnodes 4 --nproc-per-node 8 -m quintet train …`" in told


def test_an_evaluation_on_many_devices_is_refused_without_a_command() -> None:
    """Its devices have no learner, so no number of processes would do."""
    told = refusal("evaluation.path=x.jsonl", "placement.devices_per_node=8")
    assert "requires one process per device" in told
    assert "torchrun" not in told
