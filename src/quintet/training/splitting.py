"""Layers and tokens of a learner shared out among the ranks of its mesh, before its weights are laid out."""

from __future__ import annotations

from quintet.config.native.learners import LearnerConfig
from quintet.errors import ConfigError
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.sequence_parallel import refuse_ulysses
from quintet.policies.tensor_parallel import split_critic, split_layers
from quintet.policies.token_split import TokenSplit
from quintet.training.mesh import Mesh

__all__ = ["share_out"]


def share_out(module: PolicyModule | ValueModel, mesh: Mesh, config: LearnerConfig, component: str = "actor") -> None:
    """Split the module's layers as far as `parallel.tensor` says, and have its passes share tokens as far as `context`
    and `ulysses` do. Every rank brings the same weights; ranks that differ along these dimensions alone are given the
    same passes, and all of them get what is measured at all tokens. `component` is whose configuration it is.

    Raises:
        ConfigError: the backend or the model can't be split so.
    """
    tensor, ulysses, sequence = mesh.size("tensor"), mesh.size("ulysses"), config.parallel.sequence
    body = module.policy if isinstance(module, PolicyModule) else module.body
    own = body.config.get_text_config()
    if ulysses > 1:
        refuse_ulysses(own.num_attention_heads // tensor, max(1, own.num_key_value_heads // tensor), ulysses, component)
    if tensor > 1:
        _refuse_flat(config.backend, tensor, component)
        along = mesh.along("tensor")
        if isinstance(module, PolicyModule):
            split_layers(module.policy, along, sequence=sequence, component=component)
        else:
            split_critic(module, along, sequence=sequence)
    if mesh.size("context", "ulysses") > 1 or (tensor > 1 and sequence):
        context, heads = (mesh.along(name).get_group() for name in ("context", "ulysses"))
        module.split = TokenSplit(context, heads, tensor if sequence else 1)


def _refuse_flat(backend: str, ranks: int, component: str) -> None:
    """
    Raises:
        ConfigError: the backend cuts flat tensors up, which layers that are split can't be part of.
    """
    if backend == "fsdp":
        key = f"{component}.parallel.tensor"
        raise ConfigError(
            f"{key} = {ranks}: FSDP can't cut up layers that are split; fsdp2 can",
            key=key,
            value=ranks,
            hint=f"set {component}.backend=fsdp2, or {key}=1",
        )
