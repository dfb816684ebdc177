"""If this fails, vLLM on a CPU may compute with misread weights: its kernels expect layers packed by as many threads as
at its start, which is the number that torch is set to."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.rollout.engines.vllm.worker_extension import QuintetWorker

OPENMP = re.findall(r"/\S*/libgomp\S*", Path("/proc/self/maps").read_text()) if Path("/proc/self/maps").exists() else []


@pytest.mark.skipif(not OPENMP, reason="this build of torch has another OpenMP library")
def test_weights_are_loaded_with_torchs_threads_also_in_a_new_thread() -> None:
    class Loader:
        threads = 0

        def load(self, _weights: Mapping[str, torch.Tensor]) -> None:
            self.threads = ctypes.CDLL(OPENMP[0]).omp_get_max_threads()

    loader, threads = Loader(), torch.get_num_threads()
    worker: Any = QuintetWorker()
    worker._quintet_loader = loader
    torch.set_num_threads(threads + 1)
    try:
        with ThreadPoolExecutor(1) as new_thread:  # as the thread of an AsyncEngine
            new_thread.submit(worker.quintet_load_tensors, {}).result()
    finally:
        torch.set_num_threads(threads)
    assert loader.threads == threads + 1
