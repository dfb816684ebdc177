"""Check of a loaded model: our forward pass against transformers' own, one sequence at a time.

Models whose layers do more than ours (soft caps, sinks, scaled logits, recurrent layers) would otherwise be computed
wrongly without an error. Most of the check runs on a miniature of the model, see `build_miniature`, so that it takes a
fraction of a second whatever the number of layers and the vocabulary.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quintet.errors import MachineError, UserError
from quintet.policies.attention import MODELS_HINT, AttentionLayout, PackedLayout, register_attention
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.layer_kinds import num_distinct_layers
from quintet.policies.output_head import MASKED_LOGIT, OutputHead, untransformed_logits
from quintet.policies.vision.image_encoder import is_vision_language, text_decoder
from quintet.policies.vision.image_probe import image_probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_DIFFERENCE = 1e-3
"""Largest allowed difference, relative to the largest value."""
VOCABULARY = 64
"""Tokens of a miniature's vocabulary."""
DEPTH_TOKENS = 4
"""Tokens that pass through all layers."""
PREFIX, STEMS, PARENTS, BRANCHES = 9, (3, 6), (0, 0, 1), (7, 4, 9)
"""Lengths of the packed sequences, see `PackedLayout`."""
WINDOW = 6
"""Sliding window of a miniature in tokens; the sequences are longer."""
WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size")
NOISE = 0.1
"""Standard deviation of what is added to a miniature's biases, norms and adapters. Those of new models are 0 or 1, by
which an omitted one would not be noticed."""
AMPLIFIED_LOGIT = 100.0


def check_model(model: PreTrainedModel, directory: object) -> None:
    """Compare a loaded model's logits with transformers' own forward pass: through all layers for a few tokens, with an
    image if the model reads images; and for packed sequences that share beginnings, by the model's miniature.

    Raises:
        MachineError: the logits differ, or are not finite, or the model's code raises an error.
    """
    if not hasattr(model, "model") or not hasattr(model, "lm_head") or not has_layers(text_decoder(model.model)):
        raise unsupported_model(
            model, directory, "its layers and its head are not at model.layers and lm_head, as in Llama"
        )
    try:
        _check_depth(model, directory)
        _check_packed(model, directory)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # a model's code may raise anything on input that it was not made for
        raise unsupported_model(model, directory, f"{type(error).__name__}: {error}") from error


def has_layers(body: nn.Module) -> bool:
    """Return whether the body of a model has a list of decoder layers."""
    layers = getattr(body, "layers", None)
    return isinstance(layers, nn.ModuleList) and len(layers) > 0


def unsupported_model(model: PreTrainedModel, directory: object, reason: str) -> MachineError:
    """Return the error for a model that is not computed as by transformers."""
    return MachineError(f"{type(model).__name__} at {directory} is not supported: {reason}", MODELS_HINT)


def _body(model: PreTrainedModel) -> Any:
    return text_decoder(model.model)


def _check_depth(model: PreTrainedModel, directory: object) -> None:
    tokens = torch.arange(DEPTH_TOKENS) * 7919 % model.config.get_text_config().vocab_size
    position_ids = torch.arange(DEPTH_TOKENS)
    images = None
    arguments = {"input_ids": tokens[None]}
    if is_vision_language(model.config):
        tokens, position_ids, images, arguments = image_probe(model, tokens)
    layout = _CountingLayout(PackedLayout(torch.tensor([len(tokens)])))
    with torch.inference_mode():
        states = compute_hidden_states(model.model, tokens, position_ids, layout, images)
        _check_layers(model, directory, layout)
        if images is not None:
            # with the compiled kernels, too: the miniature reads no images
            packed = PackedLayout(torch.tensor([len(tokens)]))
            states = compute_hidden_states(model.model, tokens, position_ids, packed, images)
        with own_attention(model):
            reference = model.model(**arguments, use_cache=False).last_hidden_state[0]
        if not bool(model.lm_head(reference[-1:]).isfinite().all()):
            raise MachineError(
                f"the weights at {directory} contain NaN or infinite values",
                "use an earlier checkpoint, or another model",
            )
    _compare(model, directory, states, reference, "hidden states")


def _check_packed(model: PreTrainedModel, directory: object) -> None:
    miniature = build_miniature(model)
    tokens, position_ids, layout = _packed_sequences()
    rows = list(_rows_of_sequences())
    with torch.inference_mode():
        states = compute_hidden_states(miniature.model, tokens, position_ids, layout)
        _amplify_logits(miniature, states)
        logits = miniature.lm_head(states[torch.cat(rows)])
        reference = torch.cat(reference_logits(miniature, [tokens[indices] for indices in rows]))
    _compare(model, directory, logits, reference, "logits of packed sequences")


def reference_logits(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return transformers' own logits [n, vocabulary] of each sequence [n], one pass each."""
    with torch.inference_mode(), own_attention(model):
        return [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences]


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Compute attention, masks and logits by transformers' own code inside the `with` block."""
    model.set_attn_implementation("eager")
    try:
        with untransformed_logits(model.lm_head):
            yield
    finally:
        model.set_attn_implementation(register_attention())


def _compare(model: PreTrainedModel, directory: object, values: Tensor, reference: Tensor, kind: str) -> None:
    difference = float((values - reference).abs().max())
    largest = float(reference.masked_fill(reference == MASKED_LOGIT, 0.0).abs().max())
    if not difference <= MAX_DIFFERENCE * largest:
        message = f"{kind} up to {largest:.2g} differ by {difference:.2g} from those of transformers"
        raise unsupported_model(model, directory, message)


def _packed_sequences() -> tuple[Tensor, Tensor, PackedLayout]:
    """Return tokens and positions [P] of sequences that share beginnings, and their layout."""
    generator = torch.Generator().manual_seed(0)
    stems, branches = torch.tensor(STEMS), torch.tensor(BRANCHES)
    count = PREFIX + int(stems.sum()) + int(branches.sum())
    starts = [0, *(PREFIX for _ in STEMS), *(PREFIX + STEMS[parent] for parent in PARENTS)]
    spans = zip(starts, (PREFIX, *STEMS, *BRANCHES), strict=True)
    positions = torch.cat([torch.arange(start, start + length) for start, length in spans])
    tokens = torch.randint(VOCABULARY, (count,), generator=generator)
    return tokens, positions, PackedLayout(branches, PREFIX, stems, torch.tensor(PARENTS))


def _rows_of_sequences() -> Iterator[Tensor]:
    """Yield the rows of each sequence among the packed tokens, int64 [n]."""
    ends = list(itertools.accumulate((PREFIX, *STEMS, *BRANCHES)))
    parts = [torch.arange(end - n, end) for end, n in zip(ends, (PREFIX, *STEMS, *BRANCHES), strict=True)]
    for branch, parent in enumerate(PARENTS):
        yield torch.cat([parts[0], parts[1 + parent], parts[1 + len(STEMS) + branch]])


def _amplify_logits(miniature: PreTrainedModel, states: Tensor) -> None:
    """Scale the head's weights so that soft caps of logits, which are 15 or more, have an effect."""
    head = miniature.lm_head
    factor = AMPLIFIED_LOGIT / miniature.lm_head(states).abs().max()
    head.weight = nn.Parameter(head.weight * factor, requires_grad=False)


class _CountingLayout:
    """A layout that counts the attention passes of each layer. Only the model's modules take it, not the compiled
    kernels, which copy the weights of all layers."""

    def __init__(self, layout: AttentionLayout) -> None:
        self._layout = layout
        self.max_length = layout.max_length
        self.passes: dict[int, int] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        self.passes[layer] = self.passes.get(layer, 0) + 1
        return self._layout.attend(layer, query, key, value, scale, window)


def _check_layers(model: PreTrainedModel, directory: object, counting: _CountingLayout) -> None:
    """Raise if a layer does not compute attention exactly once: it mixes tokens in another way."""
    for index, layer in enumerate(_body(model).layers):
        if counting.passes.get(index) != 1:
            parts = ", ".join(type(part).__name__ for part in layer.children())
            raise unsupported_model(
                model, directory, f"layer {index} ({parts}) mixes tokens otherwise than by attention"
            )


def build_miniature(model: PreTrainedModel) -> PreTrainedModel:
    """Return a small model of the same classes and settings, in float32: the first layers up to the last kind of layer,
    with the model's weights, the first `VOCABULARY` tokens, short windows, and noise on biases and norms.

    Its matrices are the memory of the model's and must not be written to.
    """
    memo: dict[int, Any] = {}
    config, body = copy.deepcopy(model.config, memo), _body(model)
    _shrink_config(config.get_text_config(), count := num_distinct_layers(body.layers))
    dropped = {id(parameter) for layer in body.layers[count:] for parameter in layer.parameters()}
    heads = [model.lm_head, *(module for module in model.modules() if isinstance(module, nn.Embedding))]
    with_vocabulary = {id(parameter) for head in heads for parameter in head.parameters()}
    vocabulary, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if id(parameter) not in dropped:
            size = vocabulary if id(parameter) in with_vocabulary else None
            memo[id(parameter)] = _miniature_parameter(name, parameter, size, generator)
    memo[id(body.layers)] = nn.ModuleList([copy.deepcopy(layer, memo) for layer in body.layers[:count]])
    miniature = copy.deepcopy(model, memo)
    _shrink_modules(miniature)
    return miniature


def _miniature_parameter(
    name: str, parameter: nn.Parameter, vocabulary: int | None, generator: torch.Generator
) -> nn.Parameter:
    """Return a parameter on the memory of the given one: of the first tokens if it is of an embedding or head for
    `vocabulary` tokens, and with noise if it is a vector or the second part of an adapter, which is 0 at first."""
    weight = parameter.detach()
    for dim, size in enumerate(weight.shape):
        if size == vocabulary:
            weight = weight.narrow(dim, 0, min(VOCABULARY, size))
    weight = weight.float()
    if weight.dim() == 1 or ".lora_B." in name:
        weight = weight + NOISE * torch.randn(weight.shape, generator=generator).to(weight.device)
    return nn.Parameter(weight, requires_grad=False)


def _shrink_config(config: Any, num_layers: int) -> None:
    config.num_hidden_layers, config.vocab_size = num_layers, min(VOCABULARY, config.vocab_size)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    for name in WINDOW_SETTINGS:
        if getattr(config, name, None):
            setattr(config, name, WINDOW)


def _shrink_modules(miniature: PreTrainedModel) -> None:
    """Set attributes of modules that repeat the settings changed by `_shrink_config`."""
    for module in miniature.modules():
        for name in WINDOW_SETTINGS:
            if getattr(module, name, None):
                setattr(module, name, WINDOW)
        if isinstance(module, OutputHead):
            masked = module.masked_tokens
            module.masked_tokens = masked[masked < VOCABULARY]
