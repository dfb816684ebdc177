"""If these fail, a hint about checkpoints, optimizers or ranks leads nowhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hint_cases import HintCase, case, name_of, sites_without_case
from saved_checkpoints import save_checkpoint
from torch import nn

from quintet.config.native.learners import OptimizerConfig
from quintet.config.torchrun import RankInfo
from quintet.training.checkpoint.async_save import AsyncCheckpointer
from quintet.training.checkpoint.checkpoint import Checkpoint, open_checkpoint
from quintet.training.checkpoint.learner_state import _open_shards
from quintet.training.checkpoint.remote_store import RemoteStore, open_file_system
from quintet.training.checkpoint.shards import ShardReader, local_shards, write_shards
from quintet.training.optim.optimizer import build_optimizer
from quintet.training.parallel import rendezvous
from quintet.training.parallel.process_group import RankGroup

RUN = Path("runs/a")


def shards_of(layer: nn.Linear) -> ShardReader:
    """The reader of a checkpoint of this model."""
    ranks = RankGroup()
    write_shards(Path("shards"), "actor/model", local_shards(layer.state_dict(), ranks), ranks)
    reader = ShardReader.open(Path("shards"), "actor/model")
    assert reader
    return reader


def resumed(layers: tuple[nn.Linear, nn.Linear]) -> None:
    """A model from the checkpoint of another one."""
    saved, model = layers
    shards_of(saved).load_into(model.state_dict())


def loaded(contents: Sequence[str]) -> None:
    """Parts of a checkpoint that has no optimizer."""
    shards_of(nn.Linear(2, 2))
    for content in contents:
        _open_shards(Path("shards"), f"actor/{content}", content)


def open_checkpoint_of(directory: str) -> None:
    open_checkpoint(Path(directory))


def waited(ranks: Sequence[int]) -> None:
    """Wait for the part of rank 1, after these ranks have written theirs."""
    status = Path("status")
    shutil.rmtree(status, ignore_errors=True)
    status.mkdir()
    for rank in ranks:
        (status / f"{rank}.written").touch()
    saver = AsyncCheckpointer(Path("saved"), keep=1, other_ranks=["1"], timeout_seconds=0.0)
    saver._wait_for_other_ranks(status)
    saver.close()


def stored(urls: Sequence[str]) -> None:
    for url in urls:
        RemoteStore.from_url(url).check_writable()


def supported(urls: Sequence[str]) -> None:
    for url in urls:
        open_file_system(url, "checkpoint.remote_dir")


def elsewhere(urls: Sequence[str]) -> None:
    for url in urls:
        RemoteStore.from_url(url).check_is_not(RUN / "checkpoints")


def optimized(kind_and_backend: tuple[str, str]) -> None:
    """FSDP's parameters are flat."""
    kind, backend = kind_and_backend
    layer = nn.Linear(4, 4)
    matrices = [nn.Parameter(layer.weight.flatten())] if backend == "fsdp" else [layer.weight]
    build_optimizer(OptimizerConfig(kind=kind), matrices, matrices)  # type: ignore[arg-type]


def met(other: dict[str, object] | None) -> None:
    """Rank 0 meets another rank, or nobody."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    if other is not None:
        store.set("card/1", json.dumps({"host": "", "process": 1, "gpu": None, "components": "", **other}))
    described = {"fingerprint": "same", "components": ""}
    rendezvous._exchange_processes(store, RankInfo(0, 2, 0, 2), range(2), described, 0.05)


def placed(gpus: Sequence[str | None]) -> None:
    """Ranks with these GPUs."""
    rendezvous._check_no_shared_gpus({rank: {"gpu": gpu} for rank, gpu in enumerate(gpus)})


def counted(state: dict[str, object]) -> None:
    """The number of steps in the state of a checkpoint."""
    Checkpoint(RUN, 1, state).entry("steps", int)


SMALL, LARGE, BARE = nn.Linear(2, 2), nn.Linear(3, 2), nn.Linear(2, 2, bias=False)
OTHER = "it belongs to another model: set policy.path and policy.lora as in the run that saved it"
OWN = str(RUN / "checkpoints")
CASES = [
    case(resumed, (SMALL, LARGE), OTHER, (LARGE, LARGE)),
    case(resumed, (BARE, SMALL), OTHER, (SMALL, SMALL)),
    case(loaded, ["model", "optimizer"], "remove optimizer from checkpoint.load_contents, or use a", ["model"]),
    case(open_checkpoint_of, OWN, "give the path of a global_step_N directory", f"{OWN}/global_step_1"),
    case(open_checkpoint_of, f"{OWN}/global_step_2", "use an older checkpoint, or resume=auto", f"{OWN}/global_step_1"),
    case(counted, {"steps": "two"}, "use another checkpoint, or start again with resume=never", {"steps": 2}),
    case(waited, [], "check that the rank is running and that all ranks have the same checkpoint directory", [1]),
    case(
        stored,
        ["/proc/no"],
        "rerun the same command when it can be read and written, or leave checkpoint.remote_dir out",
        ["memory://x"],
        [],
    ),
    case(
        supported,
        ["no://x"],
        "use a URL that fsspec supports, install the package that it names, or leave checkpoint.remote_dir out",
        ["memory://x"],
        [],
    ),
    case(elsewhere, [OWN], "name another directory, or leave checkpoint.remote_dir out: ", ["copies"], []),
    case(
        optimized,
        ("muon", "fsdp"),
        "set backend=fsdp2 of that learner, or kind=adamw of its optimizer",
        ("muon", "fsdp2"),
        ("adamw", "fsdp"),
    ),
    case(
        met,
        {"fingerprint": "other"},
        "start all ranks with the same command, files and version of quintet",
        {"fingerprint": "same"},
    ),
    case(met, None, "start all ranks together: torchrun --nproc-per-node N -m quintet …", {"fingerprint": "same"}),
    case(placed, ["a", "a"], "start one process per GPU: torchrun --nproc-per-node N …; ", ["a"], [None, None]),
]
EXEMPT = {"training/megatron/": "megatron/test_megatron_hints.py follows them"}


@pytest.fixture(autouse=True)
def _checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints, the second of which is damaged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for step in (1, 2):
        save_checkpoint(RUN / "checkpoints", step, {}, lambda directory: (directory / "x").touch(), keep=2)
    (RUN / "checkpoints/global_step_2/x").unlink()


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_training_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_about_training_is_followed() -> None:
    assert not sites_without_case("training", CASES, EXEMPT)
