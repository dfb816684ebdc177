"""Conversion of verl's runs that only generate: `main_generation` with `generation.yaml`, and `main_generation_server`,
which reads `ppo_trainer.yaml`."""

import re
from collections.abc import Iterator
from pathlib import PurePath

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import file_list
from quintet.config.dialects.verl.batches import GPUS, ROLLOUT, num_gpus
from quintet.config.dialects.verl.dialect import OUTPUT_PATH, TABLES
from quintet.config.dialects.verl.learners import policy_to_native
from quintet.config.dialects.verl.release import policy_release_to_native
from quintet.config.dialects.verl.run_settings import (
    chat_template_from_native,
    chat_template_to_native,
    directory_to_native,
)
from quintet.config.problems import ConfigProblem
from quintet.errors import ConfigError

SAMPLES, SERVER_SAMPLES = "data.n_samples", "actor_rollout_ref.rollout.n"
DIRECTORY_KEYS = ("trainer.experiment_name", "trainer.default_local_dir")
READ = ("data.", "policy.", "rollout.", "placement.", "seed")
"""Native keys, or sections, that a run which only generates reads."""
UNREAD = tuple(TABLES["unread_in_generation"])
"""Keys of these sections that only training reads; `main_generation_server` takes the messages of all rows."""
FILES = file_list("data.train_files", "data.train_files")


def is_server(values: ForeignValues) -> bool:
    """Return whether the run is one of `main_generation_server`."""
    return "actor_rollout_ref.model.path" in values.dialect.specs()


def generation_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield several greedy responses to a prompt, and GPUs that engines cannot share evenly."""
    rollout, samples = _keys(values)
    temperature, sampled = f"{rollout}.temperature", f"{rollout}.do_sample"
    if values[samples] > 1 and _is_greedy(values):
        key = temperature if values[temperature] == 0 else sampled
        problem = f"the responses to a prompt are identical: {values.describe(key)}"
        yield values.problem(samples, problem, f"{samples}=1, or {key}={1.0 if key == temperature else 'true'}")
    if values[f"{rollout}.name"] != "hf":
        source = f"GPUs, from {values.describe(*GPUS)}"
        yield from values.divisor_problems(f"{rollout}.tensor_model_parallel_size", num_gpus(values), source)


def generation_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the native keys of generation."""
    (_server_to_native if is_server(values) else _main_to_native)(values, native)
    chat_template_to_native(values, native)
    rollout, _ = _keys(values)
    temperature, sampled = f"{rollout}.temperature", f"{rollout}.do_sample"
    native.set("rollout.do_sample", not _is_greedy(values), temperature, sampled)
    native.set("rollout.temperature", 1.0 if _is_greedy(values) else float(values[temperature]), temperature)
    native.set_constants({"rollout.think": False, "rollout.format_penalty": 0.0, "rollout.max_turns": 1})
    if not any(map(values.is_set, DIRECTORY_KEYS)):
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(values[OUTPUT_PATH]).stem).strip("-._")
        native.set("name", f"generate-{stem}", OUTPUT_PATH)


def _keys(values: ForeignValues) -> tuple[str, str]:
    """Return the section of the engine, and the key of the number of responses."""
    return (ROLLOUT, SERVER_SAMPLES) if is_server(values) else ("rollout", SAMPLES)


def _is_greedy(values: ForeignValues) -> bool:
    rollout, _ = _keys(values)
    return bool(values[f"{rollout}.temperature"] == 0 or not values[f"{rollout}.do_sample"])


def _main_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    native.set_from_keys(values.dialect.specs().values())
    native.set("policy.preset", None, "model.path")
    native.apply([file_list("external_libs", "model.external_lib", scalar=False, empty=None)])
    native.set("data.train_files", [values["data.path"]], "data.path")
    dtype = values.native("rollout.dtype")
    native.set("policy.dtype", dtype if dtype in ("bfloat16", "float32") else "bfloat16", "rollout.dtype")
    # verl's tokenizer removes the end of a longer prompt
    native.set("data.truncation", "right", "rollout.prompt_length")


def _server_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    specs = list(values.dialect.specs().values())
    read = [spec for spec in specs if all(key.startswith(READ) and not key.startswith(UNREAD) for key in spec.native)]
    native.set_from_keys(read)
    handled = {OUTPUT_PATH, SERVER_SAMPLES, *DIRECTORY_KEYS}
    unread = [spec.key for spec in specs if spec not in read and spec.key not in handled and values.is_set(spec.key)]
    native.remarks += [f"{values.describe(key)} has no effect: the run only generates" for key in unread]
    native.set("generation.output_path", values[OUTPUT_PATH], OUTPUT_PATH)
    native.set("generation.samples", values[SERVER_SAMPLES], SERVER_SAMPLES)
    native.apply([FILES])
    policy_to_native(values, native)
    policy_release_to_native(values, native)
    for name in ("prompt", "response"):
        engine, data = f"{ROLLOUT}.{name}_length", f"data.max_{name}_length"
        native.set(f"rollout.max_{name}_tokens", values[engine], engine, data)
    if any(map(values.is_set, DIRECTORY_KEYS)):
        directory_to_native(values, native)


def generation_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of `generation.yaml`.

    Raises:
        ConfigError: the prompts are in several files, of which it has one.
    """
    run, rollout = foreign.experiment, foreign.experiment.rollout
    files = run.data.train_files if run.data is not None else ()
    if len(files) != 1:
        message = f"verl's generation.yaml has one file of prompts, and this run has {len(files)}"
        raise ConfigError(message, key="data.train_files", value=list(files))
    foreign.set("data.path", files[0])
    foreign.set("rollout.temperature", rollout.temperature if rollout.do_sample else 0.0)
    foreign.set("rollout.do_sample", rollout.do_sample)
    foreign.apply([file_list("external_libs", "model.external_lib", scalar=False, empty=None)])
    chat_template_from_native(foreign)
