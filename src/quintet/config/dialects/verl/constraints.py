"""Constraints between verl's keys, which VAGEN shares."""

import math
from collections.abc import Iterator

from quintet.config.dialects.algorithm_choice import ADVANTAGE, config_class
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.release_tables import matches_code
from quintet.config.dialects.verl.batches import ACTOR, REF, StepSize, batch_problems
from quintet.config.dialects.verl.critic import DEFAULT_LEARNING_RATE, critic_problems
from quintet.config.dialects.verl.dialect import TABLES
from quintet.config.dialects.verl.key_values import UNCLIPPED
from quintet.config.dialects.verl.objective import objective_problems
from quintet.config.dialects.verl.run_settings import run_setting_problems
from quintet.config.dialects.verl.separate_engines import is_fully_async, prompts_per_step
from quintet.config.dialects.verl.training_engines import training_engine, training_engine_problems
from quintet.config.problems import ConfigProblem

PROMPTS = "data.train_batch_size"
SAMPLES = "actor_rollout_ref.rollout.n"
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
ESTIMATOR = "algorithm.adv_estimator"
REWARDS_OF_SINGLES = ("grpo", "rloo")
"""Estimators that give the only response to a prompt its reward as advantage."""
LENGTHS = ("data.max_prompt_length", "data.max_response_length")


def step_size(values: ForeignValues) -> StepSize:
    """Return the size of a training step; verl counts mini-batches in prompts."""
    samples = values[SAMPLES]
    return StepSize(
        sequences=prompts_per_step(values) * samples,
        mini_batch=(values[MINI_BATCH] if is_fully_async(values) else min(values[MINI_BATCH], values[PROMPTS]))
        * samples,
        max_tokens=values[LENGTHS[0]] + max(values[LENGTHS[1]], values["actor_rollout_ref.rollout.response_length"]),
        sequences_from=(MINI_BATCH if is_fully_async(values) else PROMPTS, SAMPLES),
        mini_batch_from=MINI_BATCH,
        max_tokens_from=LENGTHS,
    )


def mini_batch_size_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield a problem if the release does not split the prompts of a step into mini-batches of this size."""
    rules, until, release = TABLES["mini_batches"], values.dialect.is_until, values.dialect.release
    code = {} if release is None else release.code
    has_remainder = until(rules["remainder_until"]) or matches_code(rules["remainder_code"], code)
    is_split = values[f"{ACTOR}.strategy"] in ("fsdp", "fsdp2") and has_remainder
    is_larger_taken = until(rules["larger_until"]) or matches_code(rules["larger_code"], code)
    takes_larger = values[f"{ACTOR}.use_dynamic_bsz"] or is_larger_taken
    if not is_split or (values[MINI_BATCH] > values[PROMPTS] and not takes_larger):
        prompts = f"prompts of a step, from {values.describe(PROMPTS)}"
        yield from values.divisor_problems(MINI_BATCH, values[PROMPTS], prompts)


def uneven_mini_batches_to_native(
    values: ForeignValues, native: NativeBuilder, step: tuple[str, ...], samples: str
) -> None:
    """Set mini-batches that do not divide a step, of which the last one is smaller, or the only one.

    The size of a step is the product of the keys in `step`, and `samples` is the key of the sequences of each.
    """
    size, total = values[MINI_BATCH], math.prod(values[key] for key in step)
    if total % size:
        native.set("training.mini_batches", 1, MINI_BATCH, *step)
    if size < total and total % size:
        native.set("training.mini_batch_sequences", size * values[samples], MINI_BATCH, samples)


def shared_problems(
    values: ForeignValues, step: StepSize, samples: str, *, has_reference: bool
) -> Iterator[ConfigProblem]:
    """Yield problems between keys that do not depend on the environment.

    `samples` is the key of the samples to compare.
    """
    advantage = config_class(ADVANTAGE, values.native(ESTIMATOR))
    yield from training_engine_problems(values)
    yield from batch_problems(values, step, critic=advantage.uses_values, reference=has_reference)
    # with one sample to a prompt, verl takes their rewards as advantages
    takes_rewards = values.native(ESTIMATOR) in REWARDS_OF_SINGLES
    if advantage.needs_several_samples and not takes_rewards and values[samples] == values[SAMPLES] == 1:
        problem = f"{values.describe(ESTIMATOR)} compares several responses to the same prompt"
        yield values.problem(samples, problem, f"at least: {samples}=2, or {ESTIMATOR}=gae")
    yield from objective_problems(values)
    yield from _missing_keys(values)
    yield from run_setting_problems(values)
    yield from _sampling_problems(values)
    for learner in (ACTOR, "critic"):
        yield from _schedule_problems(values, learner)
    if advantage.uses_values:
        yield from critic_problems(values)


def _missing_keys(values: ForeignValues) -> Iterator[ConfigProblem]:
    padding = "actor_rollout_ref.model.use_remove_padding"
    for section in (ACTOR, REF) if training_engine(values) is None else ():
        ulysses = f"{section}.ulysses_sequence_parallel_size"
        follows_actor = section == REF and not values.is_set(ulysses)
        if values[ulysses] > 1 and not values[padding] and not follows_actor:
            yield values.problem(ulysses, f"needs {padding}", f"set {padding}=true")


def _sampling_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    samples = "actor_rollout_ref.rollout.do_sample"
    if not values[samples] and values[SAMPLES] > 1:
        problem = f"all responses to a prompt would be the same, and {values.describe(SAMPLES)}"
        yield values.problem(samples, problem, f"set {samples}=true, or {SAMPLES}=1")
    for engine, data in (
        ("actor_rollout_ref.rollout.prompt_length", LENGTHS[0]),
        ("actor_rollout_ref.rollout.response_length", LENGTHS[1]),
    ):
        if values[engine] != values[data] and (values.is_set(data) or engine.endswith("prompt_length")):
            yield values.problem(engine, f"differs from {values.describe(data)}", f"leave it out: it follows {data}")


def _schedule_problems(values: ForeignValues, learner: str) -> Iterator[ConfigProblem]:
    """Yield problems of the learning rate of Megatron's optimizer, whose bounds are absolute numbers."""
    minimum, peak, norm, warmup, decay = (
        f"{learner}.optim.{key}" for key in ("min_lr", "lr", "clip_grad", "lr_warmup_steps", "lr_decay_steps")
    )
    older = f"{learner}.grad_clip"
    if values[minimum] is None:
        return
    if values.is_set(norm) and values.is_set(older) and (values[norm] or UNCLIPPED) != values[older]:
        problem = f"is not read under megatron, and differs from {values.describe(norm)}"
        yield values.problem(older, problem, f"leave {older} out")
    rate = values[peak] or DEFAULT_LEARNING_RATE
    if values[minimum] > rate:
        yield values.problem(minimum, f"is above {peak} = {rate:g}", f"at most: {minimum}={rate:g}")
    steps = values[warmup] or 0
    if values[decay] is not None and steps >= values[decay]:
        problem = f"must be more than {values.describe(warmup)}"
        yield values.problem(decay, problem, f"at least: {decay}={steps + 1}")
