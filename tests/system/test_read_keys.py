"""If these fail, `quintet plan` says that a run reads a key which it doesn't, or that a key is silent which counts.

Each kind of run that can run here is started with a configuration whose fields record that they are read: with each
engine and learner backend, on one rank and on several, in turns with the rollout and overlapped with it. SGLang cannot
run here: `config/checks/engines.py` lists its options by hand, and it refuses the others.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm_processes
from recorded_reads import leaves

from quintet.config.checks.unread_keys import UnreadRule, condition_values, unread_reasons, unread_rules
from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.policies.tiny_models import create_preset_policy

STORED_ANSWERS = Path(__file__).parents[2] / "examples/native/stored_answers.jsonl"
RECORDER = Path(__file__).parents[1] / "support/recorded_reads.py"
ELSEWHERE = {
    "external_libs": "while the configuration is composed",
    "checkpoint.load_contents": "when a run continues",
    "checkpoint.delete_after_load": "when a run continues",
    "rollout.tool_calls.max_result_chars": "when the policy calls a tool",
    "rollout.tool_calls.kept_part": "when the policy calls a tool",
    "rollout.format_reward": "when a response is valid",
    "warm_start.until_success": "when the demonstrations are learned",
    "warm_start.check_every_updates": "when the demonstrations are learned",
    "critic.optimizer.warmup_start": "in a longer warm-up",
    "sft.optimizer.warmup_start": "in a longer warm-up",
}
"""Keys that are read, but not in so short a run."""
READ_IN_VAIN = (
    "critic.optimizer.",  # the learning rates of a step are computed for both optimizers
    "critic.warmup_steps",  # compared with the step before it is asked whether there is a critic
    "critic.shares_policy",
    "policy.vision.freeze",  # of a model without a vision encoder
)
"""Keys that are read where they change nothing."""
STEPS = "training: {steps: 2, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}"
SHORT = f"""\
{STEPS}
warm_start: {{episodes: 60, updates: 4, turns_per_update: 32, until_success: 1.0, check_every_updates: 1,
             optimizer: {{warmup_steps: 1}}}}
actor: {{optimizer: {{warmup_steps: 0}}}}
critic: {{optimizer: {{warmup_steps: 1}}}}
validation: {{episodes: 8, every_steps: 1}}
checkpoint: {{every_steps: 1}}
tracking: {{trajectories_every_steps: 1, loggers: [jsonl]}}
"""
LAKE = f"{SHORT}rollout: {{max_turns: 4, format_reward: 0.1}}\n"
SUMS = f"""\
{SHORT}env: {{name: prompts}}
policy: {{preset: numbers-1m}}
data: {{train_files: sums/train.parquet, validation_files: sums/validation.parquet}}
"""
PROMPTS = f"{SUMS}rollout: {{max_turns: 1, window_size: null, max_prompt_tokens: 64, max_response_tokens: 16}}\n"
TOOLS = f"""\
{SUMS.replace("validation.parquet", "validation.parquet, template: hermes")}rollout:
  tool_calls: {{tools: {{calculator: {{description: Adds., parameters: {{expression: string}}}}}}}}
  max_turns: 2
  window_size: null
  max_prompt_tokens: 200
  max_response_tokens: 80
"""
VISION = f"""\
{SHORT}env: {{name: frozenlake, size: 3, render: vision, tile_size: 16}}
policy: {{preset: grid-vl}}
rollout: {{max_turns: 3, max_response_tokens: 16}}
"""
ARM = f"""\
{SHORT}env: {{name: simulator, simulator: arm, task: reach, max_steps: 8, camera_height: 16, camera_width: 16}}
policy:
  preset: arm-vla
  overrides: {{hidden: 32, layers: 1, heads: 4, mlp: 64, bins: 21, patch: 4, merge: 2, image: 16}}
  vla: {{action_chunk: 4, use_proprioception: true}}
algorithm: {{advantage: {{name: grpo}}, loss: {{name: ppo}}, level: chunk, reward_level: chunk}}
"""
TUNING = """\
policy: {preset: grid-1m}
data: {train_files: [train.jsonl], validation_files: [held.jsonl], messages_key: messages}
sft: {epochs: 1, batch: 10, before_training: true, optimizer: {warmup_steps: 1, weight_decay_start: 0.1}}
training: {threads: 1}
checkpoint: {every_steps: 1}
tracking: {loggers: [jsonl]}
"""
GENERATION = """\
env: {name: prompts}
policy: {preset: null, path: model}
data: {train_files: sums/train.parquet}
rollout: {max_turns: 1, window_size: null, max_prompt_tokens: 64, max_response_tokens: 8}
warm_start: null
generation: {output_path: answers.parquet, samples: 2, batch_size: 8}
"""
TWO_DEVICES = ("placement.devices_per_node=2",)
APART = (*TWO_DEVICES, "placement.actor.devices=[0]", "placement.rollout.devices=[1]")
ASYNCHRONOUS = ("rollout.async_ratio=0.5", "rollout.partial=true", "rollout.max_staleness=4")
PIPELINED = ("training.pipelined=true", "actor.shuffle=false", "algorithm.drop_groups_without_signal=false")
CRITIC = ("algorithm={advantage: {name: gae}, kl: {apply_to: reward, target: 0.1}}",)
VALUE_HEAD = ("critic.shares_policy=true", "algorithm.advantage.name=gae")


@dataclass(frozen=True)
class Run:
    """A run whose reads are recorded."""

    text: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    options: tuple[str, ...] = ()


RUNS = {
    "episodes": Run(LAKE),
    "episodes with a critic and a reference": Run(LAKE, CRITIC),
    "episodes on FSDP": Run(LAKE, ("actor.backend=fsdp",)),
    "episodes on Megatron": Run(LAKE, ("actor.backend=megatron",)),
    "episodes on two ranks": Run(LAKE, (*TWO_DEVICES, *CRITIC), 2),
    "episodes on two ranks of Megatron": Run(LAKE, (*TWO_DEVICES, "actor.backend=megatron"), 2),
    "episodes on two ranks under Ray": Run(LAKE, TWO_DEVICES, 2, ("--ray", "local")),
    "asynchronous episodes on shared devices": Run(LAKE, ASYNCHRONOUS),
    "overlapped episodes": Run(LAKE, (*APART, *ASYNCHRONOUS), 2),
    "prompts": Run(PROMPTS),
    "prompts on two ranks": Run(PROMPTS, TWO_DEVICES, 2),
    "overlapped prompts": Run(PROMPTS, (*APART, *ASYNCHRONOUS), 2),
    "prompts in pipelined steps": Run(PROMPTS, (*APART, *PIPELINED), 2),
    "prompts on vLLM": Run(PROMPTS, ("rollout.engine=vllm",)),
    "tools": Run(TOOLS),
    "overlapped tools": Run(TOOLS, (*APART, *ASYNCHRONOUS), 2),
    "images": Run(VISION),
    "images on two ranks": Run(VISION, TWO_DEVICES, 2),
    "robots": Run(ARM),
    "robots with a value head": Run(ARM, VALUE_HEAD),
    "robots on two ranks": Run(ARM, TWO_DEVICES, 2),
    "robots on devices apart": Run(ARM, (*APART, "placement.envs.devices=[1]"), 2),
    "fine-tuning": Run(TUNING),
    "fine-tuning on two ranks": Run(TUNING, TWO_DEVICES, 2),
    "generation": Run(GENERATION),
    "generation on two ranks": Run(GENERATION, TWO_DEVICES, 2),
    "evaluation": Run("evaluation: {path: stored.jsonl}\nreward: {}\n"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the data and the model of the runs."""
    path = tmp_path_factory.mktemp("reads")
    sums = ["data", "make", "addition", "sums", "digits=1", "--train", "40", "--validation", "6"]
    warm_processes.run([sys.executable, "-m", "quintet", *sums], cwd=path, check=True, capture_output=True)
    roles = ["user", "assistant", "user", "assistant"]
    for name, numbers in {"train": range(40), "held": range(40, 48)}.items():
        talks = [[f"{number} + 1 = ?", str(number + 1), "And more?", str(number + 2)] for number in numbers]
        rows = [[{"role": role, "content": text} for role, text in zip(roles, talk, strict=True)] for talk in talks]
        (path / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    shutil.copy(STORED_ANSWERS, path / "stored.jsonl")
    create_preset_policy("numbers-1m", path / "model", ["1 + 2 = 3", "4 5 6 7 8 9 0"], 0)
    return path


def record(directory: Path, name: str, run: Run) -> tuple[dict[str, set[str]], set[str]]:
    """Run a configuration; return the modules that read each key in any rank, and the fields, by class, that workers
    read in sections that they were sent."""
    file = directory / f"{name.replace(' ', '-')}.yaml"
    file.write_text(f"name: {file.stem}\n{run.text}")
    command = "eval" if name == "evaluation" else "train"
    is_torchrun = run.ranks > 1 and not run.options
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(run.ranks)] if is_torchrun else []
    recorder = [str(RECORDER), str(file.with_suffix("")), command, str(file), *run.overrides, *run.options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm_processes.run(
        [sys.executable, *torchrun, *recorder],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reads: dict[str, set[str]] = defaultdict(set)
    sent: set[str] = set()
    for rank in range(run.ranks):
        recorded = json.loads(file.with_suffix(f".{rank}.json").read_text())
        sent |= {*recorded["unplaced"]} if rank else set()
        for key, modules in recorded["reads"].items():
            reads[key] |= {*modules}
    return reads, sent


def field_of(experiment: Experiment, key: str) -> str:
    """Return the class that has a key, and its field."""
    node: Any = experiment
    *sections, name = key.split(".")
    for section in sections:
        node = node[section] if isinstance(node, dict) else getattr(node, section)
    return f"{type(node).__name__}.{name}"


@pytest.mark.parametrize("name", RUNS)
def test_a_key_is_silent_exactly_where_the_plan_says_so(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    for part, module in {"Megatron": "megatron.core", "robots": "mujoco", "vLLM": "vllm", "Ray": "ray"}.items():
        if part in name:
            pytest.importorskip(module)
    reads, sent = record(directory, name, RUNS[name])
    experiment = load_experiment(str(directory / f"{name.replace(' ', '-')}.yaml"), RUNS[name].overrides).experiment
    reason_of = unread_reasons(experiment)
    silent = {key for key in leaves(experiment) if reason_of(key) is not None}
    unread = {*leaves(experiment)} - {*reads} - silent - {*ELSEWHERE}
    assert sorted(key for key in unread if field_of(experiment, key) not in sent) == [], "never read, and not said"
    counting = [key for key in read_in_vain(experiment) if any(map(counts, reads.get(key, ())))]
    assert counting == [], "read, and said to have no effect"


def read_in_vain(experiment: Experiment) -> Iterator[str]:
    """Keys that the kind of run, and no other key, keeps from having an effect. A null section is read to see that."""
    values = condition_values(experiment)
    for key in leaves(experiment):
        rules = (rule for rule in unread_rules() if all(name.startswith("run.") for name in conditions(rule)))
        reasons = (rule.reason_for(prefix, values) for rule in rules for prefix in rule.prefixes(key))
        if any(reasons) and values.get(key) is not None and not key.startswith(READ_IN_VAIN):
            yield key


def conditions(rule: UnreadRule) -> list[str]:
    return [*(rule.when or ()), *(rule.needs or ())]


def counts(module: str) -> bool:
    """Whether a module reads keys for a run, not to check, describe or estimate it."""
    return not module.startswith(("quintet.config.", "quintet.tracking."))
