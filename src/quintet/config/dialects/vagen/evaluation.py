"""Conversion of VAGEN's evaluations of a model behind an API, `vagen.evaluate.run_eval` since 2026."""

from collections.abc import Iterator
from pathlib import PurePath

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.vagen.agent_envs import (
    VALIDATION,
    EnvEntry,
    distinct_envs,
    entries,
    entry_problems,
    env_to_native,
    start_states_to_native,
)
from quintet.config.dialects.vagen.key_values import TABLES
from quintet.config.problems import ConfigProblem

UNLIMITED_RESPONSE = 4096
"""Tokens of a response that an evaluation without `max_tokens` is planned with."""


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of the environments."""
    for entry in entries(values, VALIDATION):
        yield from entry_problems(entry)


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert an evaluation to a validation without training; it waits for a model behind an API."""
    native.set("warm_start", None)
    native.set_constants(TABLES["evaluation_constants"])
    envs = distinct_envs(values, "tag_id")
    listed = entries(values, VALIDATION)
    for name, members in envs.items():
        env_to_native(members[0], f"envs.{name}.env" if len(envs) > 1 else "env", native)
        start_states_to_native(name, [], members, native, is_mixed=len(envs) > 1)
        if len(envs) > 1:
            native.set(f"envs.{name}.share", 1.0)
    native.set("validation.episodes", sum(entry["n_envs"] for entry in listed), *(e.key("n_envs") for e in listed))
    _limits_to_native(values, listed, native)
    backend = values["run.backend"]
    native.set("policy.preset", None, "run.backend")
    native.set("policy.path", values["backends"].get(backend, {}).get("model") or backend, "run.backend", "backends")
    native.require("run.backend", Capability.API_MODELS)
    native.set("seed", values["run.base_seed"], "run.base_seed")
    native.set("rollout.max_concurrent", values["run.max_concurrent_jobs"], "run.max_concurrent_jobs")
    directory = PurePath(values["experiment.dump_dir"])
    native.set("output_dir", str(directory.parent), "experiment.dump_dir")
    native.set("name", directory.name, "experiment.dump_dir")


def _limits_to_native(values: ForeignValues, listed: list[EnvEntry], native: NativeBuilder) -> None:
    """Set turns, windows, lengths and sampling; those that differ between environments wait."""
    sampling = [entry["chat_config"] or values["default_chat_config"] or {} for entry in listed]
    tokens = [options.get("max_tokens") for options in sampling]
    differing = {
        "max_turns": [entry["max_turns"] for entry in listed],
        "concat_multi_turn": [entry["concat_multi_turn"] for entry in listed],
        "chat_config": sampling,
    }
    for option, found in differing.items():
        if any(value != found[0] for value in found):
            native.require(listed[0].key(option), Capability.ENV_SETTINGS)
    native.set("rollout.max_turns", max(differing["max_turns"]), *(entry.key("max_turns") for entry in listed))
    window = None if differing["concat_multi_turn"][0] else 1
    native.set("rollout.window_size", window, listed[0].key("concat_multi_turn"))
    key, longest = listed[0].key("chat_config"), max((number for number in tokens if number), default=None)
    if longest is None:
        native.remarks.append(f"no max_tokens in {key}: planned with responses of {UNLIMITED_RESPONSE} tokens")
    longest = longest or UNLIMITED_RESPONSE
    native.set("rollout.max_response_tokens", longest, key)
    native.set("rollout.max_prompt_tokens", longest * max(differing["max_turns"]), key, listed[0].key("max_turns"))
    temperature = float(sampling[0].get("temperature") or 0.0)
    native.set("validation.sampling.do_sample", temperature > 0, key)
    native.set("validation.sampling.temperature", temperature, key)
    native.set("validation.sampling.top_p", float(sampling[0].get("top_p") or 1.0), key)
