"""If these fail, a run whose policy searches in a retrieval service doesn't train, natively or from a configuration of
verl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from json_service import json_service

from quintet.data.chat_templates import CHATML

Command = Any

TEMPLATE = CHATML + "{# tools are called between <tool_call> tags #}"
"""Describes no tools, which makes prompts short."""
NATIVE = """\
name: search
env: {name: prompts}
policy: {preset: numbers-1m}
data: {train_files: train.jsonl, validation_files: train.jsonl, template: short.jinja}
rollout:
  tool_calls: {tools: {search: {arguments: {url: "URL"}}}}
  max_turns: 2
  window_size: null
  max_prompt_tokens: 64
  max_response_tokens: 160
warm_start: {episodes: 8, updates: 60, turns_per_update: 16, until_success: null}
training: {steps: 2, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
tracking: {loggers: [jsonl]}
"""
CONFIG = """\
hydra:
  searchpath:
    - file://verl/trainer/config

defaults:
  - ppo_trainer
  - _self_

data:
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True
  shuffle: False

actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_assistant_turns: 2
      format: qwen
"""
TOOLS = """\
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config:
      retrieval_service_url: URL
      num_workers: 120
      rate_limit: 120
      timeout: 30
      type: native
    tool_schema:
      type: function
      function:
        name: search
        description: Searches the web for relevant information based on the given query.
        parameters:
          type: object
          properties:
            query_list: {type: array, item: {type: string}, description: Queries.}
          required: [query_list]
"""
SCRIPT = """\
set -x

ulimit -n 65535

PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/config"

TRAIN_DATA="$HOME/data/searchR1_processed_direct/train.parquet"
VAL_DATA="$HOME/data/searchR1_processed_direct/test.parquet"

TOOL_CONFIG="$CONFIG_PATH/tool_config/search_tool_config.yaml"

python3 -m verl.trainer.main_ppo \\
    --config-path="$CONFIG_PATH" \\
    --config-name='search_multiturn_grpo' \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=512 \\
    data.max_prompt_length=4096 \\
    data.max_response_length=3000 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \\
    trainer.val_before_train=False \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=8 \\
    trainer.test_freq=50 \\
    data.train_files="$TRAIN_DATA" \\
    data.val_files="$VAL_DATA"  \\
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$TOOL_CONFIG" \\
    trainer.total_epochs=1 $@
"""
SMALL = [
    *("data.train_files=train.jsonl", "data.val_files=train.jsonl", "data.train_batch_size=4"),
    *("data.max_prompt_length=64", "data.max_response_length=160", "actor_rollout_ref.model.path=policy"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.name=hf"),
    *("actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.n=4", "trainer.logger=[console]"),
    *("trainer.n_gpus_per_node=1", "trainer.total_training_steps=2", "trainer.test_freq=-1"),
    *("trainer.default_local_dir=runs/verl", "trainer.experiment_name=verl"),
]


def rows(path: Path) -> None:
    """Rows as verl's preprocessing for Search-R1 writes them; only the service knows the answers."""
    lines = []
    for number in range(8):
        call = json.dumps({"name": "search", "arguments": {"query_list": [f"age {number}"]}})
        lines.append(
            {
                "data_source": "searchR1_nq",
                "prompt": [{"role": "user", "content": f"age {number}?"}],
                "reward_model": {"style": "rule", "ground_truth": {"target": [f"{number}{number}"]}},
                "extra_info": {"need_tools_kwargs": True, "tools_kwargs": {"search": {"create_kwargs": {"q": "x"}}}},
                "response": f"<tool_call>\n{call}\n</tool_call><answer>{number}{number}</answer>",
            }
        )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_policy_searches_natively_and_as_under_verl(quintet: Command, tmp_path: Path) -> None:
    queries: list[str] = []

    def retrieve(body: Any) -> tuple[int, Any]:
        queries.extend(body["queries"])
        return 200, {"result": [[{"document": {"contents": f"age\n{query[-1] * 2}"}}] for query in body["queries"]]}

    rows(tmp_path / "train.jsonl")
    (tmp_path / "short.jinja").write_text(TEMPLATE)
    with json_service(retrieve) as url:
        (tmp_path / "search.yaml").write_text(NATIVE.replace("URL", url))
        quintet("train", "search.yaml")
        run = tmp_path / "runs/search"
        lines = metrics(run)
        assert [line["step"] for line in lines] == [0, 1, 2]
        assert all(line["tool/calls"] > line["tool/failed_calls"] for line in lines[1:])
        assert any(query.startswith("age ") for query in queries)
        queries.clear()
        (run / "checkpoints/global_step_2/hf").rename(tmp_path / "policy")
        (tmp_path / "policy/chat_template.jinja").write_text(TEMPLATE)
        (tmp_path / "config/tool_config").mkdir(parents=True)
        (tmp_path / "config/tool_config/search_tool_config.yaml").write_text(TOOLS.replace("URL", url))
        (tmp_path / "config/search_multiturn_grpo.yaml").write_text(CONFIG)
        (tmp_path / "run.sh").write_text(SCRIPT)
        quintet("train", "run.sh", *SMALL)
        lines = metrics(tmp_path / "runs/verl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["tool/calls"] > line["tool/failed_calls"] for line in lines)
    assert any(query.startswith("age ") for query in queries)
