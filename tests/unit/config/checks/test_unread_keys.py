"""If these fail, somebody sets a key that does nothing and isn't told."""

from __future__ import annotations

import pytest

from quintet.config.checks.engines import OPTIONS
from quintet.config.checks.unread_keys import unread_reasons, unread_rules
from quintet.config.compose import load_experiment, unread_remarks
from quintet.config.schema import keys

TUNING = ["sft={}", "data.train_files=[rows.jsonl]"]
TWO_DEVICES = ["placement.devices_per_node=2"]
APART = [*TWO_DEVICES, "placement.actor.devices=[0]", "placement.rollout.devices=[1]"]
QUEUE, TRANSFER = "placement.rollout.channel.size", "placement.weight_transfer"
FSDP_ALONE = ["actor.sharding.forward_prefetch=true", "actor.backend=megatron"]


@pytest.mark.parametrize(
    ("words", "key", "beside"),
    [
        (["actor.optimizer.kind=sgd", "actor.optimizer.betas=[0.8, 0.9]"], "betas", "optimizer.kind = 'sgd'"),
        (["actor.optimizer.cycles=2"], "cycles = 2", "optimizer.schedule = 'linear'"),
        (
            ["actor.optimizer.schedule=constant", "actor.optimizer.decay_steps=9"],
            "decay_steps",
            "schedule = 'constant'",
        ),
        (
            ["critic.optimizer.stable_decay_steps=9", "algorithm.advantage.name=gae"],
            "critic.optimizer.stable_decay_steps",
            "schedule = 'linear'",
        ),
        (["warm_start.optimizer.cycles=1"], "warm_start.optimizer.cycles", "warm_start.optimizer.schedule = 'linear'"),
        (["actor.optimizer.weight_decay_start=0.1"], "weight_decay_start", "weight_decay_schedule = 'constant'"),
        (["actor.sharding.grad_scaler_start=8"], "grad_scaler_start", "actor.sharding.grad_scaler = false"),
        (["actor.megatron={recompute_granularity: full}"], "recompute_granularity", "actor.backend = 'fsdp2'"),
        (["critic.warmup_steps=3"], "critic.warmup_steps = 3", "the run has no critic"),
        (["reference.dtype=bfloat16"], "reference.dtype", "the run has no reference policy"),
        (["actor.sharding.forward_prefetch=true"], "forward_prefetch", "one device has all of its weights"),
        (["rollout.engine_options.cuda_graph_max_batch=8"], "cuda_graph_max_batch", "the engine hf has no CUDA graphs"),
        (
            [*TUNING, "data.messages_key=messages", "data.prompt_key=question"],
            "data.prompt_key",
            "data.messages_key = 'messages'",
        ),
        (FSDP_ALONE, "actor.sharding.forward_prefetch", "actor.backend = 'megatron'"),
        (["actor.sharding.limit_all_gathers=true", *TWO_DEVICES], "limit_all_gathers", "actor.backend = 'fsdp2'"),
        (["actor.shuffle_seed=3", "actor.shuffle=false"], "actor.shuffle_seed = 3", "actor.shuffle = false"),
    ],
)
def test_a_key_without_effect_is_told_with_what_silences_it(words: list[str], key: str, beside: str) -> None:
    (remark,) = unread_remarks(load_experiment(None, words))
    assert key in remark
    assert remark.endswith(beside)
    assert "command line" in remark


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ([], QUEUE, None),
        (["rollout.async_ratio=0.5"], QUEUE, "an asynchronous rollout on the devices of the learners has no queue"),
        (["rollout.async_ratio=0.5", *APART], QUEUE, None),
        (TWO_DEVICES, TRANSFER, "no engine is in a process without the learner"),
        (APART, TRANSFER, None),
        (["rollout.engine=vllm"], f"{OPTIONS}.server_url", "the engine vllm has no such option"),
        (["rollout.engine=vllm"], f"{OPTIONS}.executor", None),
        (["rollout.engine=sglang"], f"{OPTIONS}.swap_space_gib", "the engine sglang has no such option"),
        ([], f"{OPTIONS}.block_size", "the engine hf has no such option"),
    ],
)
def test_devices_and_engine_decide_which_keys_a_run_reads(words: list[str], key: str, reason: str | None) -> None:
    assert unread_reasons(load_experiment(None, words).experiment)(key) == reason


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["actor.optimizer.schedule=cosine", "actor.optimizer.cycles=2"],
        ["actor.optimizer.kind=muon", "actor.optimizer.betas=[0.8, 0.9]"],
        ["actor.optimizer.schedule=inverse_square_root", "actor.optimizer.decay_steps=9"],
        ["actor.optimizer.cycles=0.5"],  # as it is anyway
        [*TUNING, "data.prompt_key=question", "data.response_key=text"],
        ["critic.parallel={}", "critic.warmup_steps=0"],
        ["actor.megatron={moe_token_dispatcher_type: allgather}"],  # counts for fsdp2, too
    ],
)
def test_what_counts_is_not_told(words: list[str]) -> None:
    assert [*unread_remarks(load_experiment(None, words))] == []


def test_every_listed_key_and_condition_is_one_of_the_schema() -> None:
    """A name without a key would silence nothing, and look as if it did."""
    names = {key.name for key in keys()}
    for rule in unread_rules():
        listed = [*rule.keys, *rule.exceptions, *(name for name in (*(rule.when or ()), *(rule.needs or ())))]
        for name in (each for each in listed if not each.startswith("run.")):
            suffix = name if rule.section is None else f"{rule.section}.{name}"
            assert suffix in names or any(key.endswith(f".{suffix}") for key in names), suffix
