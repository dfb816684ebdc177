"""Conversion of verl's settings of a run: loggers, directories, resumption; prompt files and reward functions."""

from collections.abc import Iterator

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import (
    Derived,
    OptionalSection,
    file_list,
    function_address,
    inverted,
    loggers,
)
from quintet.config.dialects.verl.key_values import parse_names
from quintet.config.dialects.verl.profiles import profiles_from_native, profiles_to_native
from quintet.config.problems import ConfigProblem

REWARD_SECTIONS = ("custom_reward_function.", "reward_model.")
"""Sections of keys that choose how responses are scored."""
FUNCTION_ARGUMENTS, MANAGER = "custom_reward_function.reward_kwargs", "reward_model.reward_manager"
RECIPE_MANAGERS = ("visual", "collabllm")
"""Reward managers of verl's recipes."""
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg.enable"
OVERLONG_BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg.len"
MAX_RESPONSE = "reward_model.reward_kwargs.max_resp_len"
RESUME_MODES = {"auto": "auto", "disable": "never"}
RESUME_NAMES = inverted(RESUME_MODES)
RUN_RULES = (
    loggers("tracking.loggers", "trainer.logger", parse=parse_names),
    Derived(
        "resume",
        ("trainer.resume_mode", "trainer.resume_from_path"),
        lambda mode, path: RESUME_MODES.get(mode) or path,
        lambda resume: (RESUME_NAMES.get(resume, "resume_path"), None if resume in RESUME_NAMES else resume),
    ),
)
TOOLS = "actor_rollout_ref.rollout.multi_turn.enable"
TOOL_FILE = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
ASSISTANT_TURNS = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
USER_TURNS = "actor_rollout_ref.rollout.multi_turn.max_user_turns"
TOOL_FUNCTIONS = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
USER_FILE = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
TRUNCATE_SIDE = "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side"
AGENT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
LOOPS = ("single_turn_agent", "tool_agent")
ROLLOUT_MODE = "actor_rollout_ref.rollout.mode"
REPLY_SECTIONS = {
    TOOL_FILE: "rollout.tool_calls",
    TOOL_FUNCTIONS: "rollout.tool_calls",
    USER_FILE: "rollout.interactions",
}
"""Native sections with the files of verl's keys."""
CALL_SECONDS = 300.0
"""Time limit of a call of a tool and of a reply of a user; verl has none, but its tools have limits of their own."""
REMOTE_DIR = "trainer.default_hdfs_dir"

DATA_RULES = (
    file_list("data.train_files", "data.train_files"),
    file_list("data.validation_files", "data.val_files"),
    function_address("data.dataset_class", "data.custom_cls.path", "data.custom_cls.name", import_none=False),
)


CHAT_TEMPLATE, TEMPLATE_OPTIONS = "actor_rollout_ref.model.custom_chat_template", "data.apply_chat_template_kwargs"
THINKING_TEMPLATES = {True: "native_thinking", False: "native_nonthinking"}
"""The tokenizer's template by its option `enable_thinking`."""


def chat_template_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the text of the chat template, or the tokenizer's template with its option `enable_thinking`."""
    text = values[CHAT_TEMPLATE] if CHAT_TEMPLATE in values.dialect.specs() else None
    thinking = (values[TEMPLATE_OPTIONS] or {}).get("enable_thinking")
    if text is not None:
        native.set("data.template", text, CHAT_TEMPLATE)
    if text is not None and thinking is not None:
        native.require(TEMPLATE_OPTIONS, Capability.CHAT_TEMPLATES)
    elif isinstance(thinking, bool):
        native.set("data.template", THINKING_TEMPLATES[thinking], TEMPLATE_OPTIONS)


def chat_template_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of the chat template; one of Quintet's named templates has no counterpart."""
    template = foreign.native_value("data.template")
    if template in THINKING_TEMPLATES.values():
        foreign.set("data.apply_chat_template_kwargs.enable_thinking", template == THINKING_TEMPLATES[True])
    elif template is not None and ("{{" in template or "{%" in template):
        foreign.set(CHAT_TEMPLATE, template)


def reward_function(native: str) -> Derived:
    """Return the rule for a native key of a user's reward function."""
    return function_address(native, "custom_reward_function.path", "custom_reward_function.name", "compute_score")


REWARD_RULES = (
    reward_function("reward.function"),
    OptionalSection(
        "reward.model",
        "reward_model.enable",
        (
            Derived(
                "reward.model.path",
                ("reward_model.model.path", "reward_model.enable"),
                lambda path, enabled: path,
                lambda path: (path,),
            ),
            file_list("reward.model.external_libs", "reward_model.model.external_lib", scalar=False, empty=None),
        ),
        on_value=True,
    ),
)


def rewards_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the native reward section."""
    native.set("reward.kind", "rules")
    native.apply(REWARD_RULES)
    if values["custom_reward_function.path"] is not None:
        native.set("reward.function_arguments", values[FUNCTION_ARGUMENTS] or {}, FUNCTION_ARGUMENTS)
    if values[MANAGER] in RECIPE_MANAGERS:
        native.require(MANAGER, Capability.REWARD_MANAGERS)
    if values[MANAGER] == "dapo":
        # without the penalty on overlong responses, DAPO's manager scores like the naive one
        native.set("reward.manager", "dapo" if values[OVERLONG] else "naive", MANAGER, OVERLONG)
        if values[OVERLONG]:
            native.set("reward.overlong.buffer", values[OVERLONG_BUFFER], OVERLONG_BUFFER, MAX_RESPONSE)


def rewards_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's keys of the reward function and the reward model."""
    reward = foreign.experiment.reward
    if reward is None:
        return
    foreign.apply(REWARD_RULES)
    foreign.set(FUNCTION_ARGUMENTS, reward.function_arguments)
    if reward.overlong is not None:
        foreign.set(MANAGER, "dapo")
        foreign.set(OVERLONG, True)
        foreign.set(OVERLONG_BUFFER, reward.overlong.buffer)


def tools_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the tools that responses may call, the users who reply, the rows that have either, and the number of turns.

    verl's releases with agent loops decide by their names, earlier ones by `multi_turn.enable`.
    """
    files = [key for key in REPLY_SECTIONS if values[key]]
    if not (values[TOOLS] or values[AGENT_LOOP] == "tool_agent") or not files:
        native.set("rollout.tool_calls", None, TOOLS, TOOL_FILE, TOOL_FUNCTIONS, AGENT_LOOP)
        native.set("rollout.interactions", None, TOOLS, USER_FILE, AGENT_LOOP)
        native.set("rollout.max_turns", 1)
        return
    for key in files:
        native.set(f"{REPLY_SECTIONS[key]}.{_file_field(key)}", values[key], key, TOOLS)
        native.set(f"{REPLY_SECTIONS[key]}.timeout_seconds", CALL_SECONDS, key)
        # verl passes the rewards of tools and users on to the reward function
        native.set(f"{REPLY_SECTIONS[key]}.reward_weight", 0.0, TOOLS)
    is_older = values.is_set(ROLLOUT_MODE) and values[ROLLOUT_MODE] == "sync"
    if values.is_set(AGENT_LOOP) and values[AGENT_LOOP] in LOOPS and not is_older:
        native.set("data.agent_loop", values[AGENT_LOOP], AGENT_LOOP)
    # a turn has at least one token
    assistant, user = values[ASSISTANT_TURNS], values[USER_TURNS]
    limits = [values["actor_rollout_ref.rollout.response_length"], assistant, None if user is None else user + 1]
    turns = min(limit for limit in limits if limit is not None)
    native.set("rollout.max_turns", turns, ASSISTANT_TURNS, USER_TURNS)
    if values.is_set(TRUNCATE_SIDE) and values[TRUNCATE_SIDE] != "middle":
        kept, before = ("end", "beginning") if values[TRUNCATE_SIDE] == "left" else ("beginning", "end")
        native.remarks.append(
            f"{values.describe(TRUNCATE_SIDE)} keeps the {kept} of a long result, as in verl since 0.8; until 0.7 it "
            f"kept the {before}"
        )


def _file_field(key: str) -> str:
    return "function_file" if key == TOOL_FUNCTIONS else "file"


def tool_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield an agent loop that calls tools without any, and without users who reply."""
    if values[AGENT_LOOP] == "tool_agent" and not any(values[key] for key in REPLY_SECTIONS):
        problem = f"needs tools, which {TOOL_FILE} names"
        yield values.problem(AGENT_LOOP, problem, f"{AGENT_LOOP}=single_turn_agent")


def tools_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's keys of tools and simulated users."""
    run, rollout = foreign.experiment, foreign.experiment.rollout
    values = {key: foreign.native_value(f"{section}.{_file_field(key)}") for key, section in REPLY_SECTIONS.items()}
    files = {key: value for key, value in values.items() if value is not None}
    foreign.set(TOOLS, bool(files))
    if not files:
        return
    if run.data is not None and run.data.agent_loop is not None:
        foreign.set(AGENT_LOOP, run.data.agent_loop)
    for key, file in files.items():
        foreign.set(key, file)
    foreign.set(ASSISTANT_TURNS, rollout.max_turns)


def overlong_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of DAPO's penalty on overlong responses."""
    response = "actor_rollout_ref.rollout.response_length"
    if values[MANAGER] != "dapo" or not values[OVERLONG]:
        return
    if not values[OVERLONG_BUFFER]:
        hint = f"for example {OVERLONG_BUFFER}={max(1, values[response] // 4)}, or {OVERLONG}=false"
        yield values.problem(OVERLONG_BUFFER, f"{values.describe(OVERLONG)} needs it", hint)
    elif values[OVERLONG_BUFFER] > values[response]:
        problem = f"is more than the maximum response length, {values.describe(response)}"
        yield values.problem(OVERLONG_BUFFER, problem, f"at most: {OVERLONG_BUFFER}={values[response]}")
    if values[MAX_RESPONSE] not in (None, values[response]):
        problem = f"differs from {values.describe(response)}"
        yield values.problem(MAX_RESPONSE, problem, "leave it out: it follows data.max_response_length")


def run_setting_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield keys of a run that lack another one."""
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if values[mode] == "resume_path" and values[path] in (None, "", True, False):
        yield values.problem(mode, f"needs {path}", f"{path}=CHECKPOINT, or {mode}=auto")
    file, name = "data.custom_cls.path", "data.custom_cls.name"
    if values[file] is not None and values[name] is None:
        yield values.problem(file, f"needs {name}", f"{name}=CLASS, of a class in that file")


def run_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set loggers, name and directories, the checkpoint to resume from, and profiles."""
    native.apply(RUN_RULES)
    profiles_to_native(values, native)
    directory_to_native(values, native)
    if values.is_set(REMOTE_DIR):
        native.set("checkpoint.remote_dir", values[REMOTE_DIR], REMOTE_DIR)


def directory_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Split the directory into the run's name, its last part, and the output directory above.

    If the user set an experiment name that differs from the last part, the run gets a directory of that name below.
    """
    keys = ("trainer.default_local_dir", "trainer.experiment_name")
    directory, name = values[keys[0]].rstrip("/"), str(values[keys[1]])
    parent, _, last = directory.rpartition("/")
    if last == name or not values.is_set(keys[1]):
        native.set("output_dir", parent or ("/" if directory.startswith("/") else "."), *keys)
        native.set("name", last, *keys)
    else:
        native.set("output_dir", directory, *keys)
        native.set("name", name, *keys)


def run_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's keys of loggers, directories, resumption and profiles."""
    run = foreign.experiment
    foreign.apply(RUN_RULES)
    profiles_from_native(foreign)
    foreign.set("trainer.experiment_name", run.name)
    parent = "" if run.output_dir == "." else run.output_dir.rstrip("/") + "/"
    foreign.set("trainer.default_local_dir", f"{parent}{run.name}")
    foreign.set(REMOTE_DIR, run.checkpoint.remote_dir)
