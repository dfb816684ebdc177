"""Distribution of a decoder's layers over the ranks of a pipeline.

Rank p of P holds stages p, P + p, 2P + p …, as many as there are virtual stages per rank (Narayanan et al. 2021,
arXiv:2104.04473). The first stage includes the embedding, the last one the final norm and the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from quintet.config.checks.sharding import ADAPTERS_NOT_SPLIT
from quintet.errors import ConfigError, MachineError
from quintet.policies.attention import AttentionLayout, PackedLayout
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.packed_batch import PackedBatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EMBEDDING_NAME, HEAD_NAME = "policy.model.embed_tokens.weight", "policy.lm_head.weight"
PROBE_TOKENS = 24
MAX_PROBE_DIFFERENCE = 1e-4


class PipelineStageBody(nn.Module):
    """Mixin for the class of a decoder's body that runs only the layers of this rank's stages."""

    layer_names: dict[int, tuple[str, ...]]
    """Names of the layers of each local stage."""
    num_stages: int
    """Number of stages on all ranks."""
    input_states: Tensor | None
    """[P, hidden], output of the second-to-last stage; input of `forward`."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, layout: AttentionLayout, **_: object) -> Any:
        """Run the last stage on `input_states` and return what a body's own forward pass returns."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        states = self.forward_stage(self.num_stages - 1, input_ids[0], position_ids[0], layout, self.input_states)
        return BaseModelOutputWithPast(last_hidden_state=states[None])

    def forward_stage(
        self, stage: int, tokens: Tensor, position_ids: Tensor, layout: AttentionLayout, states: Tensor | None
    ) -> Tensor:
        """Return the output [P, hidden] of one stage for its input [P, hidden]; None for the first stage."""
        if states is None:
            states = self.get_submodule("embed_tokens")(tokens)
        states, position_ids = states[None], position_ids[None]
        position_embeddings = self.get_submodule("rotary_emb")(states, position_ids)
        for name in self.layer_names[stage]:
            states = self.get_submodule("layers").get_submodule(name)(
                states,
                attention_mask=None,
                position_ids=position_ids,
                use_cache=False,
                position_embeddings=position_embeddings,
                layout=layout,
            )
        if stage == self.num_stages - 1:
            states = self.get_submodule("norm")(states)
        return states[0]


class _PipelineStage(nn.Module):
    """Mixin for the class of a policy's or critic's module whose forward pass can run a single stage."""

    tied_copies: Mapping[str, str]
    """Name of the tied weight on another rank, by the name of its local copy."""

    def forward(
        self, packed: PackedBatch, *args: Any, stage: int | None = None, states: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Return the output [P, hidden] of `stage`, or by default the module's result from the last stage."""
        if stage is None:
            return super().forward(packed, *args, **kwargs)
        return get_stage_body(self).forward_stage(stage, packed.tokens, packed.position_ids, packed.layout, states)


def tied_copy_names(module: nn.Module) -> Mapping[str, str]:
    """Return the names of the tied weights on other ranks, by the names of their local copies."""
    return module.tied_copies if isinstance(module, _PipelineStage) else {}


def get_stage_body(module: nn.Module) -> PipelineStageBody:
    """Return the body of a module on which `apply_pipeline_parallel` was called."""
    return cast(PipelineStageBody, _get_body(module))


def _get_body(module: nn.Module) -> nn.Module:
    return module.get_submodule("body" if isinstance(module, ValueModel) else "policy.model")


def apply_pipeline_parallel(
    module: PolicyModule | ValueModel, mesh: DeviceMesh, virtual_stages: int = 1, component: str = "actor"
) -> None:
    """Remove the layers of other ranks' stages from the module, in place.

    `mesh` is the 1-D mesh of the pipeline's ranks, each of which has all layers before the call. Parameter names stay.
    A head tied to the embedding becomes a separate weight on the last rank. Apply tensor and expert parallelism before,
    FSDP after. `component` is the learner whose configuration error messages name.

    Raises:
        ConfigError: there are fewer layers than stages, or virtual stages without a pipeline.
        MachineError: the body computes more than its layers.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()
    body = _get_body(module)
    layers = list(body.get_submodule("layers").children())
    _check(module, len(layers), ranks, virtual_stages, component)
    num_stages = ranks * virtual_stages
    layer_names = {
        stage: tuple(str(i) for i in range(stage * len(layers) // num_stages, (stage + 1) * len(layers) // num_stages))
        for stage in range(rank, num_stages, ranks)
    }
    has_tied_head, reference = _has_tied_head(module), _probe(body)
    _insert_base_class(body, PipelineStageBody)
    staged = cast(PipelineStageBody, body)
    staged.num_stages, staged.input_states = num_stages, None
    _verify_stages(reference, staged, len(layers), component)
    staged.layer_names = layer_names
    body.layers = nn.ModuleDict({name: layers[int(name)] for names in layer_names.values() for name in names})
    _drop_other_stages(module, first=rank == 0, last=rank == ranks - 1)
    _insert_base_class(module, _PipelineStage)
    has_tied_copy = has_tied_head and ranks > 1 and rank == ranks - 1
    cast(_PipelineStage, module).tied_copies = {HEAD_NAME: EMBEDDING_NAME} if has_tied_copy else {}


def _check(module: nn.Module, layers: int, ranks: int, virtual_stages: int, component: str) -> None:
    key, virtual_key = f"{component}.parallel.pipeline", f"{component}.parallel.virtual_pipeline"
    if virtual_stages > 1 and ranks == 1:
        hint = f"set {virtual_key}=1, or {key}=2"
        raise ConfigError(
            f"{virtual_key} = {virtual_stages} requires pipeline parallelism",
            key=virtual_key,
            value=virtual_stages,
            hint=hint,
        )
    if layers < ranks * virtual_stages:
        raise ConfigError(
            f"{key} = {ranks} with {virtual_key} = {virtual_stages}"
            f" needs {ranks * virtual_stages} layers, but the model has {layers}",
            key=virtual_key if virtual_stages > 1 else key,
            value=virtual_stages if virtual_stages > 1 else ranks,
            hint=f"reduce either: their product must be at most {layers}",
        )
    if any(".lora_" in name for name, _ in module.named_parameters()):
        raise ConfigError(
            f"{key} = {ranks}: {ADAPTERS_NOT_SPLIT}",
            key=key,
            value=ranks,
            hint=f"set {key}=1; the base model's weights are sharded nevertheless",
        )


def _has_tied_head(module: nn.Module) -> bool:
    return isinstance(module, PolicyModule) and module.get_parameter(HEAD_NAME) is module.get_parameter(EMBEDDING_NAME)


def _insert_base_class(module: nn.Module, base: type[nn.Module]) -> None:
    """Replace the module's class by a subclass whose `forward` comes from `base`."""
    original = type(module)
    module.__class__ = type(f"Staged{original.__name__}", (base, original), {})


def _drop_other_stages(module: nn.Module, *, first: bool, last: bool) -> None:
    """Remove the embedding, norm and head if they belong to other ranks."""
    body = _get_body(module)
    if not first:
        body.embed_tokens = None  # type: ignore[assignment]
    if last:
        return
    body.norm = None  # type: ignore[assignment]
    if isinstance(module, ValueModel):
        module.head = None  # type: ignore[assignment]
    else:
        module.get_submodule("policy").lm_head = None  # type: ignore[assignment]


def _probe_inputs(body: nn.Module) -> tuple[Tensor, Tensor, AttentionLayout]:
    weight = body.get_parameter("embed_tokens.weight")
    tokens = torch.arange(PROBE_TOKENS, device=weight.device) * 7919 % len(weight)
    layout = PackedLayout(torch.tensor([PROBE_TOKENS])).to(weight.device)
    return tokens, torch.arange(PROBE_TOKENS, device=weight.device), layout


def _probe(body: nn.Module) -> Tensor:
    with torch.no_grad():
        return compute_hidden_states(body, *_probe_inputs(body))


def _verify_stages(reference: Tensor, body: PipelineStageBody, layers: int, component: str) -> None:
    """Check that running the stages equals the body: it may scale embeddings or have several kinds of layers."""
    body.layer_names = {body.num_stages - 1: tuple(str(i) for i in range(layers))}
    with torch.no_grad():
        states = body.forward_stage(body.num_stages - 1, *_probe_inputs(body), None)
    difference = float((states - reference).abs().max())
    if not difference <= MAX_PROBE_DIFFERENCE * max(1.0, float(reference.abs().max())):
        raise MachineError(
            f"{type(body).__name__} does not support pipeline parallelism: hidden states differ by {difference:.2g}",
            f"set {component}.parallel.pipeline=1, or use another architecture, such as Llama, Mistral or Qwen",
        )
