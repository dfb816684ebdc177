"""If these fail, a run on several ranks isn't the run on one, or one rank can make another do what it shouldn't."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import as_started, free_port
from standalone_workers import through_the_wire
from transformers import AutoModelForSequenceClassification
from worker_ranks import experiment, work

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import (
    CriticObjective,
    CrossEntropyObjective,
    DistillationObjective,
    PolicyObjective,
)
from quintet.config.native.data import RewardModelConfig
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.training import DistillationConfig
from quintet.config.torchrun import RankInfo, current_rank
from quintet.errors import MachineError
from quintet.policies.model_loading import load_tokenizer
from quintet.records import Batch, Failure, FinishReason, Generation, PromptRow, Request
from quintet.runtime.calls.messages import NO_CODE
from quintet.runtime.calls.remote_call import RemoteCall, RemoteRef, decode_header, decode_value, encode, encode_value
from quintet.runtime.calls.remote_interface import (
    ACTION_POLICY_COPY,
    ACTOR,
    CRITIC,
    ENGINE,
    HOSTED_ENVS,
    HOSTED_ROBOTS,
    LEARNERS,
    POLICY_SCORER,
    REFERENCE,
    REMOTE_OBJECTS,
    ROBOTS,
    WORKER,
    EngineReport,
    properties_of,
    remote_methods,
)
from quintet.runtime.controller import Controller
from quintet.runtime.embodied.hosted_robots import LocalHostedRobots
from quintet.runtime.embodied.policy_copies import LocalActionPolicyCopy
from quintet.runtime.embodied.robot_learner import LocalRobotLearner
from quintet.runtime.engines.engine_worker import LocalEngineWorker
from quintet.runtime.env_hosts import LocalHostedEnvs
from quintet.runtime.learners.local_learners import LocalLearners
from quintet.runtime.worker import Worker
from quintet.sampling import StructuredOutput


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in theirs)
    return bool(ours == theirs)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = torch.tensor(draw(st.lists(st.integers(1, 6), max_size=4)), dtype=torch.long)
    size, episodes = int(lengths.sum()), len(lengths)
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tokens = torch.randint(0, 9, (size,), generator=numbers)
    batch = Batch(
        tokens=tokens,
        positions=tokens,
        lengths=lengths,
        loss_mask=tokens > 4,
        turn=tokens,
        turn_end=tokens > 7,
        trajectory=torch.arange(episodes),
        group=torch.arange(episodes),
        logprobs=torch.randn(size, generator=numbers),
        rewards=torch.randn(size, generator=numbers, dtype=torch.float64),
    )
    optional = [field.name for field in fields(Batch) if field.default is None and field.name != "reward_components"]
    given_too = draw(st.sets(st.sampled_from(optional)))
    parts = draw(st.none() | st.dictionaries(st.text(max_size=5), st.just(torch.randn(episodes)), max_size=3))
    return replace(batch, **{name: torch.randn(size, generator=numbers) for name in given_too}, reward_components=parts)


@given(batch=batches(), masked=st.booleans(), rate=st.floats(allow_nan=False), seed=st.integers(0, 2**64))
@settings(max_examples=60, deadline=None)
def test_a_call_arrives_at_a_worker_as_it_was_sent(batch: Batch, masked: bool, rate: float, seed: int) -> None:
    arguments = {
        "batch": batch,
        "mask": batch.loss_mask if masked else None,
        "learning_rate": rate,
        "seed": seed,
        "aggregation": Aggregation("token-mean"),
        "reference": RemoteRef(REFERENCE),
    }
    received = through_the_wire(RemoteCall(ACTOR, "update", arguments))
    assert (received.target, received.method) == (ACTOR, "update")
    assert received.arguments.keys() == arguments.keys()
    for name in ("learning_rate", "seed", "aggregation", "reference"):
        assert received.arguments[name] == arguments[name]
    assert same(received.arguments["mask"], arguments["mask"])
    for field in fields(Batch):
        assert same(getattr(received.arguments["batch"], field.name), getattr(batch, field.name)), field.name


def test_configured_objects_arrive_equal() -> None:
    config = experiment()
    arguments = {
        "policy": PolicyObjective(config.algorithm),
        "critic": CriticObjective(config.critic),
        "imitation": CrossEntropyObjective(),
        "distillation": DistillationObjective(DistillationConfig(weight=0.25)),
        "optimizer": config.actor.optimizer,
        "experiment": config,
        "directory": Path("/a/b"),
        "contents": ["model"],
        "extra": {"actor_scale": {"factor": 2.0}},
    }
    assert through_the_wire(RemoteCall(LEARNERS, "load_actor", arguments)).arguments == arguments


def test_requests_and_responses_arrive_equal() -> None:
    """The log-probs to the last bit, and texts with any character."""
    structured = StructuredOutput("regex", "[ä-ü]+\n")
    request = Request(3, (1, 2), 9, 2**63 - 1, 0.7, stop_token_ids=(4,), structured_output=structured)
    call = RemoteCall(ENGINE, "step", {"requests": [request, replace(request, stop_strings=("ü",))]}, True)
    assert through_the_wire(call) == call
    generation = Generation(3, (7, 8), (-0.1, -1e-17), FinishReason.STOP, 2, ((1, 3),), None, (((7, -0.1),), ()))
    report = EngineReport((generation,), Failure("engine", "EngineError", "device lost"))
    for result in (report, 512, None):
        header, _ = encode_value(result)
        assert decode_value(json.loads(header), NO_CODE.check)[1]() == result


def test_a_call_without_arguments_has_none() -> None:
    assert through_the_wire(RemoteCall(LEARNERS, "create_critic")) == RemoteCall(LEARNERS, "create_critic")


@pytest.mark.parametrize(
    "header",
    [
        b'{"target": "learners", "method": "__init__", "tensors": []}',
        b'{"target": "learners", "method": "_snapshot_source", "tensors": []}',
        b'{"target": "learners.actor.model", "method": "forward", "tensors": []}',
        b'{"target": "os", "method": "system", "tensors": []}',
        b'{"target": "learners", "method": ["save"], "tensors": []}',
        b"[]",
        b'"stop"',
        b"\x80\x04.",
    ],
)
def test_only_methods_of_the_protocols_can_be_called(header: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode_header(json.loads(header), NO_CODE.check)


def test_tensors_of_other_types_are_neither_sent_nor_received() -> None:
    with pytest.raises(ValueError, match="complex64 cannot be sent"):
        encode(RemoteCall(CRITIC, "compute_values", {"batch": torch.zeros(1, dtype=torch.complex64)}))
    header = {"target": CRITIC, "method": "compute_values", "arguments": {}, "tensors": [["complex64", [1]]]}
    with pytest.raises(ValueError, match="'complex64' cannot be received"):
        decode_header(header, NO_CODE.check)


def test_other_objects_are_not_sent() -> None:
    with pytest.raises(ValueError, match="of type function cannot be sent"):
        encode(RemoteCall(ACTOR, "update", {"objective": lambda logprobs, entropy, targets: (logprobs.sum(), {})}))


BUILDERS = (WORKER, ENGINE, HOSTED_ENVS, ACTION_POLICY_COPY, HOSTED_ROBOTS)
"""Components that every worker has, and that their own calls build."""


@pytest.mark.parametrize("target", sorted(REMOTE_OBJECTS.keys() - BUILDERS))
def test_calls_before_the_learners_are_built_are_refused(target: str) -> None:
    for method in remote_methods(REMOTE_OBJECTS[target]):
        with pytest.raises(ValueError, match="before it was built"):
            Worker().execute(RemoteCall(target, method))


@pytest.fixture
def reward_model(policy_directory: Path, tmp_path: Path) -> RewardModelConfig:
    """A classifier with the policy's layers and a random head."""
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(policy_directory, num_labels=1).save_pretrained(tmp_path)
    load_tokenizer(policy_directory).save_pretrained(tmp_path)
    return RewardModelConfig(path=str(tmp_path))


def test_a_reward_model_on_a_worker_gives_the_scores_of_a_local_one(
    policy_directory: Path, reward_model: RewardModelConfig
) -> None:
    row = PromptRow(0, "s", ({"role": "user", "content": "Left or right?"},))
    remote = Controller.in_process().build_learners(experiment(), policy_directory).load_reward_model(reward_model, 64)
    local = LocalLearners.build(experiment(), policy_directory).load_reward_model(reward_model, 64)
    scores = remote.score([row, row], ["Left", "Right"])
    assert scores == local.score([row, row], ["Left", "Right"])
    assert scores[0] != scores[1]
    assert remote.offloads is False


def test_learners_and_engines_implement_every_remote_method(
    policy_directory: Path, reward_model: RewardModelConfig
) -> None:
    """A name that can be sent and that the learners lack would be an AttributeError in the middle of a run."""
    learners = LocalLearners.build(experiment(), policy_directory)
    learners.load_reward_model(reward_model, 64)
    learners.create_critic()
    learners.snapshot_reference()
    learners.actor_with_optimizer(OptimizerConfig())
    assert all(hasattr(LocalEngineWorker, name) for name in remote_methods(REMOTE_OBJECTS[ENGINE]))
    standalone = {
        HOSTED_ENVS: LocalHostedEnvs,
        HOSTED_ROBOTS: LocalHostedRobots,
        ACTION_POLICY_COPY: LocalActionPolicyCopy,
    }
    robots = REMOTE_OBJECTS[ROBOTS]
    assert all(hasattr(LocalRobotLearner, name) for name in (*remote_methods(robots), *properties_of(robots)))
    for target, component in standalone.items():
        assert all(hasattr(component, name) for name in remote_methods(REMOTE_OBJECTS[target]))
    for target, protocol in REMOTE_OBJECTS.items():
        if target not in (WORKER, ENGINE, POLICY_SCORER, ROBOTS, *standalone):
            actual = reduce(getattr, target.split(".")[1:], learners)
            for name in (*remote_methods(protocol), *properties_of(protocol)):
                assert hasattr(actual, name), f"{target}.{name}"


def split(way: str) -> list[str]:
    """Actor, critic and reference split so."""
    return [f"{name}.parallel.{word}" for name in ("actor", "critic", "reference") for word in way.split()]


LAYOUTS = {"": 0, "tensor=2 sequence=true": 0, "ulysses=2": 0, "context=2": 0}
LAYOUTS |= {"pipeline=2": 0, "pipeline=2 virtual_pipeline=2": 1, "expert=2": 2}
"""How two ranks split a learner, and which of the policies: one of two layers, one of five, a mixture of experts."""


@pytest.mark.proves(
    "verl",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
)
@pytest.mark.proves(
    "rlinf",
    "actor.model.tensor_model_parallel_size",
    "actor.model.pipeline_model_parallel_size",
    "actor.model.sequence_parallel",
)
@pytest.mark.proves(
    "roll",
    "actor_train.model_args.ulysses_size",
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size",
    "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size",
    "actor_train.strategy_args.strategy_config.expert_model_parallel_size",
    "actor_train.strategy_args.strategy_config.context_parallel_size",
    "actor_train.strategy_args.strategy_config.virtual_pipeline_model_parallel_size",
    "actor_train.strategy_args.strategy_config.sequence_parallel",
    "reference.strategy_args.strategy_config.tensor_model_parallel_size",
)
@pytest.mark.parametrize("way", LAYOUTS)
def test_two_ranks_do_what_one_does(
    policy_directory: Path, deep_directory: Path, mixture_directory: Path, tmp_path: Path, way: str
) -> None:
    policy_directory = (policy_directory, deep_directory, mixture_directory)[LAYOUTS[way]]
    before = torch.get_num_threads()
    alone = work(Controller.in_process(), policy_directory, tmp_path / "one")
    torch.set_num_threads(before)
    program = [sys.executable, str(Path(worker_ranks.__file__))]
    command, port = [*program, str(policy_directory), str(tmp_path / "two"), *split(way)], free_port()
    ranks = [
        subprocess.Popen(command, env=as_started(rank, 2, port), stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert answers[1] == ""
    parsed = json.loads(answers[0])
    assert parsed.keys() == alone.keys()
    for name, expected in alone.items():
        # AdamW makes steps of a first gradient's signs: its rounding grows
        assert parsed[name] == pytest.approx(expected, rel=1e-3, abs=5e-5), name
    assert parsed["again"] == pytest.approx(parsed["after saving"], rel=1e-5, abs=1e-6)
    assert parsed["actor 0"]["actor/pg_loss"] != parsed["actor 1"]["actor/pg_loss"]


def test_torchrun_says_which_rank_this_is() -> None:
    assert current_rank({}) == RankInfo()
    assert current_rank({"RANK": "3", "WORLD_SIZE": "8"}) == RankInfo()  # nobody says where to meet
    actual = as_started(3, 8, 1)
    assert current_rank({**actual, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == RankInfo(3, 8, 1, 2)
    for name, word in {"RANK": "8", "WORLD_SIZE": "many", "LOCAL_RANK": "-1"}.items():
        with pytest.raises(MachineError, match=name):
            current_rank({**actual, name: word})


def test_missing_ranks_are_named() -> None:
    code = "from quintet.training.parallel.rendezvous import rendezvous; "
    code += "from quintet.config.torchrun import current_rank; rendezvous(current_rank(), 'x', 2.0)"
    port = free_port()
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=as_started(rank, 3, port), stderr=subprocess.PIPE, text=True)
        for rank in (0, 2)
    ]
    try:
        output = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("MachineError" in one for one in output)
    assert "rank 1 of 3 did not start within 2 seconds" in output[0]
