"""The lock for loading models with transformers.

While `from_pretrained` creates a model, it replaces `PreTrainedModel.tie_weights` and torch's default dtype for all
threads. Two threads that load at once can leave them replaced: models with tied embeddings then have a random head.
"""

import threading

LOADING_LOCK = threading.RLock()
"""Held while a model is created and loaded."""
