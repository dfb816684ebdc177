"""If these fail, a run on several ranks isn't the run on one, or one rank can make another do what it shouldn't."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from following_ranks import experiment, sequences, work
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.algorithms.objective import Imitation, PolicyObjective
from quintet.config.native import AlgorithmConfig
from quintet.config.started import Started, started
from quintet.errors import MachineError
from quintet.records import Batch
from quintet.runtime.calls import METHODS, Call, decoded, encoded, filled
from quintet.runtime.learners import Learners
from quintet.runtime.performing import Performer, plain_objective
from quintet.training.ranks import Ranks


def through_the_wire(call: Call) -> Call:
    header, sent = encoded(call)
    told, room = decoded(header)
    for place, tensor in zip(room.values(), sent, strict=True):
        place.copy_(tensor)
    return filled(told, room)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in theirs)
    return bool(ours == theirs)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = torch.tensor(draw(st.lists(st.integers(1, 6), max_size=4)), dtype=torch.long)
    size, games = int(lengths.sum()), len(lengths)
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tokens = torch.randint(0, 9, (size,), generator=numbers)
    batch = Batch(
        tokens=tokens,
        positions=tokens,
        lengths=lengths,
        loss_mask=tokens > 4,
        turn=tokens,
        turn_end=tokens > 7,
        trajectory=torch.arange(games),
        group=torch.arange(games),
        logprobs=torch.randn(size, generator=numbers),
        rewards=torch.randn(size, generator=numbers, dtype=torch.float64),
    )
    optional = [each.name for each in fields(Batch) if each.default is None and each.name != "parts"]
    given_too = draw(st.sets(st.sampled_from(optional)))
    parts = draw(st.none() | st.dictionaries(st.text(max_size=5), st.just(torch.randn(games)), max_size=3))
    return replace(batch, **{name: torch.randn(size, generator=numbers) for name in given_too}, parts=parts)


@given(batch=batches(), masked=st.booleans(), rate=st.floats(allow_nan=False), seed=st.integers(0, 2**64))
@settings(max_examples=60, deadline=None)
def test_what_is_told_is_what_is_heard(batch: Batch, masked: bool, rate: float, seed: int) -> None:
    arguments = {"rate": rate, "seed": seed, "of": "actor", "aggregation": {"scale": None}}
    call = Call("update", arguments, batch, batch.loss_mask if masked else None)
    heard = through_the_wire(call)
    assert (heard.method, heard.arguments) == (call.method, call.arguments)
    assert same(heard.mask, call.mask)
    assert heard.batch is not None
    for each in fields(Batch):
        assert same(getattr(heard.batch, each.name), getattr(batch, each.name)), each.name


def test_a_call_without_a_batch_has_none() -> None:
    assert through_the_wire(Call("grow_critic")) == Call("grow_critic")


@pytest.mark.parametrize(
    "header", [b'{"method": "__init__", "tensors": []}', b'{"method": ["open"]}', b"[]", b'"stop"', b"\x80\x04."]
)
def test_what_isnt_a_call_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decoded(header)


def test_tensors_of_other_types_are_neither_sent_nor_received() -> None:
    with pytest.raises(ValueError, match="complex64 aren't sent"):
        encoded(Call("values", mask=torch.zeros(1, dtype=torch.complex64)))
    with pytest.raises(ValueError, match="'complex64' aren't received"):
        decoded(b'{"method": "values", "arguments": {}, "parts": false, "tensors": [["mask", "complex64", [1]]]}')


def test_every_method_is_performed_or_refused_as_not_ready() -> None:
    """A name that is allowed on the wire and unknown behind it would be a KeyError in the middle of a run."""
    arguments = {"of": "actor", "swapped": False, "with_reference": False, "objective": "policy", "aggregation": {}}
    arguments |= {
        "rate": 1.0,
        "seed": 0,
        "optimizer": {},
        "policy": "/nowhere",
        "directory": "/nowhere",
        "tuned": False,
    }
    for method in METHODS - {"stop"}:
        with pytest.raises((ValueError, MachineError)):
            Performer(experiment(), Ranks()).perform(Call(method, arguments, sequences()))


def test_objectives_go_by_name_and_strangers_dont_go() -> None:
    config = experiment()
    assert plain_objective(Imitation(), config) == "imitation"
    assert plain_objective(PolicyObjective(config.algorithm), config) == "policy"
    with pytest.raises(ValueError, match="don't know the objective"):
        plain_objective(PolicyObjective(AlgorithmConfig(entropy_coefficient=0.5)), config)
    with pytest.raises(ValueError, match="don't know the objective"):
        plain_objective(lambda logprobs, entropy, targets: (logprobs.sum(), {}), config)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def as_started(rank: int, size: int, port: int) -> dict[str, str]:
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {**os.environ, **{k: str(v) for k, v in told.items()}, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def split(way: str) -> list[str]:
    """Actor, critic and reference split so."""
    return [f"{name}.parallel.{word}" for name in ("actor", "critic", "reference") for word in way.split()]


WAYS = {"": 0, "tensor=2 sequence=true": 0, "ulysses=2": 0, "context=2": 0}
WAYS |= {"pipeline=2": 0, "pipeline=2 virtual_pipeline=2": 1, "expert=2": 2}
"""How two ranks split a learner, and which of the policies: one of two layers, one of five, a mixture of experts."""


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_do_what_one_does(
    policy_directory: Path, deep_directory: Path, mixture_directory: Path, tmp_path: Path, way: str
) -> None:
    policy_directory = (policy_directory, deep_directory, mixture_directory)[WAYS[way]]
    before = torch.get_num_threads()
    alone = work(Learners.open(experiment(), policy_directory), tmp_path / "one")
    torch.set_num_threads(before)
    program = [sys.executable, str(Path(__file__).with_name("following_ranks.py"))]
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
    told = json.loads(answers[0])
    assert told.keys() == alone.keys()
    for name, expected in alone.items():
        # AdamW makes steps of a first gradient's signs: its rounding grows
        assert told[name] == pytest.approx(expected, rel=1e-3, abs=5e-5), name
    assert told["again"] == pytest.approx(told["after saving"], rel=1e-5, abs=1e-6)
    assert told["actor 0"]["actor/pg_loss"] != told["actor 1"]["actor/pg_loss"]


def test_torchrun_says_which_rank_this_is() -> None:
    assert started({}) == Started()
    assert started({"RANK": "3", "WORLD_SIZE": "8"}) == Started()  # nobody says where to meet
    told = as_started(3, 8, 1)
    assert started({**told, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == Started(3, 8, 1, 2)
    for name, word in {"RANK": "8", "WORLD_SIZE": "many", "LOCAL_RANK": "-1"}.items():
        with pytest.raises(MachineError, match=name):
            started({**told, name: word})


def test_ranks_that_dont_come_are_named() -> None:
    code = "from quintet.training.meeting import *; from quintet.config.started import *; meet(started(), 'x', 2.0)"
    port = free_port()
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=as_started(rank, 3, port), stderr=subprocess.PIPE, text=True)
        for rank in (0, 2)
    ]
    try:
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("MachineError" in one for one in told)
    assert "rank 1 of 3 didn't come within 2 seconds" in told[0]
