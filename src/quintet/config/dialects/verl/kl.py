"""KL divergences of verl's trees: in the rewards, in the loss, or both."""

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder

KL_IN_LOSS, KL_IN_REWARD = "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"
LOSS_KEYS = {"coefficient": "actor_rollout_ref.actor.kl_loss_coef", "estimator": "actor_rollout_ref.actor.kl_loss_type"}
REWARD_KEYS = {
    "coefficient": "algorithm.kl_ctrl.kl_coef",
    "estimator": "algorithm.kl_penalty",
    "horizon": "algorithm.kl_ctrl.horizon",
}
KL_TARGET, KL_CONTROL = "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.type"


def kl_to_native(values: ForeignValues, native: NativeBuilder, *switches: str, in_loss: bool, in_reward: bool) -> None:
    """Set the divergences that count, as the keys `switches` say."""
    if not (in_loss or in_reward):
        native.set("algorithm.kl", None, *switches)
        return
    native.set("algorithm.kl.apply_to", "loss" if in_loss else "reward", *switches)
    if in_loss:
        _section_to_native(values, native, "algorithm.kl", LOSS_KEYS)
    if not in_reward:
        return
    section = "algorithm.reward_kl" if in_loss else "algorithm.kl"
    _section_to_native(values, native, section, REWARD_KEYS)
    is_adaptive = values[KL_CONTROL] == "adaptive"
    native.set(f"{section}.target", values[KL_TARGET] if is_adaptive else None, KL_TARGET, KL_CONTROL)


def _section_to_native(values: ForeignValues, native: NativeBuilder, section: str, keys: dict[str, str]) -> None:
    for field, key in keys.items():
        if values.dialect.spec(key) is not None:
            native.set(f"{section}.{field}", values.native(key), key)


def kl_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of both divergences."""
    algorithm = foreign.experiment.algorithm
    in_loss, in_reward = algorithm.kl_in_loss, algorithm.kl_in_reward
    foreign.set(KL_IN_LOSS, in_loss is not None)
    foreign.set(KL_IN_REWARD, in_reward is not None)
    for divergence, keys in ((in_loss, LOSS_KEYS), (in_reward, REWARD_KEYS)):
        for field, key in keys.items() if divergence is not None else ():
            if foreign.dialect.spec(key) is not None:
                foreign.set_native(key, getattr(divergence, field))
    if in_reward is not None and in_reward.target is not None:
        foreign.set(KL_CONTROL, "adaptive")
        foreign.set(KL_TARGET, in_reward.target)
