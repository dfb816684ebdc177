"""If these fail, a run saved on some devices can't go on on others, or goes on with another optimizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from resharding_ranks import CHAINS, ENV, learner, step
from torch import Tensor

from quintet.errors import MachineError
from quintet.training.checkpoint.learner_state import restore_learner, snapshot_learner
from quintet.training.checkpoint.shards import ShardReader
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.checkpoint.state_dict import model_state_dict, optimizer_state_dict


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes saved, one arrangement after the other."""
    place = tmp_path_factory.mktemp("resharding")
    script = Path(__file__).parents[3] / "support" / "resharding_ranks.py"
    started = [
        subprocess.Popen(
            [sys.executable, script, place, str(rank), place / "meeting"], stderr=subprocess.PIPE, text=True
        )
        for rank in range(ENV)
    ]
    try:
        told = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ENV, "\n".join(told)[-4000:]
    return place


def read(directory: Path, name: str) -> dict[str, Tensor]:
    """Every tensor that lies there, as a whole."""
    found: dict[str, Tensor] = {}
    for stem in ("model", "optim"):
        stored = ShardReader.open(directory, f"{name}/{stem}")
        assert stored is not None
        empty = {key: torch.full(stored.shape(key), torch.nan, dtype=stored.dtype(key)) for key in stored.names}
        stored.load_into(empty)
        found |= {f"{stem}:{key}": tensor for key, tensor in empty.items()}
    return found


STEPS = [(name, number) for name, chain in CHAINS.items() for number in range(1, len(chain))]


@pytest.mark.parametrize(("chain", "number"), STEPS, ids=lambda value: str(value))
def test_another_parallel_layout_restores_every_bit(saved: Path, chain: str, number: int) -> None:
    before, after = read(saved / chain / f"{number - 1}", "actor"), read(saved / chain / f"{number}", "again")
    assert before.keys() == after.keys(), CHAINS[chain][number]
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), f"{name} from {CHAINS[chain][number - 1]} to {CHAINS[chain][number]}"


@pytest.mark.parametrize("chain", CHAINS)
def test_steps_between_restores_agree_with_one_process(saved: Path, chain: str) -> None:
    """The moments that were taken up are those that the next step uses, or its weights would be others."""
    one = learner("plain", {}, tied=chain == "tied")
    for number, arrangement in enumerate(CHAINS[chain]):
        step(one)
        found = read(saved / chain / f"{number}", "actor")
        for name, tensor in model_state_dict(one.strategy.module).items():
            torch.testing.assert_close(
                found[f"model:{name}"], tensor.detach(), atol=1e-5, rtol=1e-5, msg=f"{name} after {arrangement}"
            )
        for name, tensor in optimizer_state_dict(one.strategy.module, one.optimizer).items():
            torch.testing.assert_close(found[f"optim:{name}"], tensor, atol=1e-5, rtol=1e-5)


def test_each_rank_writes_its_shards_under_the_models_names(saved: Path) -> None:
    found = read(saved / "tied/2", "actor")
    assert "model:model.layers.1.mlp.up_proj.weight" in found
    assert "optim:model.embed_tokens.weight.exp_avg_sq" in found
    assert "model:lm_head.weight" not in found, "a tied head is the embedding"
    files = sorted((saved / "tied/2/actor").glob("optim*.safetensors"))
    assert len(files) == 4
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 2 * min(sizes), sizes


def test_replicated_tensors_are_written_once(saved: Path) -> None:
    whole = [path.stat().st_size for path in (saved / "tied/9/actor").glob("model*.safetensors")]
    alone = [path.stat().st_size for path in (saved / "tied/0/actor").glob("model*.safetensors")]
    assert whole == alone


def test_another_model_or_missing_shards_are_errors(saved: Path, tmp_path: Path) -> None:
    one = learner("plain", {}, tied=True)
    with pytest.raises(MachineError, match=r"has no tensor lm_head\.weight"):
        restore_learner(learner("plain", {}, tied=False), saved / "tied/0", "actor", ["model"])
    copies = snapshot_learner(one, "actor", ["model"], HostBuffers())
    copies.write(tmp_path)
    with pytest.raises(MachineError, match="actor/optim"):
        restore_learner(one, tmp_path, "actor", ["optimizer"])
    table = tmp_path / "actor/model_world_size_1_rank_0.json"
    table.rename(table.with_name("model_world_size_2_rank_0.json"))
    with pytest.raises(MachineError, match="only 1 of the 2 shard tables"):
        restore_learner(one, tmp_path, "actor", ["model"])
