"""vLLM's own engine, held at arm's length: started, asked, put to sleep and ended, without knowing what it writes.

All that touches vLLM's classes in our processes is here. In this process its `LLMEngine` runs a step when it is asked
to; in processes of its own it runs ahead, and answers wait in a queue.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import random
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quintet.errors import ConfigError, UserError
from quintet.rollout.engine import EngineFault, EngineSetup
from quintet.rollout.vllm_options import KEY, Release, engine_arguments, environment
from quintet.rollout.vllm_weights import WeightPlan, weight_file
from quintet.rollout.vllm_worker import SEED

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Core", "Unfit"]

MOST_SEEDS = 2**63
GRACE_SECONDS = 2.0
"""Time that a process has to end by itself."""
_IN_THIS_PROCESS: list[int] = []
"""Engines that live here now."""


class Unfit(ValueError):
    """A request that vLLM won't take."""


class Core:
    """A vLLM that runs."""

    def __init__(self, setup: EngineSetup) -> None:
        """See `open_vllm`."""
        self._setup = setup
        self._own = setup.options.own_process
        self._elsewhere = self._own or setup.options.tensor_parallel * setup.options.pipeline_parallel > 1
        if not self._own:
            _refuse_company()
        self._engine: Any = None
        self._weights_away = False
        self._exits: list[str] = []
        self._family: list[Any] = []
        if not setup.options.log_statistics:
            # for what it says before it has read its own settings
            logging.getLogger("vllm").setLevel(logging.ERROR)
        with _surroundings(environment(setup.options)):
            self._start_or_leave()
        if not self._own:
            _IN_THIS_PROCESS.append(id(self))
        try:
            self._take_charge()
        except BaseException:
            self.close()
            raise

    def _take_charge(self) -> None:
        """Of its processes, and of how it draws."""
        self._processes = self._find_processes()
        self._family = _with_descendants(self._processes)
        if self._own:
            self._begin_watch()
        self._draw_exactly()

    def _start_or_leave(self) -> None:
        try:
            self._start()
        except UserError:
            raise
        except ValueError as error:
            told = f"vLLM refuses what it is started with: {_first_lines(error)}"
            raise ConfigError(told, key=KEY, hint=f"see {KEY} and rollout.max_concurrent") from error
        except Exception as error:
            raise EngineFault(f"vLLM doesn't start: {_first_lines(error)}") from error
        finally:
            if self._engine is None and not self._own:
                _leave_group()

    def _start(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._release = _installed(EngineArgs)
        config = EngineArgs(**engine_arguments(self._setup, self._release)).create_engine_config()
        self._sleeps = bool(config.model_config.enable_sleep_mode)
        self._multimodal = bool(config.model_config.is_multimodal_model)
        self.context = int(config.model_config.max_model_len)
        statistics = self._setup.options.log_statistics
        self._engine = _make(LLMEngine, config, own_process=self._own, statistics=statistics)
        # the tokens that end an answer are the request's, also for `min_tokens`
        self._engine.input_processor.generation_config_fields = {}

    def _find_processes(self) -> list[Any]:
        """Those that vLLM started, `multiprocessing`'s."""
        if self._own:
            return list(self._engine.engine_core.resources.engine_manager.processes)
        return [worker.proc for worker in self._engine.model_executor.workers] if self._elsewhere else []

    def _begin_watch(self) -> None:
        threading.Thread(target=self._watch, args=(self._engine.engine_core,), daemon=True).start()

    def _watch(self, client: Any) -> None:
        """Whoever waits for an answer of a process that was killed would wait forever: give an error instead."""
        from vllm.v1.engine.exceptions import EngineDeadError

        wait([process.sentinel for process in self._processes])
        for process in self._processes:
            process.join(timeout=GRACE_SECONDS)
        self._exits = [_exit(process) for process in self._processes]
        client.resources.engine_dead = True
        client.outputs_queue.put_nowait(EngineDeadError())
        for future in list(client.utility_results.values()):
            if not future.done():
                future.set_exception(EngineDeadError())

    def _draw_exactly(self) -> None:
        unknown = [name for name in self._engine.collective_rpc("quintet_draw_exactly") if name]
        if unknown:
            told = f"vLLM {self._release.version} draws with {unknown[0]}"
            raise EngineFault(f"{told}: what its log-probs mean isn't known; 0.32.0 is")

    def seeded(self, seed: int) -> dict[str, Any]:
        """Keywords of `SamplingParams` that give a request a seed. vLLM takes -1 for none at all."""
        own = seed % MOST_SEEDS
        return {"extra_args": {SEED: own}} if self._release.cpu else {"seed": own}

    def add(self, name: str, prompt: Sequence[int], sampling: Mapping[str, Any]) -> None:
        """Queue a request under a name of ours.

        Raises:
            Unfit: vLLM refuses it; the others go on.
        """
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        tokens = {"type": "token", "prompt_token_ids": list(prompt)}
        how = {"detokenize": self._setup.options.detokenize, "output_kind": RequestOutputKind.DELTA}
        try:
            self._engine.add_request(name, tokens, SamplingParams(**sampling, **how))
        except ValueError as error:
            raise Unfit(_first_lines(error)) from error

    def step(self) -> list[Any]:
        """What was written since the last call; waits for some in another process."""
        outputs: list[Any] = self._engine.step()
        return outputs

    def abort(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names))

    def pause(self) -> list[Any]:
        """Write nothing more; what was written until then."""
        if not self._own:
            return []
        self._engine.sleep(level=0, mode="keep")
        outputs = []
        while not self._engine.engine_core.outputs_queue.empty():
            outputs += self._engine.step()
        return outputs

    def resume(self) -> None:
        if self._own:
            self._engine.wake_up(tags=["scheduling"])

    def load(self, weights: Mapping[str, Tensor], plan: WeightPlan) -> None:
        """Put new weights into the model."""
        if self._weights_away:
            self._engine.wake_up(tags=["weights"])
            self._weights_away = False
        if not self._elsewhere:
            size = sum(tensor.nbytes for tensor in weights.values())
            self._engine.collective_rpc("quintet_take", args=(plan.whole(weights), size))
            return
        with weight_file(weights, self._setup.dtype) as path:
            self._engine.collective_rpc("quintet_load", args=(str(path), list(plan.aliases)))

    def forget(self) -> None:
        """Drop what is computed, also of running requests: they compute it again."""
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the computed prompts weren't dropped")
        if self._multimodal:
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()

    def sleep(self) -> None:
        """Free the cache, and with `offload` the weights; they stay on the device otherwise."""
        self.forget()
        if self._sleeps:
            self._engine.sleep(level=1)
            self._weights_away = self._setup.options.offload
            if not self._weights_away:
                self._engine.wake_up(tags=["weights"])

    def wake(self) -> None:
        if self._sleeps:
            self._engine.wake_up(tags=None if self._weights_away else ["kv_cache"])
            self._weights_away = False

    def cause(self, error: Exception) -> str:
        """What happened, with how processes ended."""
        told = [f"{type(error).__name__}: {_first_lines(error)}", *self._exits]
        return "; ".join(told)

    def close(self) -> None:
        """End the processes; what they wouldn't do by themselves is done to them."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.engine_core.shutdown(timeout=GRACE_SECONDS)
        _end(self._family)
        if not self._own:
            _IN_THIS_PROCESS.remove(id(self))
            _leave_group()


def _refuse_company() -> None:
    """vLLM keeps groups of ranks for a whole process and ends all of them as it ends."""
    shared = "another vLLM" if _IN_THIS_PROCESS else "a learner of several ranks"
    if _IN_THIS_PROCESS or torch.distributed.is_initialized():
        raise ConfigError(
            f"{KEY}.own_process = false: {shared} lives in this process",
            key=f"{KEY}.own_process",
            value=False,
            hint=f"set {KEY}.own_process=true",
        )


def _with_descendants(processes: Sequence[Any]) -> list[Any]:
    """Them and all that they started; as `psutil` has them, which knows them even if a number is given anew."""
    import psutil

    heads = [psutil.Process(process.pid) for process in processes]
    return [*heads, *(child for head in heads for child in head.children(recursive=True))]


def _end(family: Sequence[Any]) -> None:
    import psutil

    _, alive = psutil.wait_procs(family, timeout=GRACE_SECONDS)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_SECONDS)


def _make(engine: Any, config: Any, *, own_process: bool, statistics: bool) -> Any:
    from vllm.v1.executor import Executor

    return engine(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=statistics,
        multiprocess_mode=own_process,
    )


def _installed(arguments: Any) -> Release:
    from vllm.platforms import current_platform

    known = frozenset(arguments.__dataclass_fields__)
    return Release(importlib.metadata.version(_distribution()), known, cpu=bool(current_platform.is_cpu()))


def _distribution() -> str:
    """vLLM's build for CPUs goes by a name of its own."""
    return importlib.metadata.packages_distributions()["vllm"][0]


def _leave_group() -> None:
    """Undo what an engine in this process did to `torch.distributed`, so that another can start."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@contextmanager
def _surroundings(variables: Mapping[str, str]) -> Iterator[None]:
    """The process as vLLM wants it while it starts, and afterwards as it was.

    It changes environment variables (libraries to be loaded before others, threads) that every later child would
    inherit, seeds the global generators, takes threads from torch, and replaces `torch.set_num_threads` by a function
    that does nothing.
    """
    before, set_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    os.environ.update({name: value for name, value in variables.items() if name not in before})
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _exit(process: Any) -> str:
    deadline = time.monotonic() + GRACE_SECONDS
    # vLLM waits for it, too: whoever comes second is told nothing until the first has noted the status
    while (code := process.exitcode) is None and time.monotonic() < deadline:
        process.join(timeout=0.05)
        time.sleep(0.01)
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit status {code}"
    return f"its process {process.pid} ended: {how}"


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]
