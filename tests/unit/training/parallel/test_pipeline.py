"""If these fail, a model whose layers lie on several devices learns something else than on one, or its ranks wait for
each other forever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model_parallel_steps
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quintet.errors import ConfigError
from quintet.policies.causal_lm import PolicyModule
from quintet.policies.model_loading import load_model
from quintet.policies.parallel import pipeline_stages
from quintet.training.parallel.pipeline import Action, Pipeline, build_schedule

Told = dict[str, Any]


@pytest.fixture(scope="module")
def alone(deep_directory: Path) -> Told:
    return model_parallel_steps.alone(deep_directory)


@pytest.fixture(scope="module")
def on_two(deep_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Told]]:
    ways = ("pipeline", "virtual pipeline", "critic")
    return model_parallel_steps.on_ranks(ways, deep_directory, 2, tmp_path_factory.mktemp("two") / "meeting")


def same(ours: Told, theirs: Told) -> None:
    for name in ("losses", "norms", "logprobs"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, sums in theirs["weights"].items():
        assert ours["weights"][name] == pytest.approx(sums, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("way", ["pipeline", "virtual pipeline"])
def test_two_pipeline_stages_train_as_one(alone: Told, on_two: list[dict[str, Told]], way: str) -> None:
    """Five layers and passes of different lengths, whose number is not a multiple of the stages."""
    assert len(model_parallel_steps.passes()) % 2 == 1
    assert len({len(one.packed.tokens) for one in model_parallel_steps.passes()}) > 2
    assert abs(alone["losses"][-1] - alone["losses"][0]) > 0.1
    same(on_two[0][way], alone)
    assert on_two[0][way] == on_two[1][way]


def test_a_critic_in_stages_agrees_with_the_full_one(on_two: list[dict[str, Told]]) -> None:
    for told in on_two:
        assert told["critic"]["largest"] > 0.1
        assert told["critic"]["values"] < 1e-5
        assert told["critic"]["gradients"] < 1e-4


def written(plan: list[Action]) -> str:
    return " ".join(f"{'F' if one.forward else 'B'}{one.stage}.{one.micro_batch}" for one in plan)


def test_the_schedule_is_1f1b() -> None:
    """Figure 4 of Narayanan et al. 2021: four pipeline stages, here with five micro-batches."""
    first, *_, last = build_schedule(4, 1, 5)
    assert written(first) == "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 B0.2 B0.3 B0.4"
    assert written(last) == "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4"


def test_virtual_stages_are_interleaved() -> None:
    first, second = build_schedule(2, 2, 2)
    assert written(first) == "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"
    assert written(second) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_each_schedule_completes_in_bounded_memory(ranks: int, virtual: int) -> None:
    """Whatever the number of passes: each is done once forward and once backward through every part, and what is in
    flight doesn't grow with the passes."""
    for passes in (0, 1, 2, 3, 5, 8, 13):
        plan = build_schedule(ranks, virtual, passes)
        for rank, actions in enumerate(plan):
            expected = {(p, n) for p in range(rank, ranks * virtual, ranks) for n in range(passes)}
            for way in (True, False):
                did = [(one.stage, one.micro_batch) for one in actions if one.forward is way]
                assert len(did) == len(expected)
                assert set(did) == expected
            flying = torch.tensor([1 if one.forward else -1 for one in actions]).cumsum(0)
            limit = ranks - rank if virtual == 1 else 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1
            assert passes == 0 or int(flying.max()) <= limit


def test_neighbours_send_and_receive_in_the_same_order() -> None:
    """NCCL matches messages by their order only."""
    for passes in (1, 3, 4, 7):
        plan = build_schedule(3, 2, passes)
        for rank, actions in enumerate(plan):
            following = plan[(rank + 1) % 3]
            for way in (True, False):
                mine = [one for one in actions if one.forward is way]
                theirs = [one for one in following if one.forward is way]
                pairs = [(one.stage + 1, one.micro_batch) for one in mine if one.stage < 5]
                heard = [(one.stage, one.micro_batch) for one in theirs if one.stage > 0]
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
    packed = [micro.packed for micro in model_parallel_steps.passes()]
    pipeline = Pipeline(module, by_itself)
    for ours, one in zip(pipeline.forward_only(packed, lambda n: module(packed[n]).logprobs), packed, strict=True):
        with torch.no_grad():
            assert torch.equal(ours, whole(one).logprobs)


def test_passes_run_on_the_stages_device_with_offloaded_shards(policy_directory: Path, by_itself: DeviceMesh) -> None:
    """Shards in host memory are fetched by passes on a GPU; another kind of device stands for host memory here."""
    module = PolicyModule(load_model(policy_directory))
    pipeline = Pipeline(module, by_itself, autocast=torch.bfloat16)
    module.to("meta")
    packed = model_parallel_steps.passes()[0].packed
    assert pipeline._local_tokens(packed).tokens.device.type == "cpu"
    with pipeline._autocast_context():
        assert torch.is_autocast_enabled("cpu")


def test_a_stage_has_its_layers_under_the_models_names(deep_directory: Path) -> None:
    module = PolicyModule(load_model(deep_directory))
    pipeline_stages.apply_pipeline_parallel(module, Some(2, 1), virtual_stages=2)  # type: ignore[arg-type]
    names = {name for name, _ in module.named_parameters()}
    whole = {name for name, _ in PolicyModule(load_model(deep_directory)).named_parameters()}
    layers = {name.split(".")[3] for name in names if ".layers." in name}
    assert layers == {"1", "3", "4"}
    assert names - whole == {"policy.lm_head.weight"}
    assert "policy.model.norm.weight" in names
    assert "policy.model.embed_tokens.weight" not in names


@pytest.mark.parametrize(
    ("ranks", "virtual", "said"),
    [(6, 1, "needs 6 layers, but the model has 5"), (1, 2, "requires pipeline parallelism")],
)
def test_an_impossible_number_of_stages_is_rejected(deep_directory: Path, ranks: int, virtual: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pipeline_stages.apply_pipeline_parallel(PolicyModule(load_model(deep_directory)), Some(ranks, 0), virtual)  # type: ignore[arg-type]
