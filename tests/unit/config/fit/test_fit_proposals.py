"""If these fail, `quintet plan --fit` proposes what does not fit or does not work, or hides what does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from example_models import PARAMETERS, at, measured

from quintet.cli.configuration import reread_config
from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.fit.overrides import read_back
from quintet.config.fit.proposals import FitResult, find_fits
from quintet.config.fit.variants import Cluster, Variant, undominated
from quintet.config.native.experiment import Experiment
from quintet.config.plan.devices import find_device
from quintet.config.plan.format_sizes import GIB
from quintet.config.plan.placement import place_components
from quintet.errors import ConfigError

ROOT = Path(__file__).parents[4]
P = PARAMETERS["Qwen2.5-7B"]


def cluster(devices: int, gib: float = 80, nodes: int = 1, device: str = "h100") -> Cluster:
    return Cluster(nodes, devices // nodes, int(gib * GIB), find_device(device))


def run_of(tmp_path: Path, *words: str, engine: str = "vllm") -> list[str]:
    """Qwen2.5-7B with long responses, one turn an episode."""
    model = ["policy.preset=null", f"policy.path={at(tmp_path, 'Qwen2.5-7B')}", "policy.dtype=bfloat16"]
    lengths = ["rollout.max_turns=1", "rollout.max_prompt_tokens=1024", "rollout.max_response_tokens=4096"]
    return [*model, *lengths, "warm_start=null", f"rollout.engine={engine}", *words]


def fits(words: Sequence[str], on: Cluster) -> FitResult:
    def reload(overrides: Sequence[str]) -> ComposedConfig:
        return load_experiment(None, [*words, *overrides])

    return find_fits(load_experiment(None, words), on, reload)


def test_every_proposal_fits_as_the_plan_measures_it(tmp_path: Path) -> None:
    """A tenth of the memory stays free for what is not estimated."""
    words = run_of(tmp_path, "algorithm.kl={coefficient: 0.001}")
    result = fits(words, cluster(8))
    assert len(result.proposals) == 5
    for proposal in result.proposals:
        peak = measured(load_experiment(None, [*words, *proposal.overrides])).fullest
        assert peak is not None
        assert (peak.total, peak.phase) == (proposal.peak.total, proposal.peak.phase)
        assert peak.total <= 72 * GIB


def test_proposals_are_ranked_by_time_and_have_different_parallel_sizes(tmp_path: Path) -> None:
    result = fits(run_of(tmp_path), cluster(8))
    times = [proposal.step_seconds for proposal in result.proposals]
    assert all(later > earlier / 1.05 for earlier, later in pairwise(times))
    sizes = [[component.parallelism for component in proposal.placement.components] for proposal in result.proposals]
    assert len({tuple(size) for size in sizes}) == 5


def test_sizes_that_the_model_cannot_be_split_into_are_rejected_with_the_reason(tmp_path: Path) -> None:
    """28 heads."""
    result = fits(run_of(tmp_path), cluster(8))
    assert result.considered > result.rejected.total()
    reason = "it does not divide the 28 attention heads of the model"
    assert result.rejected[f"actor.parallel.tensor: {reason}"] == 1
    assert result.rejected[f"rollout.engine_options.tensor_parallel: {reason}"] == 1


def test_a_backend_that_cannot_split_models_gets_no_such_sizes(tmp_path: Path) -> None:
    result = fits(run_of(tmp_path, "actor.backend=fsdp"), cluster(8))
    words = {word.partition("=")[0] for proposal in result.proposals for word in proposal.overrides}
    assert not words & {"actor.parallel.tensor", "actor.parallel.pipeline"}
    assert any("only fsdp2 and megatron can split a model so" in reason for reason in result.rejected)


def test_learners_on_megatron_keep_the_same_sizes(tmp_path: Path) -> None:
    backends = ("actor.backend=megatron", "reference.backend=megatron", "algorithm.kl={coefficient: 0.001}")
    for proposal in fits(run_of(tmp_path, *backends), cluster(8)).proposals:
        config = proposal.composed.experiment
        assert config.actor.parallel == config.reference.parallel
        assert not config.actor.memory.offload_optimizer


def test_nothing_is_offloaded_where_everything_fits(tmp_path: Path) -> None:
    """LoRA: 4 bytes a weight for the learner and 2 for the engine, 43 GiB, and the cache of 64 requests."""
    words = run_of(tmp_path, "policy.lora.rank=16", "rollout.max_concurrent=64")
    best = fits(words, cluster(1, 180)).proposals[0]
    assert not any("offload" in word or "sleep" in word for word in best.overrides)
    tight = fits(words, cluster(1, 66)).proposals[0]
    assert tight.peak.total <= 0.9 * 66 * GIB
    assert {"actor.memory.offload_parameters=true", "rollout.engine_options.sleep_between_steps=true"} & {
        *tight.overrides
    }


def test_what_is_already_set_is_not_repeated() -> None:
    """A tiny model fits as it is; more tokens in a micro-batch are all that may help."""
    result = fits(["training.micro_batch_tokens=65536", "training.mini_batches=1"], cluster(1))
    assert result.proposals[0].overrides == ()
    assert result.rejected.total() == 0


def test_several_nodes_shard_within_a_node_where_their_network_is_slow(tmp_path: Path) -> None:
    """Four nodes of two H100: their two network adapters reach 100 GB/s, NVLink 450 GB/s. With short sequences,
    gathering weights takes longer than computing with them."""
    short = ("rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64", "policy.lora.rank=16")
    result = fits(run_of(tmp_path, *short), cluster(8, nodes=4))
    assert {"placement.nodes=4", "placement.devices_per_node=2"} <= {*result.proposals[0].overrides}
    assert "actor.sharding.group_size=2" in result.proposals[0].overrides


def test_an_engine_with_a_share_of_memory_gets_another_share(tmp_path: Path) -> None:
    """0.95 of a device is more than the 0.9 that are usable."""
    result = fits(run_of(tmp_path, "rollout.engine_options.memory_share=0.95"), cluster(8))
    for proposal in result.proposals:
        assert any(word.startswith("rollout.engine_options.memory_share=") for word in proposal.overrides)


def test_if_nothing_fits_the_closest_is_named_with_what_is_missing(tmp_path: Path) -> None:
    """18 bytes a weight for learner and cast copy, far more than 80 GiB; the message says how much."""
    with pytest.raises(ConfigError, match=r"no combination fits into 1 device of 80\.0 GiB") as error:
        fits(run_of(tmp_path), cluster(1))
    message = str(error.value)
    assert "closest: training.micro_batch_tokens=5120 actor.gradient_checkpointing=true" in message
    needed, missing = (float(part.split()[0]) for part in (message.split("it needs ")[1], message.split("learns, ")[1]))
    assert needed > 18 * P / GIB
    assert needed - missing == pytest.approx(72, abs=0.11)
    assert f"optimizer state of actor {8 * P / GIB:.1f} GiB" in message
    assert "what helps: --devices 2, or policy.lora.rank=16, or a smaller model" in message


EXAMPLES = {
    "ragen": ("ragen/sokoban_ppo.yaml", ["model.base_model={}"], 2),
    "verl": ("verl/run_grpo_math_qwen2.5-3b.sh", ["actor_rollout_ref.model.path={}"], 2),
    "vagen": ("vagen/sokoban_grpo/overrides.txt", ["actor_rollout_ref.model.path={}"], 2),
    "rlinf": ("rlinf/math_grpo_megatron.yaml", ["rollout.model.model_path={}"], 8),
    "roll": ("roll/qwen2.5-0.5b_single_gpu.yaml", ["pretrain={}"], 2),
}
"""An example of each framework, the keys of its model, and a number of devices that it can be divided over."""


@pytest.mark.parametrize("dialect", EXAMPLES)
def test_another_framework_gets_its_own_keys_and_learns_the_same(dialect: str, tmp_path: Path) -> None:
    """RAGEN lists visible devices, ROLL's accumulation steps follow from the number of ranks, and with RLinf the
    reference follows the actor."""
    file, model_keys, devices = EXAMPLES[dialect]
    model = [key.format(at(tmp_path, "Qwen2.5-0.5B")) for key in model_keys]

    def reload(overrides: Sequence[str]) -> ComposedConfig:
        return reread_config(str(ROOT / "examples" / file), [*model, *overrides], dialect, "refuse")

    before = reload([])
    result = find_fits(before, cluster(devices), reload)
    assert result.proposals
    sections = {field for field in Experiment.model_fields if field not in ("actor", "critic", "reference", "rollout")}
    for proposal in result.proposals:
        assert not any(
            word.startswith(("placement.", "training.micro", "rollout.engine")) for word in proposal.overrides
        )
        after = reload(proposal.overrides)
        peak = measured(after, 80 * GIB).fullest
        assert peak is not None
        assert peak.total == proposal.peak.total <= 72 * GIB
        assert len(place_components(after.experiment).devices) == devices
        for section in sections - {"placement", "training"}:
            assert getattr(after.experiment, section) == getattr(before.experiment, section)
        mini_batches = [composed.experiment.training.mini_batches for composed in (before, after)]
        assert mini_batches[0] == mini_batches[1]


def test_overrides_that_a_hint_demands_are_proposed_too() -> None:
    """The first alternative is followed; without one the error remains."""
    user = load_experiment(None)

    def reload(overrides: Sequence[str]) -> ComposedConfig:
        if "rollout.max_concurrent=8" not in overrides:
            raise ConfigError("too many\n  set rollout.max_concurrent=8, or training.micro_batch_tokens=1")
        return load_experiment(None, overrides)

    overrides, _ = read_back(user, ["training.micro_batch_tokens=4096"], reload)
    assert list(overrides) == ["training.micro_batch_tokens=4096", "rollout.max_concurrent=8"]
    with pytest.raises(ConfigError, match="must be an integer > 0"):
        read_back(user, ["training.micro_batch_tokens=0"], lambda words: load_experiment(None, words))


def test_overrides_that_would_change_what_is_learnt_are_followed_by_those_that_restore_it() -> None:
    """A format in which a size of micro-batches also sets the number of mini-batches."""
    user = load_experiment(None)

    def reload(overrides: Sequence[str]) -> ComposedConfig:
        return load_experiment(None, ["training.mini_batches=4", *overrides])

    overrides, composed = read_back(user, ["training.micro_batch_tokens=4096"], reload)
    assert list(overrides) == ["training.micro_batch_tokens=4096", "training.mini_batches=8"]
    assert composed.experiment.training.mini_batches == 8


def test_a_run_without_reinforcement_learning_or_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does something else"):
        fits(["sft.batch=8"], cluster(1))
    with pytest.raises(ConfigError, match="--fit needs the sizes of the model") as error:
        fits(["policy.preset=null", f"policy.path={tmp_path}"], cluster(1))
    assert error.value.key == "policy.path"


def test_a_variant_that_another_one_beats_everywhere_is_dropped() -> None:
    """Of the same time, the one with fewer changes and the one with less memory stay."""
    large, small = ((2, 2),), ((1, 1),)
    plain, slim = Variant({}, {}, {}, 1.0, large), Variant({"a": 1}, {}, {}, 1.0, small)
    worse, fast = Variant({"a": 1}, {}, {}, 1.0, large), Variant({"a": 2, "b": 1}, {}, {}, 0.5, large)
    assert undominated([worse, slim, plain, fast]) == [fast, plain, slim]
