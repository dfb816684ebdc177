"""If these fail, `quintet sft` begins what can't work, or says so without the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.cli.sft import run
from quintet.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["training.steps=3"], ["no section `sft`", "rl_or_sft=sft"]),
        (["sft.epochs=3"], ["no training data", "data.train_files"]),
        (["sft.devices=2", "sft.episodes={}"], ["sft.devices", "torchrun --nproc-per-node 2"]),
        (["sft.path=/nowhere", "sft.episodes={}"], ["sft.path", "/nowhere"]),
        (["sft.lora.path=/nowhere", "sft.episodes={}"], ["sft.lora.path", "/nowhere"]),
        (["sft.batch=1", "data.train_files=[nowhere.jsonl]"], ["nowhere.jsonl"]),
        (["sft.optimizer.kind=lion", "sft.episodes={}"], ["sft.optimizer.kind"]),
        (["sft.epoch=3"], ["sft.epochs"]),
        (
            ["sft.max_tokens=9", "sft.batch=1", "data.train_files=[rows.jsonl]"],
            ["rows.jsonl, row 0 has", "sft.max_tokens = 9"],
        ),
    ],
)
def test_the_users_faults_name_the_key(
    arguments: list[str], overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "How many words are too many?", "answer": "These are."}')
    with pytest.raises(UserError) as error:
        run(None, arguments, None, "refuse")
    for word in overrides:
        assert word in str(error.value)
