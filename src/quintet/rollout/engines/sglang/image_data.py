"""Images in requests to SGLang: one placeholder for each in `input_ids`, and its file in `image_data`.

SGLang expands placeholders and keeps the other tokens of `input_ids`: `SGLANG_MM_AVOID_RETOKENIZE`, by default on
(sgl-project/sglang pull request 26555). Images are sent as they were resized, so that its image processor does not
resize them again. Whether it has read as many tokens is checked in each response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from quintet.envs.service.png import encode_png, png_data_url
from quintet.policies.vision.image_encoder import is_vision_language, placeholder_tokens
from quintet.policies.vision.image_processing import ImageProcessor
from quintet.policies.vision.image_tokens import with_placeholders
from quintet.records import Request
from quintet.rollout.engines.sglang.protocol import MalformedResponseError, ResponseChunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ImageData:
    """Converts images of a vision-language model's prompts."""

    processor: ImageProcessor
    image_token: int
    """Placeholder of an image, `<|image_pad|>`."""
    placeholders: frozenset[int]
    """Tokens that only prompts contain."""

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> Self | None:
        """Return the image data of a vision-language model; None for other models."""
        config: Any = model.config
        if not is_vision_language(config):
            return None
        processor: ImageProcessor = model.base_model.image_processor
        return cls(processor, config.image_token_id, frozenset(placeholder_tokens(config)))

    def fields(self, request: Request, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the fields of a request whose prompt is followed by response `tokens`."""
        input_ids, keys = with_placeholders(request.prompt, self.image_token)
        urls = {image.key: png_data_url(encode_png(self.processor.resized_image(image))) for image in request.images}
        return {"input_ids": [*input_ids, *tokens], "image_data": [urls[key] for key in keys]}

    def check(self, request: Request, num_response_tokens: int, chunk: ResponseChunk) -> None:
        """Check that SGLang has read the prompt, which was followed by response tokens, as it is.

        Raises:
            MalformedResponseError: it has read another number of tokens, or sampled a placeholder.
        """
        expected = len(request.prompt) + num_response_tokens
        if request.images and chunk.prompt_tokens != expected:
            raise MalformedResponseError(
                f"SGLang has read {chunk.prompt_tokens} tokens of a prompt with images of {expected} tokens: its image "
                "processor differs, or SGLANG_MM_AVOID_RETOKENIZE is off"
            )
        if sampled := self.placeholders.intersection(chunk.tokens):
            raise MalformedResponseError(
                f"SGLang sampled {sorted(sampled)}, placeholders of images, which it cannot exclude"
            )
