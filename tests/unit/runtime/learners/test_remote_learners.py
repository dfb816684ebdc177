"""If these fail, log-probs, a critic, reference or reward model on devices of their own differ from those beside the
actor, are lost with a checkpoint, or die without anyone noticing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import SUPPORT
from transformers import AutoModelForSequenceClassification
from worker_ranks import experiment, sequences

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective
from quintet.config.native.data import RewardModelConfig
from quintet.errors import MachineError
from quintet.policies.model_loading import load_tokenizer
from quintet.records import PromptRow
from quintet.runtime.calls.listener import ControllerAddress, WorkerListener
from quintet.runtime.calls.messages import RemoteCallError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import CRITIC
from quintet.runtime.calls.transport import Transport
from quintet.runtime.controller import Controller
from quintet.runtime.learners.remote_learners import LearnerGroup
from quintet.runtime.worker import Worker
from quintet.training.checkpoint.async_save import AsyncCheckpointer
from quintet.training.parallel.rendezvous import RankDiedError

WORKER = f"""
import sys
from pathlib import Path
sys.path.append({str(SUPPORT)!r})
from rank_processes import join_group
from quintet.runtime.calls.listener import ControllerAddress
from quintet.runtime.worker import Worker
from quintet.runtime.worker_process import WorkerProcess
host, port, token, file, rank = sys.argv[1:]
ranks = join_group(int(rank) - 1, 2, Path(file))
process = WorkerProcess(ControllerAddress(host, int(port), token), int(rank), "the run")
process.run(Worker(ranks, shard_writer=rank), ["learners"])
"""
PLACED = (
    "placement.devices_per_node=3",
    "placement.actor.devices=[0]",
    "placement.rollout.devices=[0]",
    "placement.critic.devices=[1,2]",
    "placement.reference.devices=[1,2]",
    "algorithm.kl={estimator: k3}",
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[Transport, list[subprocess.Popen[bytes]]]]:
    """Two workers with one process group."""
    listener = WorkerListener("127.0.0.1", {1: "Critics", 2: "Critics"}, "the run", lost_seconds=20.0)
    address = ControllerAddress.of(listener)
    arguments = [address.host, str(address.port), address.token, str(tmp_path / "rendezvous")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, "-c", WORKER, *arguments, str(rank)], env=environment) for rank in (1, 2)
    ]
    try:
        yield Transport(listener.wait_for([1, 2], 60.0, "learners"), "critic and reference"), started
    finally:
        for process in started:
            process.kill()
            process.wait()
        listener.close()


Processes = tuple[Transport, list[subprocess.Popen[bytes]]]


def work(learners: LearnerGroup, directory: Path, writers: list[str]) -> dict[str, Any]:
    """What a run does with critic and reference."""
    config, batch = experiment(*PLACED), sequences()
    critic, reference = learners.create_critic(), learners.snapshot_reference()

    def update() -> dict[str, float]:
        return critic.update(batch, CriticObjective(config.critic), Aggregation("token-mean"), 1e-2, batch.values > 0)

    for _ in range(2):  # the adapters of the first one are zero
        learners.actor.update(batch, CrossEntropyObjective(), "token-mean", 1e-2)
    results: dict[str, Any] = {"update": update(), "log-probs": reference.compute_log_probs(batch).tolist()}
    saver = AsyncCheckpointer(directory, keep=1, other_ranks=writers)
    saver.save(1, {}, learners.save)
    saver.wait()
    saver.close()
    results["next update"], results["values"] = update(), critic.compute_values(batch).tolist()
    learners.snapshot_reference()
    results["new reference"] = learners.reference.compute_log_probs(batch).tolist()  # type: ignore[union-attr]
    learners.load(directory / "global_step_1", ("model", "optimizer"), learners.extra_state())
    assert learners.critic is not None
    assert learners.reference is not None
    critic = learners.critic
    results["resumed"] = update()
    results["resumed log-probs"] = learners.reference.compute_log_probs(batch).tolist()
    return results


@pytest.mark.parametrize("lora", [(), ("policy.lora.rank=2",)], ids=["all weights", "lora"])
def test_critic_and_reference_on_two_workers_are_those_of_one_process(
    processes: Processes, policy_directory: Path, tmp_path: Path, lora: tuple[str, ...]
) -> None:
    transport, _ = processes
    config = experiment(*PLACED, *lora)
    colocated = config.model_copy(update={"placement": experiment().placement})
    expected = work(Controller.in_process().build_learners(colocated, policy_directory), tmp_path / "one", [])
    actor = Transport(local=Worker())
    Controller(actor).build_learners(config, policy_directory)
    standalone = dict.fromkeys(("critic", "reference"), transport)
    learners = LearnerGroup(actor, config, policy_directory, standalone)
    results = work(learners, tmp_path / "three", ["1", "2"])
    for name, value in expected.items():
        assert results[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert results["resumed"] == pytest.approx(results["next update"], rel=1e-6)
    assert results["resumed log-probs"] == results["log-probs"] != results["new reference"]
    again = Controller.in_process().build_learners(colocated, policy_directory)
    again.load(tmp_path / "three/global_step_1", ("model", "optimizer"), {})
    assert again.reference is not None
    assert again.reference.compute_log_probs(sequences()).tolist() == pytest.approx(results["log-probs"], abs=1e-5)
    transport.close()


@pytest.mark.parametrize("lora", [(), ("policy.lora.rank=2",)], ids=["all weights", "lora"])
def test_log_prob_workers_have_the_weights_before_the_first_update_of_each_step(
    processes: Processes, policy_directory: Path, tmp_path: Path, lora: tuple[str, ...]
) -> None:
    """With a run that trains all weights, log-probs are those of the actor bit for bit."""
    transport, _ = processes
    settings = ("actor.balance_ranks=false", "algorithm.advantage={name: grpo}", "algorithm.kl=null", *lora)
    config, batch = experiment(*settings), sequences()
    controller = Controller(Transport(local=Worker()))
    controller._standalone = {"logprobs": transport}
    learners = controller.build_learners(config, policy_directory)

    def update() -> None:
        learners.actor.update(batch, CrossEntropyObjective(), "token-mean", 1e-2)

    def check(step: int) -> torch.Tensor:
        expected = learners.actor.scorer.compute_log_probs(batch)
        log_probs = learners.policy_scorer(step).compute_log_probs(batch)
        tolerance = 1e-5 if lora else 0.0
        torch.testing.assert_close(log_probs, expected, rtol=0.0, atol=tolerance)
        return log_probs

    saver = AsyncCheckpointer(tmp_path, keep=1, other_ranks=["1", "2"])
    saver.save(1, {}, learners.save)
    saver.wait()
    saver.close()
    assert {path.name for path in (tmp_path / "global_step_1").iterdir()} >= {"actor", "hf"}
    before = check(1)
    update()
    update()
    assert learners.policy_scorer(1).compute_log_probs(batch).equal(before)
    after = check(2)
    assert not after.equal(before)
    squares = learners.actor.scorer.compute_sum_squared_probs(batch)
    torch.testing.assert_close(learners.policy_scorer(2).compute_sum_squared_probs(batch), squares, rtol=0.0, atol=1e-6)
    learners.load(tmp_path / "global_step_1", ("model", "optimizer"), {})
    assert check(2).equal(before)
    staged = Path(learners._policy_weights.shared_tensors[0].file)
    assert staged.exists()
    controller.close()
    assert not staged.exists()
    transport.close()


@pytest.mark.proves("verl", "reward_model.model.fsdp_config.min_num_params")
@pytest.mark.parametrize("min_sharded", [0, 1000, 10**9], ids=["copies", "sharded modules", "one unit"])
def test_every_worker_scores_a_part_of_the_responses(
    processes: Processes, policy_directory: Path, tmp_path: Path, min_sharded: int
) -> None:
    """With sharded weights, also a worker without responses takes part in every pass."""
    transport, _ = processes
    torch.manual_seed(0)
    model = tmp_path / "model"
    AutoModelForSequenceClassification.from_pretrained(policy_directory, num_labels=1).save_pretrained(model)
    load_tokenizer(policy_directory).save_pretrained(model)
    reward_model = RewardModelConfig(path=str(model))
    actor = Transport(local=Worker())
    local = Controller(actor).build_learners(experiment(), policy_directory).load_reward_model(reward_model, 64)
    learners = LearnerGroup(actor, experiment(), policy_directory, {"reward": transport})
    sharded = reward_model.model_copy(update={"min_sharded_parameters": min_sharded, "sequences_per_pass": 1})
    remote = learners.load_reward_model(sharded, 64)
    rows = [PromptRow(i, "s", ({"role": "user", "content": "Left?"},), ground_truth=object()) for i in range(3)]
    for count in (3, 1):
        responses = ["Left", "Right, I think", "Up"][:count]
        assert remote.score(rows[:count], responses) == pytest.approx(local.score(rows[:count], responses), abs=1e-5)
    assert remote.offloads is False


def test_a_killed_worker_is_named_with_its_components(processes: Processes) -> None:
    transport, (_, second) = processes
    threading.Timer(0.3, second.kill).start()
    while second.poll() is None:
        pass
    with pytest.raises(
        RankDiedError, match=rf"rank 2 \(Critics, process {second.pid}\) .* needs its critic and reference"
    ):
        transport.broadcast(RemoteCall(CRITIC, "compute_values", {"batch": sequences()}))
    with pytest.raises(RankDiedError, match="rank 2"):
        transport.check_alive()


def test_an_error_of_a_call_is_named_with_rank_components_and_cause(processes: Processes) -> None:
    transport, _ = processes
    call = RemoteCall(CRITIC, "compute_values", {"batch": sequences()})
    with pytest.raises(RemoteCallError, match="before it was built"):
        transport.call(call)
    with pytest.raises(MachineError, match=r"rank [12] \(Critics\) failed: ValueError: .*before it was"):
        transport.broadcast(call)
