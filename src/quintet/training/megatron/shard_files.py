"""Directories of Megatron weights: a safetensors file per tensor-parallel rank and pipeline stage.

TARGET/
  config.json                      of the Hugging Face model
  mp_rank_00_000/model.safetensors tensor-parallel rank 0 of stage 0, under Megatron's names
  pieces.json                      number of ranks and stages; written last

Layers are numbered globally. A learner with other degrees can read the files, too: shards are joined and split again.
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
    ModelDims,
    TensorMapping,
    from_hugging_face,
    join_shards,
    take_shard,
    tensor_mapping,
    tensor_mappings,
    to_hugging_face,
)
from quintet.training.megatron.hf_weights import HfWeights

INDEX = "pieces.json"


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """Source, target, degrees and workers of a conversion."""

    source: Path
    target: Path
    tensor: int = 1
    pipeline: int = 1
    processes: int = 1
    devices: tuple[int, ...] = ()
    """GPUs to convert on (default: CPU)."""


def shard_path(directory: Path, tensor: int, stage: int) -> Path:
    """Return the path of a shard, named as in Megatron-LM."""
    return directory / f"mp_rank_{tensor:02d}_{stage:03d}" / "model.safetensors"


def is_complete(directory: Path) -> bool:
    """Return whether a conversion into this directory was completed."""
    return (directory / INDEX).is_file()


def convert(job: ConversionJob) -> None:
    """Convert a Hugging Face model to Megatron shards; an existing target directory is replaced.

    Raises:
        MachineError: the source has no safetensors.
        ConfigError: its layers or heads cannot be divided this way.
    """
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(job.source, local_files_only=True)
    if hf_config.num_hidden_layers % job.pipeline or hf_config.num_attention_heads % job.tensor:
        raise ConfigError(
            f"{hf_config.num_hidden_layers} layers of {hf_config.num_attention_heads} heads cannot be divided into "
            f"{job.pipeline} stages of {job.tensor} ranks",
            key="actor.megatron.conversion",
        )
    shutil.rmtree(job.target, ignore_errors=True)
    job.target.mkdir(parents=True)
    shards = [(rank, stage) for stage in range(job.pipeline) for rank in range(job.tensor)]
    if job.processes > 1 and len(shards) > 1:
        with ProcessPoolExecutor(min(job.processes, len(shards)), mp_context=get_context("spawn")) as pool:
            list(pool.map(_write_shard, [job] * len(shards), *zip(*shards, strict=True)))
    else:
        for rank, stage in shards:
            _write_shard(job, rank, stage)
    hf_config.save_pretrained(job.target)
    write_index(job.target, job.tensor, job.pipeline)


def write_index(directory: Path, tensor: int, pipeline: int) -> None:
    """Write the file that marks the directory as complete."""
    (directory / INDEX).write_text(json.dumps({"tensor": tensor, "pipeline": pipeline}), encoding="utf-8")


def _write_shard(job: ConversionJob, rank: int, stage: int) -> None:
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(job.source, local_files_only=True)
    weights, shape = HfWeights(job.source), ModelDims.from_hf_config(hf_config)
    number = stage * job.tensor + rank
    device = torch.device("cuda", job.devices[number % len(job.devices)]) if job.devices else torch.device("cpu")
    shard = {}
    for mapping in tensor_mappings(set(weights), hf_config.num_hidden_layers):
        if _stage(mapping, hf_config.num_hidden_layers // job.pipeline, job.pipeline) == stage:
            full = from_hugging_face([weights[name].to(device) for name in mapping.hugging_face], mapping.layout, shape)
            shard[mapping.megatron] = take_shard(full, mapping.layout, rank, job.tensor)
    path = shard_path(job.target, rank, stage)
    path.parent.mkdir()
    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in shard.items()}, path)


def _stage(mapping: TensorMapping, layers_per_stage: int, stages: int) -> int:
    if mapping.megatron.startswith("decoder.layers."):
        return int(mapping.megatron.split(".")[2]) // layers_per_stage
    return 0 if mapping.megatron.startswith("embedding") else stages - 1


def _conversion_hint(directory: Path) -> str:
    return f"actor.megatron.conversion.target={directory} instead of actor.megatron.checkpoint writes them"


class MegatronWeights(Mapping[str, Tensor]):
    """Mapping of the full Hugging Face tensors in a directory of shards, each loaded on access."""

    def __init__(self, directory: Path, hf_config: Any) -> None:
        """Raise `MachineError` if shards are missing."""
        if not is_complete(directory):
            raise MachineError(f"no converted Megatron weights in {directory}", _conversion_hint(directory))
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        self._shape = ModelDims.from_hf_config(hf_config)
        self._paths: dict[str, list[Path]] = {}
        self._megatron_name: dict[str, str] = {}
        for stage in range(index["pipeline"]):
            paths = [shard_path(directory, rank, stage) for rank in range(index["tensor"])]
            if missing := [str(path) for path in paths if not path.is_file()]:
                hint = f"remove {directory}; {_conversion_hint(directory)}"
                raise MachineError(f"the Megatron weights in {directory} lack {missing[0]}", hint)
            with safe_open(paths[0], "pt") as file:
                self._paths |= dict.fromkeys(file.keys(), paths)
        for name in self._paths:
            self._megatron_name |= dict.fromkeys(tensor_mapping(name).hugging_face, name)

    def __getitem__(self, name: str) -> Tensor:
        megatron_name = self._megatron_name[name]
        mapping, paths = tensor_mapping(megatron_name), self._paths[megatron_name]
        with ExitStack() as stack:
            shards = [stack.enter_context(safe_open(path, "pt")).get_tensor(megatron_name) for path in paths]
        full = join_shards(shards, mapping.layout)
        tensors: Sequence[Tensor] = to_hugging_face(full, mapping.layout, self._shape)
        return tensors[mapping.hugging_face.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._megatron_name)

    def __len__(self) -> int:
        return len(self._megatron_name)
