"""If these fail, a reward model that should be sharded takes the memory of a whole copy on each rank."""

from __future__ import annotations

from pathlib import Path

from rank_processes import SUPPORT, run_ranks
from transformers import AutoModelForSequenceClassification

from quintet.policies.model_loading import load_tokenizer

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


def test_each_rank_has_a_part_of_the_weights(policy_directory: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    model = AutoModelForSequenceClassification.from_pretrained(policy_directory, num_labels=1)
    model.save_pretrained(directory)
    load_tokenizer(policy_directory).save_pretrained(directory)
    (tmp_path / "rank.py").write_text(RANK)
    counts = [int(output) for output in run_ranks(tmp_path / "rank.py", 2, tmp_path, directory)]
    total = sum(parameter.numel() for parameter in model.parameters())
    # the only row of the classifier is on one rank
    assert sum(counts) == total
    assert max(counts) < 0.6 * total
