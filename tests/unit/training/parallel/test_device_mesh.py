"""If this fails, ranks that share a sequence or a sharding group are other ones than configured."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.config.native.experiment import Experiment
from quintet.runtime.learners.learner_builders import build_device_mesh
from quintet.training.parallel import device_mesh
from quintet.training.parallel.process_group import RankGroup


@pytest.mark.parametrize(
    ("actor", "shape"),
    [
        ({"sharding": {"group_size": 4}}, (4, 4, 1, 1, 1, 1)),
        ({"parallel": {"context": 2}}, (1, 8, 1, 2, 1, 1)),
        ({"parallel": {"ulysses": 2}}, (1, 8, 1, 1, 2, 1)),
        ({"parallel": {"context": 2, "ulysses": 2}, "sharding": {"group_size": 8}}, (2, 2, 1, 2, 2, 1)),
    ],
)
def test_sixteen_ranks_are_divided_as_configured(
    monkeypatch: pytest.MonkeyPatch, actor: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """Ranks by replicas, shards, pipeline stages, context, Ulysses and tensor parallelism."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda device, shape, mesh_dim_names: shapes.append(shape))
    monkeypatch.setattr(device_mesh, "_rank_group", lambda mesh, names, name: RankGroup())
    build_device_mesh(Experiment.model_validate({"actor": actor}), "actor", RankGroup(0, 16))
    assert shapes == [shape]
