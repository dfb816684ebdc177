"""If these fail, a reward model that should be sharded takes the memory of a whole copy on each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForSequenceClassification

from quintet.policies.model_loading import load_tokenizer

RANK = """
import sys
from pathlib import Path
from quintet.config.native.data import RewardModelConfig
from quintet.training.parallel.process_group import RankGroup
from quintet.training.sharded_reward_model import load_reward_model
rank, directory, file = sys.argv[1:]
ranks = RankGroup.join(int(rank), 2, Path(file))
config = RewardModelConfig(path=directory, min_sharded_parameters=1000)
model = load_reward_model(config, Path(directory), 64, ranks)._model._model
print(sum(parameter.to_local().numel() for parameter in model.parameters()))
ranks.destroy()
"""


def test_each_rank_has_a_part_of_the_weights(policy_directory: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    model = AutoModelForSequenceClassification.from_pretrained(policy_directory, num_labels=1)
    model.save_pretrained(directory)
    load_tokenizer(policy_directory).save_pretrained(directory)
    words = [sys.executable, "-c", RANK]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    files = [str(directory), str(tmp_path / "rendezvous")]
    ranks = [
        subprocess.Popen([*words, str(rank), *files], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        counts = [int(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    total = sum(parameter.numel() for parameter in model.parameters())
    # the only row of the classifier is on one rank
    assert sum(counts) == total
    assert max(counts) < 0.6 * total
