"""Files of RLinf before release 0.1, as files of newer releases: other names of values, and numbers of groups and of
chunks in place of environments and actions. Names that a file leaves empty are those of RLinf's reference."""

from collections.abc import Iterator, Mapping
from typing import Any

from quintet.config.dialects.rlinf.key_values import TABLES
from quintet.config.dotted import get_value, has_key

GREEDY, SAMPLES = "algorithm.sampling_params.use_greedy", "algorithm.sampling_params.do_sample"
CHUNKS = {"train": "algorithm.n_chunk_steps", "eval": "algorithm.n_eval_chunk_steps"}


def newer_values(tree: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the values that newer files have in place of those of earlier releases, by key, each with the key from
    which it follows."""
    return dict(_newer_values(tree))


def _newer_values(tree: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, str]]]:
    for key, names in TABLES["newer_names"].items():
        if isinstance(value := get_value(tree, key), str) and value in names:
            yield key, (names[value], key)
    yield from (
        (key, (name, key)) for key, name in TABLES["reference_names"].items() if get_value(tree, key, name) is None
    )
    if isinstance(get_value(tree, GREEDY), bool) and not has_key(tree, SAMPLES):
        yield SAMPLES, (not get_value(tree, GREEDY), GREEDY)
    for side, chunks in CHUNKS.items():
        env = f"env.{side}"
        groups, number, rename = f"{env}.num_group", f"{env}.total_num_envs", f"{env}.num_envs"
        if has_key(tree, groups) and not has_key(tree, number) and not has_key(tree, rename):
            yield number, (f"${{multiply:${{{groups}}},${{{env}.group_size}}}}", groups)
        steps, limit = f"{env}.max_steps_per_rollout_epoch", f"{env}.max_episode_steps"
        if has_key(tree, chunks) and has_key(tree, env) and not has_key(tree, steps):
            yield steps, (f"${{multiply:${{{chunks}}},${{actor.model.num_action_chunks}}}}", chunks)
        inner = f"{env}.init_params.max_episode_steps"
        if has_key(tree, inner) and not has_key(tree, limit):
            yield limit, (f"${{{inner}}}", inner)
