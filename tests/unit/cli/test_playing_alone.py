"""If these fail, what several processes learnt can't be served or measured by one, or where its learner isn't."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet import hardware
from quintet.cli import evaluate, serve
from quintet.cli.choices import check_choices
from quintet.cli.configuration import load_config
from quintet.cli.options import EvalOptions, ServeOptions
from quintet.pipelines.model_lookup import StoredModel


def served(actual: StoredModel) -> Iterator[str]:
    return serve._overrides(actual, ServeOptions())


def measured(actual: StoredModel) -> Iterator[str]:
    return evaluate._model_overrides("", actual, EvalOptions(env="frozenlake"))


@pytest.mark.parametrize("words", [served, measured])
@pytest.mark.parametrize(
    "learnt",
    [
        "placement: {nodes: 2, devices_per_node: 2}",
        "{placement: {devices_per_node: 2, actor: {devices: 0-1}}, actor: {parallel: {tensor: 2}}}",
        "actor: {backend: megatron, megatron: {apply_rope_fusion: true}}",
        "{critic: {backend: megatron}, algorithm: {advantage: {name: gae}}}",
        "actor: {memory: {liger: true, sharded_offload: true}, sharding: {group_size: 3}}",
    ],
)
def test_a_runs_policy_is_played_with_by_one_process(
    learnt: str, words: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "is_installed", lambda name: name not in ("megatron.core", "liger_kernel"))
    run = tmp_path / "config.yaml"
    run.write_text(learnt)
    composed = load_config(str(run), list(words(StoredModel(tmp_path, run))), "native", "refuse", of_run=True)  # type: ignore[operator]
    check_choices(composed)
    assert composed.experiment.placement.devices_per_node == 1
    assert composed.experiment.actor.backend == "fsdp2"
    assert capsys.readouterr().err == ""
