"""If these fail, a run on Megatron learns, scores, stores or goes on otherwise than any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_ranks
from rank_processes import as_started, free_port
from worker_ranks import experiment, sequences, work

from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective
from quintet.config.native.learners import CriticConfig
from quintet.errors import ConfigError, MachineError
from quintet.runtime.controller import Controller
from quintet.runtime.learners.learner_backends import load_backend
from quintet.runtime.learners.local_learners import LocalLearners
from quintet.runtime.learners.megatron_backend import WriteAssignment
from quintet.runtime.learners.remote_learners import LearnerGroup
from quintet.training.checkpoint.async_save import AsyncCheckpointer
from quintet.training.parallel.process_group import RankGroup

pytest.importorskip("megatron.core", reason="pip install -e '.[megatron]'")

MEGATRON = tuple(f"{name}.backend=megatron" for name in ("actor", "critic", "reference"))


pytestmark = pytest.mark.usefixtures("megatron_alone")


def same(ours: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name in theirs:
            same(ours[name], theirs[name], f"{where} {name}")
    else:
        assert ours == pytest.approx(theirs, rel=2e-4, abs=5e-5), where


@pytest.fixture(scope="module")
def plain(policy_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the learners of one process do."""
    before = torch.get_num_threads()
    actual = work(Controller.in_process(), policy_directory, tmp_path_factory.mktemp("plain"))
    torch.set_num_threads(before)
    return actual


@pytest.mark.proves("verl", "actor_rollout_ref.actor.strategy")
@pytest.mark.proves("rlinf", "actor.training_backend")
def test_a_run_on_megatron_does_what_any_does(policy_directory: Path, tmp_path: Path, plain: dict[str, Any]) -> None:
    same(work(Controller.in_process(), policy_directory, tmp_path, *MEGATRON), plain)


@pytest.mark.proves("rlinf", "actor.megatron.use_dist_ckpt")
def test_a_run_on_two_ranks_does_too_with_a_critic_of_other_sizes(
    policy_directory: Path, tmp_path: Path, plain: dict[str, Any]
) -> None:
    stages = ("critic.parallel.tensor=1", "critic.parallel.pipeline=2")
    same(on_two_ranks(policy_directory, tmp_path / "two", *split_by("tensor"), *stages), plain)
    stored = sorted(path.name for path in (tmp_path / "two").rglob("model_world_size_2_*.safetensors"))
    assert {name.rpartition("_")[2] for name in stored} == {"0.safetensors", "1.safetensors"}


def test_experts_on_two_ranks_do_what_those_of_one_do(mixture_directory: Path, tmp_path: Path) -> None:
    """And what they stored goes on in learners that hold them otherwise."""
    before = torch.get_num_threads()
    actual = work(Controller.in_process(), mixture_directory, tmp_path / "plain")
    torch.set_num_threads(before)
    same(on_two_ranks(mixture_directory, tmp_path / "two", *split_by("expert")), actual)
    plain = Controller.in_process().build_learners(experiment(), mixture_directory)
    first, second = (_goes_on(plain, tmp_path / name / "global_step_1") for name in ("plain", "two"))
    same(second, first)


def _goes_on(learners: LearnerGroup, checkpoint: Path) -> dict[str, float]:
    learners.load(checkpoint, ("model", "optimizer"), {})
    return learners.actor.update(sequences(), CrossEntropyObjective(), "token-mean", 1e-3)


def split_by(way: str) -> list[str]:
    split = [f"{name}.parallel.{way}=2" for name in ("actor", "critic", "reference")]
    return [*MEGATRON, *split, "actor.megatron={use_dist_ckpt: true}"]


def on_two_ranks(policy: Path, directory: Path, *overrides: str) -> Any:
    """What learners do that two processes share."""
    program = [sys.executable, "-W", "ignore", str(Path(worker_ranks.__file__))]
    command, port = [*program, str(policy), str(directory), *overrides], free_port()
    ranks = [
        subprocess.Popen(command, env=as_started(rank, 2, port), stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=200)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads(answers[0].splitlines()[-1])


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", ["policy_directory", "mixture_directory"])
def test_a_checkpoint_goes_on_on_another_backend(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, backwards: bool
) -> None:
    """Of a mixture of experts, too."""
    policy = request.getfixturevalue(kind)
    ways = [Controller.in_process().build_learners(experiment(*overrides), policy) for overrides in (MEGATRON, ())]
    first, second = reversed(ways) if backwards else ways
    values = CriticObjective(CriticConfig())
    for learners in (first, second):
        learners.create_critic()
        learners.snapshot_reference()
    first.actor.update(sequences(), CrossEntropyObjective(), "token-mean", 1e-3)
    first.critic.update(sequences(), values, "token-mean", 1e-2)
    saver = AsyncCheckpointer(tmp_path, keep=1, other_ranks=())
    saver.save(1, {}, first.save)
    saver.wait()
    saver.close()
    assert first.extra_state() == {}
    second.load(tmp_path / "global_step_1", ("model", "optimizer"), {})
    for _ in range(2):
        ours, theirs = (
            each.actor.update(sequences(), CrossEntropyObjective(), "token-mean", 1e-3) for each in (first, second)
        )
        same(ours, theirs)
        ours, theirs = (each.critic.update(sequences(), values, "token-mean", 1e-2) for each in (first, second))
        same(ours, theirs)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["policy.lora={rank: 2}"], "LoRA is not supported on Megatron"),
        (["actor.optimizer.kind=muon"], "Megatron supports adamw and sgd"),
        (["reference.parallel.tensor=2"], "compares logits of the same sequences, and actor has 1"),
        (["reference.backend=fsdp2"], "actor and reference have different backends"),
        (["actor.sharding.forward_prefetch=true"], "Megatron does not support this option"),
        (["critic.memory.liger=true"], "Megatron does not support this option"),
        (["reference.dtype=bfloat16"], "use the type of the policy"),
        (["policy.attention=eager"], "has its own attention"),
        (["sft.lora={rank: 2}"], "sft.lora.rank = 2 .*LoRA"),
        (["sft.liger=true"], "layers of transformers"),
        (["sft.optimizer.kind=muon"], "sft.optimizer.kind = 'muon' .*adamw and sgd"),
        (["sft.path=a", "actor.megatron.checkpoint=b"], "starts from sft.path = a"),
        (["sft.path=a", "actor.megatron.conversion.source=b"], "starts from sft.path = a"),
    ],
)
def test_what_megatron_doesnt_do_here_is_refused(policy_directory: Path, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LocalLearners.build(experiment(*MEGATRON, *overrides), policy_directory)


@pytest.mark.parametrize("overrides", [MEGATRON[:1], MEGATRON[1:]])
def test_megatron_and_plain_learners_make_one_run(policy_directory: Path, overrides: tuple[str, ...]) -> None:
    """A full divergence apart, which is measured inside one backend."""
    kl = "algorithm.kl={place: loss, coefficient: 0.1, estimator: k3}"
    results = [part(LocalLearners.build(experiment(kl, *own), policy_directory)) for own in ((), overrides)]
    same(results[1], results[0])


def part(learners: LocalLearners) -> dict[str, Any]:
    """What critic and reference make of a policy that has learnt something."""
    batch = sequences()
    learners.actor.update(batch, CrossEntropyObjective(), "token-mean", 1e-3)
    critic, reference = learners.create_critic(), learners.snapshot_reference()
    learners.actor.update(batch, CrossEntropyObjective(), "token-mean", 1e-3)
    metrics = critic.update(batch, CriticObjective(CriticConfig()), "token-mean", 1e-2)
    return {
        "critic": metrics,
        "values": critic.compute_values(batch).tolist(),
        "kept": reference.compute_log_probs(batch).tolist(),
    }


def test_log_prob_workers_of_a_megatron_actor_score_as_it_does(policy_directory: Path) -> None:
    config, batch = experiment(*MEGATRON, "actor.balance_ranks=false"), sequences()
    learners = LocalLearners.build(config, policy_directory)
    scorer = load_backend("megatron").build_policy_scorer(config, policy_directory, RankGroup())
    learners.actor.update(batch, CrossEntropyObjective(), "token-mean", 1e-3)
    expected = learners.actor.scorer.compute_log_probs(batch)
    assert float((scorer.compute_log_probs(batch) - expected).abs().max()) > 1e-4
    scorer.load_weights(dict(learners.actor.weights()))
    torch.testing.assert_close(scorer.compute_log_probs(batch), expected, rtol=0.0, atol=1e-6)


def test_a_checkpoint_of_another_model_is_refused_by_name(policy_directory: Path, tmp_path: Path) -> None:
    learners = LocalLearners.build(experiment(*MEGATRON), policy_directory)
    saver = AsyncCheckpointer(tmp_path, keep=1, other_ranks=())
    saver.save(1, {}, learners.save)
    saver.wait()
    saver.close()
    table = tmp_path / "global_step_1/actor/model_world_size_1_rank_0.json"
    table.write_text(table.read_text().replace('"name": "model.norm.weight"', '"name": "model.other.weight"'))
    with pytest.raises(MachineError, match="does not fit the model"):
        learners.load_actor(tmp_path / "global_step_1", ("model",), {})


@pytest.mark.parametrize(("distributed", "written"), [("true", [1, 3]), ("false", [])])
def test_other_ranks_write_shards_of_a_checkpoint_if_configured(distributed: str, written: list[int]) -> None:
    config = experiment(f"actor.megatron={{use_dist_ckpt: {distributed}}}")
    assignment = WriteAssignment.from_config(config, RankGroup(1, 2))
    assert [index for index in range(4) if assignment.writes(index)] == written
