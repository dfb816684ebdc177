"""If these fail, a run whose policy calls tools doesn't train, natively or from a configuration of verl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quintet.data.chat_templates import CHATML

Command = Any

TEMPLATE = CHATML + "{# calls of tools are between <tool_call> tags #}"
"""Describes no tools, which makes prompts short."""

NATIVE = """\
name: sums
env: {name: prompts}
policy: {preset: numbers-1m}
data: {train_files: sums/train.parquet, validation_files: sums/validation.parquet, template: short.jinja}
rollout:
  tool_calls: {tools: {calculator: {description: Adds., parameters: {expression: string}}}}
  max_turns: 2
  window_size: null
  max_prompt_tokens: 64
  max_response_tokens: 80
warm_start: {episodes: 64, updates: 60, turns_per_update: 16, until_success: null}
training: {steps: 2, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
validation: {every_steps: 2}
tracking: {trajectories_every_steps: 1, loggers: [jsonl]}
"""
VERL = """\
data: {train_files: sums/train.parquet, val_files: sums/validation.parquet, train_batch_size: 4, return_raw_chat: true,
       max_prompt_length: 64, max_response_length: 80}
actor_rollout_ref:
  hybrid_engine: true
  model: {path: policy}
  actor: {ppo_mini_batch_size: 4, ppo_micro_batch_size_per_gpu: 8}
  rollout:
    name: hf
    n: 4
    dtype: float32
    tensor_model_parallel_size: 1
    log_prob_micro_batch_size_per_gpu: 8
    agent: {default_agent_loop: tool_agent}
    multi_turn: {enable: true, max_assistant_turns: 2, tool_config_path: tools.yaml}
algorithm: {adv_estimator: grpo}
trainer: {total_training_steps: 2, n_gpus_per_node: 1, logger: [console], default_local_dir: runs/verl, test_freq: 2}
"""
TOOLS = """\
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function: {name: calculator, description: Adds., parameters: {expression: string}}
"""
FUNCTIONS = '''
from verl.tools.function_tool import function_tool


@function_tool("calculator")
def add(expression: str) -> str:
    """Adds numbers.

    Args:
        expression: a sum
    """
    return str(sum(map(int, expression.split("+"))))
'''


def played(run: Path, step: int) -> list[dict[str, Any]]:
    lines = (run / f"trajectories/validation/step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_policy_learns_to_call_a_tool_and_trains_on_natively_and_as_under_verl(
    quintet: Command, tmp_path: Path
) -> None:
    sizes = ("--train", "64", "--validation", "8")
    quintet("data", "make", "addition", "sums", "digits=1", "instruction=", "--style", "tool", *sizes)
    (tmp_path / "sums.yaml").write_text(NATIVE)
    (tmp_path / "short.jinja").write_text(TEMPLATE)
    quintet("train", "sums.yaml")
    run = tmp_path / "runs/sums"
    lines = metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["tool/calls"] > 0 for line in lines[1:])
    turns = [turn for episode in played(run, 2) for turn in episode["turns"]]
    assert any("<tool_call>" in turn["text"] for turn in turns)
    (run / "checkpoints/global_step_2/hf").rename(tmp_path / "policy")
    (tmp_path / "policy/chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "verl.yaml").write_text(VERL)
    quintet("train", "verl.yaml")
    run = tmp_path / "runs/verl"
    lines = metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    # the policy calls by the name that it has learnt, and the class of verl answers
    assert all(line["tool/calls"] > 0 and line["tool/failed_calls"] < line["tool/calls"] for line in lines[1:])
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    turns = "actor_rollout_ref.rollout.multi_turn"
    functions = (f"{turns}.tool_config_path=null", f"{turns}.function_tool_path=functions.py")
    quintet("train", "verl.yaml", *functions, "trainer.default_local_dir=runs/functions")
    lines = metrics(tmp_path / "runs/functions")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["tool/calls"] > 0 and line["tool/failed_calls"] < line["tool/calls"] for line in lines[1:])
