"""First prompt of a run as the policy sees it, without its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv
from quintet.config.plan.models import policy_path
from quintet.data.prompt_dataset import PromptDataset
from quintet.data.start_state_files import build_start_states
from quintet.envs.env import IMAGE
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.start_states import env_index
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, EpisodeStarted
from quintet.errors import ConfigError, MachineError
from quintet.policies.model_loading import load_policy_tokenizer
from quintet.rollout.chat.chat_format import Dialogue
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.runtime.components import build_chat_format, stop_token_ids

FIRST_STARTS = 1024
"""Start states among which the first one of each env is looked for."""


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The first prompt of an env or of the data files."""

    source: str
    text: str
    """With the chat template; of a preset, whose tokenizer does not exist yet, the messages."""
    tokens: int | None
    """None for a preset."""


def first_prompts(config: Experiment) -> Iterator[FirstPrompt]:
    """Yield the first prompt of each env, or of the training files. Runs the code that a run would for it.

    Raises:
        ConfigError: the run has no prompts, or its tokenizer, template, env or data do not match the configuration.
        MachineError: the env of an episode fails, or a file cannot be read.
    """
    path = policy_path(config)
    policy = None if path is None else Path(path)
    if config.sft_only is not None or config.evaluation is not None or config.env.is_simulator:
        hint = "`quintet data show` prints the rows of fine-tuning" if config.sft_only is not None else "leave it out"
        raise ConfigError("--prompt: this run gives its policy no prompts", key="--prompt", hint=hint)
    if config.env.reads_prompts:
        yield _first_row(config, policy)
    else:
        yield from _first_episodes(config, policy)


def _images(config: Experiment, policy: Path) -> ImagePrompts | None:
    trusted = config.policy.runs_tokenizer_code
    return ImagePrompts.from_directory(policy, config.policy.vision, trust_remote_code=trusted)


def _first_row(config: Experiment, policy: Path | None) -> FirstPrompt:
    if policy is None or config.data is None:
        message = (
            "--prompt needs the tokenizer of policy.path; that of a preset is made from the data when a run starts"
        )
        raise ConfigError(message, key="--prompt", hint="policy.path=DIRECTORY policy.preset=null")
    # the other rows need not be read
    data = config.data.model_copy(update={"train_rows": 1, "validation_files": (), "filter_long_prompts": False})
    read, tokenizer = config.model_copy(update={"data": data}), load_policy_tokenizer(config.policy, policy)
    with closing(PromptDataset.from_config(read, tokenizer, _images(config, policy))) as prompts:
        tokens = prompts.prompt(0)
    return FirstPrompt(", ".join(data.train_files), _decoded(tokenizer, tokens), len(tokens))


def _first_episodes(config: Experiment, policy: Path | None) -> Iterator[FirstPrompt]:
    chat, tokenizer = None, None
    if policy is not None:
        tokenizer = load_policy_tokenizer(config.policy, policy)
        ends = stop_token_ids(tokenizer, _generation_config(policy))
        chat = build_chat_format(config, tokenizer, ends, _images(config, policy))
    for env, start in _started(config):
        if chat is None:
            text = f"system: {start.instruction}\nuser: {start.observation.text}"
            yield FirstPrompt(env.name, text, None)
            continue
        dialogue = Dialogue.from_config(env.rollout, chat, start.instruction, start.actions, start.observation.text)
        prompt, _, _ = dialogue.observe(start.observation.text, start.observation.images)
        yield FirstPrompt(env.name, _decoded(tokenizer, prompt), len(prompt))


def _started(config: Experiment) -> Iterator[tuple[RunEnv, EpisodeStarted]]:
    """Yield each env with the start of its first episode in training, in the order in which they start."""
    states = build_start_states(config)
    first: dict[int, int] = {}
    for start in states.take(FIRST_STARTS):
        first.setdefault(env_index(start), start)
    with closing(build_run_envs(config)) as envs:
        for number, start in first.items():
            envs.start(number, start)
        while envs.pending:
            for event in envs.poll(wait=True):
                yield config.run_envs[event.episode], _checked(event)


def _checked(event: EnvEvent) -> EpisodeStarted:
    if isinstance(event, EpisodeFailed):
        raise MachineError(f"the environment fails: {event.failure.error_type}: {event.failure.message}")
    if isinstance(event, ActionsExecuted):
        raise AssertionError("actions of an episode without a response")
    return event


def _generation_config(policy: Path) -> Any:
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(policy, local_files_only=True)
    except OSError:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(policy, local_files_only=True))


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of a prompt, with `<image>` in place of the tokens of an image."""
    runs = groupby(tokens, key=lambda token: token >= 0)
    return "".join(
        tokenizer.decode(list(run), skip_special_tokens=False) if is_text else IMAGE for is_text, run in runs
    )
