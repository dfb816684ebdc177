"""If these fail, a warm start shows the policy results that no tool returned, or trains on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.config.compose import load_experiment
from quintet.data.chat_templates import HERMES
from quintet.data.prompt_dataset import PromptDataset
from quintet.pipelines.warm_start import response_batch
from quintet.policies.model_loading import load_tokenizer


def test_demonstrated_calls_are_executed_and_only_responses_are_trained_on(
    policy_directory: Path, tmp_path: Path
) -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "20 + 3"}}\n</tool_call>'
    rows = [
        {"prompt": "20 + 3 = ?", "response": f"{call}<answer> 23 </answer>"},
        {"prompt": "1 = ?", "response": "<answer> 1 </answer>"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = load_tokenizer(policy_directory)
    config = load_experiment(
        None,
        [
            *("env.name=prompts", f"data.train_files={tmp_path}/rows.jsonl", "data.template=hermes"),
            *("rollout.tool_calls.tools={calculator: {}}", "rollout.max_response_tokens=300"),
            "rollout.max_prompt_tokens=800",
        ],
    ).experiment
    batch = response_batch(PromptDataset.from_config(config, tokenizer), 2, tokenizer, config)
    size = int(batch.lengths[0])
    first, second, mask = batch.tokens[:size], batch.tokens[size:], batch.loss_mask[:size]
    end = "<|im_end|>"
    assert tokenizer.decode(first[mask]) == f"{call}{end}<answer> 23 </answer>{end}"
    assert tokenizer.decode(first).endswith(
        f"{call}{end}\n<|im_start|>user\n<tool_response>\n23\n</tool_response>{end}\n<|im_start|>assistant\n"
        f"<answer> 23 </answer>{end}"
    )
    assert tokenizer.decode(second).endswith(f"<|im_start|>assistant\n<answer> 1 </answer>{end}")


@pytest.mark.parametrize("tools", [[], ["rollout.tool_calls.tools={calculator: {}}", "data.template=hermes"]])
def test_a_demonstration_beyond_the_limit_has_no_end_token(
    policy_directory: Path, tmp_path: Path, tools: list[str]
) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "20 + 3"}}</tool_call>'
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "20 + 3 = ?", "response": call}))
    tokenizer = load_tokenizer(policy_directory)
    size = len(tokenizer.encode(call, add_special_tokens=False))
    for limit, text in ((size + 1, f"{call}{tokenizer.eos_token}"), (size, call), (3, None)):
        options = ["env.name=prompts", f"data.train_files={tmp_path}/rows.jsonl", *tools]
        options += [f"rollout.max_response_tokens={limit}", "rollout.max_prompt_tokens=800"]
        config = load_experiment(None, options).experiment
        batch = response_batch(PromptDataset.from_config(config, tokenizer), 1, tokenizer, config)
        decoded = tokenizer.decode(batch.tokens[batch.loss_mask])
        assert decoded == text if text else call.startswith(decoded)
        # a call at the limit of tokens leaves no room for its result
        assert batch.truncated.tolist() == [limit <= size or bool(tools)]


def test_a_closing_tag_in_arguments_or_a_thought_ends_no_turn(policy_directory: Path, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "</tool_call>"}}</tool_call>'
    row = {"prompt": "20 + 3 = ?", "response": f"<think></tool_call></think>{call}no"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tokenizer = load_tokenizer(policy_directory)
    options = ["env.name=prompts", f"data.train_files={tmp_path}/rows.jsonl", "data.template=hermes"]
    options += ["rollout.tool_calls.tools={calculator: {}}", "rollout.max_prompt_tokens=800"]
    config = load_experiment(None, [*options, "rollout.max_response_tokens=300"]).experiment
    batch = response_batch(PromptDataset.from_config(config, tokenizer), 1, tokenizer, config)
    end = tokenizer.eos_token
    assert tokenizer.decode(batch.tokens[batch.loss_mask]) == f"<think></tool_call></think>{call}{end}no{end}"


@pytest.mark.parametrize("tools", [[], ["rollout.tool_calls.tools={calculator: {}}"]])
@pytest.mark.parametrize("response", ["<think>\n2</think> 4", "2</think> 4"])
def test_a_demonstrated_thought_that_the_prompt_opens_is_opened_once(
    policy_directory: Path, tmp_path: Path, response: str, tools: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2 + 2 = ?", "response": response}))
    (tmp_path / "template.jinja").write_text(f"{HERMES}{{% if add_generation_prompt %}}<think>\n{{% endif %}}")
    tokenizer = load_tokenizer(policy_directory)
    options = [
        "env.name=prompts",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"data.template={tmp_path}/template.jinja",
    ]
    config = load_experiment(None, [*options, *tools, "rollout.max_prompt_tokens=800"]).experiment
    batch = response_batch(PromptDataset.from_config(config, tokenizer), 1, tokenizer, config)
    assert tokenizer.decode(batch.tokens[batch.loss_mask]) == f"2</think> 4{tokenizer.eos_token}"
    assert tokenizer.decode(batch.tokens).count("<think>") == 1
