"""If these fail, a run on Megatron learns, scores, stores or goes on otherwise than any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from following_ranks import experiment, sequences, work
from test_following import as_started, free_port

from quintet.algorithms.objective import CriticObjective, Imitation
from quintet.config.native import CriticConfig
from quintet.errors import ConfigError, MachineError
from quintet.runtime.learners import Learners
from quintet.training.saving import Saver

pytest.importorskip("megatron.core", reason="pip install 'quintet[megatron]'")

MEGATRON = tuple(f"{name}.backend=megatron" for name in ("actor", "critic", "reference"))


pytestmark = pytest.mark.usefixtures("megatron_alone")


def same(ours: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name in theirs:
            same(ours[name], theirs[name], f"{where} {name}")
    else:
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5), where


@pytest.fixture(scope="module")
def plain(policy_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the learners of one process do."""
    before = torch.get_num_threads()
    told = work(Learners.open(experiment(), policy_directory), tmp_path_factory.mktemp("plain"))
    torch.set_num_threads(before)
    return told


def test_a_run_on_megatron_does_what_any_does(policy_directory: Path, tmp_path: Path, plain: dict[str, Any]) -> None:
    same(work(Learners.open(experiment(*MEGATRON), policy_directory), tmp_path, *MEGATRON), plain)


def test_a_run_on_two_ranks_does_too(policy_directory: Path, tmp_path: Path, plain: dict[str, Any]) -> None:
    same(on_two_ranks(policy_directory, tmp_path / "two", *split_by("tensor")), plain)
    stored = sorted(path.name for path in (tmp_path / "two").rglob("model_world_size_2_*.safetensors"))
    assert {name.rpartition("_")[2] for name in stored} == {"0.safetensors", "1.safetensors"}


def test_experts_on_two_ranks_do_what_those_of_one_do(mixture_directory: Path, tmp_path: Path) -> None:
    """And what they stored goes on in learners that hold them otherwise."""
    before = torch.get_num_threads()
    plain = Learners.open(experiment(), mixture_directory)
    told = work(plain, tmp_path / "plain")
    torch.set_num_threads(before)
    same(on_two_ranks(mixture_directory, tmp_path / "two", *split_by("expert")), told)
    first, second = (_goes_on(plain, tmp_path / name / "global_step_1") for name in ("plain", "two"))
    same(second, first)


def _goes_on(learners: Learners, checkpoint: Path) -> dict[str, float]:
    learners.load(checkpoint, ("model", "optimizer"), {})
    return learners.actor.update(sequences(), Imitation(), "token-mean", 1e-3)


def split_by(way: str) -> list[str]:
    split = [f"{name}.parallel.{way}=2" for name in ("actor", "critic", "reference")]
    return [*MEGATRON, *split, "actor.megatron={use_dist_ckpt: true}"]


def on_two_ranks(policy: Path, directory: Path, *words: str) -> Any:
    """What learners do that two processes share."""
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("following_ranks.py"))]
    command, port = [*program, str(policy), str(directory), *words], free_port()
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
    ways = [Learners.open(experiment(*words), policy) for words in (MEGATRON, ())]
    first, second = reversed(ways) if backwards else ways
    values = CriticObjective(CriticConfig())
    for learners in (first, second):
        learners.grow_critic()
        learners.keep_reference()
    first.actor.update(sequences(), Imitation(), "token-mean", 1e-3)
    first.critic.update(sequences(), values, "token-mean", 1e-2)
    saver = Saver(tmp_path, keep=1, others=0)
    saver.save(1, {}, first.save)
    saver.wait()
    saver.close()
    assert first.extra() == {}
    second.load(tmp_path / "global_step_1", ("model", "optimizer"), {})
    for _ in range(2):
        ours, theirs = (each.actor.update(sequences(), Imitation(), "token-mean", 1e-3) for each in (first, second))
        same(ours, theirs)
        ours, theirs = (each.critic.update(sequences(), values, "token-mean", 1e-2) for each in (first, second))
        same(ours, theirs)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["policy.lora={rank: 2}"], "Megatron's layers have no adapters"),
        (["actor.optimizer.kind=muon"], "Megatron has adamw and sgd"),
        (["critic.parallel.tensor=2"], "all split alike"),
        (["reference.backend=fsdp2"], "one of actor and reference is Megatron's"),
        (["actor.sharding.forward_prefetch=true"], "Megatron has no such option"),
        (["critic.memory.liger=true"], "Megatron has no such option"),
        (["reference.dtype=bfloat16"], "all have the policy's type"),
        (["policy.attention=eager"], "one kind of attention"),
        (["sft.lora={rank: 2}"], "sft.lora.rank = 2 .*adapters"),
        (["sft.liger=true"], "layers of transformers"),
        (["sft.optimizer.kind=muon"], "sft.optimizer.kind = 'muon' .*adamw and sgd"),
        (["sft.path=a", "actor.megatron.checkpoint=b"], "starts from sft.path = a"),
        (["sft.path=a", "actor.megatron.conversion.source=b"], "starts from sft.path = a"),
    ],
)
def test_what_megatron_doesnt_do_here_is_refused(policy_directory: Path, words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Learners.open(experiment(*MEGATRON, *words), policy_directory)


@pytest.mark.parametrize("words", [MEGATRON[:1], MEGATRON[1:]])
def test_megatron_and_plain_learners_make_one_run(policy_directory: Path, words: tuple[str, ...]) -> None:
    """A full divergence apart, which is measured inside one backend."""
    kl = "algorithm.kl={place: loss, coefficient: 0.1, estimator: k3}"
    told = [part(Learners.open(experiment(kl, *own), policy_directory)) for own in ((), words)]
    same(told[1], told[0])


def part(learners: Learners) -> dict[str, Any]:
    """What critic and reference make of a policy that has learnt something."""
    batch = sequences()
    learners.actor.update(batch, Imitation(), "token-mean", 1e-3)
    critic, reference = learners.grow_critic(), learners.keep_reference()
    learners.actor.update(batch, Imitation(), "token-mean", 1e-3)
    told = critic.update(batch, CriticObjective(CriticConfig()), "token-mean", 1e-2)
    return {"critic": told, "values": critic.values(batch).tolist(), "kept": reference.logprobs(batch).tolist()}


def test_a_checkpoint_of_another_model_is_refused_by_name(policy_directory: Path, tmp_path: Path) -> None:
    learners = Learners.open(experiment(*MEGATRON), policy_directory)
    saver = Saver(tmp_path, keep=1, others=0)
    saver.save(1, {}, learners.save)
    saver.wait()
    saver.close()
    table = tmp_path / "global_step_1/actor/model_world_size_1_rank_0.json"
    table.write_text(table.read_text().replace('"name": "model.norm.weight"', '"name": "model.other.weight"'))
    with pytest.raises(MachineError, match="of another model"):
        learners.load(tmp_path / "global_step_1", ("model",), {})
