"""A decoder's layers shared out over the stages of a pipeline.

Stage p of P holds parts p, P + p, 2P + p … of the layers, as many as it has virtual stages (Narayanan et al. 2021,
arXiv:2104.04473). The first part has the embedding before it, the last one norm and head after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from quintet.config.layouts import APART
from quintet.errors import ConfigError, MachineError
from quintet.policies.attention import Layout, PackedLayout
from quintet.policies.causal_lm import Packed, PolicyModule, ValueModel, hidden_states

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["EMBEDDING", "HEAD", "StagedBody", "copied_names", "split_stages", "staged_body"]

EMBEDDING, HEAD = "policy.model.embed_tokens.weight", "policy.lm_head.weight"
TRIAL_TOKENS = 24
TRIAL_GAP = 1e-4


class StagedBody(nn.Module):
    """In front of the class of a decoder's body: the layers of this rank's parts alone."""

    own: dict[int, tuple[str, ...]]
    """The names of the layers in each part that is held here."""
    parts: int
    """Of the whole body, over all ranks."""
    incoming: Tensor | None
    """[P, hidden], what the part before the last gave; for a pass through the last one."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, **_: object) -> Any:
        """The last part, on what came `incoming`; what a body's own pass gives."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        states = self.through(self.parts - 1, input_ids[0], position_ids[0], layout, self.incoming)
        return BaseModelOutputWithPast(last_hidden_state=states[None])

    def through(self, part: int, tokens: Tensor, positions: Tensor, layout: Layout, states: Tensor | None) -> Tensor:
        """[P, hidden] after one part, from [P, hidden] before it; the first part begins with the tokens."""
        if states is None:
            states = self.get_submodule("embed_tokens")(tokens)
        states, where = states[None], positions[None]
        turn = self.get_submodule("rotary_emb")(states, where)
        for name in self.own[part]:
            states = self.get_submodule("layers").get_submodule(name)(
                states,
                attention_mask=None,
                position_ids=where,
                past_key_values=None,
                use_cache=False,
                position_embeddings=turn,
                layout=layout,
            )
        if part == self.parts - 1:
            states = self.get_submodule("norm")(states)
        return states[0]


class _Staged(nn.Module):
    """In front of the class of a policy's or critic's module: a pass may end after a part."""

    copied: Mapping[str, str]
    """Of weights that are tied to one on another rank, that one's name."""

    def forward(
        self, packed: Packed, *given: Any, part: int | None = None, states: Tensor | None = None, **named: Any
    ) -> Any:
        """With `part`, the states [P, hidden] after it; else what the module gives, from the last part on."""
        if part is None:
            return super().forward(packed, *given, **named)
        return staged_body(self).through(part, packed.tokens, packed.positions, packed.layout, states)


def copied_names(module: nn.Module) -> Mapping[str, str]:
    """Of a module's parameters that are copies of other ranks', by name, the name of that one."""
    return module.copied if isinstance(module, _Staged) else {}


def staged_body(module: nn.Module) -> StagedBody:
    """The body of a module that `split_stages` took apart."""
    return cast(StagedBody, _body(module))


def _body(module: nn.Module) -> nn.Module:
    return module.get_submodule("body" if isinstance(module, ValueModel) else "policy.model")


def split_stages(
    module: PolicyModule | ValueModel, mesh: DeviceMesh, virtual: int = 1, component: str = "actor"
) -> None:
    """Keep the parts of this rank, in place; `mesh` is the 1-D mesh of the pipeline's ranks, each of which holds all
    layers before. Names of parameters stay. A head that is tied to the embedding is a weight of its own afterwards, on
    the last rank. What splits layers or experts comes first, what shards weights afterwards. `component` is
    whose configuration it is.

    Raises:
        ConfigError: there are fewer layers than parts, or virtual stages without a pipeline.
        MachineError: the body does something besides its layers.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()
    body = _body(module)
    layers = list(body.get_submodule("layers").children())
    _refuse(module, len(layers), ranks, virtual, component)
    parts = ranks * virtual
    own = {
        part: tuple(str(i) for i in range(part * len(layers) // parts, (part + 1) * len(layers) // parts))
        for part in range(rank, parts, ranks)
    }
    tied, before = _is_tied(module), _trial(body)
    _take_class(body, StagedBody)
    staged = cast(StagedBody, body)
    staged.parts, staged.incoming = parts, None
    _hold_against(before, staged, len(layers))
    staged.own = own
    body.layers = nn.ModuleDict({name: layers[int(name)] for names in own.values() for name in names})
    _drop_ends(module, first=rank == 0, last=rank == ranks - 1)
    _take_class(module, _Staged)
    copies = tied and ranks > 1 and rank == ranks - 1
    cast(_Staged, module).copied = {HEAD: EMBEDDING} if copies else {}


def _refuse(module: nn.Module, layers: int, ranks: int, virtual: int, component: str) -> None:
    key, virtual_key = f"{component}.parallel.pipeline", f"{component}.parallel.virtual_pipeline"
    if virtual > 1 and ranks == 1:
        hint = f"set {virtual_key}=1, or {key}=2"
        raise ConfigError(f"{virtual_key} = {virtual}: there is no pipeline", key=virtual_key, value=virtual, hint=hint)
    if layers < ranks * virtual:
        raise ConfigError(
            f"{key} = {ranks} with {virtual_key} = {virtual} makes {ranks * virtual} parts of {layers} layers",
            key=virtual_key if virtual > 1 else key,
            value=virtual if virtual > 1 else ranks,
            hint=f"make both smaller: their product is at most {layers}",
        )
    if any(".lora_" in name for name, _ in module.named_parameters()):
        raise ConfigError(
            f"{key} = {ranks}: {APART}",
            key=key,
            value=ranks,
            hint=f"set {key}=1; the base model's weights are sharded all the same",
        )


def _is_tied(module: nn.Module) -> bool:
    return isinstance(module, PolicyModule) and module.get_parameter(HEAD) is module.get_parameter(EMBEDDING)


def _take_class(module: nn.Module, front: type[nn.Module]) -> None:
    """`forward` comes from `front`, and everything else from the module's own class."""
    kind = type(module)
    module.__class__ = type(f"Staged{kind.__name__}", (front, kind), {})


def _drop_ends(module: nn.Module, *, first: bool, last: bool) -> None:
    """Let go of what belongs to the other ranks' parts: embedding, norm and head."""
    body = _body(module)
    if not first:
        body.embed_tokens = None  # type: ignore[assignment]
    if last:
        return
    body.norm = None  # type: ignore[assignment]
    if isinstance(module, ValueModel):
        module.head = None  # type: ignore[assignment]
    else:
        module.get_submodule("policy").lm_head = None  # type: ignore[assignment]


def _inputs(body: nn.Module) -> tuple[Tensor, Tensor, Layout]:
    weight = body.get_parameter("embed_tokens.weight")
    tokens = torch.arange(TRIAL_TOKENS, device=weight.device) * 7919 % len(weight)
    layout = PackedLayout(torch.tensor([TRIAL_TOKENS])).to(weight.device)
    return tokens, torch.arange(TRIAL_TOKENS, device=weight.device), layout


def _trial(body: nn.Module) -> Tensor:
    """What the whole body makes of a few tokens."""
    with torch.no_grad():
        return hidden_states(body, *_inputs(body))


def _hold_against(before: Tensor, body: StagedBody, layers: int) -> None:
    """A body that scales embeddings, or has layers of several kinds, would be another one in parts."""
    body.own = {body.parts - 1: tuple(str(i) for i in range(layers))}
    with torch.no_grad():
        now = body.through(body.parts - 1, *_inputs(body), None)
    gap = float((now - before).abs().max())
    if not gap <= TRIAL_GAP * max(1.0, float(before.abs().max())):
        raise MachineError(
            f"{type(body).__name__} does something besides its layers: in parts, states differ by {gap:.2g}",
            "do without a pipeline, or take a model of another architecture, such as Llama, Mistral or Qwen",
        )
