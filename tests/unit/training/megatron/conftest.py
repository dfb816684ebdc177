"""Tiny models of each family that the Megatron learner supports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_models import COMMON, KINDS

from quintet.training.megatron.core_package import require_megatron

pytest.importorskip("megatron.core", reason="pip install -e '.[megatron]'")
require_megatron()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a Hugging Face model of each of `KINDS`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("megatron")
    for name, (model_type, options) in KINDS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**COMMON, **options}))
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    """Use one thread, and destroy all process groups afterwards."""
    from megatron.core import parallel_state

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
