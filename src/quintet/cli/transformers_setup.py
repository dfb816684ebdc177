"""Environment of `transformers` in commands: offline by default, without warnings and progress bars."""

from __future__ import annotations

import os


def silence_transformers() -> None:
    """Import `transformers` offline by default, with errors only and without progress bars."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.disable_progress_bar()
