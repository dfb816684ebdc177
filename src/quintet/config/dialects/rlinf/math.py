"""RLinf's runs on text: prompts from files, rules that judge replies, Megatron or FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.rlinf.words import DTYPES
from quintet.config.native import TrainingConfig

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["convert_backend", "convert_math", "express_backend", "express_math"]

IMAGES = "image"
"""The field of pictures in RLinf's rows for vision-language models."""
WRONG = -1.0
"""Reward of a wrong answer, as a multiple of that of a right one."""
PICTURED = ("vision_language", "vlm")
FOLLOWING = {
    "actor.megatron.seq_length": ("actor.model.seq_length", "runner.seq_length"),
    "actor.megatron.encoder_seq_length": ("actor.model.encoder_seq_length", "runner.seq_length"),
    "actor.megatron.conversion.source": ("actor.megatron.ckpt.hf_model_path", "rollout.model.model_path"),
    "actor.megatron.conversion.tensor_parallel": (
        "actor.megatron.ckpt.tensor_model_parallel_size",
        "actor.model.tensor_model_parallel_size",
    ),
    "actor.megatron.conversion.pipeline_parallel": (
        "actor.megatron.ckpt.pipeline_model_parallel_size",
        "actor.model.pipeline_model_parallel_size",
    ),
}
"""Native keys that are null where RLinf's key says the same as another one."""
SHARDED = "actor.fsdp_config"


def convert_math(values: Values, native: Native) -> None:
    """What such a run is, natively."""
    path, kind = "rollout.model.model_path", "rollout.model.model_type"
    native.put("policy.preset", None, path)
    native.put("policy.path", values[path], path)
    native.put("policy.kind", values[kind], kind)
    words = "actor.tokenizer.tokenizer_model"
    # the reference's tokenizer is that of its own model
    other = values.given(words) and values[words] != values[path]
    native.put("policy.tokenizer", values[words] if other else None, words)
    native.put("world", {"name": "prompts"}, "runner.task_type", "data.train_data_paths")
    task = "runner.task_type"
    native.put("validation.only", values[task].endswith("_eval"), task)
    if values[task].endswith("_eval"):
        _as_in_training(values, native)
    _data(values, native)
    _lengths(values, native)
    _budgets(values, native)
    _optimizer(values, native)
    convert_backend(values, native)
    _megatron(values, native)


def _as_in_training(values: Values, native: Native) -> None:
    """A run that only evaluates draws its replies by the keys that say how training draws them."""
    for name, value in native.tree["rollout"].items():
        if name in ("do_sample", "temperature", "top_k", "top_p"):
            native.put(f"validation.sampling.{name}", value, *native.origins[f"rollout.{name}"])
    group = "algorithm.group_size"
    native.put("validation.sampling.samples", values[group], group)


def _data(values: Values, native: Native) -> None:
    kind = "data.type"
    native.put("data.kind", "demonstrations" if values[kind] == "robot_demo" else "prompts", kind)
    native.put("data.image_key", IMAGES if values[kind] in PICTURED else None, kind)
    native.put("data.truncation", "right", "data.max_prompt_length")
    for name in ("train", "val"):
        key, ours = f"data.{name}_data_paths", "train_files" if name == "train" else "validation_files"
        native.put(f"data.{ours}", [values[key]] if isinstance(values[key], str) else values[key], key)
    batch, usual = "data.val_rollout_batch_size", "data.rollout_batch_size"
    native.put("data.validation_batch", values[batch] or values[usual], batch, usual)
    native.put("data.epochs", values["runner.max_epochs"], "runner.max_epochs")
    if values["runner.max_steps"] >= 0:
        native.put("data.max_steps", values["runner.max_steps"], "runner.max_steps")
    _rewards(values, native)


def _rewards(values: Values, native: Native) -> None:
    """A right answer earns `reward_scale`, a wrong one costs as much."""
    native.put("reward.worst", WRONG, "reward.reward_scale")


def _lengths(values: Values, native: Native) -> None:
    whole, prompt, reply = "runner.seq_length", "data.max_prompt_length", "algorithm.sampling_params.max_new_tokens"
    native.put("rollout.max_response_tokens", values[reply], reply, whole, prompt)
    room = values[whole] if values[whole] != values[prompt] + values[reply] else None
    native.put("rollout.engine_options.max_model_tokens", room, whole)
    native.put("rollout.max_turns", 1)
    native.put("rollout.window_size", None)
    native.put("rollout.think", False)
    native.put("rollout.format_penalty", 0.0)


def _budgets(values: Values, native: Native) -> None:
    filled, tokens, each = (
        "runner.enable_dynamic_batch_size",
        "runner.max_tokens_per_mbs",
        "algorithm.training_batch_size_per_gpu",
    )
    native.put("actor.budget.tokens", values[tokens] if values[filled] else None, filled, tokens)
    native.put("actor.budget.sequences", None if values[filled] else values[each], filled, each)
    inference = "algorithm.logprob_forward_micro_batch_size"
    for component in ("actor", "reference"):
        native.put(f"{component}.inference_budget.sequences", values[inference], inference)


def _optimizer(values: Values, native: Native) -> None:
    peak, bound = "actor.optim.lr", "actor.lr_sched.max_lr"
    # nobody means a bound that they didn't write
    bounds = [bound] if values.given(bound) else []
    rate = min(values[key] for key in (peak, *bounds))
    native.put("actor.optimizer.learning_rate", rate, peak, bound)
    floors = ("actor.optim.min_lr", "actor.lr_sched.min_lr")
    floor = max(values[key] for key in [key for key in floors if values.given(key)] or floors)
    native.put("actor.optimizer.min_learning_rate_ratio", min(1.0, floor / rate), *floors, peak)
    first, second = "actor.optim.adam_beta1", "actor.optim.adam_beta2"
    native.put("actor.optimizer.betas", [values[first], values[second]], first, second)
    ends, style = "actor.lr_sched.lr_decay_iters", "actor.lr_sched.lr_decay_style"
    # a constant rate has no end of its decay
    native.put("actor.optimizer.decay_steps", None if values[style] == "constant" else values[ends], ends, style)
    warm, share = "actor.lr_sched.lr_warmup_iters", "actor.lr_sched.lr_warmup_fraction"
    steps = native.tree["training"].get("steps", TrainingConfig().steps)
    of = values[ends] or steps * values["algorithm.n_minibatches"]
    native.put("actor.optimizer.warmup_steps", values[warm] or int((values[share] or 0) * of), warm, share, ends)


def convert_backend(values: Values, native: Native) -> None:
    """What spreads the learner over devices, and in which types it computes."""
    backend, strategy = "actor.training_backend", f"{SHARDED}.strategy"
    sharded = values[backend] == "fsdp"
    chosen, origins = (values[strategy].lower(), (backend, strategy)) if sharded else ("megatron", (backend,))
    for component in ("actor", "reference") if values["algorithm.kl_beta"] else ("actor",):
        native.put(f"{component}.backend", chosen, *origins)
    if not sharded:
        return
    mixed = f"{SHARDED}.mixed_precision"
    for name, ours in {"param": "parameter", "reduce": "reduce", "buffer": "buffer"}.items():
        key = f"{mixed}.{name}_dtype"
        dtype = DTYPES.get(values[key])
        if name == "param":
            dtype = None if dtype == native.tree["policy"]["dtype"] else dtype
        if name == "buffer" and dtype is None:
            dtype = DTYPES.get(values["actor.model.precision"], "float32")
        native.put(f"actor.sharding.{ours}_dtype", dtype, key)
    switch, precision = f"{SHARDED}.amp_autocast.enabled", f"{SHARDED}.amp_autocast.precision"
    native.put("actor.sharding.autocast", DTYPES[values[precision]] if values[switch] else None, switch, precision)


def _megatron(values: Values, native: Native) -> None:
    if values["actor.training_backend"] != "megatron":
        return
    for ours, (key, other) in FOLLOWING.items():
        native.put(ours, None if values[key] == values[other] else values[key], key)
    start, convert = "actor.model.megatron_checkpoint", "actor.megatron.use_hf_ckpt"
    native.put("actor.megatron.checkpoint", values[start], start, convert)
    for flag, dtype in {"bf16": "bfloat16", "fp16": "float16"}.items():
        key = f"actor.optim.{flag}"
        value = values[key] if values.given(key) else native.tree["policy"]["dtype"] == dtype
        native.put(f"actor.megatron.{flag}", value, key, "actor.model.precision")


def express_math(foreign: Foreign) -> None:
    """Such a run in RLinf's words."""
    run = foreign.experiment
    foreign.put("rollout.model.model_path", run.policy.path)
    foreign.put("rollout.model.model_type", run.policy.kind or "qwen2.5")
    foreign.put("actor.tokenizer.tokenizer_model", run.policy.tokenizer or run.policy.path)
    if run.validation.only:
        foreign.put("runner.task_type", "reasoning_eval")
    from_rows = run.data is not None and run.data.epochs is not None
    most = run.data.max_steps if run.data and from_rows else run.training.steps
    foreign.put("runner.max_steps", -1 if most is None else most)
    prompt, reply = run.rollout.max_prompt_tokens, run.rollout.max_response_tokens
    foreign.put("runner.seq_length", run.rollout.engine_options.max_model_tokens or prompt + reply)
    foreign.put("algorithm.sampling_params.max_new_tokens", reply)
    _express_data(foreign)
    budget = run.actor.budget
    foreign.put("runner.enable_dynamic_batch_size", budget.tokens is not None)
    if budget.tokens is not None:
        foreign.put("runner.max_tokens_per_mbs", budget.tokens)
    if budget.sequences is not None:
        foreign.put("algorithm.training_batch_size_per_gpu", budget.sequences)
    if run.actor.inference_budget.sequences is not None:
        foreign.put("algorithm.logprob_forward_micro_batch_size", run.actor.inference_budget.sequences)
    _express_optimizer(foreign)
    express_backend(foreign)
    _express_megatron(foreign)


def _express_data(foreign: Foreign) -> None:
    data, training = foreign.experiment.data, foreign.experiment.training
    if data is None:
        return
    pictured = "vision_language" if data.image_key else "math"
    foreign.put("data.type", "robot_demo" if data.kind == "demonstrations" else pictured)
    foreign.put("data.train_data_paths", list(data.train_files))
    foreign.put("data.val_data_paths", list(data.validation_files))
    same = data.validation_batch in (None, training.groups_per_step)
    foreign.put("data.val_rollout_batch_size", None if same else data.validation_batch)
    if data.epochs is not None:
        foreign.put("runner.max_epochs", data.epochs)


def _express_optimizer(foreign: Foreign) -> None:
    optimizer = foreign.experiment.actor.optimizer
    rate = optimizer.learning_rate
    foreign.put("actor.optim.lr", rate)
    floor = next(floor for floor in _floors(optimizer.min_learning_rate_ratio, rate))
    foreign.put("actor.optim.min_lr", floor)
    foreign.put("actor.optim.adam_beta1", optimizer.betas[0])
    foreign.put("actor.optim.adam_beta2", optimizer.betas[1])
    if optimizer.decay_steps is not None or optimizer.schedule != "constant":
        foreign.put("actor.lr_sched.lr_decay_iters", optimizer.decay_steps)
    foreign.put("actor.lr_sched.lr_warmup_iters", optimizer.warmup_steps)
    if optimizer.warmup_steps == 0 and optimizer.schedule != "constant":
        foreign.put("actor.lr_sched.lr_warmup_fraction", None)


def _floors(ratio: float, rate: float) -> Iterator[float]:
    """Learning rates of that share of another: the shortest that gives the share back, or else the nearest."""
    for digits in range(1, 18):
        floor = float(f"{ratio * rate:.{digits}g}")
        if floor / rate == ratio:
            yield floor
    yield ratio * rate


def express_backend(foreign: Foreign) -> None:
    """What spreads the learner over devices, in RLinf's words."""
    learner, dtype = foreign.experiment.actor, foreign.experiment.policy.dtype
    foreign.put("actor.training_backend", "megatron" if learner.backend == "megatron" else "fsdp")
    if learner.backend == "megatron":
        return
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    sharding = learner.sharding
    foreign.put(f"{SHARDED}.strategy", learner.backend)
    mixed = f"{SHARDED}.mixed_precision"
    foreign.put(f"{mixed}.param_dtype", words.get(sharding.parameter_dtype or dtype))
    foreign.put(f"{mixed}.reduce_dtype", words.get(sharding.reduce_dtype or ""))
    foreign.put(f"{mixed}.buffer_dtype", words.get(sharding.buffer_dtype))
    foreign.put(f"{SHARDED}.amp_autocast.enabled", sharding.autocast is not None)
    if sharding.autocast is not None:
        foreign.put(f"{SHARDED}.amp_autocast.precision", words[sharding.autocast])


def _express_megatron(foreign: Foreign) -> None:
    megatron = foreign.experiment.actor.megatron
    if megatron is None:
        return
    for ours, (key, _) in FOLLOWING.items():
        if (value := foreign.native(ours)) is not None:
            foreign.put(key, value)
    foreign.put("actor.model.megatron_checkpoint", megatron.checkpoint)
    foreign.put("actor.megatron.use_hf_ckpt", megatron.checkpoint is None)
    foreign.put("actor.optim.bf16", megatron.bf16)
    foreign.put("actor.optim.fp16", megatron.fp16)
