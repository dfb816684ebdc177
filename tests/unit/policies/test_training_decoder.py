"""If these fail, models on a CPU learn something else than their modules would, or hooks on them are passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from quintet.kernels.build import find_compiler
from quintet.policies import hidden_states
from quintet.policies.attention import PackedLayout, register_attention
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.model_loading import enable_activation_checkpointing
from quintet.policies.tiny_models import Preset, build_model
from quintet.policies.training_decoder import training_hidden_states

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")

VOCABULARY = 100


def qwen() -> PreTrainedModel:
    """Biases on queries, keys and values, two queries to a key."""
    return build_model(Preset(64, 2, 4, 2, 90, VOCABULARY, 512), VOCABULARY, 2, 0, 0)


def llama() -> PreTrainedModel:
    """No biases, heads wider than the hidden size over their number, a query to each key."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=48,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Biases and norms that aren't all alike."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.set_attn_implementation(register_attention())
    return model.eval()


def rows(*lengths: int) -> Tensor:
    return torch.tensor(lengths, dtype=torch.long)


LAYOUTS = {
    "alone": (PackedLayout(rows(5, 33, 130)), 168),
    "one prompt": (PackedLayout(rows(5, 33, 17), prefix=19), 74),
    "prompts that begin alike": (PackedLayout(rows(5, 33, 17, 70), 3, rows(4, 40), torch.tensor([0, 0, 1, 1])), 172),
    "prompts out of order": (PackedLayout(rows(5, 33, 17), 0, rows(40, 4, 1), torch.tensor([2, 0, 1])), 100),
    "a prompt whose answer is one token": (PackedLayout(rows(7), 0, rows(40, 4), torch.tensor([1])), 51),
    "a prompt alone": (PackedLayout(rows(), prefix=21), 21),
}


def last_states(model: PreTrainedModel, layout: PackedLayout, size: int, dtype: torch.dtype) -> Tensor:
    tokens, positions = torch.arange(size) * 7919 % VOCABULARY, torch.arange(size) % 50
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        return compute_hidden_states(model.model, tokens, positions, layout).float()


def passes(
    model: PreTrainedModel,
    layout: PackedLayout,
    size: int,
    dtype: torch.dtype,
    forward: Callable[..., Tensor] = last_states,
) -> dict[str, Tensor]:
    """Last states, and the gradients of all weights for a random direction."""
    model.zero_grad()
    states = forward(model, layout, size, dtype)
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward((states * direction).sum())
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"states": states.detach(), **grads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [qwen, llama])
@pytest.mark.parametrize("name", LAYOUTS)
def test_states_and_gradients_are_those_of_the_modules(
    name: str, make: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shaken(qwen() if make is qwen else llama())
    layout, size = LAYOUTS[name]
    actual = passes(model, layout, size, dtype)
    asked = training_hidden_states(model.model, torch.zeros(size, dtype=torch.long), torch.arange(size), layout)
    assert asked is not None
    monkeypatch.setattr(hidden_states, "training_hidden_states", lambda *_: None)
    modules = passes(model, layout, size, dtype)
    assert actual.keys() == modules.keys()
    for key, value in modules.items():
        bound = (1e-5 if dtype is torch.float32 else 6e-2) * float(value.abs().max())
        assert float((actual[key] - value).abs().max()) <= bound, key


def takes_modules(model: PreTrainedModel) -> bool:
    return training_hidden_states(model.model, torch.arange(8), torch.arange(8), PackedLayout(rows(8))) is None


def test_what_is_hooked_in_is_called() -> None:
    model = shaken(qwen())
    assert not takes_modules(model)
    seen = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    compute_hidden_states(model.model, torch.arange(8), torch.arange(8), PackedLayout(rows(8)))
    assert seen == [1]
    handle.remove()
    assert not takes_modules(model)


@pytest.fixture
def mesh() -> Iterator[distributed.DeviceMesh]:
    """A mesh of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("gathered", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("make", [qwen, llama])
def test_layers_that_fsdp_shards_are_computed_by_the_kernels(
    make: object, reshard: bool, gathered: torch.dtype, mesh: distributed.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, (layout, size) = (qwen if make is qwen else llama), LAYOUTS["prompts that begin alike"]
    expected = passes(shaken(build()), layout, size, gathered)
    model = shaken(build())
    policy = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    monkeypatch.delattr(hidden_states, "_modules_hidden_states")
    model.forward = partial(last_states, model)  # type: ignore[assignment]
    for _ in range(2):
        actual = passes(model, layout, size, gathered, lambda model, *arguments: model(*arguments))
    for key, value in expected.items():
        bound = (1e-5 if gathered is torch.float32 else 6e-2) * float(value.abs().max())
        tensor = actual[key].full_tensor() if hasattr(actual[key], "full_tensor") else actual[key]
        assert float((tensor - value).abs().max()) <= bound, key


def test_other_sharding_units_than_layers_are_left_to_the_modules(mesh: distributed.DeviceMesh) -> None:
    model = shaken(qwen())
    for layer in model.model.layers:
        fully_shard(layer.mlp, mesh=mesh)
    assert takes_modules(model)


def test_models_that_recompute_or_are_of_another_type_keep_their_modules() -> None:
    assert takes_modules(shaken(qwen()).double())
    model = shaken(qwen())
    enable_activation_checkpointing(model)
    assert takes_modules(model)
    grown = shaken(qwen())
    grown.model.layers[0].mlp.down_proj = torch.nn.Linear(90, 64, bias=True)
    assert takes_modules(grown)


def test_without_kernels_the_modules_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.policies.training_decoder.training_kernels", lambda _: None)
    assert takes_modules(shaken(qwen()))


def test_a_window_is_left_to_the_modules_which_refuse_what_is_longer() -> None:
    shape = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    assert takes_modules(shaken(MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=4))))
    assert not takes_modules(shaken(MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=None))))
