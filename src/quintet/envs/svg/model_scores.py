"""Similarity of images by features of vision models: DINOv2 and DreamSim, from local directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from quintet.errors import ConfigError
from quintet.loading_lock import LOADING_LOCK

DIGITS: Final = 4
"""Decimal places of a score: batches of other sizes change the last digits of a model's output."""


class ModelScorer(Protocol):
    """Model that compares images."""

    def scores(self, targets: Sequence[np.ndarray], images: Sequence[np.ndarray]) -> list[float]:
        """Return the similarity of each picture to its target, 0…1; all are RGB `uint8[size, size, 3]`."""


class DinoScorer:
    """Cosine similarity of DINOv2's mean features, as (cosine + 1) / 2 (VAGEN's `DINOScoreCalculator`)."""

    def __init__(self, path: str, device: str) -> None:
        """
        Raises:
            ConfigError: the directory has no such model, or there is no such device.
        """
        import torch
        from transformers import AutoImageProcessor, AutoModel

        self._torch, directory = torch, os.path.expanduser(path)
        with LOADING_LOCK, _loading("dino", path, device):
            self._processor = AutoImageProcessor.from_pretrained(directory, local_files_only=True, backend="pil")
            model = AutoModel.from_pretrained(
                directory, local_files_only=True, dtype=torch.float32, use_safetensors=True
            )
            self._model = model.to(device).eval()
        self._device = device

    def scores(self, targets: Sequence[np.ndarray], images: Sequence[np.ndarray]) -> list[float]:
        """See `ModelScorer.scores`; one forward pass over the distinct targets and all images."""
        distinct = list({id(target): target for target in targets}.values())
        numbers = {id(target): number for number, target in enumerate(distinct)}
        features = self._features([*distinct, *images])
        target_features = features[[numbers[id(target)] for target in targets]]
        cosines = self._torch.nn.functional.cosine_similarity(target_features, features[len(distinct) :], dim=1)
        return [round((cosine + 1.0) / 2.0, DIGITS) for cosine in cosines.double().tolist()]

    def _features(self, images: Sequence[np.ndarray]) -> Any:
        with self._torch.inference_mode():
            inputs = self._processor(images=list(images), return_tensors="pt").to(self._device)
            return self._model(**inputs).last_hidden_state.mean(dim=1)


class DreamSimScorer:
    """1 − distance of DreamSim (Fu et al. 2023, arXiv:2306.09344), limited to 0…1, by the package `dreamsim`."""

    def __init__(self, path: str, device: str) -> None:
        """
        Raises:
            ConfigError: the directory has no weights, or there is no such device.
        """
        import torch
        from dreamsim import dreamsim

        self._torch, self._device = torch, device
        with _loading("dreamsim", path, device):
            directory = os.path.expanduser(path)
            self._model, self._preprocess = dreamsim(pretrained=True, cache_dir=directory, device=device)

    def scores(self, targets: Sequence[np.ndarray], images: Sequence[np.ndarray]) -> list[float]:
        """See `ModelScorer.scores`."""
        from PIL import Image

        with self._torch.inference_mode():
            first, second = (
                self._torch.cat([self._preprocess(Image.fromarray(image)) for image in batch]).to(self._device)
                for batch in (targets, images)
            )
            distances = self._model(first, second).reshape(-1).tolist()
        return [round(1.0 - min(1.0, max(0.0, distance)), DIGITS) for distance in distances]


MODELS: Final[dict[str, Callable[[str, str], ModelScorer]]] = {"dino": DinoScorer, "dreamsim": DreamSimScorer}


@lru_cache(maxsize=4)
def load_scorer(name: str, path: str, device: str) -> ModelScorer:
    """Return the model of a directory, loaded once per process.

    Raises:
        ConfigError: see `DinoScorer` and `DreamSimScorer`.
    """
    return MODELS[name](path, device)


@contextmanager
def _loading(name: str, path: str, device: str) -> Iterator[None]:
    """Raise errors of loading a model under its key."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        key = f"env.{name}_path"
        message = f"{key} = {path} cannot be loaded on {device}: {error!s:.500}"
        hint = f"check the files in {Path(path).resolve()}, and env.{name}_device"
        raise ConfigError(message, key=key, value=path, hint=hint) from error
