"""Token losses of the policy and of the critic; `aggregation` makes one number of them."""

from quintet.algorithms.losses.clipping import ppo_clip
from quintet.algorithms.losses.critic import value_clip
from quintet.algorithms.losses.registry import LOSSES, Loss, loss_of
from quintet.algorithms.losses.targets import PolicyLoss, PolicyTargets, ValueLoss

__all__ = ["LOSSES", "Loss", "PolicyLoss", "PolicyTargets", "ValueLoss", "loss_of", "ppo_clip", "value_clip"]
