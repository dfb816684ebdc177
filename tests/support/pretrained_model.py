"""The published model of tests about text. It stays in the cache of the user, so a machine downloads it once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from quintet.pipelines.model_download import DownloadError, get_published_model

NAME = "smollm2-135m"


@cache
def unavailable() -> str:
    """Why the model cannot be downloaded; empty if it is here."""
    try:
        get_published_model(NAME)
    except DownloadError as error:
        return error.message
    return ""


def pretrained_directory() -> Path:
    """Its directory; skips the test without network."""
    if reason := unavailable():
        pytest.skip(reason)
    return get_published_model(NAME)
