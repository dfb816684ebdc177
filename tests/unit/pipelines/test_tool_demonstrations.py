"""If these fail, a warm start shows the policy results that no tool returned, or trains on them."""

from __future__ import annotations

import json
from pathlib import Path

from quintet.config.compose import load_experiment
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
    first, second = batch.tokens.split(batch.lengths.tolist())
    mask, _ = batch.loss_mask.split(batch.lengths.tolist())
    end = "<|im_end|>"
    assert tokenizer.decode(first[mask]) == f"{call}{end}<answer> 23 </answer>{end}"
    assert tokenizer.decode(first).endswith(
        f"{call}{end}\n<|im_start|>user\n<tool_response>\n23\n</tool_response>{end}\n<|im_start|>assistant\n"
        f"<answer> 23 </answer>{end}"
    )
    assert tokenizer.decode(second).endswith(f"<|im_start|>assistant\n<answer> 1 </answer>{end}")
