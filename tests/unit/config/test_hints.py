"""If these fail, somebody does what an error says and gets the same error again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hints import SRC, followed, hint_sites, printed_hints, recorded_sites

from quintet import hardware
from quintet.cli import plan
from quintet.cli.configuration import inspect_config, load_config
from quintet.config.checks.backends import UNSUPPORTED_WITH_ACTOR
from quintet.config.checks.megatron import GPU_OPTIONS
from quintet.config.plan.placement import check_placement
from quintet.config.plan.run_plan import plan_run
from quintet.config.torchrun import current_rank
from quintet.errors import UserError

MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "vocab_size": 64,
}
MODELS = {
    "mixture": MIXTURE,
    "mixtral": MIXTURE | {"model_type": "mixtral"},
    "DIRECTORY": MIXTURE | {"model_type": "qwen3"},
    "large": MIXTURE | {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8},
}
"""By directory."""


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a GPU; the working directory has a model, data and a function."""
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    for name, model in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(model))
    (tmp_path / "FILE.py").write_text("def FUNCTION(**_): return 0.0\n")
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: verl.tools.mcp_search_tool.MCPSearchTool}]")
    (tmp_path / "users.yaml").write_text("interaction: [{class_name: verl.interactions.base.BaseInteraction}]")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 = ?"}\n' * 6)


def printed(words: Sequence[str], file: str | None = None, gib: float | None = None) -> str:
    """What `quintet plan` refuses and lists, and the start of `quintet train` refuses, in their words."""
    try:
        inspected = inspect_config(file, list(words), None, "refuse")
        lines = [*map(str, inspected.unsupported), *map(str, plan._missing(inspected))]
        plan_run(inspected.composed, None if gib is None else int(gib * 2**30))
    except UserError as error:
        return str(error)
    return "\n".join(lines)


def refused_by_torchrun(words: Sequence[str]) -> str:
    """What the start of `quintet train` refuses on the processes that torchrun started."""
    try:
        check_placement(load_config(None, list(words), None, "refuse"))
    except UserError as error:
        return str(error)
    return ""


ELSEWHERE = re.compile("is not supported yet: requires|not installed here")
"""Errors that other machines or later versions do not have."""
TWO = "placement.devices_per_node=2"
THREE = ("placement.devices_per_node=3", "placement.actor.devices=[0]", "algorithm.kl={apply_to: loss}")
PIPELINED_APART = (
    *("placement.devices_per_node=3", "placement.actor.devices=[0]", "placement.rollout.devices=[1]"),
    *("placement.logprobs.devices=[2]", "training.pipelined=true", "actor.shuffle=false"),
    "algorithm.drop_groups_without_signal=false",
)
ROBOTS = [
    *("env.name=simulator", "env.simulator=arm", "policy.preset=arm-vla"),
    *("training.groups_per_step=4", "training.samples_per_group=4", "training.mini_batches=4"),
]
MEGATRON = "actor.backend=megatron"
PARALLEL, ENGINE = "actor.parallel", "rollout.engine_options"
BESIDE_MEGATRON = {
    "policy.lora.rank": ["policy.lora.rank=8"],
    "rollout.engine_options.validate_weights": [f"{ENGINE}.validate_weights=true"],
    "policy.attention": ["policy.attention=sdpa"],
    "sft.lora.rank": ["sft.episodes={}", "sft.lora.rank=8"],
    "sft.liger": ["sft.episodes={}", "sft.liger=true"],
}
"""A setting of each key of `UNSUPPORTED_WITH_ACTOR`."""
FULL = "algorithm.kl={estimator: full, coefficient: 0.1}"
LAKE = "envs={lake: {}, pond: {}}"

ROWS = ("data.train_files=[rows.jsonl]", "sft.batch=2")
DOMAIN = "data.domains={a: {share: 1.0}}"
PROMPTS = ("env.name=prompts", "data.train_files=[rows.jsonl]")

CASES = [
    ["envs={arm: {env: {name: simulator, simulator: arm}}, lake: {}}"],
    # weights of engines without a learner
    ["placement.weight_transfer=tcp"],
    [
        *("placement.nodes=2", "placement.devices_per_node=2", "placement.actor.devices=[0]"),
        *("placement.rollout.devices=[1,2,3]", "placement.weight_transfer=shared_memory"),
    ],
    # validation of keys and values
    ["training.stesp=3"],
    ["trainning.steps=3"],
    ["optimizer.learning_rate=0.1"],
    ["env.boxes=2"],
    ["algorithm.loss.min_covariance=3"],
    ["env.name=sokobn"],
    ["training=5"],
    ["training=null"],
    ["env=5"],
    ["validation=null"],
    ["checkpoint=null"],
    ["training.steps=1e3"],
    # values of one section that contradict each other
    ["policy.path=DIRECTORY", "policy.preset=grid-1m"],
    ["policy.preset=null"],
    ["rollout.async_ratio=1", f"{ENGINE}.offload=true"],
    [f"{ENGINE}.validate_weights_dir=x"],
    ["rollout.partial=true"],
    ["rollout.max_staleness=1"],
    ["placement.rollout.channel.size=4", "rollout.async_ratio=1"],
    ["training.pipelined=true"],
    ["training.pipelined=true", "training.mini_batches=1", "training.epochs=2", "algorithm.filter.keep_share=0.5"],
    ["training.pipelined=true", "training.mini_batches=64", "algorithm.filter.min_mean=0.1", "algorithm.correction={}"],
    ["training.pipelined=true", "algorithm.advantage.whiten=true", "algorithm.shaping.center=batch"],
    ["training.pipelined=true", "algorithm.advantage.name=brpo", "rollout.recompute_logprobs=true"],
    ["training.pipelined=true", "algorithm.advantage.name=gae", f"{ENGINE}.sleep_between_steps=true"],
    ["training.pipelined=true", "algorithm.kl={apply_to: reward, target: 0.1, refresh_every_steps: 2}"],
    ["training.pipelined=true", "algorithm.kl={}", "algorithm.reward_kl={target: 0.1}"],
    ["training.pipelined=true", "algorithm.train_on_observations=true", "algorithm.loss.name=decoupled_ppo"],
    ["placement.rollout.channel.name=pipe", "rollout.async_ratio=1"],
    ["placement.actor.group=Workers", "placement.rollout.group=Workers"],
    ["placement.actor.group=engines"],
    ["placement.envs.channel={name: pipe, queue: all}", "placement.rollout.action_channel={name: pipe, queue: all}"],
    ["placement.rollout.channel.queue=actions", "placement.rollout.action_channel.size=4"],
    [
        *("placement.devices_per_node=3", "placement.actor.devices=[0,1]", "placement.rollout.devices=[2]"),
        *("rollout.async_ratio=1", "env.name=prompts", "data.train_files=[rows.jsonl]"),
        "reward={model: {path: DIRECTORY, min_sharded_parameters: 1000}}",
    ],
    ["rollout.async_ratio=1", f"{ENGINE}.sleep_between_steps=true"],
    ["rollout.do_sample=false", "rollout.temperature=0.5"],
    ["rollout.ignore_end=true", "rollout.end_token=1"],
    ["rollout.thoughts=grounding", "rollout.think=false"],
    ["rollout.thoughts=grounding", "envs.lake={think: false}", "envs.boxes={env: {name: sokoban}}"],
    ["rollout.thoughts=grounding", "env.name=prompts", "data.train_files=[rows.jsonl]"],
    ["rollout.thoughts=grounding", "sft.episodes={}", "sft.then_reinforce=true"],
    ["rollout.state_reward={}"],
    ["rollout.thoughts=grounding", "rollout.state_reward={}", "rollout.binary_reward=true"],
    ["rollout.thoughts=grounding", "rollout.state_reward={scorer: judge}"],
    ["envs.lake.share=0"],
    ["envs.lake.validation_episodes=0"],
    ["rollout.min_response_tokens=30"],
    ["algorithm.kl.target=0.1"],
    ["algorithm.reward_kl={}"],
    ["algorithm.kl={apply_to: reward}", "algorithm.reward_kl={}"],
    ["algorithm.loss.name=decoupled_ppo", "algorithm.correction={}"],
    ["algorithm.advantage.name=remax", "algorithm.shaping.center=group"],
    ["algorithm.kl.refresh_every_steps=2", "reference.path=DIRECTORY"],
    ["algorithm.filter={min_mean: 0.5, max_mean: 0.25}"],
    ["algorithm.correction={lower: 3.0}"],
    ["algorithm.correction.reject_before_advantages=true", "rollout.recompute_logprobs=true"],
    ["algorithm.correction.reject=[{estimator: k2, upper: 2.0}, {estimator: k1, upper: 0.5}]"],
    ["reward.model.path=DIRECTORY", "reward.judge={url: http://127.0.0.1:1/v1, model: x}"],
    ["reward.format_reward=1.0"],
    ["reward.requests_per_minute=5"],
    ["reward.function_arguments={x: 1}"],
    # tools
    ["rollout.tool_calls={tools: {calculator: {}}}"],
    ["rollout.tool_calls.max_parallel_calls=2", *PROMPTS],
    ["rollout.tool_calls.tools={calculator: {}}", "rollout.max_turns=1", *PROMPTS],
    ["rollout.tool_calls.tools={calculator: {}}", "reward={model: {path: DIRECTORY}}", *PROMPTS],
    ["rollout.tool_calls.file=nowhere.yaml", *PROMPTS],
    ["data.agent_loop=tool_agent", *PROMPTS],
    ["rollout.interactions={}", *PROMPTS],
    ["rollout.interactions={users: {gsm8k: {}}}"],
    ["rollout.interactions.users={gsm8k: {arguments: {x: 1}}}", *PROMPTS],
    ["rollout.interactions.users={gsm8k: {}}", "rollout.max_turns=1", *PROMPTS],
    ["rollout.interactions.users={gsm8k: {}}", "reward={model: {path: DIRECTORY}}", *PROMPTS],
    ["rollout.interactions.file=nowhere.yaml", *PROMPTS],
    ["rollout.interactions.file=users.yaml", *PROMPTS],
    ["rollout.tool_calls.file=tools.yaml", *PROMPTS],
    # generation
    ["generation.output_path=x.parquet"],
    ["generation.output_path=x.parquet", "sft.batch=2", *PROMPTS],
    ["generation.output_path=x.parquet", "evaluation.path=x.parquet", *PROMPTS],
    ["generation.output_path=x.parquet", "rollout.tool_calls.tools={calculator: {}}", *PROMPTS],
    ["generation.output_path=x.parquet", "rollout.interactions.users={gsm8k: {}}", *PROMPTS],
    ["generation={output_path: x.parquet, samples: 2}", "rollout.do_sample=false", *PROMPTS],
    # domains of prompts
    ["data.domains={a: {share: 0.5}, b: {share: 0.5}}", "data.weights=[1.0]", *PROMPTS],
    ["data.domains={a: {share: 0.5}, b: {share: 0.9}}", *PROMPTS],
    ["data.domains={a: {share: 0.001}, b: {share: 0.9}}", *PROMPTS],
    ["reward={kind: math, function: FILE.py:FUNCTION, verifiers: {a: {kind: exact}}}", *PROMPTS],
    ["reward={judge: {url: 'http://x', model: m}, verifiers: {a: {kind: exact}}}", *PROMPTS],
    # rounds of dynamic sampling
    ["algorithm.filter.groups_per_round=5"],
    ["algorithm.filter.groups_per_round=500", "rollout.async_ratio=1"],
    # distillation
    ["sft.distillation={}", *ROWS],
    ["sft.distillation={}", "reference.path=DIRECTORY", "actor.backend=megatron", *ROWS],
    ["sft.distillation={}", "reference.path=DIRECTORY", "reference.backend=megatron", *ROWS],
    ["sft={distillation: {}, batch: 2}", "reference={path: DIRECTORY, parallel: {tensor: 2}}", TWO, ROWS[0]],
    # judges
    ["reward.judge={}", *PROMPTS],
    ["reward.judge={url: 'http://x/v1', server: {path: DIRECTORY}}", *PROMPTS],
    ["reward.judge={url: 'http://x/v1'}", *PROMPTS],
    ["reward.judge={model: m, server: {path: DIRECTORY}}", *PROMPTS],
    ["reward={verifiers: {a: {kind: exact, judge: {url: 'http://x', model: m}}}}", DOMAIN, *PROMPTS],
    ["reward={model: {path: DIRECTORY}, verifiers: {a: {judge: {url: 'http://x', model: m}}}}", DOMAIN, *PROMPTS],
    ["reward.judge.server={path: DIRECTORY, devices: [0, 1]}", *PROMPTS],
    ["reward.judge.server={path: DIRECTORY, arguments: {seed: 1}}", *PROMPTS],
    ["sft={batch: 2}", "data.domains={a: {share: 1.0}}", *PROMPTS],
    # batches, envs, files
    ["training.mini_batches=5"],
    ["training.samples_per_group=1"],
    ["algorithm.loss.name=distillation"],
    ["data.train_files=rows.jsonl"],
    ["data.train_files=rows.jsonl", LAKE],
    ["policy.preset=grid-1n"],
    ["rollout.max_prompt_tokens=2040"],
    ["rollout.max_prompt_tokens=4000"],
    ["rollout.max_response_tokens=4000"],
    ["rollout.max_prompt_tokens=4000", "rollout.max_response_tokens=4000"],
    ["actor.optimizer.warmup_ratio=0.1"],
    [LAKE, "env.size=5"],
    ["envs.lake={}", "envs.file.env.name=prompts"],
    ["env.name=prompts", "data.train_files=rows.jsonl", "data.epochs=1", "warm_start=null"],
    ["env.name=prompts", "data.train_files=rows.jsonl", "warm_start=null", "placement.envs.channel.size=4"],
    # placement
    [TWO, "placement.actor.devices=[1,2,3]"],
    [TWO, "placement.actor.devices=[0,1]", "placement.envs.devices=[1]"],
    [TWO, "placement.visible_devices=[0]"],
    ["placement.devices_per_node=4", "placement.rollout.devices_per_worker=3"],
    ["placement.actor.devices=[0,0]"],
    [TWO, "placement.rollout.processes_per_device=2"],
    [TWO, "placement.actor.devices=[0]", "placement.rollout.devices=[0,1,1]"],
    [TWO, "placement.envs.processes_per_device=2"],
    [
        *("placement.devices_per_node=3", "placement.actor.devices=[0]", "placement.rollout.devices=[1,2]"),
        *("placement.rollout.processes_per_device=2", f"{ENGINE}.tensor_parallel=2", "rollout.engine=vllm"),
    ],
    [
        *(TWO, "placement.actor.devices=[0]", "placement.rollout.devices=[1]", f"{ENGINE}.memory_share=0.6"),
        "placement.rollout.processes_per_device=2",
    ],
    [
        *("placement.devices_per_node=4", "placement.actor.devices=[0,1]", "placement.reference.devices=[1,2]"),
        "algorithm.kl={coefficient: 0.1}",
    ],
    [*THREE, "placement.reference.devices=[0,1]"],
    [*THREE, "placement.logprobs.devices=[1,2]"],
    [
        *(TWO, f"{PARALLEL}.tensor=2", "placement.nodes=2", "placement.actor.devices=[0,1]"),
        *("placement.rollout.devices=[0,1]", "placement.logprobs.devices=[2]", "rollout.recompute_logprobs=true"),
    ],
    [*PIPELINED_APART, "algorithm.correction={level: token, normalize: true}"],
    [*THREE, "placement.reference.devices=[1]", "placement.critic.devices=[1,2]", "algorithm.advantage={name: gae}"],
    [*THREE, "placement.reference.devices=[1]", FULL],
    [TWO, "placement.envs.devices=[1]", "env.name=prompts", "data.train_files=[rows.jsonl]"],
    [TWO, "placement.actor.devices=[0]", "placement.rollout.devices=[1]", "placement.envs.devices=[1]"],
    ["placement.devices_per_node=4", f"{PARALLEL}.tensor=3"],
    ["placement.devices_per_node=4", "actor.sharding.group_size=3"],
    [f"{PARALLEL}.tensor=2"],
    # sharding
    [TWO, f"{PARALLEL}.pipeline=2", "actor.sharding.policy=no_shard"],
    [TWO, "actor.sharding.backward_prefetch=post"],
    [TWO, f"{PARALLEL}.pipeline=2", f"{PARALLEL}.sequence=true"],
    [TWO, f"{PARALLEL}.pipeline=2", "policy.lora={}"],
    [TWO, f"{PARALLEL}.expert=2", "actor.megatron.moe_token_dispatcher_type=alltoall_seq", "policy.path=mixture"],
    [TWO, f"{PARALLEL}.context=2", "policy.attention=eager"],
    [TWO, f"{PARALLEL}.tensor=2", FULL],
    [TWO, "actor.backend=fsdp", "actor.optimizer.kind=muon"],
    # engines
    [f"{ENGINE}.block_size=16"],
    [TWO, "rollout.engine=vllm", f"{ENGINE}.executor=ray"],
    [f"{ENGINE}.load_format=gguf"],
    # adapters
    ["policy.lora.target_modules=nothing"],
    ["policy.lora.target_modules=*"],
    ["policy.lora.target_modules=lm_head"],
    # images
    ["env.render=vision"],
    ["policy.vision.freeze=true"],
    ["policy.vision={min_pixels: 9000, max_pixels: 4000}"],
    ["policy.preset=grid-vl", TWO, f"{PARALLEL}.pipeline=2"],
    ["policy.preset=grid-vl", MEGATRON],
    ["policy.preset=grid-vl", "env.render=vision", "sft={episodes: {form: base}}", "rollout.window_size=null"],
    ["policy.preset=grid-vl", "env.render=vision", "env.tile_size=256", "policy.vision.max_pixels=16000000"],
    ["policy.preset=grid-vl", "env.render=vision", "env.tile_size=96", "rollout.window_size=4"],
    # Megatron
    *([MEGATRON, f"actor.megatron.{name}={'x' if name.endswith('cfg') else 'true'}"] for name in GPU_OPTIONS),
    *([MEGATRON, *words] for words in BESIDE_MEGATRON.values()),
    [MEGATRON, "actor.megatron.distributed_backend=nccl"],
    [MEGATRON, "actor.megatron.moe_token_dispatcher_type=flex"],
    [MEGATRON, "actor.megatron.spec_name=te_gpt"],
    [MEGATRON, "actor.megatron.mcore_gpt=false"],
    [MEGATRON, "actor.megatron.encoder_seq_length=8"],
    [MEGATRON, "actor.megatron.ckpt_format=zarr"],
    [MEGATRON, "actor.megatron.bf16=true"],
    [MEGATRON, "actor.megatron.overlap_param_gather=true"],
    [MEGATRON, TWO, f"{PARALLEL}.pipeline=2", f"{PARALLEL}.virtual_pipeline=2", "actor.megatron.batch_p2p_comm=true"],
    [MEGATRON, "policy.path=mixtral"],
    [MEGATRON, "actor.memory.torch_compile=true"],
    [MEGATRON, "algorithm.kl={}", "reference.backend=megatron", "reference.dtype=bfloat16"],
    [MEGATRON, "sft={episodes: {}, path: DIRECTORY}", "actor.megatron.checkpoint=x"],
    [MEGATRON, "actor.optimizer.kind=muon"],
    [MEGATRON, TWO, f"{PARALLEL}.tensor=2", "algorithm.kl={estimator: full}", "reference.backend=megatron"],
    [MEGATRON, "algorithm.kl={estimator: full}"],
    [MEGATRON, "algorithm.kl={}", "reference.backend=megatron", "reference.megatron.checkpoint=x"],
    [
        *(MEGATRON, TWO, f"{PARALLEL}.tensor=2", "algorithm.kl={}", "reference.backend=megatron"),
        *("actor.megatron.tp_comm_overlap_cfg=x", "reference.megatron.tp_comm_overlap_cfg=x"),
    ],
    # names of before, and of after
    ["rollout.fold_case=true", "rollout.ignore_case=true"],
    # what this version lacks
    # robots
    *(
        [*ROBOTS, word]
        for word in (
            *("algorithm.advantage.name=gae", "env.fixed_start_states=false"),
            *("rollout.engine=vllm", "actor.backend=megatron", "actor.parallel.context=2", "rollout.async_ratio=1"),
            *("rollout.top_p=0.9", "sft={}", "training.mini_batches=7"),
            *("env.environments=12", "env.pipeline_stages=3", "env.options={control: tip, speed: 2}"),
        )
    ),
    ["policy.vla={images: 2}"],
    # chunks of robot actions
    ["algorithm.level=chunk", "critic.huber_delta=1.0"],
    ["env.name=simulator", "env.simulator=arm", "algorithm.aggregation=seq-mean-token-sum", "algorithm.correction={}"],
    ["env.name=simulator", "env.simulator=arm", "algorithm.advantage.name=gigpo", "algorithm.loss.name=gspo"],
    ["env.name=simulator", "env.simulator=arm", "algorithm.level=chunk", "algorithm.reward_level=action"],
    [
        *ROBOTS,
        "algorithm.advantage.name=grpo",
        "algorithm.advantage.length_weight=true",
        "algorithm.advantage.deviation_weight=true",
        "algorithm.filter={keep_by: length, scale_advantages: sqrt, stop_after_empty_steps: 2}",
        "algorithm.advantage_clip=1.0",
    ],
    ["env.name=simulator", "env.simulator=arm", "algorithm.kl={apply_to: reward, estimator: full}"],
    ["env.name=simulator", "env.simulator=arm", "algorithm.kl={}", "algorithm.reward_kl={}"],
    ["env.name=svg"],
    ["tracking.video={}"],
    ["tracking.profile={ranks: [0, 1], steps: [1000]}", "training.steps=3"],
    *(
        [f"tracking.profile={{{words}}}"]
        for words in ("steps: []", "ranks: []", "trace: false", "memory_snapshot: true")
    ),
    ["tracking.validation_video.robots=4"],
    *(
        ["env.name=svg", "policy.preset=grid-vl", *words]
        for words in (
            ["env.dino_weight=1"],
            ["env.dreamsim_weight=1"],
            ["env.dataset=nowhere"],
            ["env.pixel_weight=0", "env.structural_weight=0"],
        )
    ),
]


ON_A_GPU = [
    ["actor.memory.sharded_offload=true"],
    [TWO, "actor.memory.sharded_offload=true", "actor.sharding.policy=no_shard"],
    [TWO, "actor.backend=fsdp", "actor.memory.sharded_offload=true", "actor.sharding.sync_every_micro_batch=true"],
]
LARGE = ["policy.path=large", "policy.dtype=bfloat16", "warm_start=null"]
TOO_LARGE = {
    "an engine that sleeps": ([*LARGE, "algorithm.kl={}"], 8.2),
    "an engine that runs on": ([*LARGE, "rollout.async_ratio=1"], 4.0),
    "Megatron": ([*LARGE, MEGATRON, "algorithm.kl={}", "reference.backend=megatron"], 6.0),
}
WORLD = {"RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}


def check(words: Sequence[str]) -> None:
    """Follow every alternative of every hint: its error is gone, and no other one has come."""
    hints = printed_hints(printed(words))
    assert hints, "an error without a hint, or none"
    for message, hint in hints.items():
        for changed in followed(message, hint, words):
            left = printed(changed)
            assert message not in left, changed
            assert all(line in hints or ELSEWHERE.search(line) for line in printed_hints(left)), (changed, left)


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_a_hint_removes_its_error(words: list[str]) -> None:
    check(words)


@pytest.mark.parametrize("words", ON_A_GPU, ids=" ".join)
def test_a_hint_on_a_gpu_removes_its_error(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 8)
    check(words)


@pytest.mark.parametrize(("words", "gib"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_settings_that_save_memory_save_what_they_promise(
    words: list[str], gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 8)
    ((message, hint),) = printed_hints(printed(words, gib=gib)).items()
    (changed,) = followed(message, hint, words)
    assert "more devices" not in hint
    assert not printed(changed, gib=gib)


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (["placement.devices_per_node=4"], 1),
        (["placement.devices_per_node=4"], 2),
        (["sft={episodes: {}, devices: 2}"], 1),
    ],
)
def test_a_torchrun_command_starts_the_processes_that_are_needed(
    words: list[str], started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(size: int) -> str:
        for name, value in (WORLD | {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}).items():
            monkeypatch.setenv(name, str(value))
        return refused_by_torchrun(words)

    refusal = start(started)
    (size,) = {int(size) for size in re.findall(r"--nproc-per-node (\d+)", refusal)}
    assert not start(size)


def test_variables_of_torchrun_that_are_wrong_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (WORLD | {"WORLD_SIZE": "many", "LOCAL_WORLD_SIZE": 1}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError) as error:
        current_rank()
    monkeypatch.delenv(str(error.value.hint).removeprefix("unset "))
    assert current_rank().size == 1


def test_a_key_with_dots_in_a_file_and_a_key_for_a_file_are_written_as_the_hint_says(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout.max_turns: 3\n")
    (hint,) = printed_hints(printed([], str(file))).values()
    key, section = re.findall(r"`([\w.]+):`", hint)
    file.write_text(f"{section}:\n  {key}: 3\n")
    assert not printed([], str(file))
    (hint,) = printed_hints(printed([], "training.steps")).values()
    assert not printed([hint.rpartition(" ")[2].replace("VALUE", "3")])


def test_one_remedy_for_each_key_that_excludes_megatron() -> None:
    assert list(BESIDE_MEGATRON) == list(UNSUPPORTED_WITH_ACTOR)


EXEMPT = {
    "config/checks/profiles.py": "`test_profile_checks.py` follows them",
    "config/plan/disk.py": "`test_disk.py` follows it, on a disk without space",
    "config/checks/code_settings.py": "`test_code_settings.py` sets the key on the command line, as the hint says",
    "config/checks/processes.py": "names a command, which has a test of its own",
    "config/composed.py": "passes on the hint of an error of a running program",
    "config/plan/devices.py": "names an option",
    "config/fit/proposals.py": "names options of `quintet plan --fit`, which has tests of its own",
    "config/plan/mixed_envs.py": "a name is the user's choice",
    "config/plan/row_counts.py": "the plan has the same hint",
    "config/torchrun.py": "names an environment variable",
    "config/yaml_reader.py": "YAML that cannot be read has no keys",
}


def test_every_hint_about_native_keys_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_sites() as places:
        for words in CASES:
            printed(words)
        monkeypatch.setattr(hardware, "num_gpus", lambda: 8)
        for words in ON_A_GPU:
            printed(words)
        for words, gib in TOO_LARGE.values():
            printed(words, gib=gib)
    native = [site for site in hint_sites(SRC / "config") if "dialects" not in site.path and site.path not in EXEMPT]
    assert not [str(site) for site in native if not any((site.path, line) in places for line in site.lines)]
