"""Images and vision-language policies in runs that cannot have them."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.models import find_models
from quintet.config.problems import ConfigProblem

FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Families of vision-language models that read images; of others, only the language model is trained."""


def vision_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the keys of images if the policy reads none, and what a vision-language policy does not support."""
    shape = find_models(composed.experiment).policy
    if not isinstance(shape, ModelShape):
        return
    if shape.vision and shape.family.removesuffix("_text") in FAMILIES:
        yield from _unsupported_problems(composed)
    else:
        yield from _text_policy_problems(composed)


def _text_policy_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    config, reason = composed.experiment, "the policy reads no images"
    for env in _envs_with_images(config):
        key = f"{env.key}.render"
        other = "" if env.config.name == "svg" else f"{key}=text, or "
        yield composed.problem(key, reason, f"{other}policy.preset=grid-vl")
    if config.policy.vision.freeze:
        yield composed.problem("policy.vision.freeze", "the policy has no vision encoder", "policy.vision.freeze=false")


def _envs_with_images(config: Experiment) -> list[RunEnv]:
    """Return the run's environments that show images, of those that this version has."""
    supported = (env for env in config.run_envs if env.config.requires is None)
    return [env for env in supported if env.config.shows_images]


def _unsupported_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    config = composed.experiment
    for name in ("actor", "critic", "reference"):
        learner = getattr(config, name)
        if learner.backend == "megatron":
            key = f"{name}.backend"
            yield composed.problem(key, "this backend has no vision encoder", f"{key}=fsdp2")
        if learner.parallel.pipeline > 1:
            key = f"{name}.parallel.pipeline"
            yield composed.problem(key, "pipeline stages do not pass on the features of images", f"{key}=1")
    shown = _envs_with_images(config)
    episodes = config.sft and config.sft.episodes
    if shown and episodes and episodes.form != "message":
        key = "sft.episodes.form"
        yield composed.problem(key, "only messages have images", f"{key}=message, or {shown[0].key}.render=text")
