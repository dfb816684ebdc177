"""Megatron weights in directories: a safetensors file for each tensor-parallel part of each stage.

TARGET/
  config.json                      of the Hugging Face model
  mp_rank_00_000/model.safetensors tensor-parallel rank 0 of stage 0, under Megatron's names
  pieces.json                      how many ranks and stages there are; written last

Layers are numbered over all stages. A learner of other degrees reads them too: parts are joined and cut anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quintet.errors import ConfigError, MachineError
from quintet.training.megatron.conversion import (
    Entry,
    Shape,
    cut,
    entries,
    entry_of,
    from_hugging_face,
    join,
    to_hugging_face,
)
from quintet.training.megatron.stored import StoredWeights

__all__ = ["Conversion", "Pieces", "convert", "is_whole", "piece_path", "write_index"]

INDEX = "pieces.json"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is converted, into how many parts, and by whom."""

    source: Path
    target: Path
    tensor: int = 1
    pipeline: int = 1
    processes: int = 1
    devices: tuple[int, ...] = ()
    """GPUs that lay the tensors; none leaves it to the CPU."""


def piece_path(directory: Path, tensor: int, stage: int) -> Path:
    """Where a part lies, by Megatron's own naming of ranks."""
    return directory / f"mp_rank_{tensor:02d}_{stage:03d}" / "model.safetensors"


def is_whole(directory: Path) -> bool:
    """Whether a conversion into that directory was finished."""
    return (directory / INDEX).is_file()


def convert(plan: Conversion) -> None:
    """Write the parts of a Hugging Face model; what lies at the target is replaced.

    Raises:
        MachineError: the source has no safetensors.
        ConfigError: its layers can't be shared out so.
    """
    from transformers import AutoConfig

    hf = AutoConfig.from_pretrained(plan.source, local_files_only=True)
    if hf.num_hidden_layers % plan.pipeline or hf.num_attention_heads % plan.tensor:
        raise ConfigError(
            f"{hf.num_hidden_layers} layers of {hf.num_attention_heads} heads can't be shared out over "
            f"{plan.pipeline} stages of {plan.tensor} ranks",
            key="actor.megatron.conversion",
        )
    shutil.rmtree(plan.target, ignore_errors=True)
    plan.target.mkdir(parents=True)
    places = [(rank, stage) for stage in range(plan.pipeline) for rank in range(plan.tensor)]
    if plan.processes > 1 and len(places) > 1:
        with ProcessPoolExecutor(min(plan.processes, len(places)), mp_context=get_context("spawn")) as pool:
            list(pool.map(_write_piece, [plan] * len(places), *zip(*places, strict=True)))
    else:
        for rank, stage in places:
            _write_piece(plan, rank, stage)
    hf.save_pretrained(plan.target)
    write_index(plan.target, plan.tensor, plan.pipeline)


def write_index(directory: Path, tensor: int, pipeline: int) -> None:
    """Say that all parts are there."""
    (directory / INDEX).write_text(json.dumps({"tensor": tensor, "pipeline": pipeline}))


def _write_piece(plan: Conversion, rank: int, stage: int) -> None:
    from transformers import AutoConfig

    hf = AutoConfig.from_pretrained(plan.source, local_files_only=True)
    stored, shape = StoredWeights(plan.source), Shape.of(hf)
    number = stage * plan.tensor + rank
    where = torch.device("cuda", plan.devices[number % len(plan.devices)]) if plan.devices else torch.device("cpu")
    piece = {}
    for entry in entries(set(stored), hf.num_hidden_layers):
        if _stage(entry, hf.num_hidden_layers // plan.pipeline, plan.pipeline) == stage:
            parts = [stored[name].to(where) for name in entry.hugging_face]
            piece[entry.megatron] = cut(from_hugging_face(parts, entry.kind, shape), entry.kind, rank, plan.tensor)
    path = piece_path(plan.target, rank, stage)
    path.parent.mkdir()
    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in piece.items()}, path)


def _stage(entry: Entry, each: int, stages: int) -> int:
    """Which stage has it."""
    if entry.megatron.startswith("decoder.layers."):
        return int(entry.megatron.split(".")[2]) // each
    return 0 if entry.megatron.startswith("embedding") else stages - 1


class Pieces(Mapping[str, Tensor]):
    """The parts of a directory as whole Hugging Face tensors, each read when it is asked for."""

    def __init__(self, directory: Path, hf: Any) -> None:
        """Raises `MachineError` where parts are missing."""
        if not is_whole(directory):
            raise MachineError(f"no converted Megatron weights at {directory}", "give a directory that convert wrote")
        index = json.loads((directory / INDEX).read_text())
        self._shape = Shape.of(hf)
        self._paths: dict[str, list[Path]] = {}
        self._owner: dict[str, str] = {}
        for stage in range(index["pipeline"]):
            paths = [piece_path(directory, rank, stage) for rank in range(index["tensor"])]
            if missing := [str(path) for path in paths if not path.is_file()]:
                raise MachineError(f"the Megatron weights at {directory} lack {missing[0]}", "convert them again")
            with safe_open(paths[0], "pt") as file:
                self._paths |= dict.fromkeys(file.keys(), paths)
        for name in self._paths:
            self._owner |= dict.fromkeys(entry_of(name).hugging_face, name)

    def __getitem__(self, name: str) -> Tensor:
        owner = self._owner[name]
        entry, paths = entry_of(owner), self._paths[owner]
        with ExitStack() as stack:
            parts = [stack.enter_context(safe_open(path, "pt")).get_tensor(owner) for path in paths]
        whole = join(parts, entry.kind)
        tensors: Sequence[Tensor] = to_hugging_face(whole, entry.kind, self._shape)
        return tensors[entry.hugging_face.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)
