"""If these fail, a machine with an older processor computes otherwise than others."""

from __future__ import annotations

import ctypes
from subprocess import run

import pytest
import torch
from torch import Tensor

from quintet.kernels.build import BASE_FLAGS, FLAG_SETS, SOURCE_DIRECTORY, find_compiler

SOURCE = """
#include "vectors.hpp"
extern "C" void exponentials(const float* x, float* y) { store(exponential(load(x)), y); }
extern "C" void gates(const float* x, float* y) { store(load(x) * inverse(exponential(-load(x)) + 1.0f), y); }
"""


@pytest.fixture(scope="module", params=[BASE_FLAGS, FLAG_SETS[0]], ids=["any processor", "this one"])
def vectors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    command = find_compiler()
    if command is None:
        pytest.skip("no C++ compiler")
    directory = tmp_path_factory.mktemp("vectors")
    (directory / "vectors.cpp").write_text(SOURCE)
    flags = [flag for flag in request.param if flag != "-fopenmp"]
    arguments = [command, *flags, f"-I{SOURCE_DIRECTORY}", "-shared", "vectors.cpp", "-o", "vectors.so"]
    if run(arguments, cwd=directory, check=False, capture_output=True).returncode:
        pytest.skip("the compiler doesn't know these")
    return ctypes.CDLL(str(directory / "vectors.so"))


def computed(function: object, value: Tensor) -> Tensor:
    out = torch.empty(16)
    function(ctypes.c_void_p(value.data_ptr()), ctypes.c_void_p(out.data_ptr()))  # type: ignore[operator]
    return out


def test_exponentials_are_those_of_torch_up_to_infinity(vectors: ctypes.CDLL) -> None:
    inputs = torch.tensor([-86.5, -40, -1, -1e-3, 0, 1e-6, 0.5, 1, 3, 20, 60, 87.9, 90, 500, torch.inf, torch.nan])
    torch.testing.assert_close(computed(vectors.exponentials, inputs), inputs.exp(), rtol=3e-7, atol=0, equal_nan=True)
    assert not computed(vectors.exponentials, torch.full((16,), -88.0)).any()


def test_gates_are_those_of_torch_far_out(vectors: ctypes.CDLL) -> None:
    inputs = torch.tensor(
        [-torch.inf, -1e30, -500, -90, -50, -8, -1, -1e-3, 0, 1e-3, 1, 8, 90, 1e30, torch.inf, torch.nan]
    )
    expected = torch.nn.functional.silu(inputs)
    torch.testing.assert_close(computed(vectors.gates, inputs), expected, rtol=1e-6, atol=1e-30, equal_nan=True)
