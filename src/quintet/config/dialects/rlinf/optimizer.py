"""Conversion of the optimizers of RLinf's runs on text, and of their schedules."""

from collections.abc import Iterator

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.native.training import TrainingConfig

PEAK_RATE, MAX_RATE = "optim.lr", "lr_sched.max_lr"
MIN_RATES = ("optim.min_lr", "lr_sched.min_lr")
BETAS = ("optim.adam_beta1", "optim.adam_beta2")
DECAY_STEPS, DECAY_STYLE, WARMUP_STEPS, WARMUP_SHARE = (
    f"lr_sched.{name}" for name in ("lr_decay_iters", "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction")
)


def optimizer_to_native(values: ForeignValues, native: NativeBuilder, learner: str = "actor") -> None:
    """Set learning rates and schedule of the actor, or of the critic, whose keys have the actor's values by default."""

    def key(name: str) -> str:
        return f"{learner}.{name}" if values.is_set(f"{learner}.{name}") else f"actor.{name}"

    optimizer = f"{learner}.optimizer"
    peak = key(PEAK_RATE)
    style = key(DECAY_STYLE)
    # the reference's `max_lr` is no limit unless the user set it
    rates = [peak, *(name for name in [key(MAX_RATE)] if values.is_set(name))]
    rate = min(values[name] for name in rates)
    native.set(f"{optimizer}.learning_rate", rate, peak, key(MAX_RATE))
    minima = [key(name) for name in MIN_RATES]
    minimum = max(values[name] for name in [name for name in minima if values.is_set(name)] or minima)
    native.set(f"{optimizer}.min_learning_rate_ratio", min(1.0, minimum / rate), *minima, peak)
    # a constant rate does not decay
    decay = key(DECAY_STEPS)
    native.set(f"{optimizer}.decay_steps", None if values[style] == "constant" else values[decay], decay, style)
    total = values[decay] or native.get("training.steps", TrainingConfig().steps) * values["algorithm.n_minibatches"]
    steps, share = key(WARMUP_STEPS), key(WARMUP_SHARE)
    warmup = values[steps] or int((values[share] or 0) * total)
    native.set(f"{optimizer}.warmup_steps", warmup, steps, share, decay)
    betas = [key(name) for name in BETAS]
    native.set(f"{optimizer}.betas", [values[name] for name in betas], *betas)


def optimizer_from_native(foreign: ForeignBuilder, learner: str = "actor") -> None:
    """Set the keys of the optimizer of the actor or of the critic."""
    run = foreign.experiment
    optimizer = run.actor.optimizer if learner == "actor" else run.critic.optimizer
    rate, is_constant = optimizer.learning_rate, optimizer.schedule == "constant"
    foreign.set(f"{learner}.{PEAK_RATE}", rate)
    foreign.set(f"{learner}.{MIN_RATES[0]}", next(_min_rates(optimizer.min_learning_rate_ratio, rate)))
    if optimizer.decay_steps is not None or not is_constant:
        foreign.set(f"{learner}.{DECAY_STEPS}", optimizer.decay_steps)
    foreign.set(f"{learner}.{WARMUP_STEPS}", optimizer.warmup_steps)
    if optimizer.warmup_steps == 0 and not is_constant:
        foreign.set(f"{learner}.{WARMUP_SHARE}", None)
    for name, beta in zip(BETAS, optimizer.betas, strict=True):
        foreign.set(f"{learner}.{name}", beta)


def _min_rates(ratio: float, rate: float) -> Iterator[float]:
    """Yield learning rates that give exactly this ratio, the shortest first, and at last the nearest."""
    for digits in range(1, 18):
        minimum = float(f"{ratio * rate:.{digits}g}")
        if minimum / rate == ratio:
            yield minimum
    yield ratio * rate
