"""If these fail, people rent devices that are too small, or twice as many as they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_models import CONFIGS, PARAMETERS, at, measured, on

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.native.policy import LoraConfig
from quintet.config.plan.component_memory import (
    MemoryUse,
    activation_bytes,
    attention_bytes,
    lora_parameters,
)
from quintet.config.plan.format_sizes import GIB, format_bytes
from quintet.config.plan.memory import memory_problems
from quintet.config.plan.model_shapes import ModelShape, read_shape
from quintet.config.plan.models import find_models
from quintet.config.plan.placement import place_components

P = PARAMETERS["Qwen2.5-7B"]
EMBEDDING = 152064 * 3584
LAYER = (3584 * 3584 + 3584) + 2 * (3584 * 512 + 512) + 3584 * 3584 + 3 * 3584 * 18944 + 2 * 3584
QWEN = read_shape(CONFIGS["Qwen2.5-7B"])
MEGATRON = ("actor.backend=megatron", "actor.parallel.tensor=2", "actor.parallel.pipeline=2")
SHARED = 2 * 512 + 8 * 24
"""Tokens of 8 episodes on one of eight devices: responses of 24, and at most two prompts of 512, each packed once."""
UNSHARED = ("training.groups_per_step=512", "training.samples_per_group=1", "algorithm.advantage.name=raw")
"""Prompts that no other episode has."""
VLLM = ("rollout.engine=vllm",)


def qwen(tmp_path: Path, *words: str) -> ComposedConfig:
    """Qwen2.5-7B on one node of eight devices."""
    return on(tmp_path, "Qwen2.5-7B", 1, 8, *words)


def actor(composed: ComposedConfig) -> MemoryUse:
    return measured(composed).active["actor"]


def test_one_process_keeps_sixteen_bytes_a_parameter() -> None:
    """Weights, gradients and two moments in float32; the engine plays with the same weights."""
    found = measured(load_experiment(None))
    load, parameters = found.active["actor"], find_models(load_experiment(None).experiment).of("actor")
    assert parameters is not None
    four = 4 * parameters.parameters
    assert (load.weights, load.copies, load.gradients, load.optimizer) == (four, 0, four, 2 * four)
    assert found.active["rollout"].weights == 0


def test_one_process_in_bfloat16_casts_weights_and_gives_the_engine_its_own() -> None:
    found = measured(load_experiment(None, ["policy.dtype=bfloat16"]))
    load = found.active["actor"]
    assert (load.weights, load.copies) == (2 * load.copies, found.active["rollout"].weights)


def test_fsdp_cuts_up_float32_and_gathers_two_layers_at_a_time(tmp_path: Path) -> None:
    """Eight devices: 4 bytes of weights, 4 of gradients, 8 of moments for each eighth; in bfloat16 two layers,
    embedding and head; one layer's whole gradients in float32."""
    load = actor(qwen(tmp_path))
    assert (load.weights, load.optimizer) == (P // 2, P)
    assert load.gradients == P // 2 + 4 * LAYER
    assert load.copies == 2 * (2 * LAYER + 2 * EMBEDDING)


@pytest.mark.parametrize(
    ("words", "shards"),
    [
        (["actor.sharding.group_size=4"], 4),
        (["actor.sharding.group_size=2", "actor.parallel.tensor=2", "actor.parallel.pipeline=2"], 8),
        (["actor.sharding.policy=hybrid_shard"], 8),
        (["actor.sharding.policy=no_shard"], 1),
        ([], 16),
    ],
)
def test_smaller_groups_hold_larger_shards(tmp_path: Path, words: list[str], shards: int) -> None:
    assert actor(on(tmp_path, "Qwen2.5-7B", 2, 8, *words)).optimizer == 8 * P // shards


def test_several_micro_batches_accumulate_whole_gradients(tmp_path: Path) -> None:
    """8 sequences of 536 tokens in passes of 1072: FSDP2 keeps whole gradients in float32 and FSDP in bfloat16 until
    the last one, a device with tensor parallelism those of its half; shards are enough if every pass reduces them."""
    passes = "training.micro_batch_tokens=1072"
    assert actor(qwen(tmp_path, passes)).gradients == 4 * P + 4 * LAYER
    assert actor(qwen(tmp_path, passes, "actor.backend=fsdp")).gradients == 2 * P + 4 * LAYER
    assert actor(qwen(tmp_path, passes, "actor.parallel.tensor=2")).gradients == 4 * (P // 2) + 4 * LAYER
    synced = qwen(tmp_path, passes, "actor.sharding.sync_every_micro_batch=true")
    assert actor(synced).gradients == P // 2 + 4 * LAYER


def test_a_device_gathers_and_accumulates_only_its_experts(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: an eighth of the 128 experts in each of 48 layers, 3 × 2048 × 768 each."""
    words = ("training.micro_batch_tokens=1072", "actor.parallel.expert=8")
    whole, eighth = (actor(on(tmp_path, "Qwen3-30B-A3B", 1, 8, *some)) for some in (words[:1], words))
    elsewhere = 112 * 3 * 2048 * 768
    assert whole.copies - eighth.copies == 2 * 2 * elsewhere
    assert whole.gradients - eighth.gradients == 4 * 48 * elsewhere + 4 * elsewhere
    assert whole.weights == eighth.weights


def test_a_reward_model_is_whole_on_each_of_its_devices(tmp_path: Path) -> None:
    """It has no head, and two bytes a weight."""
    model = f"reward.model={{path: {at(tmp_path, 'Qwen2.5-7B')}}}"
    words = ("env.name=prompts", "data.train_files=[x.jsonl]", model)
    assert measured(qwen(tmp_path, *words)).active["reward"].weights == 2 * (P - EMBEDDING)
    sharded = measured(qwen(tmp_path, *words, "reward.model.min_sharded_parameters=1000")).active["reward"]
    assert (sharded.weights, sharded.copies) == ((P - EMBEDDING) // 4, 2 * (2 * LAYER + EMBEDDING))


def test_sharing_out_gradients_alone_leaves_whole_weights(tmp_path: Path) -> None:
    load = actor(qwen(tmp_path, "actor.sharding.policy=shard_grad_op"))
    assert (load.copies, load.optimizer) == (2 * P, P)


def test_megatron_splits_layers_and_stages(tmp_path: Path) -> None:
    """TP 2 × PP 2 on 16 devices: the first stage has half the layers and the embedding, each split by two: 2 bytes
    of weights, 4 of gradients, 12 of masters and moments, of which the distributed optimizer leaves a quarter."""
    own = ((P - 2 * EMBEDDING) // 2 + EMBEDDING) // 2
    load = actor(on(tmp_path, "Qwen2.5-7B", 2, 8, *MEGATRON))
    assert (load.weights, load.copies, load.gradients, load.optimizer) == (2 * own, 0, 4 * own, 12 * own)
    shared = actor(on(tmp_path, "Qwen2.5-7B", 2, 8, *MEGATRON, "actor.megatron.use_distributed_optimizer=true"))
    assert shared.optimizer == 12 * own // 4


def test_experts_are_shared_out_and_the_rest_is_not(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts, 3 × 2048 × 768 each."""
    routed = 48 * 128 * 3 * 2048 * 768
    words = ("actor.backend=megatron", "actor.parallel.expert=8")
    load = actor(on(tmp_path, "Qwen3-30B-A3B", 1, 8, *words))
    assert load.weights == 2 * (PARAMETERS["Qwen3-30B-A3B"] - routed + routed // 8)


def test_adapters_alone_have_gradients(tmp_path: Path) -> None:
    """Rank 8 on queries and values: 28 × 8 × (3584 + 3584 + 3584 + 512); the rest lies there without. The reference
    is the same model with the adapters of the beginning."""
    trained = 28 * 8 * (3584 + 3584 + 3584 + 512)
    lora = LoraConfig(rank=8, target_modules=("q_proj", "v_proj"))
    assert lora_parameters(QWEN, lora) == trained
    words = ["policy.lora.rank=8", "policy.lora.target_modules=[q_proj, v_proj]"]
    load = actor(on(tmp_path, "Qwen2.5-7B", 1, 1, *words))
    assert (load.weights, load.gradients, load.optimizer) == (4 * P + 4 * trained, 4 * trained, 8 * trained)
    kl = "algorithm.kl={coefficient: 0.1}"
    kept, copied = (measured(on(tmp_path, "Qwen2.5-7B", 1, 1, kl, *some)).active["reference"] for some in (words, ()))
    assert kept.weights == 4 * trained
    assert copied.weights == 4 * P


def test_every_linear_layer_but_the_head_can_be_adapted() -> None:
    inner = (3584 + 3584) * 2 + (3584 + 512) * 2 + (3584 + 18944) * 3
    assert lora_parameters(QWEN, LoraConfig(rank=32)) == 28 * 32 * inner


def test_activations_are_those_of_the_published_formula() -> None:
    """Korthikanti et al.: 34·h bytes a token in 16 bit where heads fill h and 8·h numbers of the feed-forward part
    are kept, two of them dropout masks, which there are none of now."""
    hidden = 1024
    shape = ModelShape(1, hidden, 2 * hidden, 16, 16, hidden // 16, 100)
    assert activation_bytes(shape, 10, 2) == 10 * (34 - 2) * hidden


def test_tensor_parallelism_splits_what_it_can_of_a_layer() -> None:
    """Qwen2.5-7B keeps 4·3584 + 2·3584 + 2·512 + 4·18944 numbers a token; the inputs are on every device unless the
    sequence is split, too."""
    assert activation_bytes(QWEN, 1, 2) == 2 * 98_304
    assert activation_bytes(QWEN, 1, 2, tensor=2) == 2 * (14_336 + 83_968 // 2)
    assert activation_bytes(QWEN, 1, 2, tensor=2, sequence=True) == 2 * 98_304 // 2


def test_plain_attention_keeps_its_matrix(tmp_path: Path) -> None:
    flash = actor(qwen(tmp_path))
    eager = actor(qwen(tmp_path, "policy.attention=eager"))
    matrix = attention_bytes(QWEN, SHARED, 536, 2)
    assert matrix == SHARED * 536 * 28 * 2
    assert eager.activations - flash.activations == 28 * matrix


def test_recomputing_keeps_inputs_and_one_layer(tmp_path: Path) -> None:
    """A rank has 8 episodes in a mini-batch, less than its budget."""
    tokens = SHARED
    kept = actor(qwen(tmp_path)).activations
    anew = actor(qwen(tmp_path, "actor.gradient_checkpointing=true")).activations
    assert kept == 28 * tokens * 2 * 98_304
    assert anew == tokens * 2 * 98_304 + 28 * tokens * 2 * 3584


def test_megatron_recomputes_as_many_layers_as_it_is_told(tmp_path: Path) -> None:
    words = [f"actor.megatron.recompute_{name}" for name in ("granularity=full", "method=block", "num_layers=20")]
    tokens = 4 * 512 + 4 * 16 * 24
    load = actor(
        on(tmp_path, "Qwen2.5-7B", 1, 1, "actor.backend=megatron", "training.micro_batch_tokens=1000000", *words)
    )
    assert load.activations == 9 * tokens * 2 * 98_304 + 20 * tokens * 2 * 3584


def test_a_critic_recomputes_as_the_actor_does_unless_told(tmp_path: Path) -> None:
    words = ["algorithm.advantage.name=gae", "actor.gradient_checkpointing=true"]
    same = measured(qwen(tmp_path, *words)).active
    assert same["critic"].activations == same["actor"].activations
    assert same["critic"].logits == 0
    other = measured(qwen(tmp_path, *words, "critic.gradient_checkpointing=false")).active
    assert other["critic"].activations > 10 * other["actor"].activations


def test_logits_count_the_places_that_are_predicted(tmp_path: Path) -> None:
    """Four of a rank's eight episodes at a time, 24 tokens of an answer each, 16 bytes for each of 152,064 words."""
    load = actor(qwen(tmp_path, "actor.budget.sequences=4"))
    assert load.logits == 4 * 24 * 152_064 * 16


def test_sequences_that_are_split_take_a_share_of_everything(tmp_path: Path) -> None:
    words = [*UNSHARED, "training.groups_per_step=1024", "actor.budget.sequences=4"]
    whole = actor(qwen(tmp_path, *words))
    split = actor(qwen(tmp_path, *words, "actor.parallel.ulysses=4"))
    assert (split.activations, split.logits) == (whole.activations // 4, whole.logits // 4)


def test_an_engine_keeps_as_many_requests_as_there_can_be(tmp_path: Path) -> None:
    """512 episodes over two engines of four devices, 536 tokens each; no more than it may run side by side."""
    words = (*VLLM, "rollout.engine_options.tensor_parallel=4")
    load = measured(qwen(tmp_path, *words)).active["rollout"]
    assert (load.weights, load.cache) == (P // 4 * 2, 256 * 536 * 14_336)
    few = measured(qwen(tmp_path, *words, "rollout.max_concurrent=10")).active["rollout"]
    assert few.cache == 10 * 536 * 14_336


def test_an_engine_takes_its_share_of_a_known_device(tmp_path: Path) -> None:
    composed = qwen(tmp_path, *VLLM, "rollout.engine_options.memory_share=0.5")
    load = measured(composed, 80 * GIB).active["rollout"]
    assert load.total == 40 * GIB
    assert load.weights == 2 * P


def test_the_embedded_engine_has_blocks_for_all_requests(tmp_path: Path) -> None:
    """grid-1m: 4 layers × 2 × 2 heads × 16 in float32, 536 tokens in 34 blocks and one more, 256 requests. A share of a
    known device limits them, but not below one request."""
    block = 16 * 4 * 2 * 2 * 16 * 4
    experiment = load_experiment(None)
    assert measured(experiment).active["rollout"].cache == 256 * 35 * block
    assert measured(experiment, 100 << 20).active["rollout"].cache == int(0.3 * (100 << 20)) // block * block
    assert measured(experiment, 1 << 20).active["rollout"].cache == 35 * block


def test_a_reference_is_a_copy_in_one_process_and_a_shard_in_many(tmp_path: Path) -> None:
    def weights(devices: int, *words: str) -> int:
        composed = on(tmp_path, "Qwen2.5-7B", 1, devices, "algorithm.kl.coefficient=0.1", *words)
        return measured(composed).active["reference"].weights

    assert (weights(1), weights(8), weights(1, "reference.dtype=bfloat16")) == (4 * P, 4 * P // 8, 2 * P)
    halves = ("reference.parallel.tensor=2", "reference.parallel.pipeline=2")
    assert weights(8, "reference.dtype=bfloat16", *halves) == 2 * P // 8


def test_taking_turns_needs_the_fullest_turn(tmp_path: Path) -> None:
    """While the actor learns the engine keeps weights and cache, unless it sleeps and its weights are moved away."""
    found = measured(qwen(tmp_path, *VLLM, *UNSHARED))
    (peak,) = found.peaks
    assert peak.phase == "while the actor learns"
    assert peak.total == found.active["actor"].total + found.active["rollout"].total
    words = ["rollout.engine_options.sleep_between_steps=true", "rollout.engine_options.offload=true"]
    (asleep,) = measured(qwen(tmp_path, *VLLM, *UNSHARED, *words)).peaks
    assert asleep.total == found.active["actor"].total


def test_what_is_moved_away_leaves_room_to_play(tmp_path: Path) -> None:
    words = [*VLLM, "rollout.max_prompt_tokens=100000"]
    moved = [f"actor.memory.offload_{part}=true" for part in ("parameters", "optimizer")]
    (here,) = measured(on(tmp_path, "Qwen2.5-0.5B", 1, 8, *words)).peaks
    away = measured(on(tmp_path, "Qwen2.5-0.5B", 1, 8, *words, *moved))
    assert away.idle["actor"].total == 0
    assert here.parts["actor"].total > 0


def test_weights_that_the_engine_plays_with_stay(tmp_path: Path) -> None:
    words = ["rollout.engine=hf", "policy.dtype=float32", "actor.memory.offload_parameters=true"]
    found = measured(on(tmp_path, "Qwen2.5-0.5B", 1, 1, *words))
    assert found.idle["actor"].weights == found.active["actor"].weights > 0


def test_working_side_by_side_needs_the_sum(tmp_path: Path) -> None:
    found = measured(qwen(tmp_path, *VLLM, "placement.colocated=false"))
    (peak,) = found.peaks
    assert peak.phase == "all at once"
    assert peak.total == sum(load.total for load in found.active.values())


def test_components_apart_have_peaks_of_their_own(tmp_path: Path) -> None:
    words = ["placement.actor.devices=[0,1]", "placement.rollout.devices=[2,3]", "placement.colocated=false"]
    found = measured(on(tmp_path, "Qwen2.5-7B", 1, 4, *VLLM, *words))
    assert [(peak.devices, peak.total) for peak in found.peaks] == [
        (range(2), found.active["actor"].total),
        (range(2, 4), found.active["rollout"].total),
    ]


def test_log_prob_workers_have_weights_without_gradients_and_moments(tmp_path: Path) -> None:
    """Two devices: half of the weights each, in float32, and what the actor gathers."""
    words = ["placement.actor.devices=[0,1]", "placement.rollout.devices=[0,1]", "rollout.recompute_logprobs=true"]
    words += ["actor.budget.sequences=1", "actor.inference_budget.sequences=4"]
    beside, apart = (
        measured(on(tmp_path, "Qwen2.5-7B", 1, 4, *VLLM, *words, *more))
        for more in ((), ("placement.logprobs.devices=[2,3]",))
    )
    workers, learner = apart.active["logprobs"], apart.active["actor"]
    assert (workers.weights, workers.gradients, workers.optimizer) == (4 * P // 2, 0, 0)
    assert workers.copies == learner.copies
    assert beside.active["actor"].logits == workers.logits > learner.logits
    assert {peak.devices: peak.phase for peak in apart.peaks}[range(2, 4)] == "while the log-prob workers compute"


def test_a_model_of_an_unknown_size_takes_nothing_that_would_be_made_up(tmp_path: Path) -> None:
    words = ["policy.preset=null", f"policy.path={tmp_path}"]
    found = measured(load_experiment(None, words))
    assert (found.active, found.fullest) == ({}, None)


def test_auto_is_the_models_own_type(tmp_path: Path) -> None:
    """`dtype: auto` of a model stored in bfloat16 must not be planned as float32."""
    composed = qwen(tmp_path, "policy.dtype=auto")
    (tmp_path / "Qwen2.5-7B" / "config.json").write_text(
        json.dumps(CONFIGS["Qwen2.5-7B"] | {"torch_dtype": "bfloat16"})
    )
    assert actor(composed).copies == 2 * (2 * LAYER + 2 * EMBEDDING)


def faults(composed: ComposedConfig, gibibytes: float) -> list[str]:
    config = composed.experiment
    found = memory_problems(composed, place_components(config), find_models(config), int(gibibytes * GIB))
    return [str(fault) for fault in found]


ASLEEP = (*VLLM, *UNSHARED, "rollout.engine_options.sleep_between_steps=true", "rollout.engine_options.offload=true")


def test_what_doesnt_fit_is_refused_with_what_helps_most(tmp_path: Path) -> None:
    """Activations of 28 layers are 22.0 GiB here: recomputing them is enough, and changes no number."""
    composed = qwen(tmp_path, *ASLEEP)
    total = measured(composed).peaks[0].total
    assert faults(composed, 80) == []
    (message,) = faults(composed, 30)
    needed = f"device 0 needs {format_bytes(total)} of 30.0 GiB while the actor learns"
    assert f"{needed}: activations of actor 22.0 GiB" in message
    assert "what helps most: actor.gradient_checkpointing=true (then " in message
    assert "more devices" not in message


def test_what_one_change_doesnt_mend_several_may(tmp_path: Path) -> None:
    """Recomputed layers leave 36.0 GiB, of which 18.2 are the engine's."""
    (message,) = faults(qwen(tmp_path, *VLLM, *UNSHARED), 30)
    asked = ["actor.gradient_checkpointing=true (then 36.0 GiB)", "rollout.engine_options.offload=true (then"]
    assert all(part in message for part in asked), message
    assert "more devices" not in message


def test_what_never_fits_asks_for_more_devices(tmp_path: Path) -> None:
    (message,) = faults(on(tmp_path, "Qwen2.5-7B", 1, 1), 10)
    assert message.endswith("; more devices for the rest")


def test_a_budget_is_cut_down_to_the_longest_sequence(tmp_path: Path) -> None:
    """With layers recomputed what is left are their inputs, of which a smaller pass has fewer."""
    words = ["actor.gradient_checkpointing=true", "rollout.max_response_tokens=8000", "rollout.max_concurrent=8"]
    words += ["training.micro_batch_tokens=160000", "training.mini_batches=1"]
    words += ["actor.sharding.sync_every_micro_batch=true"]
    (message,) = faults(qwen(tmp_path, *words, *ASLEEP), 22)
    assert "training.micro_batch_tokens=8512 (then" in message


def test_an_engine_that_stays_awake_is_put_to_sleep(tmp_path: Path) -> None:
    words = ["rollout.engine_options.memory_share=0.6", "actor.gradient_checkpointing=true"]
    (message,) = faults(qwen(tmp_path, *VLLM, *UNSHARED, *words), 48)
    assert "what helps most: rollout.engine_options.sleep_between_steps=true (then" in message


def test_small_sizes_are_told_in_mebibytes() -> None:
    assert [format_bytes(size) for size in (1, 1 << 20, 3 << 29, GIB)] == ["1 MiB", "1 MiB", "1.5 GiB", "1.0 GiB"]
    assert format_bytes(2500 << 30) == "2,500.0 GiB"


def test_engines_on_one_device_take_memory_each(tmp_path: Path) -> None:
    words = ("placement.actor.devices=[0]", "placement.rollout.devices=[1]", *VLLM)
    one = measured(qwen(tmp_path, *words)).active["rollout"]
    several = measured(qwen(tmp_path, *words, "placement.rollout.processes_per_device=3")).active["rollout"]
    assert several.weights == 3 * one.weights
    # each has a third of the episodes
    assert one.cache <= several.cache < 3 * one.cache
