"""If these fail, a run that can't be placed starts, one that can is refused, or people look for it on other devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_models import on

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.plan.placement import check_placement, format_ranges, place_components
from quintet.errors import ConfigError

MEGATRON = ("actor.backend=megatron",)
SPLIT = (*MEGATRON, "actor.parallel.tensor=2", "actor.parallel.pipeline=2")


def refusal(composed: ComposedConfig) -> str:
    with pytest.raises(ConfigError) as error:
        check_placement(composed)
    return str(error.value)


def test_two_nodes_of_eight_with_two_by_two(tmp_path: Path) -> None:
    """Four copies of the policy, two engines of eight, everything on all sixteen devices."""
    words = (*SPLIT, "algorithm.kl.coefficient=0.1", "rollout.engine_options.tensor_parallel=4")
    composed = on(tmp_path, "Qwen2.5-7B", 2, 8, *words, "rollout.engine_options.pipeline_parallel=2")
    check_placement(composed)
    placement = place_components(composed.experiment)
    assert [one.name for one in placement.components] == ["actor", "rollout", "reference"]
    actor, engines, reference = placement.components
    assert (actor.copies, engines.copies, reference.copies) == (4, 2, 16)
    assert placement.by_node(actor) == {0: tuple(range(8)), 1: tuple(range(8, 16))}
    assert format_ranges(placement.by_node(actor)[1]) == "8-15"
    assert placement.idle == ()


def test_split_components_and_idle_devices(tmp_path: Path) -> None:
    words = ["placement.actor.devices=[0,1,2,3]", "placement.rollout.devices=[4,5,9]", "placement.colocated=false"]
    composed = on(tmp_path, "Qwen2.5-7B", 2, 8, *words)
    check_placement(composed)
    placement = place_components(composed.experiment)
    assert placement.groups() == {("actor",): range(4), ("rollout",): (4, 5, 9)}
    assert format_ranges(placement.idle) == "6-8,10-15"


def test_what_shares_a_device_is_one_group_with_it(tmp_path: Path) -> None:
    composed = on(tmp_path, "Qwen2.5-7B", 1, 4, "placement.rollout.devices=[2,3]")
    assert place_components(composed.experiment).groups() == {("actor",): range(2), ("actor", "rollout"): range(2, 4)}


def test_the_processes_of_one_device_count_once(tmp_path: Path) -> None:
    composed = on(tmp_path, "Qwen2.5-7B", 1, 4, "placement.actor.devices=[0,0,1,1]")
    actor = place_components(composed.experiment).of("actor")
    assert actor is not None
    assert (actor.devices, actor.copies) == (range(2), 2)


def test_the_cpu_has_no_device(tmp_path: Path) -> None:
    composed = on(tmp_path, "Qwen2.5-7B", 1, 1, "placement.rollout.devices=[]")
    check_placement(composed)
    assert place_components(composed.experiment).groups() == {("actor",): range(1)}


QWEN, LLAMA, MIXTRAL = "Qwen2.5-7B", "Llama-3-8B", "Mixtral-8x7B"
TP, PP, EP = "actor.parallel.tensor", "actor.parallel.pipeline", "actor.parallel.expert"
VPP, ULYSSES = "actor.parallel.virtual_pipeline", "actor.parallel.ulysses"
ENGINE_TP, WORKER = "rollout.engine_options.tensor_parallel", "placement.rollout.devices_per_worker"
IN_MEGATRON = "actor.backend=megatron"
GAE, KL = "algorithm.advantage.name=gae critic.backend=megatron", "algorithm.kl={} reference.backend=megatron"


WORKERS = f"{TP}=2 rollout.recompute_logprobs=true placement.actor.devices=[0,1,2,3] placement.logprobs.devices"


@pytest.mark.parametrize(
    ("model", "words", "reason", "nearest"),
    [
        (QWEN, f"{WORKERS}=[4,5,6]", "tensor 2 does not divide the 3 devices", "placement.logprobs.devices=[4, 5]"),
        (QWEN, f"{WORKERS}=[3,4]", "they share 3 with the actor", "placement.logprobs.devices=[0, 1, 2, 3]"),
        (QWEN, "placement.actor.devices=[14,15,16]", "16 devices (2 × 8)", "placement.actor.devices=[14, 15]"),
        (QWEN, f"{WORKER}=3", "splits an engine over 1 devices", f"{WORKER}=1"),
        (LLAMA, f"{IN_MEGATRON} {TP}=3", "the 16 devices", f"{TP}=2"),
        (QWEN, f"{IN_MEGATRON} {TP}=8", "the 28 attention heads", f"{TP}=4"),
        (LLAMA, f"{IN_MEGATRON} {TP}=16", "the 8 key-value heads", f"{TP}=8"),
        (QWEN, f"{IN_MEGATRON} {PP}=8", "the 28 layers", f"{PP}=4"),
        (QWEN, f"{IN_MEGATRON} {PP}=4 {VPP}=2", "8 parts of stages", f"{VPP}=1"),
        (QWEN, f"{IN_MEGATRON} {VPP}=2", "without a pipeline", f"{VPP}=1"),
        (QWEN, f"{ULYSSES}=8", "the 28 attention heads", f"{ULYSSES}=4"),
        (QWEN, "actor.sharding.group_size=3", "16 devices", "actor.sharding.group_size=2"),
        (QWEN, f"actor.backend=fsdp {PP}=2", "only fsdp2 and megatron can split a model so", f"{PP}=1"),
        (QWEN, f"actor.backend=fsdp {TP}=2", "and the backend is fsdp", f"{TP}=1"),
        (QWEN, f"{PP}=8 {VPP}=4", "32 parts are more than the 28 layers", f"{VPP}=2"),
        (QWEN, f"{IN_MEGATRON} {ULYSSES}=2", "only fsdp and fsdp2", f"{ULYSSES}=1"),
        (QWEN, f"{TP}=4 {ULYSSES}=2", "the 7 attention heads that tensor 4 leaves to a device", f"{ULYSSES}=1"),
        (QWEN, f"{IN_MEGATRON} {EP}=2", "no experts", f"{EP}=1"),
        (MIXTRAL, f"{IN_MEGATRON} {EP}=16", "the 8 experts", f"{EP}=8"),
        (MIXTRAL, f"{IN_MEGATRON} {PP}=4 {EP}=8", "pipeline 4 × expert 8", f"{EP}=4"),
        (MIXTRAL, f"{IN_MEGATRON} {TP}=4", "only with parallel.sequence=true", f"{TP}=1"),
        (QWEN, f"{ENGINE_TP}=8", "28 attention heads", f"{ENGINE_TP}=4"),
        (QWEN, f"placement.rollout.devices=[0,1,2,3,4,5] {ENGINE_TP}=4", "the 6 devices", f"{ENGINE_TP}=2"),
        (QWEN, f"{GAE} critic.parallel.tensor=7", "the 16 devices", "critic.parallel.tensor=4"),
        (QWEN, f"{KL} reference.parallel.pipeline=16", "28 layers", "reference.parallel.pipeline=4"),
    ],
)
def test_what_cant_work_names_the_nearest_that_can(
    tmp_path: Path, model: str, words: str, reason: str, nearest: str
) -> None:
    message = refusal(on(tmp_path, model, 2, 8, *words.split()))
    key, _, value = words.split()[-1].partition("=")
    for part in (f"{key} = {value.replace(',', ', ')} (command line)", reason, f"nearest valid value: {nearest}"):
        assert part in message, message


def test_devices_that_nobody_sees_are_refused(tmp_path: Path) -> None:
    message = refusal(on(tmp_path, QWEN, 2, 8, "placement.visible_devices=[0,1,2]"))
    assert "placement.devices_per_node = 8" in message
    assert "visible_devices = [0, 1, 2] (command line) are fewer" in message
    assert "nearest valid value: placement.devices_per_node=3" in message


def test_engines_repeat_key_value_heads_that_are_too_few(tmp_path: Path) -> None:
    """Llama-3-8B has 8 of them; vLLM takes 16 devices all the same."""
    check_placement(on(tmp_path, "Llama-3-8B", 2, 8, "rollout.engine_options.tensor_parallel=16"))


def test_the_nearest_fits_everything_else_too(tmp_path: Path) -> None:
    """With two stages only 4 of the 16 devices' divisors remain for tensor parallelism that also divide the heads."""
    words = (*MEGATRON, "actor.parallel.tensor=16", "actor.parallel.pipeline=2")
    message = refusal(on(tmp_path, "Qwen2.5-7B", 2, 8, *words))
    assert "nearest valid value: actor.parallel.tensor=4" in message


def test_an_unknown_model_is_placed_by_what_is_known(tmp_path: Path) -> None:
    words = ["policy.preset=null", f"policy.path={tmp_path}", "placement.devices_per_node=8"]
    check_placement(load_experiment(None, [*words, "actor.parallel.ulysses=8"]))
    assert "the 8 devices" in refusal(load_experiment(None, [*words, "actor.parallel.ulysses=3"]))


@pytest.mark.parametrize(
    ("group", "others", "reason"),
    [
        (3, (), "actor.sharding.group_size = 3 (command line): groups of 3 do not fill the 8"),
        (3, (f"{TP}=2",), "groups of 3 do not fill the 4 devices that compute with the same weights"),
        (2, (f"{ULYSSES}=4",), "groups of 2 cut through the 4 devices that share a sequence"),
    ],
)
def test_sharding_groups_are_cut_out_of_devices_with_the_same_weights(
    tmp_path: Path, group: int, others: tuple[str, ...], reason: str
) -> None:
    """Else a plan says yes to what the start refuses, minutes later."""
    assert reason in refusal(on(tmp_path, QWEN, 1, 8, f"actor.sharding.group_size={group}", *others))


def test_a_sharding_group_of_more_devices_than_there_are_takes_them_all(tmp_path: Path) -> None:
    """As in verl, where `fsdp_size` may be that of a larger machine."""
    check_placement(on(tmp_path, "Qwen2.5-7B", 1, 4, "actor.sharding.group_size=8"))


def test_one_device_is_not_split_in_silence() -> None:
    """A run of one process would train unsplit, whatever its configuration says."""
    composed = load_experiment(None, ["actor.parallel.tensor=2"])
    with pytest.raises(ConfigError, match=r"actor\.parallel\.tensor = 2 \(command line\).*one device\n.*torchrun"):
        check_placement(composed)


def test_everything_that_cant_work_comes_in_one_message(tmp_path: Path) -> None:
    words = [*MEGATRON, "actor.parallel.pipeline=8", "rollout.engine_options.tensor_parallel=8"]
    message = refusal(on(tmp_path, "Qwen2.5-7B", 2, 8, *words))
    for key in ("actor.parallel.pipeline", "rollout.engine_options.tensor_parallel"):
        assert f"{key} = 8" in message


def test_a_cluster_that_nobody_has_is_refused_before_it_is_laid_out() -> None:
    message = refusal(load_experiment(None, ["placement.nodes=1000000000000"]))
    assert "1,000,000,000,000 devices" in message


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8")]
)
def test_ranges_are_short(numbers: tuple[int, ...], text: str) -> None:
    assert format_ranges(numbers) == text
