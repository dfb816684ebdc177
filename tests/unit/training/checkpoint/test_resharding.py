"""If these fail, a run saved on some devices can't go on on others, or goes on with another optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from resharding_ranks import CHAINS, NUM_RANKS, build_learner, step
from torch import Tensor

from quintet.errors import MachineError
from quintet.training.checkpoint.learner_state import restore_learner, snapshot_learner
from quintet.training.checkpoint.shards import ShardReader
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.checkpoint.state_dict import model_state_dict, optimizer_state_dict


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with what four ranks saved, one parallel layout after the other."""
    directory = tmp_path_factory.mktemp("resharding")
    run_ranks("resharding_ranks.py", NUM_RANKS, directory, directory)
    return directory


def read(directory: Path, name: str) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint in full."""
    tensors: dict[str, Tensor] = {}
    for stem in ("model", "optim"):
        stored = ShardReader.open(directory, f"{name}/{stem}")
        assert stored is not None
        empty = {key: torch.full(stored.shape(key), torch.nan, dtype=stored.dtype(key)) for key in stored.names}
        stored.load_into(empty)
        tensors |= {f"{stem}:{key}": tensor for key, tensor in empty.items()}
    return tensors


STEPS = [(name, number) for name, chain in CHAINS.items() for number in range(1, len(chain))]


@pytest.mark.parametrize(("chain", "number"), STEPS, ids=lambda value: str(value))
def test_another_parallel_layout_restores_every_bit(saved: Path, chain: str, number: int) -> None:
    before, after = read(saved / chain / f"{number - 1}", "actor"), read(saved / chain / f"{number}", "again")
    assert before.keys() == after.keys(), CHAINS[chain][number]
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), f"{name} from {CHAINS[chain][number - 1]} to {CHAINS[chain][number]}"


@pytest.mark.parametrize("chain", CHAINS)
def test_steps_between_restores_agree_with_one_process(saved: Path, chain: str) -> None:
    """A step with other moments than the restored ones would result in other weights."""
    learner = build_learner("plain", {}, tied=chain == "tied")
    for number, layout in enumerate(CHAINS[chain]):
        step(learner)
        saved_tensors = read(saved / chain / f"{number}", "actor")
        for name, tensor in model_state_dict(learner.strategy.module).items():
            torch.testing.assert_close(
                saved_tensors[f"model:{name}"], tensor.detach(), atol=1e-5, rtol=1e-5, msg=f"{name} after {layout}"
            )
        for name, tensor in optimizer_state_dict(learner.strategy.module, learner.optimizer).items():
            torch.testing.assert_close(saved_tensors[f"optim:{name}"], tensor, atol=1e-5, rtol=1e-5)


def test_each_rank_writes_its_shards_under_the_models_names(saved: Path) -> None:
    saved_tensors = read(saved / "tied/2", "actor")
    assert "model:model.layers.1.mlp.up_proj.weight" in saved_tensors
    assert "optim:model.embed_tokens.weight.exp_avg_sq" in saved_tensors
    assert "model:lm_head.weight" not in saved_tensors, "a tied head is the embedding"
    files = sorted((saved / "tied/2/actor").glob("optim*.safetensors"))
    assert len(files) == 4
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 2 * min(sizes), sizes


def test_replicated_tensors_are_written_once(saved: Path) -> None:
    sizes_of_two_ranks = [path.stat().st_size for path in (saved / "tied/9/actor").glob("model*.safetensors")]
    sizes_of_one_rank = [path.stat().st_size for path in (saved / "tied/0/actor").glob("model*.safetensors")]
    assert sizes_of_two_ranks == sizes_of_one_rank


def test_another_model_or_missing_shards_are_errors(saved: Path, tmp_path: Path) -> None:
    learner = build_learner("plain", {}, tied=True)
    with pytest.raises(MachineError, match=r"has no tensor lm_head\.weight"):
        restore_learner(build_learner("plain", {}, tied=False), saved / "tied/0", "actor", ["model"])
    copies = snapshot_learner(learner, "actor", ["model"], HostBuffers())
    copies.write(tmp_path)
    with pytest.raises(MachineError, match="actor/optim"):
        restore_learner(learner, tmp_path, "actor", ["optimizer"])
    table = tmp_path / "actor/model_world_size_1_rank_0.json"
    table.rename(table.with_name("model_world_size_2_rank_0.json"))
    with pytest.raises(MachineError, match="only 1 of the 2 shard tables"):
        restore_learner(learner, tmp_path, "actor", ["model"])
