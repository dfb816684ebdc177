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
ENGINES = frozenset({"hf", "vllm"})
"""Engines that read images."""
PARALLEL = ("tensor", "pipeline", "context", "ulysses")
"""Ways of splitting a model or a sequence that its vision encoder does not support."""


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
    return [env for env in supported if getattr(env.config, "render", "text") == "vision"]


def _unsupported_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    config = composed.experiment
    for name in ("actor", "critic"):
        learner = getattr(config, name)
        if learner.backend == "megatron":
            key = f"{name}.backend"
            yield composed.problem(key, "this backend has no vision encoder", f"{key}=fsdp2")
        for way in PARALLEL:
            if getattr(learner.parallel, way) > 1:
                key = f"{name}.parallel.{way}"
                yield composed.problem(key, "not with a vision-language policy", f"{key}=1")
    shown = _envs_with_images(config)
    if shown and config.rollout.engine not in ENGINES:
        yield composed.problem("rollout.engine", "this engine does not read images yet", "rollout.engine=hf")
    if shown and config.sft is not None and config.sft.episodes is not None:
        key = f"{shown[0].key}.render"
        yield composed.problem(key, "rows of solved episodes have no images", f"{key}=text")
