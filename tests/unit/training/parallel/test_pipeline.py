"""If these fail, a model with pipeline stages learns something else than on one device, or its ranks wait for each
other forever."""

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

Results = dict[str, Any]


@pytest.fixture(scope="module")
def single_process(deep_directory: Path) -> Results:
    return model_parallel_steps.train_in_one_process(deep_directory)


@pytest.fixture(scope="module")
def two_ranks(deep_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Results]]:
    cases = ("pipeline", "virtual pipeline", "critic")
    return model_parallel_steps.train_on_ranks(cases, deep_directory, 2, tmp_path_factory.mktemp("ranks"))


def assert_close(actual: Results, expected: Results) -> None:
    for name in ("losses", "norms", "logprobs"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-5), name
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, sums in expected["weights"].items():
        assert actual["weights"][name] == pytest.approx(sums, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("case", ["pipeline", "virtual pipeline"])
def test_two_pipeline_stages_train_as_one(
    single_process: Results, two_ranks: list[dict[str, Results]], case: str
) -> None:
    """Five layers and passes of different lengths, whose number is not a multiple of the stages."""
    assert len(model_parallel_steps.micro_batches()) % 2 == 1
    assert len({len(micro.packed.tokens) for micro in model_parallel_steps.micro_batches()}) > 2
    assert abs(single_process["losses"][-1] - single_process["losses"][0]) > 0.1
    assert_close(two_ranks[0][case], single_process)
    assert two_ranks[0][case] == two_ranks[1][case]


def test_a_critic_in_stages_agrees_with_the_full_one(two_ranks: list[dict[str, Results]]) -> None:
    for results in two_ranks:
        assert results["critic"]["largest"] > 0.1
        assert results["critic"]["values"] < 1e-5
        assert results["critic"]["gradients"] < 1e-4


def action_text(plan: list[Action]) -> str:
    return " ".join(f"{'F' if action.forward else 'B'}{action.stage}.{action.micro_batch}" for action in plan)


def test_the_schedule_is_1f1b() -> None:
    """Figure 4 of Narayanan et al. 2021: four pipeline stages, here with five micro-batches."""
    first, *_, last = build_schedule(4, 1, 5)
    assert action_text(first) == "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 B0.2 B0.3 B0.4"
    assert action_text(last) == "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4"


def test_virtual_stages_are_interleaved() -> None:
    first, second = build_schedule(2, 2, 2)
    assert action_text(first) == "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"
    assert action_text(second) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_each_schedule_completes_in_bounded_memory(ranks: int, virtual: int) -> None:
    """With any number of passes, each goes forward and backward once through every stage, and the number of passes in
    flight is bounded."""
    for passes in (0, 1, 2, 3, 5, 8, 13):
        plan = build_schedule(ranks, virtual, passes)
        for rank, actions in enumerate(plan):
            expected = {(p, n) for p in range(rank, ranks * virtual, ranks) for n in range(passes)}
            for forward in (True, False):
                scheduled = [(action.stage, action.micro_batch) for action in actions if action.forward is forward]
                assert len(scheduled) == len(expected)
                assert set(scheduled) == expected
            in_flight = torch.tensor([1 if action.forward else -1 for action in actions]).cumsum(0)
            limit = ranks - rank if virtual == 1 else 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1
            assert passes == 0 or int(in_flight.max()) <= limit


def test_neighbours_send_and_receive_in_the_same_order() -> None:
    """NCCL matches messages by their order only."""
    for passes in (1, 3, 4, 7):
        plan = build_schedule(3, 2, passes)
        for rank, actions in enumerate(plan):
            following = plan[(rank + 1) % 3]
            for forward in (True, False):
                senders = [action for action in actions if action.forward is forward]
                receivers = [action for action in following if action.forward is forward]
                sent = [(action.stage + 1, action.micro_batch) for action in senders if action.stage < 5]
                received = [(action.stage, action.micro_batch) for action in receivers if action.stage > 0]
                for wrapped in (True, False):
                    pairs = [pair for pair in sent if (pair[0] % 3 == 0) is wrapped]
                    assert pairs == [pair for pair in received if (pair[0] % 3 == 0) is wrapped]


@pytest.fixture
def single_rank_mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of only this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("pipeline",))["pipeline"]
    dist.destroy_process_group()


class FakeMesh:
    """The part of a device mesh that dividing a model into stages needs."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.size, self.get_local_rank = (lambda: ranks), (lambda: rank)


def test_a_pipeline_of_one_is_the_model(policy_directory: Path, single_rank_mesh: DeviceMesh) -> None:
    whole, module = PolicyModule(load_model(policy_directory)), PolicyModule(load_model(policy_directory))
    packed = [micro.packed for micro in model_parallel_steps.micro_batches()]
    pipeline = Pipeline(module, single_rank_mesh)
    for ours, one in zip(pipeline.forward_only(packed, lambda n: module(packed[n]).logprobs), packed, strict=True):
        with torch.no_grad():
            assert torch.equal(ours, whole(one).logprobs)


def test_passes_run_on_the_stages_device_with_offloaded_shards(
    policy_directory: Path, single_rank_mesh: DeviceMesh
) -> None:
    """Shards in host memory are fetched by passes on a GPU; another kind of device stands for host memory here."""
    module = PolicyModule(load_model(policy_directory))
    pipeline = Pipeline(module, single_rank_mesh, autocast=torch.bfloat16)
    module.to("meta")
    packed = model_parallel_steps.micro_batches()[0].packed
    assert pipeline._local_tokens(packed).tokens.device.type == "cpu"
    with pipeline._autocast_context():
        assert torch.is_autocast_enabled("cpu")


def test_a_stage_has_its_layers_under_the_models_names(deep_directory: Path) -> None:
    module = PolicyModule(load_model(deep_directory))
    pipeline_stages.apply_pipeline_parallel(module, FakeMesh(2, 1), virtual_stages=2)  # type: ignore[arg-type]
    names = {name for name, _ in module.named_parameters()}
    whole = {name for name, _ in PolicyModule(load_model(deep_directory)).named_parameters()}
    layers = {name.split(".")[3] for name in names if ".layers." in name}
    assert layers == {"1", "3", "4"}
    assert names - whole == {"policy.lm_head.weight"}
    assert "policy.model.norm.weight" in names
    assert "policy.model.embed_tokens.weight" not in names


@pytest.mark.parametrize(
    ("ranks", "virtual", "message"),
    [(6, 1, "needs 6 layers, but the model has 5"), (1, 2, "requires pipeline parallelism")],
)
def test_an_impossible_number_of_stages_is_rejected(
    deep_directory: Path, ranks: int, virtual: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline_stages.apply_pipeline_parallel(PolicyModule(load_model(deep_directory)), FakeMesh(ranks, 0), virtual)  # type: ignore[arg-type]
