"""What must agree in a verl configuration, and how it is told."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.config.dialects.conversion import Values
from quintet.config.dialects.verl.batches import ACTOR, MODEL, REF, ROLLOUT, Step
from quintet.config.dialects.verl.critic import OWN, critic_faults
from quintet.config.dialects.verl.objective import objective_faults
from quintet.config.dialects.verl.other_keys import UNCLIPPED
from quintet.config.divisors import nearest_divisor
from quintet.config.faults import Fault

__all__ = ["GROUPED", "divergence_faults", "group_faults", "mini_batch_faults", "shared_faults", "step_of"]

GROUPED = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized")
"""Estimators that compare replies to one prompt."""
PROMPTS, SAMPLES, MINI = "data.train_batch_size", f"{ROLLOUT}.n", f"{ACTOR}.ppo_mini_batch_size"
LENGTHS = ("data.max_prompt_length", "data.max_response_length")

CRITIC_RATE = OWN[f"{ACTOR}.optim.lr"]
"""The critic's learning rate where nobody gives one."""


def step_of(values: Values) -> Step:
    """verl counts mini-batches in prompts."""
    samples = values[SAMPLES]
    return Step(
        sequences=values[PROMPTS] * samples,
        update=values[MINI] * samples,
        longest=values[LENGTHS[0]] + max(values[LENGTHS[1]], values[f"{ROLLOUT}.response_length"]),
        of=(PROMPTS, SAMPLES),
        update_of=MINI,
        longest_of=LENGTHS,
    )


def mini_batch_faults(values: Values) -> Iterator[Fault]:
    """The prompts of a step fill whole optimizer steps."""
    prompts, mini = values[PROMPTS], values[MINI]
    if prompts % mini:
        problem = f"the {prompts} prompts of a step ({values.source(PROMPTS)}) must be a multiple of it"
        yield values.fault(MINI, problem, f"nearest: {MINI}={nearest_divisor(prompts, mini)}")


def group_faults(values: Values, samples: str) -> Iterator[Fault]:
    """Estimators that compare need something to compare with."""
    estimator = "algorithm.adv_estimator"
    if values[estimator] in GROUPED and values[samples] == 1:
        problem = f"leaves {values.told(estimator)} nothing to compare a reply with"
        yield values.fault(samples, problem, f"give at least 2, or {estimator}=gae")


def divergence_faults(values: Values) -> Iterator[Fault]:
    """The divergence from the reference counts once."""
    reward, loss = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
    if values[reward] and values[loss]:
        problem = f"the divergence counts already in the loss, by {values.told(loss)}"
        yield values.fault(reward, problem, f"set one of them to false: {reward}=false, or {loss}=false")


def shared_faults(values: Values) -> Iterator[Fault]:
    """What verl's own keys demand of each other, whatever is played."""
    yield from objective_faults(values)
    yield from _needs(values)
    yield from _sampling(values)
    yield from _schedules(values)
    yield from critic_faults(values)


def _needs(values: Values) -> Iterator[Fault]:
    """Keys that need another."""
    padding = f"{MODEL}.use_remove_padding"
    for section in (ACTOR, REF):
        together = f"{section}.ulysses_sequence_parallel_size"
        follows = section == REF and not values.given(together)
        if values[together] > 1 and not values[padding] and not follows:
            yield values.fault(together, f"needs {padding}", f"set {padding}=true")
    shuffle, seed = f"{ACTOR}.shuffle", f"{ACTOR}.data_loader_seed"
    if values[shuffle] and values[seed] is None and values[f"{ACTOR}.strategy"] == "megatron":
        yield values.fault(shuffle, f"needs {seed} under megatron", f"set {seed}=42, or {shuffle}=false")
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if values[mode] == "resume_path" and values[path] is None:
        yield values.fault(mode, f"needs {path}", f"set {path} to a checkpoint, or {mode}=auto")
    file, name = "data.custom_cls.path", "data.custom_cls.name"
    if values[file] is not None and values[name] is None:
        yield values.fault(file, f"needs {name}", f"set {name} to the class in that file")


def _sampling(values: Values) -> Iterator[Fault]:
    """How replies are drawn, and by what."""
    eager, freed = f"{ROLLOUT}.enforce_eager", f"{ROLLOUT}.free_cache_engine"
    if values[f"{ROLLOUT}.name"] == "vllm" and values[freed] and not values[eager]:
        problem = f"CUDA graphs don't go with {values.told(freed)}"
        yield values.fault(eager, problem, f"set {eager}=true, or {freed}=false")
    drawn = f"{ROLLOUT}.do_sample"
    if not values[drawn] and values[SAMPLES] > 1:
        problem = f"the replies to a prompt would all be the same, and {values.told(SAMPLES)}"
        yield values.fault(drawn, problem, f"set {drawn}=true, or {SAMPLES}=1")
    for engine, data in ((f"{ROLLOUT}.prompt_length", LENGTHS[0]), (f"{ROLLOUT}.response_length", LENGTHS[1])):
        if values[engine] != values[data] and (values.given(data) or engine.endswith("prompt_length")):
            problem = f"says otherwise than {values.told(data)}"
            yield values.fault(engine, problem, f"leave it out: it follows {data}")


def _schedules(values: Values) -> Iterator[Fault]:
    yield from _schedule(values, ACTOR)
    yield from _schedule(values, "critic")


def _schedule(values: Values, learner: str) -> Iterator[Fault]:
    """The learning rate of Megatron's optimizer, whose keys come in absolute numbers."""
    section = f"{learner}.optim"
    least, peak = f"{section}.min_lr", f"{section}.lr"
    if values[least] is None:
        return
    norm, older = f"{section}.clip_grad", f"{learner}.grad_clip"
    if values.given(norm) and values.given(older) and (values[norm] or UNCLIPPED) != values[older]:
        problem = f"is not read under megatron, and {values.told(norm)} says otherwise"
        yield values.fault(older, problem, f"leave {older} out")
    if values[least] > (values[peak] or CRITIC_RATE):
        highest = values[peak] or CRITIC_RATE
        yield values.fault(least, f"is above {peak} = {highest:g}", f"at most: {least}={highest:g}")
    warm, decay = values[f"{section}.lr_warmup_steps"] or 0, values[f"{section}.lr_decay_steps"]
    if decay is not None and warm >= decay:
        problem = f"must be more than {values.told(f'{section}.lr_warmup_steps')}"
        yield values.fault(f"{section}.lr_decay_steps", problem, f"at least: {section}.lr_decay_steps={warm + 1}")
