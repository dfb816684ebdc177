"""Layers and tokens of a learner shared out among the ranks of its mesh, before its weights are laid out."""

from __future__ import annotations

from quintet.config.native.learners import ParallelConfig
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.tensor_parallel import split_critic, split_layers
from quintet.policies.token_split import TokenSplit
from quintet.training.mesh import Mesh

__all__ = ["share_out"]


def share_out(module: PolicyModule | ValueModel, mesh: Mesh, parallel: ParallelConfig) -> None:
    """Split the module's layers as far as `parallel.tensor` says, and have its passes share tokens as far as `context`
    and `ulysses` do. Every rank brings the same weights; ranks that differ along these dimensions alone are given the
    same passes, and all of them get what is measured at all tokens.

    Raises:
        ConfigError: the model can't be split so.
    """
    tensor = mesh.size("tensor")
    if tensor > 1:
        along = mesh.along("tensor")
        if isinstance(module, PolicyModule):
            split_layers(module.policy, along, sequence=parallel.sequence)
        else:
            split_critic(module, along, sequence=parallel.sequence)
    if mesh.size("context", "ulysses") > 1 or (tensor > 1 and parallel.sequence):
        context, ulysses = (mesh.along(name).get_group() for name in ("context", "ulysses"))
        module.split = TokenSplit(context, ulysses, multiple=tensor if parallel.sequence else 1)
