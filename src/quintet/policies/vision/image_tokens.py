"""Image tokens: negative numbers that stand for the tokens of an image in a token sequence.

A number contains the image's hash and the row and column of the token. Sequences are therefore equal exactly if their
images are: whatever compares them, such as prefix caches and the packing of common prompts, needs no further knowledge
of images, and positions follow from the numbers alone. Tokens of the vocabulary are not negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quintet.records import ImageInput, Request

SIDE_BITS = 9
MAX_SIDE = 1 << SIDE_BITS
"""Maximum number of rows and of columns of image tokens."""
KEY_BITS = 63 - 2 * SIDE_BITS - 1
"""Size of an image's hash. Among 10,000 different images, two have the same hash with a probability of 3e-6."""

IntArray = npt.NDArray[np.int64]
Integers = TypeVar("Integers", IntArray, Tensor)


class DecodedTokens(NamedTuple, Generic[Integers]):
    """Image tokens, int64 [n] each: arrays or tensors."""

    keys: Integers
    rows: Integers
    columns: Integers


def image_tokens(image: ImageInput) -> tuple[int, ...]:
    """Return the tokens of an image, row by row.

    >>> image_tokens(ImageInput(key=3, grid=(1, 2), patches=b""))
    (-786433, -786434)
    """
    first, (rows, columns) = image.key << 2 * SIDE_BITS, image.grid
    return tuple(-1 - (first | row << SIDE_BITS | column) for row in range(rows) for column in range(columns))


def decode_image_tokens(tokens: Integers) -> DecodedTokens[Integers]:
    """Return the images, rows and columns of image tokens [n]."""
    code = -1 - tokens
    columns, rows = code & (MAX_SIDE - 1), code >> SIDE_BITS & (MAX_SIDE - 1)
    return DecodedTokens(code >> 2 * SIDE_BITS, rows, columns)


def contains_images(tokens: Sequence[int]) -> bool:
    """Return whether a token sequence contains image tokens."""
    return min(tokens, default=0) < 0


class _Images(NamedTuple):
    """Images of a token sequence: `inside` are the indices of all their tokens, `first` the positions in `inside` at
    which an image begins, `extents` the positions that each one takes, [I]."""

    inside: IntArray
    tokens: DecodedTokens[IntArray]
    first: IntArray
    extents: IntArray
    sizes: IntArray
    """Number of tokens of each image, [I]."""

    @property
    def shifts(self) -> IntArray:
        """Positions that each image takes beyond its number of tokens, [I]; usually negative."""
        return self.extents - self.sizes


def _find_images(tokens: IntArray) -> _Images:
    """Find the images of a sequence with at least one image token."""
    inside = np.flatnonzero(tokens < 0)
    decoded = decode_image_tokens(tokens[inside])
    # behind text, another image, or the end of the same one
    continues = (np.diff(inside) == 1) & (np.diff(decoded.keys) == 0) & (np.diff(tokens[inside]) < 0)
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    extents = np.maximum.reduceat(np.maximum(decoded.rows, decoded.columns), first) + 1
    return _Images(inside, decoded, first, extents, np.diff(first, append=len(inside)))


def mrope_positions(tokens: Sequence[int] | IntArray) -> IntArray:
    """Return the positions of a sequence's tokens in time, height and width, int64 [n, 3] (Wang et al. 2024, Qwen2-VL,
    arXiv:2409.12191).

    Text tokens count on in all three. The tokens of an image have one position in time and their row and column added
    to it in height and width; text behind it continues after its largest position.
    """
    sequence = np.asarray(tokens, np.int64)
    positions = np.arange(len(sequence))[:, None].repeat(3, 1)
    if not len(sequence) or sequence.min() >= 0:
        return positions
    images = _find_images(sequence)
    begins = images.inside[images.first]
    shift = np.zeros(len(sequence) + 1, np.int64)
    shift[begins + images.sizes] = images.shifts
    shift = shift.cumsum()
    positions += shift[:-1, None]
    base = (begins + shift[begins]).repeat(images.sizes)
    positions[images.inside] = np.stack([base, base + images.tokens.rows, base + images.tokens.columns], 1)
    return positions


def position_shift(tokens: Sequence[int]) -> int:
    """Return the difference between the position of the token behind a sequence and the sequence's length."""
    if not contains_images(tokens):
        return 0
    return int(_find_images(np.asarray(tokens, np.int64)).shifts.sum())


def with_placeholders(tokens: Sequence[int], placeholder: int) -> tuple[list[int], list[int]]:
    """Return the tokens with one `placeholder` for each image, as engines outside of Quintet read them, and the keys of
    the images in their order.

    >>> image = ImageInput(key=3, grid=(1, 2), patches=b"")
    >>> with_placeholders((7, *image_tokens(image), 8), 5)
    ([7, 5, 8], [3])
    """
    out: list[int] = []
    keys: list[int] = []
    for token in tokens:
        code = -1 - token
        if code < 0:
            out.append(token)
        elif not code & (1 << 2 * SIDE_BITS) - 1:
            out.append(placeholder)
            keys.append(code >> 2 * SIDE_BITS)
    return out, keys


def check_images(request: Request, *, supported: bool) -> None:
    """Check the images of a request.

    Raises:
        ValueError: the model reads no images (not `supported`), or the request lacks an image of its prompt.
    """
    if not supported:
        if request.images:
            raise ValueError("the model reads no images")
        return
    sequence = np.asarray(request.prompt, np.int64)
    keys = set(decode_image_tokens(sequence[sequence < 0]).keys.tolist())
    if missing := keys - {image.key for image in request.images}:
        raise ValueError(f"the prompt has tokens of {len(missing)} images that the request does not contain")
