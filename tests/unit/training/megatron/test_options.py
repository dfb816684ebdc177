"""If these fail, an option of the Megatron learner doesn't reach Megatron's own classes, or isn't refused where this
machine can't honour it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron_models import COMMON, KINDS
from transformers import AutoConfig

from quintet.config.native.learners import OptimizerConfig, ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.errors import ConfigError
from quintet.training.megatron import model
from quintet.training.megatron.options import ddp_config, optimizer_config, transformer_config

HALF = torch.bfloat16


def hf(kind: str = "llama", **changes: Any) -> Any:
    name, own = KINDS[kind]
    return AutoConfig.for_model(name, **{**COMMON, **own, **changes})


def transformer(
    options: dict[str, Any], parallel: dict[str, Any] | None = None, kind: str = "llama", **changes: Any
) -> Any:
    """Megatron's own description of the model, as on a machine with a GPU."""
    split = ParallelConfig(**(parallel or {}))
    return transformer_config(hf(kind, **changes), MegatronConfig(**options), split, HALF, on_cpu=False)


def test_megatrons_config_describes_the_model() -> None:
    config = transformer({}, kind="qwen3")
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (2, 32, 48)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (4, 2, 16)
    assert (config.qk_layernorm, config.add_qkv_bias, config.normalization) == (True, False, "RMSNorm")
    assert (config.activation_func, config.gated_linear_unit) == (F.silu, True)
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)
    assert transformer({}, kind="qwen2").add_qkv_bias


DEPTH = {"num_hidden_layers": 4}
TRANSFORMER: list[tuple[str, Any, str, Any]] = [
    ("batch_p2p_comm", True, "batch_p2p_comm", True),
    ("batch_p2p_comm", False, "batch_p2p_comm", False),
    ("bias_dropout_fusion", True, "bias_dropout_fusion", True),
    ("bias_activation_fusion", True, "bias_activation_fusion", True),
    ("gradient_accumulation_fusion", True, "gradient_accumulation_fusion", True),
    ("persist_layer_norm", True, "persist_layer_norm", True),
    ("attention_softmax_in_fp32", True, "attention_softmax_in_fp32", True),
    ("attention_softmax_in_fp32", False, "attention_softmax_in_fp32", False),
    ("use_cpu_initialization", True, "use_cpu_initialization", True),
    ("use_cpu_initialization", False, "use_cpu_initialization", False),
    ("activation", "fast-swiglu", "bias_activation_fusion", True),
    ("tp_comm_bootstrap_backend", "gloo", "tp_comm_bootstrap_backend", "gloo"),
    ("moe_token_dispatcher_type", "alltoall", "moe_token_dispatcher_type", "alltoall"),
    ("moe_token_dispatcher_type", "alltoall_seq", "moe_token_dispatcher_type", "alltoall"),
    ("recompute_granularity", "selective", "recompute_granularity", "selective"),
]


@pytest.mark.proves(
    "rlinf",
    "actor.model.bias_dropout_fusion",
    "actor.model.persist_layer_norm",
    "actor.model.bias_activation_fusion",
    "actor.model.attention_softmax_in_fp32",
    "actor.model.gradient_accumulation_fusion",
    "actor.model.use_cpu_initialization",
    "actor.megatron.tp_comm_bootstrap_backend",
)
@pytest.mark.parametrize(("option", "value", "field", "expected"), TRANSFORMER)
def test_an_option_reaches_megatrons_transformer(option: str, value: Any, field: str, expected: Any) -> None:
    assert getattr(transformer({option: value}), field) == expected


PARALLEL: list[tuple[dict[str, Any], str, Any]] = [
    ({"tensor": 2}, "tensor_model_parallel_size", 2),
    ({"pipeline": 2}, "pipeline_model_parallel_size", 2),
    ({"pipeline": 2, "virtual_pipeline": 2}, "virtual_pipeline_model_parallel_size", 2),
    ({"expert": 2}, "expert_model_parallel_size", 2),
    ({"tensor": 2, "sequence": True}, "sequence_parallel", True),
    ({"sequence": True}, "sequence_parallel", False),
]


@pytest.mark.parametrize(("parallel", "field", "expected"), PARALLEL)
def test_a_degree_reaches_megatrons_transformer(parallel: dict[str, Any], field: str, expected: Any) -> None:
    config = transformer({}, parallel, kind="experts" if "expert" in parallel else "deep")
    assert getattr(config, field) == expected


def test_recomputed_layers_are_limited_to_those_of_a_stage() -> None:
    options = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 20}
    config = transformer(options, {"pipeline": 2}, kind="deep")
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == ("full", "block", 2)
    config = transformer({**options, "recompute_method": "uniform", "recompute_num_layers": 2}, kind="deep")
    assert (config.recompute_method, config.recompute_num_layers) == ("uniform", 2)
    plain = transformer_config(hf(), MegatronConfig(), ParallelConfig(), recompute=True)
    assert (plain.recompute_granularity, plain.recompute_method, plain.recompute_num_layers) == ("full", "uniform", 1)
    assert transformer({"moe_layer_recompute": True}, kind="experts").recompute_modules == ["moe"]


@pytest.mark.proves(
    "roll",
    "actor_train.strategy_args.strategy_config.moe_grouped_gemm",
    "actor_train.strategy_args.strategy_config.moe_shared_expert_overlap",
)
def test_options_of_experts_reach_megatron() -> None:
    config = transformer({"moe_grouped_gemm": True, "moe_shared_expert_overlap": True}, kind="experts")
    assert (config.moe_grouped_gemm, config.moe_shared_expert_overlap) == (True, True)
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (4, 2, 24)
    allgather = transformer({"moe_token_dispatcher_type": "allgather"}, {"expert": 2}, kind="experts")
    assert allgather.moe_token_dispatcher_type == "allgather"


def test_pipeline_stages_exchange_variable_lengths() -> None:
    assert transformer({}, {"pipeline": 2}, kind="deep").variable_seq_lengths
    assert not transformer({"variable_seq_lengths": False}, {"pipeline": 2}, kind="deep").variable_seq_lengths


DDP: list[tuple[str, Any, str]] = [
    ("overlap_grad_reduce", True, "overlap_grad_reduce"),
    ("overlap_param_gather", True, "overlap_param_gather"),
    ("use_distributed_optimizer", True, "use_distributed_optimizer"),
    ("ddp_bucket_size", 1234, "bucket_size"),
]


@pytest.mark.parametrize(("option", "value", "field"), DDP)
def test_an_option_reaches_megatrons_gradient_buffers(option: str, value: Any, field: str) -> None:
    assert getattr(ddp_config(MegatronConfig(**{option: value})), field) == value
    assert getattr(ddp_config(MegatronConfig()), field) in (False, None)


SHARED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
OPTIMIZER: list[tuple[dict[str, Any], str, Any]] = [
    ({"use_distributed_optimizer": True}, "use_distributed_optimizer", True),
    ({**SHARED, "overlap_param_gather": True}, "overlap_param_gather", True),
    (
        {**SHARED, "overlap_param_gather": True, "overlap_param_gather_with_optimizer_step": True},
        "overlap_param_gather_with_optimizer_step",
        True,
    ),
    ({"optimizer_enable_pin": True}, "pin_cpu_params", True),
    ({"optimizer_enable_pin": True}, "pin_cpu_grads", True),
    ({}, "pin_cpu_grads", False),
    ({"loss_scale_window": 7}, "loss_scale_window", 7),
    ({"bf16": True}, "bf16", True),
]


@pytest.mark.proves("rlinf", "actor.optim.optimizer_enable_pin", "actor.optim.overlap_param_gather_with_optimizer_step")
@pytest.mark.parametrize(("options", "field", "expected"), OPTIMIZER)
def test_an_option_reaches_megatrons_optimizer(options: dict[str, Any], field: str, expected: Any) -> None:
    assert getattr(optimizer_config(OptimizerConfig(), MegatronConfig(**options), HALF), field) == expected


def test_rates_and_moments_reach_megatrons_optimizer() -> None:
    own = OptimizerConfig(learning_rate=0.5, betas=(0.8, 0.9), epsilon=1e-3, weight_decay=0.1, max_grad_norm=2.0)
    config = optimizer_config(own, MegatronConfig(fp16=True), torch.float16)
    assert (config.lr, config.adam_beta1, config.adam_beta2, config.adam_eps) == (0.5, 0.8, 0.9, 1e-3)
    assert (config.weight_decay, config.decoupled_weight_decay, config.clip_grad) == (0.1, True, 2.0)
    assert config.fp16
    assert optimizer_config(OptimizerConfig(kind="sgd"), MegatronConfig(), HALF).sgd_momentum == 0.0


@pytest.mark.proves(
    "rlinf",
    "actor.mcore_gpt",
    "actor.spec_name",
    "actor.model.encoder_seq_length",
    "actor.model.normalization",
    "actor.model.apply_rope_fusion",
    "actor.megatron.distributed_backend",
    "actor.megatron.ckpt_format",
)
@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("apply_rope_fusion", True, "no GPU"),
        ("persist_layer_norm", True, "no GPU"),
        ("gradient_accumulation_fusion", True, "no GPU"),
        ("moe_grouped_gemm", True, "no GPU"),
        ("moe_shared_expert_overlap", True, "no GPU"),
        ("optimizer_enable_pin", True, "no GPU"),
        ("tp_comm_overlap_cfg", "overlap.yaml", "no GPU"),
        ("distributed_backend", "nccl", "NCCL needs GPUs"),
        ("moe_token_dispatcher_type", "flex", "DeepEP"),
        ("spec_name", "te_gpt", "transformer_engine is not installed"),
        ("mcore_gpt", False, "only Megatron Core's model"),
        ("ckpt_format", "torch", "a pickle can run code"),
        ("ckpt_format", "zarr", "dropped"),
        ("encoder_seq_length", 64, "no encoder"),
        ("activation", "gelu", "trained with swiglu"),
        ("normalization", "layernorm", "uses RMSNorm"),
        ("normalization", "layernorm1p", "uses RMSNorm"),
        ("add_bias_linear", True, "no biases in linear layers"),
        ("position_embedding_type", "mrope", "by rope"),
        ("recompute_granularity", "full", "Megatron rejects the options"),
    ],
)
def test_unsupported_options_are_rejected_with_the_reason(option: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        transformer_config(hf(), MegatronConfig(**{option: value}), ParallelConfig())
    assert "actor.megatron" in str(error.value.key)


@pytest.mark.proves("rlinf", "actor.model.activation", "actor.model.position_embedding_type")
def test_options_that_contradict_the_weights_are_rejected() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    options = {"position_embedding_type": "yarn"}
    assert transformer(options, rope_parameters=yarn).num_layers == 2
    assert transformer({"activation": "geglu"}, hidden_act="gelu").activation_func is F.gelu
    biased = transformer({"add_bias_linear": True}, kind="biased")
    assert (biased.add_bias_linear, biased.add_qkv_bias) == (True, True)
    with pytest.raises(ConfigError, match="biases in all linear layers"):
        transformer({}, kind="biased")


@pytest.mark.parametrize(("flag", "dtype"), [("bf16", torch.float32), ("fp16", torch.bfloat16)])
def test_the_optimizers_dtype_must_be_the_policys(flag: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"policy\.dtype is"):
        optimizer_config(OptimizerConfig(), MegatronConfig(**{flag: True}), dtype)


def test_early_weight_gathering_needs_the_distributed_optimizer() -> None:
    with pytest.raises(ConfigError, match="only the distributed optimizer"):
        optimizer_config(OptimizerConfig(), MegatronConfig(overlap_param_gather=True), HALF)


def test_virtual_pipelines_do_not_batch_messages() -> None:
    with pytest.raises(ConfigError, match="told apart"):
        transformer({"batch_p2p_comm": True}, {"pipeline": 2, "virtual_pipeline": 2}, kind="deep")


def test_an_unknown_model_family_is_rejected() -> None:
    with pytest.raises(ConfigError, match="gpt2"):
        transformer_config(AutoConfig.for_model("gpt2"), MegatronConfig(), ParallelConfig())


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd", "inverse_square_root"])
@pytest.mark.parametrize("decay", ["exponential", "linear", "cosine", "minus_sqrt"])
def test_learning_rate_schedules_agree_with_megatron(kind: str, decay: str) -> None:
    """Learning rates of 12 steps against those of Megatron's own `OptimizerParamScheduler`."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from quintet.training.optim.lr_schedule import learning_rate

    own = OptimizerConfig(
        learning_rate=0.3, warmup_steps=3, schedule=kind, stable_decay=decay, stable_decay_steps=4, warmup_start=0.1
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    theirs = OptimizerParamScheduler(
        optimizer,
        init_lr=0.1,
        max_lr=0.3,
        min_lr=0.3 * own.min_learning_rate_ratio,
        lr_warmup_steps=3,
        lr_decay_steps=12,
        lr_decay_style={"wsd": "WSD", "inverse_square_root": "inverse-square-root"}.get(kind, kind),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=12,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        wsd_decay_steps=4,
        lr_wsd_decay_style=decay,
    )
    for step in range(1, 13):
        theirs.step(1)
        assert learning_rate(own, step, 12) == pytest.approx(optimizer.param_groups[0]["lr"]), step


@pytest.mark.proves("rlinf", "actor.megatron.distributed_timeout_minutes")
@pytest.mark.parametrize(
    ("text", "backend", "minutes"),
    [({}, "gloo", 30), ({"distributed_timeout_minutes": 7, "distributed_backend": "nccl"}, "nccl", 7)],
)
def test_the_timeout_reaches_the_process_group(
    monkeypatch: pytest.MonkeyPatch, text: dict[str, Any], backend: str, minutes: int
) -> None:
    from quintet.training.megatron import process_groups as groups

    results: dict[str, Any] = {}
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(groups.dist, "init_process_group", lambda name, **rest: results.update(rest, name=name))
    groups._initialize_torch_distributed(MegatronConfig(**text))
    assert (results["name"], results["timeout"].total_seconds()) == (backend, 60 * minutes)
    monkeypatch.setenv("WORLD_SIZE", "4")
    groups._initialize_torch_distributed(MegatronConfig(**text))
    assert results["timeout"].total_seconds() == 60 * minutes


@pytest.mark.proves("rlinf", "actor.megatron.tp_comm_overlap_cfg")
def test_communication_overlap_reads_the_configured_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron-LM calls Transformer Engine, which isn't here: what it would be given."""
    from quintet.training.megatron import process_groups as groups

    results: dict[str, Any] = {}
    base = SimpleNamespace(initialize_ub=lambda **options: results.update(options))
    engine = ModuleType("transformer_engine.pytorch")
    engine.module = SimpleNamespace(base=base)  # type: ignore[attr-defined]
    parent = ModuleType("transformer_engine")
    parent.pytorch = engine  # type: ignore[attr-defined]
    file = tmp_path / "overlap.yaml"
    file.write_text("qkv_fprop: {method: ring_exchange}\n")
    options = {"tp_comm_overlap_cfg": str(file), "tp_comm_bootstrap_backend": "mpi"}
    parallel = ParallelConfig(tensor=2, sequence=True)
    with pytest.raises(ConfigError, match="is not installed"):
        groups.initialize_tp_comm_overlap(MegatronConfig(**options), parallel, 32)
    monkeypatch.setitem(sys.modules, "transformer_engine", parent)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    monkeypatch.setattr(groups, "has_transformer_engine", lambda: True)
    with pytest.raises(ConfigError, match="fixed sequence length"):
        groups.initialize_tp_comm_overlap(MegatronConfig(**options), parallel, 32)
    long = {"variable_seq_lengths": False, "seq_length": 64}
    groups.initialize_tp_comm_overlap(MegatronConfig(**options, **long), parallel, 32)
    assert results == {
        "shape": [64, 32],
        "tp_size": 2,
        "use_fp8": False,
        "ub_cfgs": {"qkv_fprop": {"method": "ring_exchange"}},
        "bootstrap_backend": "mpi",
    }
    assert transformer(options, {"tensor": 2, "sequence": True}).tp_comm_overlap


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_dense_layers_in_a_mixture_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="qwen3_moe with 1 dense layer among sparse ones") as refused:
        transformer({}, {}, "experts", **changes)
    assert refused.value.key == "policy.path"


@pytest.mark.parametrize(
    ("name", "on_gpu", "layers"),
    [("te_gpt", False, "te"), ("local_gpt", True, "local"), (None, True, "te"), (None, False, "local")],
)
def test_layers_are_those_of_the_configured_implementation(
    monkeypatch: pytest.MonkeyPatch, name: str | None, layers: str, *, on_gpu: bool
) -> None:
    class Chosen(Exception):
        """Stops before the layers, which need Transformer Engine, are built."""

    def choose(chosen: str) -> Any:
        def build(*_: Any, **__: Any) -> None:
            raise Chosen(chosen)

        return build

    monkeypatch.setattr(model, "get_gpt_layer_with_transformer_engine_spec", choose("te"))
    monkeypatch.setattr(model, "get_gpt_layer_local_spec", choose("local"))
    monkeypatch.setattr(model, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    with pytest.raises(Chosen, match=layers):
        model.block_spec(transformer({}), MegatronConfig(spec_name=name), None)


def test_the_fused_rotary_kernel_is_used_if_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Transformer Engine, which has the kernel."""
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda *_: None)
    assert transformer({"apply_rope_fusion": True}).apply_rope_fusion
    assert not transformer({}).apply_rope_fusion
