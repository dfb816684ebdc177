"""`quintet plan --prompt`: the first prompt of a run as the policy sees it, without its weights."""

from __future__ import annotations

import json
from dataclasses import asdict

from quintet.cli.choices import unknown_choices
from quintet.cli.configuration import inspect_config
from quintet.cli.model_downloads import with_downloaded_models
from quintet.cli.tables import clean, page, section
from quintet.config.composed import errors_with_sources
from quintet.config.problems import raise_problems

NEEDED = ("policy.path", "policy.tokenizer")


def run(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str, *, as_json: bool) -> None:
    """Print the first prompt of each env, or of the data.

    Raises:
        ConfigError: the configuration is invalid, its tokenizer is missing, or see `first_prompts`.
        MachineError: an env fails, or a file cannot be read.
    """
    composed = inspect_config(config, overrides, dialect, unknown_keys).runnable
    raise_problems(problem for problem in unknown_choices(composed) if problem.key in NEEDED)
    composed = with_downloaded_models(composed)
    from quintet.pipelines.first_prompt import first_prompts

    with errors_with_sources(composed):
        prompts = list(first_prompts(composed.experiment))
    if as_json:
        print(json.dumps([asdict(prompt) for prompt in prompts], indent=1))
        return
    with page() as out:
        for prompt in prompts:
            kind = "messages; the tokenizer of a preset is made when the run starts"
            section(out, f"{prompt.source}: {kind if prompt.tokens is None else f'{prompt.tokens:,} tokens'}")
            out.print(clean(prompt.text), soft_wrap=True)
