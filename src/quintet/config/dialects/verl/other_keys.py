"""Keys of verl's `evaluation.yaml`, of its Megatron optimizer and of its `sft_trainer.yaml`."""

from __future__ import annotations

from dataclasses import replace

from quintet.config.dialects.ledger import Capability, Row, row
from quintet.config.dialects.takes import (
    BOOLEAN,
    COUNT,
    POSITIVE,
    POSITIVE_NUMBER,
    SHARE,
    TEXT,
    TEXTS,
    choice,
    integer,
    number,
    optional,
)
from quintet.config.dialects.verl.keys import VERL_TRAINER_KEYS
from quintet.config.dialects.verl.rollout_keys import PROOF

__all__ = [
    "UNCLIPPED",
    "VERL_EVALUATION_KEYS",
    "VERL_MEGATRON_OPTIM_KEYS",
    "VERL_SFT_KEYS",
    "VERL_SFT_RUN_KEYS",
]

UNCLIPPED = 1e12
"""A global norm that no gradient reaches: what Megatron writes as 0."""

VERL_EVALUATION_KEYS: tuple[Row, ...] = (
    row(
        "data.path",
        TEXT,
        "/tmp/math_Qwen2-7B-Instruct.parquet",  # noqa: S108 - the value that the reference shows
        "Parquet file with stored replies.",
        pending=Capability.EVALUATION,
        native="evaluation.path",
    ),
    row(
        "data.prompt_key",
        TEXT,
        "prompt",
        "Column that holds the prompt; scores don't depend on it.",
        pending=Capability.EVALUATION,
        native="evaluation.prompt_key",
        noop=("prompt",),
    ),
    row(
        "data.response_key",
        TEXT,
        "responses",
        "Column that holds the list of replies to a prompt, whose scores are averaged.",
        pending=Capability.EVALUATION,
        native="evaluation.response_key",
        noop=("responses",),
    ),
    row(
        "data.data_source_key",
        TEXT,
        "data_source",
        "Column that says where a prompt comes from; each source gets a mean score of its own.",
        pending=Capability.EVALUATION,
        native="evaluation.source_key",
        noop=("data_source",),
    ),
    row(
        "data.reward_model_key",
        TEXT,
        "reward_model",
        "Column that holds the right answer or the tests against which replies are scored.",
        pending=Capability.EVALUATION,
        native="evaluation.truth_key",
        noop=("reward_model",),
    ),
    row(
        "custom_reward_function.path",
        optional(TEXT),
        None,
        "Python file with the function that scores a reply; null takes built-in ones, though verl's source then fails.",
        pending=Capability.EVALUATION,
        noop=(None,),
        native="evaluation.function",
        computed=True,
    ),
    row(
        "custom_reward_function.name",
        TEXT,
        "compute_score",
        "Name of the scoring function in the file at `path`.",
        pending=Capability.EVALUATION,
        noop=("compute_score",),
        native="evaluation.function",
        computed=True,
    ),
)

VERL_MEGATRON_OPTIM_KEYS: tuple[Row, ...] = (
    row(
        "optim.optimizer",
        choice("adam", "sgd", "muon"),
        "adam",
        "Optimizer of the Megatron learner.",
        pending=Capability.SCHEDULES,
        noop=("adam",),
        native="actor.optimizer.kind",
        words={"adam": "adamw"},
    ),
    row(
        "optim.lr",
        POSITIVE_NUMBER,
        1e-6,
        "Learning rate after the warm-up.",
        native="actor.optimizer.learning_rate",
        proof=PROOF,
    ),
    row(
        "optim.clip_grad",
        number(least=0),
        1.0,
        "Gradients are scaled down to this global norm; 0 leaves them.",
        native="actor.optimizer.max_grad_norm",
        proof=PROOF,
        words={0: UNCLIPPED},
    ),
    row(
        "optim.total_training_steps",
        optional(integer(least=-1)),
        -1,
        "Training steps of the run; -1 and null take as many as `trainer.total_epochs` makes. verl's source puts that "
        "count there in any case.",
        native="training.steps",
        proof=PROOF,
        computed=True,
        unit="steps",
        aliases=("trainer.total_training_steps",),
    ),
    row(
        "optim.lr_warmup_init",
        number(least=0),
        0.0,
        "Learning rate with which the warm-up starts.",
        native="actor.optimizer.warmup_start",
        proof=PROOF,
    ),
    row(
        "optim.lr_warmup_steps",
        optional(integer(least=-1)),
        -1,
        "Training steps in which the learning rate rises; -1, 0 and null leave it to `lr_warmup_steps_ratio`.",
        native="actor.optimizer.warmup_steps",
        proof=PROOF,
        computed=True,
        unit="steps",
    ),
    row(
        "optim.lr_warmup_steps_ratio",
        optional(SHARE),
        0.0,
        "Share of `lr_decay_steps` in which the learning rate rises; null leaves it to `lr_warmup_steps`.",
        native=("actor.optimizer.warmup_ratio", "actor.optimizer.warmup_steps"),
        unit="share",
        proof=PROOF,
    ),
    row(
        "optim.lr_decay_steps",
        optional(POSITIVE),
        None,
        "Training steps, warm-up included, until the learning rate is down at `min_lr`; null takes the whole training.",
        native="actor.optimizer.decay_steps",
        unit="steps",
        proof=PROOF,
    ),
    row(
        "optim.lr_decay_style",
        choice("constant", "linear", "cosine", "inverse_square_root", "inverse-square-root", "WSD"),
        "linear",
        "Course of the learning rate after the warm-up; `WSD` holds it and then falls as `lr_wsd_decay_style` says.",
        native="actor.optimizer.schedule",
        aliases=("optim.warmup_style",),
        words={
            "inverse_square_root": "inverse_square_root",
            "inverse-square-root": "inverse_square_root",
            "WSD": "wsd",
        },
        proof=PROOF,
    ),
    row(
        "optim.min_lr",
        number(least=0),
        0.0,
        "Learning rate at the end of the decay.",
        native="actor.optimizer.min_learning_rate_ratio",
        proof=PROOF,
        computed=True,
    ),
    row(
        "optim.weight_decay",
        number(least=0),
        0.01,
        "Decoupled weight decay; 0 is none.",
        native="actor.optimizer.weight_decay",
        proof=PROOF,
    ),
    row(
        "optim.weight_decay_incr_style",
        choice("constant", "linear", "cosine"),
        "constant",
        "Course of the weight decay, which verl's source starts and ends with the same value.",
        pending=Capability.SCHEDULES,
        noop=("constant",),
        native="actor.optimizer.weight_decay_schedule",
    ),
    row(
        "optim.lr_wsd_decay_style",
        choice("constant", "exponential", "cosine", "linear", "minus_sqrt"),
        "exponential",
        "Shape of the last fall of the learning rate under `lr_decay_style: WSD`.",
        native="actor.optimizer.stable_decay",
        only_if=("optim.lr_decay_style", "WSD"),
        proof=PROOF,
    ),
    row(
        "optim.lr_wsd_decay_steps",
        optional(POSITIVE),
        None,
        "Training steps of the last fall under `lr_decay_style: WSD`; null gives none.",
        native="actor.optimizer.stable_decay_steps",
        only_if=("optim.lr_decay_style", "WSD"),
        unit="steps",
        proof=PROOF,
    ),
    row(
        "optim.use_checkpoint_opt_param_scheduler",
        BOOLEAN,
        False,
        "The schedule is stored in checkpoints and resumed from them; false follows the configuration instead.",
        pending=Capability.MEGATRON,
        noop=(False,),
        native="actor.megatron.use_checkpoint_opt_param_scheduler",
    ),
)

VERL_SFT_KEYS: tuple[Row, ...] = (
    row(
        "optim.lr",
        POSITIVE_NUMBER,
        1e-5,
        "Learning rate after the warm-up.",
        native="sft.optimizer.learning_rate",
        pending=Capability.SFT,
    ),
    row(
        "optim.weight_decay",
        number(least=0),
        0.01,
        "AdamW's decoupled weight decay; 0 is none.",
        native="sft.optimizer.weight_decay",
        pending=Capability.SFT,
    ),
    row(
        "optim.warmup_steps_ratio",
        SHARE,
        0.1,
        "Share of all training steps in which the learning rate rises from 0.",
        native="sft.warmup_ratio",
        pending=Capability.SFT,
        aliases=("optim.lr_warmup_steps_ratio",),
        unit="share",
    ),
    row(
        "optim.clip_grad",
        POSITIVE_NUMBER,
        1.0,
        "Gradients are scaled down to this global norm.",
        native="sft.optimizer.max_grad_norm",
        pending=Capability.SFT,
    ),
    row(
        "optim.lr_scheduler",
        choice("cosine", "wsd", "constant"),
        "cosine",
        "Course of the learning rate after the warm-up; `wsd` holds it for nine tenths of the rest, then falls to 0.",
        native="sft.optimizer.schedule",
        pending=Capability.SFT,
        noop=("cosine",),
        aliases=("optim.lr_scheduler_type",),
    ),
    row(
        "model.partial_pretrain",
        TEXT,
        "~/models/gemma-1.1-7b-it",
        "Pretrained model, local or on HDFS, with which the tuning starts.",
        native=("policy.path", "sft.path"),
        pending=Capability.SFT,
        aliases=("model.path",),
    ),
    row(
        "model.fsdp_config.model_dtype",
        choice("fp32", "float32", "32", 32, "bf16", "bfloat16", "fp16", "float16", "16", 16),
        "fp32",
        "Type in which the weights are loaded and kept.",
        native="policy.dtype",
        pending=Capability.MEMORY,
        noop=("fp32", "float32", "32", 32, "bf16", "bfloat16"),
        words={
            **dict.fromkeys(("fp32", "float32", "32", 32), "float32"),
            **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
            **dict.fromkeys(("fp16", "float16", "16", 16), "float16"),
        },
    ),
    row(
        "model.fsdp_config.wrap_policy.min_num_params",
        COUNT,
        0,
        "Parameters from which a module becomes a sharding unit of its own; 0 makes each layer one.",
        pending=Capability.SHARDING,
        noop=(0,),
        native="actor.sharding.min_parameters",
        unit="parameters",
    ),
    row(
        "model.fsdp_config.cpu_offload",
        BOOLEAN,
        False,
        "FSDP may use CPU memory, in the way that `offload_params` says.",
        pending=Capability.MEMORY,
        noop=(True, False),
        native="actor.memory.sharded_offload",
        computed=True,
    ),
    row(
        "model.fsdp_config.offload_params",
        BOOLEAN,
        False,
        "Unused weights, and with them gradients, lie in CPU memory, so the optimizer steps on the CPU; "
        "read only under `cpu_offload`.",
        pending=Capability.MEMORY,
        noop=(False,),
        native="actor.memory.sharded_offload",
        computed=True,
        only_if=("model.fsdp_config.cpu_offload", True),
    ),
    row(
        "model.external_lib",
        optional(TEXT),
        None,
        "Python module that is imported before the model is built, so that it can register classes; null imports none.",
        native="external_libs",
        computed=True,
        proof=PROOF,
    ),
    row(
        "model.enable_gradient_checkpointing",
        BOOLEAN,
        False,
        "Activations are computed again in the backward pass: less memory, more time.",
        native="sft.gradient_checkpointing",
        pending=Capability.SFT,
        noop=(False,),
    ),
    row(
        "model.trust_remote_code",
        BOOLEAN,
        False,
        "Python code that comes with the model is run when it is loaded.",
        native="policy.trust_remote_code",
        proof=PROOF,
    ),
    row(
        "model.lora_rank",
        COUNT,
        0,
        "Rank of the LoRA adapters that are trained in place of the weights; 0 trains all weights.",
        pending=Capability.LORA,
        noop=(0,),
        native="sft.lora.rank",
        computed=True,
    ),
    row(
        "model.lora_alpha",
        POSITIVE,
        16,
        "Strength of the LoRA adapters: their output is scaled by alpha divided by the rank.",
        pending=Capability.LORA,
        native="sft.lora.alpha",
        noop=(16,),
        computed=True,
    ),
    row(
        "model.target_modules",
        TEXTS,
        "all-linear",
        "Modules that get LoRA adapters, by name or pattern; `all-linear` takes every linear layer but the last.",
        pending=Capability.LORA,
        native="sft.lora.target_modules",
        noop=("all-linear",),
        computed=True,
    ),
    row(
        "model.use_liger",
        BOOLEAN,
        False,
        "Parts of the model are replaced by Liger's fused kernels, which need less GPU memory.",
        pending=Capability.MEMORY,
        noop=(False,),
        native="actor.memory.liger",
    ),
)

_SFT_RUN = {
    **{f"data.{key}": None for key in ("train_files", "val_files", "prompt_key", "truncation")},
    **{f"data.custom_cls.{key}": None for key in ("path", "name")},
    "data.train_batch_size": "sft.batch",
    "trainer.total_epochs": "sft.epochs",
    **{f"trainer.{key}": None for key in ("project_name", "experiment_name", "logger", "nnodes", "n_gpus_per_node")},
    **{f"trainer.{key}": None for key in ("save_freq", "test_freq", "default_hdfs_dir", "default_local_dir")},
    **{f"trainer.{key}": None for key in ("resume_mode", "resume_from_path")},
}
"""Keys of data and trainer that the trainer of supervised fine-tuning has as well, and what they feed there where it
is something else."""


def _of_sft(row: Row) -> Row:
    """A key of `ppo_trainer.yaml` in `sft_trainer.yaml`."""
    native = _SFT_RUN[row.key]
    if native is None:
        return row
    return replace(row, native=(native,), computed=False, pending=Capability.SFT, proof=None)


VERL_SFT_RUN_KEYS: tuple[Row, ...] = tuple(_of_sft(row) for row in VERL_TRAINER_KEYS if row.key in _SFT_RUN)
"""Documented with `ppo_trainer.yaml` alone, though `sft_trainer.yaml` has them too."""
