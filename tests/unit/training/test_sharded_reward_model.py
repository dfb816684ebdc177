"""If these fail, a reward model that should be sharded takes the memory of a whole copy on each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import SUPPORT, run_ranks
from torch import nn
from transformers import AutoModelForSequenceClassification, Qwen2ForSequenceClassification
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from quintet.config.native.data import RewardModelConfig
from quintet.policies.model_loading import load_tokenizer
from quintet.training import sharded_reward_model
from quintet.training.parallel.process_group import RankGroup

RANK = f"""
import sys
from pathlib import Path
sys.path.append({str(SUPPORT)!r})
from rank_processes import join_group, leave_group
from quintet.config.native.data import RewardModelConfig
from quintet.training.sharded_reward_model import load_reward_model
rank, num_ranks, rendezvous_file, directory = sys.argv[1:]
ranks = join_group(int(rank), int(num_ranks), Path(rendezvous_file))
config = RewardModelConfig(path=directory, min_sharded_parameters=1000)
model = load_reward_model(config, Path(directory), 64, ranks)._model._model
print(sum(parameter.to_local().numel() for parameter in model.parameters()))
leave_group(ranks)
"""


@pytest.fixture
def directory(policy_directory: Path, tmp_path: Path) -> Path:
    """A reward model of random weights."""
    directory = tmp_path / "model"
    AutoModelForSequenceClassification.from_pretrained(policy_directory, num_labels=1).save_pretrained(directory)
    load_tokenizer(policy_directory).save_pretrained(directory)
    return directory


def test_each_rank_has_a_part_of_the_weights(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    counts = [int(output) for output in run_ranks(tmp_path / "rank.py", 2, tmp_path, directory)]
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    total = sum(parameter.numel() for parameter in model.parameters())
    # the only row of the classifier is on one rank
    assert sum(counts) == total
    assert max(counts) < 0.6 * total


def test_modules_of_the_configured_size_are_gathered_together(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer of the MLP has 32 × 64 weights; those of the attention have fewer, but more together."""
    units: list[nn.Module] = []
    monkeypatch.setattr(sharded_reward_model, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(sharded_reward_model, "fully_shard", lambda unit, mesh: units.append(unit))
    config = RewardModelConfig(path=str(directory), min_sharded_parameters=32 * 64)
    sharded_reward_model.load_reward_model(config, directory, 64, RankGroup(0, 2))
    *parts, whole = units
    layer = [Qwen2Attention, nn.Linear, nn.Linear, nn.Linear]
    assert [type(part) for part in parts] == [nn.Embedding, *layer, *layer]
    assert isinstance(whole, Qwen2ForSequenceClassification)
