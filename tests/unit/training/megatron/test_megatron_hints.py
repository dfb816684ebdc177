"""If these fail, a hint about the Megatron learner leads nowhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hint_cases import HintCase, case, name_of, sites_without_case
from megatron_models import COMMON, KINDS
from transformers import AutoConfig

from quintet import hardware
from quintet.config.compose import load_experiment
from quintet.config.native.learners import ParallelConfig
from quintet.config.native.megatron import ConversionConfig, MegatronConfig
from quintet.training.megatron import build, core_package, options, process_groups, weight_export
from quintet.training.megatron.conversion import ModelDims
from quintet.training.megatron.hf_weights import HfWeights
from quintet.training.megatron.model import rotary_frequencies
from quintet.training.megatron.shard_files import ConversionJob, convert, shard_path

SPLIT = ParallelConfig()


def hf(kind: str = "llama", **changes: Any) -> Any:
    """The configuration of a model."""
    return AutoConfig.for_model(KINDS.get(kind, (kind,))[0], **{**COMMON, **KINDS.get(kind, (kind, {}))[1], **changes})


def on_megatron(action: Callable[[], object]) -> Callable[[list[str]], None]:
    """Something that only Megatron does, in a run with these overrides."""

    def act(overrides: list[str]) -> None:
        if load_experiment(None, overrides).experiment.actor.backend == "megatron":
            action()

    return act


def described(settings: Mapping[str, Any]) -> None:
    """Megatron's description of a Llama."""
    split = ParallelConfig(**settings.get("parallel", {}))
    own = {key: value for key, value in settings.items() if key != "parallel"}
    options.transformer_config(hf(), MegatronConfig(**own), split)


def packaged(is_installed: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "is_installed", lambda name: is_installed)
        core_package.require_megatron()


def saved(is_safe: bool) -> None:
    """A model directory with or without safetensors."""
    Path("model").mkdir(exist_ok=True)
    shutil.copy("llama/model.safetensors", "model") if is_safe else Path("model/model.safetensors").unlink(True)
    HfWeights(Path("model"))


def conversion_devices(devices: int) -> None:
    build._conversion_devices(ConversionConfig(devices=devices))


def named(model: str | None) -> None:
    build._check_model_name(model, hf())


def converted(settings: Mapping[str, Any]) -> None:
    """The initial weights of a learner."""
    if settings.get("remove"):
        shutil.rmtree(settings["remove"])
    ranks = SimpleNamespace(world=SimpleNamespace(rank=0))
    spec: Any = SimpleNamespace(hf_config=hf(), ranks=ranks, parallel=SPLIT)
    asked = MegatronConfig.model_validate({key: value for key, value in settings.items() if key != "remove"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "barrier", lambda: None)
        build._initial_weights(asked, spec, Path("llama"))


def divided(processes_and_parallel: tuple[int, Mapping[str, int]]) -> None:
    """Divide processes into groups."""
    processes, parallel = processes_and_parallel
    groups = process_groups.initialize_process_groups(SPLIT, MegatronConfig()).groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda *_: processes)
        patch.setattr(process_groups, "_states", {})
        patch.setattr(process_groups, "_create_groups", lambda *_: groups)
        process_groups.initialize_process_groups(ParallelConfig(**parallel), MegatronConfig())


def overlapped(settings: Mapping[str, Any], has_engine: bool = True) -> None:
    """Communication that overlaps, with a stand-in for Transformer Engine."""
    engine: Any = ModuleType("transformer_engine.pytorch")
    engine.module = SimpleNamespace(base=SimpleNamespace(initialize_ub=lambda **_: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "has_transformer_engine", lambda: has_engine)
        patch.setitem(sys.modules, "transformer_engine", SimpleNamespace(pytorch=engine))
        patch.setitem(sys.modules, "transformer_engine.pytorch", engine)
        process_groups.initialize_tp_comm_overlap(MegatronConfig(**settings), SPLIT, 8)


def overlapped_here(settings: Mapping[str, Any]) -> None:
    overlapped(settings, has_engine=False)


def complete(weights: Mapping[str, Any]) -> None:
    """Load the weights of a last norm."""
    ranks = process_groups.initialize_process_groups(SPLIT, MegatronConfig())
    with pytest.MonkeyPatch.context() as patch, ranks.active():
        patch.setattr(weight_export, "global_parameters", lambda _: [("decoder.final_layernorm.weight", torch.ones(2))])
        weight_export.load_hf_weights([], weights, ModelDims(4, 2, 1, 5))


def copied(weights: Mapping[str, Any]) -> None:
    """Load the weights of a last norm from another learner."""
    ranks = process_groups.initialize_process_groups(SPLIT, MegatronConfig())
    with pytest.MonkeyPatch.context() as patch, ranks.active():
        patch.setattr(weight_export, "global_parameters", lambda _: [("decoder.final_layernorm.weight", torch.ones(2))])
        weight_export.load_weight_stream([], weights.items(), ModelDims(4, 2, 1, 5))


MEGATRON = ["actor.backend=megatron"]
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
OVERLAP = {"tp_comm_overlap_cfg": "overlap.yaml"}
TARGET = "actor.megatron.conversion.target"
FIXED = "set actor.megatron.variable_seq_lengths=false and actor.megatron.seq_length"
CASES = [
    # models
    case(on_megatron(lambda: rotary_frequencies(hf(rope_parameters=DYNAMIC))), MEGATRON, "set actor.backend=fsdp2"),
    case(on_megatron(lambda: options.model_family(hf("gpt2"))), MEGATRON, "set actor.backend=fsdp2; "),
    case(on_megatron(lambda: options.model_family(hf("qwen2", **WINDOW))), MEGATRON, "set actor.backend=fsdp2"),
    case(on_megatron(lambda: options.model_family(hf(attention_bias=True))), MEGATRON, "set actor.backend=fsdp2"),
    case(described, {"parallel": {"context": 3}}, "their product must be one of 1, 2, 4", {"parallel": {"context": 2}}),
    case(described, {"activation": "gelu"}, "set actor.megatron.activation=swiglu", {"activation": "swiglu"}),
    case(described, {"normalization": "layernorm"}, "set actor.megatron.normalization=rmsnorm", {}),
    case(described, {"add_bias_linear": True}, "set actor.megatron.add_bias_linear=false", {"add_bias_linear": False}),
    case(
        described,
        {"position_embedding_type": "yarn"},
        "set actor.megatron.position_embedding_type=rope",
        {"position_embedding_type": "rope"},
    ),
    case(described, {"moe_grouped_gemm": True}, "leave actor.megatron.moe_grouped_gemm out, or ", {}),
    case(packaged, False, "pip install ", True),
    # weights
    case(saved, False, "save the model with save_pretrained", True),
    case(complete, {}, "use the directory of a complete model", {"model.norm.weight": torch.ones(2)}),
    case(copied, {}, "start from a model of the same architecture", {"model.norm.weight": torch.ones(2)}),
    case(conversion_devices, 3, "actor.megatron.conversion.devices=0 converts on the CPU", 0),
    case(named, "Qwen3-8B", "actor.megatron.conversion.model=null reads the model's config.json", None),
    case(converted, {"checkpoint": "none"}, f"{TARGET}=none instead of actor.", {"conversion": {"target": "none"}}),
    case(
        converted,
        {"checkpoint": "damaged"},
        f"remove damaged; {TARGET}=damaged instead of actor.megatron.checkpoint writes them",
        {"remove": "damaged", "conversion": {"target": "damaged"}},
    ),
    # ranks
    case(divided, (3, {"tensor": 2}), "start a multiple of 2 processes", (2, {"tensor": 2}), (4, {"tensor": 2})),
    case(divided, (3, {"expert": 4}), "start a multiple of 4 processes", (4, {"expert": 4})),
    case(
        divided,
        (4, {"tensor": 2, "pipeline": 2, "expert": 4}),
        "start a multiple of 8 processes",
        (8, {"tensor": 2, "pipeline": 2, "expert": 4}),
    ),
    case(overlapped_here, OVERLAP, "remove actor.megatron.tp_comm_overlap_cfg", {}),
    case(overlapped, {**OVERLAP}, FIXED, {**OVERLAP, "variable_seq_lengths": False, "seq_length": 64}),
]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    """A working directory with a model, and with damaged shards of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").symlink_to(models / "llama")
    (tmp_path / "overlap.yaml").write_text("")
    convert(ConversionJob(models / "llama", tmp_path / "damaged"))
    shard_path(tmp_path / "damaged", 0, 0).unlink()


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_megatron_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_about_megatron_is_followed() -> None:
    assert not sites_without_case("training/megatron", CASES, ())
