"""If these fail, a model whose layers lie on several devices learns something else than on one, or its ranks wait for
each other forever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import split_ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quintet.errors import ConfigError
from quintet.policies import stages
from quintet.policies.causal_lm import PolicyModule, load_model
from quintet.training.pipeline import Action, Pipeline, schedule

Told = dict[str, Any]


@pytest.fixture(scope="module")
def alone(deep_directory: Path) -> Told:
    return split_ranks.alone(deep_directory)


@pytest.fixture(scope="module")
def on_two(deep_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Told]]:
    ways = ("pipeline", "virtual pipeline", "critic")
    return split_ranks.on_ranks(ways, deep_directory, 2, tmp_path_factory.mktemp("two") / "meeting")


def same(ours: Told, theirs: Told) -> None:
    for name in ("losses", "norms", "logprobs"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, sums in theirs["weights"].items():
        assert ours["weights"][name] == pytest.approx(sums, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("way", ["pipeline", "virtual pipeline"])
def test_two_stages_learn_the_same_as_one(alone: Told, on_two: list[dict[str, Told]], way: str) -> None:
    """Five layers and passes of different lengths, whose number is no multiple of the stages."""
    assert len(split_ranks.passes()) % 2 == 1
    assert len({len(one.packed.tokens) for one in split_ranks.passes()}) > 2
    assert abs(alone["losses"][-1] - alone["losses"][0]) > 0.1
    same(on_two[0][way], alone)
    assert on_two[0][way] == on_two[1][way]


def test_a_critic_goes_through_the_same_stages(on_two: list[dict[str, Told]]) -> None:
    for told in on_two:
        assert told["critic"]["largest"] > 0.1
        assert told["critic"]["values"] < 1e-5
        assert told["critic"]["gradients"] < 1e-4


def written(plan: list[Action]) -> str:
    return " ".join(f"{'F' if one.forward else 'B'}{one.part}.{one.number}" for one in plan)


def test_the_schedule_is_one_forward_one_backward() -> None:
    """Figure 4 of Narayanan et al. 2021: four stages, here with five passes."""
    first, *_, last = schedule(4, 1, 5)
    assert written(first) == "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 B0.2 B0.3 B0.4"
    assert written(last) == "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4"


def test_virtual_stages_alternate() -> None:
    first, second = schedule(2, 2, 2)
    assert written(first) == "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"
    assert written(second) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_every_schedule_comes_to_its_end_in_bounded_memory(ranks: int, virtual: int) -> None:
    """Whatever the number of passes: each is done once forward and once backward through every part, and what is in
    flight doesn't grow with the passes."""
    for passes in (0, 1, 2, 3, 5, 8, 13):
        plan = schedule(ranks, virtual, passes)
        for rank, actions in enumerate(plan):
            expected = {(p, n) for p in range(rank, ranks * virtual, ranks) for n in range(passes)}
            for way in (True, False):
                did = [(one.part, one.number) for one in actions if one.forward is way]
                assert len(did) == len(expected)
                assert set(did) == expected
            flying = torch.tensor([1 if one.forward else -1 for one in actions]).cumsum(0)
            limit = ranks - rank if virtual == 1 else 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1
            assert passes == 0 or int(flying.max()) <= limit


def test_neighbours_send_and_receive_in_the_same_order() -> None:
    """NCCL tells messages apart by nothing else."""
    for passes in (1, 3, 4, 7):
        plan = schedule(3, 2, passes)
        for rank, actions in enumerate(plan):
            following = plan[(rank + 1) % 3]
            for way in (True, False):
                mine = [one for one in actions if one.forward is way]
                theirs = [one for one in following if one.forward is way]
                pairs = [(one.part + 1, one.number) for one in mine if one.part < 5]
                heard = [(one.part, one.number) for one in theirs if one.part > 0]
                for wrapped in (True, False):
                    said = [pair for pair in pairs if (pair[0] % 3 == 0) is wrapped]
                    assert said == [pair for pair in heard if (pair[0] % 3 == 0) is wrapped]


@pytest.fixture
def by_itself(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("pipeline",))["pipeline"]
    dist.destroy_process_group()


class Some:
    """As much of a mesh as taking a model apart asks for."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.size, self.get_local_rank = (lambda: ranks), (lambda: rank)


def test_a_pipeline_of_one_is_the_model(policy_directory: Path, by_itself: DeviceMesh) -> None:
    whole, module = PolicyModule(load_model(policy_directory)), PolicyModule(load_model(policy_directory))
    packed = [micro.packed for micro in split_ranks.passes()]
    pipeline = Pipeline(module, by_itself)
    for ours, one in zip(pipeline.measure(packed, lambda n: module(packed[n]).logprobs), packed, strict=True):
        with torch.no_grad():
            assert torch.equal(ours, whole(one).logprobs)


def test_passes_are_where_a_stage_computes_whatever_is_kept_elsewhere(
    policy_directory: Path, by_itself: DeviceMesh
) -> None:
    """Shards in main memory are fetched by passes on a GPU; another kind of device stands for main memory here."""
    module = PolicyModule(load_model(policy_directory))
    pipeline = Pipeline(module, by_itself, autocast=torch.bfloat16)
    module.to("meta")
    packed = split_ranks.passes()[0].packed
    assert pipeline._here(packed).tokens.device.type == "cpu"
    with pipeline._precision():
        assert torch.is_autocast_enabled("cpu")


def test_a_stage_holds_its_layers_under_their_own_names(deep_directory: Path) -> None:
    module = PolicyModule(load_model(deep_directory))
    stages.split_stages(module, Some(2, 1), virtual=2)  # type: ignore[arg-type]
    names = {name for name, _ in module.named_parameters()}
    whole = {name for name, _ in PolicyModule(load_model(deep_directory)).named_parameters()}
    layers = {name.split(".")[3] for name in names if ".layers." in name}
    assert layers == {"1", "3", "4"}
    assert names - whole == {"policy.lm_head.weight"}
    assert "policy.model.norm.weight" in names
    assert "policy.model.embed_tokens.weight" not in names


@pytest.mark.parametrize(("ranks", "virtual", "said"), [(6, 1, "6 parts of 5 layers"), (1, 2, "there is no pipeline")])
def test_what_cant_be_shared_out_is_refused(deep_directory: Path, ranks: int, virtual: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        stages.split_stages(PolicyModule(load_model(deep_directory)), Some(ranks, 0), virtual)  # type: ignore[arg-type]
