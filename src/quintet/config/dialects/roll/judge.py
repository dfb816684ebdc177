"""Conversion of the sections of `rewards` with ROLL's judge: a model behind an endpoint, or one that the run serves."""

from collections.abc import Iterable, Iterator
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.roll.device_mapping import parse_device_mapping
from quintet.config.dialects.roll.workers import STRATEGY, STRATEGY_OPTIONS, strategy_kind
from quintet.config.problems import ConfigProblem

JUDGE = "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker"
PROMPT_NAME = "Qwen2.5-7B-Instruct-RLVR-prompt"
"""ROLL's only prompt of that class whose reply it can read."""
CLUSTER_SECTION = "reward_model"
"""Section of the model of judges with `judge_model_type: cluster`."""
API_SECONDS, API_RETRIES = 600.0, 2
"""Timeout of a request and number of further attempts, in ROLL."""
SAMPLING = {"max_new_tokens": 8192, "temperature": 0.95, "top_p": 0.7, "top_k": 50}
"""Keys of `generating_args` with ROLL's defaults."""
ENGINES = ("hf", "vllm", "sglang")
SHARES = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
CONTEXTS = {"vllm": "max_model_len", "sglang": "context_length"}
"""Options of a strategy that have native keys."""


def is_judge(values: ForeignValues, section: str) -> bool:
    """Return whether a section of `rewards` has ROLL's judge."""
    return bool(values[f"{section}.worker_cls"] == JUDGE)


def _model_section(values: ForeignValues, section: str) -> str:
    """Return the section with the model of a judge."""
    return CLUSTER_SECTION if values[f"{section}.judge_model_type"] == "cluster" else section


def judge_problems(values: ForeignValues, section: str) -> Iterator[ConfigProblem]:
    """Yield missing or contradictory keys of a judge, as ROLL would find at its start, or never."""
    kind, prompt = f"{section}.judge_model_type", f"{section}.judge_prompt"
    if values[kind] is None:
        yield values.problem(kind, "ROLL's judge needs one", f"{kind}=inference, or {kind}=api")
        return
    if values[prompt] != PROMPT_NAME:
        problem = "ROLL has no other prompt whose reply it reads: its own asks for a number, and YES is looked for"
        yield values.problem(prompt, problem, f"{prompt}={PROMPT_NAME}")
    if values[kind] == "api":
        for name, example in (("judge_api_url", "http://127.0.0.1:8000/v1"), ("judge_model_name", "NAME")):
            key = f"{section}.{name}"
            if not values[key]:
                yield values.problem(
                    key, f"a judge behind an endpoint needs it: {values.describe(kind)}", f"{key}={example}"
                )
        return
    model = _model_section(values, section)
    path, mapping = f"{model}.model_args.model_name_or_path", f"{model}.device_mapping"
    if not values[path]:
        yield values.problem(
            path, f"a judge that the run serves needs it: {values.describe(kind)}", f"{path}=DIRECTORY"
        )
    try:
        judge_devices(values, model)
    except ValueError as error:
        yield values.problem(mapping, str(error), f"for example {mapping}=list(range(0,8)), or {mapping}=[0,1,2,3]")


def judge_to_native(values: ForeignValues, section: str, native: NativeBuilder, target: str) -> None:
    """Set a judge; `target` is its native section."""
    kind, prompt = f"{section}.judge_model_type", f"{section}.judge_prompt"
    native.set(f"{target}.verdict", "yes_no", f"{section}.worker_cls", prompt)
    native.set(f"{target}.timeout_seconds", API_SECONDS, kind)
    native.set(f"{target}.retries", API_RETRIES, kind)
    # ROLL goes on whatever its judges reply
    native.set("reward.max_failed_share", 1.0, kind)
    if values[kind] != "api":
        _server_to_native(values, _model_section(values, section), native, target, kind)
        return
    native.set(f"{target}.url", values[f"{section}.judge_api_url"], f"{section}.judge_api_url", kind)
    native.set(f"{target}.model", values[f"{section}.judge_model_name"], f"{section}.judge_model_name")
    # ROLL sends only the messages
    native.set(f"{target}.max_tokens", None, kind)
    native.set(f"{target}.temperature", None, kind)
    key = f"{section}.judge_api_key"
    if values[key] is not None:
        native.remarks.append(f"{key} is not stored here: the key is read from the environment variable OPENAI_API_KEY")


def _server_to_native(values: ForeignValues, section: str, native: NativeBuilder, target: str, kind: str) -> None:
    """Set sampling and server of a judge that the run serves; `section` has its model."""
    for name, field in zip(SAMPLING, ("max_tokens", "temperature", "top_p", "top_k"), strict=True):
        key = f"{section}.generating_args.{name}"
        value = SAMPLING[name] if values[key] is None else values[key]
        native.set(f"{target}.{field}", value if name in ("max_new_tokens", "top_k") else float(value), key, kind)
    server, strategy = f"{target}.server", f"{section}.{STRATEGY}"
    engine = strategy_kind(values[strategy] or "hf_infer")
    if engine not in ENGINES:
        native.require(strategy, Capability.JUDGE_ENGINES)
        engine = "hf"
    native.set(f"{server}.engine", engine, strategy)
    path, dtype, template = (
        f"{section}.{name}" for name in ("model_args.model_name_or_path", "model_args.dtype", "data_args.template")
    )
    native.set(f"{server}.path", values[path], path)
    native.set(f"{server}.dtype", "float32" if values[dtype] == "fp32" else "bfloat16", dtype)
    if values[dtype] == "fp16":
        native.require(dtype, Capability.JUDGE_ENGINES)
    native.set(f"{server}.template", None if values[template] == "native" else values[template], template)
    native.set(f"{server}.devices", judge_devices(values, section), f"{section}.device_mapping")
    _options_to_native(values, section, native, server, engine)


def _options_to_native(values: ForeignValues, section: str, native: NativeBuilder, server: str, engine: str) -> None:
    """Set the options of the engine; those without a native key are passed on unchanged."""
    key, gpus = f"{section}.{STRATEGY_OPTIONS}", f"{section}.num_gpus_per_worker"
    options: dict[str, Any] = dict(values[key] or {})
    if engine == "hf":
        return
    sizes = [options.pop(name, None) or 1 for name in ("tensor_parallel_size", "pipeline_parallel_size", "tp_size")]
    if set(sizes) != {1}:
        native.require(key, Capability.JUDGE_ENGINES)
    if (values[gpus] or 1) > 1:
        native.require(gpus, Capability.JUDGE_ENGINES)
    share, context = options.pop(SHARES[engine], None), options.pop(CONTEXTS[engine], None)
    options.pop("sleep_level", None)
    if share is not None:
        native.set(f"{server}.memory_share", float(share), key)
    native.set(f"{server}.max_model_tokens", context, key)
    native.set(f"{server}.arguments", options, key)


def judge_devices(values: ForeignValues, section: str) -> tuple[int, ...] | None:
    """Return the devices of the judge's model in a section; None for the CPU.

    Raises:
        ValueError: its `device_mapping` is malformed.
    """
    mapping = values[f"{section}.device_mapping"]
    return None if mapping is None else parse_device_mapping(str(mapping))


def served_devices(values: ForeignValues, sections: Iterable[str]) -> set[int]:
    """Return the devices of all judges that the run serves."""
    served = (
        section for section in sections if is_judge(values, section) and values[f"{section}.judge_model_type"] != "api"
    )
    return {device for section in served for device in judge_devices(values, _model_section(values, section)) or ()}
