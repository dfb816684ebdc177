"""If this fails, vLLM on a CPU may compute with misread weights: its kernels expect layers packed by as many threads as
at its start, which is the number that torch is set to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# torch's own: other packages bring copies, which have thread counts of their own
OPENMP = [str(library) for library in Path(torch.__file__).parent.glob("lib/libgomp*")]
LOAD_IN_A_NEW_THREAD = """
import ctypes, sys
from concurrent.futures import ThreadPoolExecutor
import torch
from quintet.rollout.engines.vllm.worker_extension import QuintetWorker

class Loader:
    def load(self, _weights):
        print(torch.get_num_threads(), ctypes.CDLL(sys.argv[1]).omp_get_max_threads())

worker = QuintetWorker()
worker._quintet_loader = Loader()
torch.set_num_threads(torch.get_num_threads() + 1)
print(torch.get_num_threads())
with ThreadPoolExecutor(1) as new_thread:  # as the thread of an AsyncEngine
    new_thread.submit(worker.quintet_load_tensors, {}).result()
"""


@pytest.mark.skipif(not OPENMP, reason="this build of torch has another OpenMP library")
def test_weights_are_loaded_with_torchs_threads_also_in_a_new_thread() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", LOAD_IN_A_NEW_THREAD, OPENMP[0]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    expected, *threads = done.stdout.split()
    assert threads == [expected, expected]
