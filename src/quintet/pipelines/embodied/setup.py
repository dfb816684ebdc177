"""Set up a run in simulators before its first step: policy, components, warm start."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from quintet.pipelines.embodied.components import RobotComponents
from quintet.pipelines.embodied.rollout import validate
from quintet.pipelines.embodied.warm_start import warm_start
from quintet.pipelines.run import Run
from quintet.policies.vla.build import create_action_preset
from quintet.runtime.controller import Controller
from quintet.runtime.signals import StopRequest
from quintet.seeds import derive_seed
from quintet.tracking.atomic_files import translate_os_errors
from quintet.training.checkpoint.checkpoint import Checkpoint


def set_up(run: Run, stop: StopRequest, resources: ExitStack) -> RobotComponents:
    """Build the components and restore the run's checkpoint, or run the warm start and save it as checkpoint 0.

    A policy that is only evaluated is not saved again.
    """
    config, controller = run.config, run.controller or Controller.in_process()
    components = RobotComponents.build(config, _policy_directory(run), controller)
    resources.callback(components.close)
    if run.checkpoint:
        _restore(run, run.checkpoint, components)
        return components
    if config.warm_start:
        warm_start(run, components, config.warm_start, stop)
        components.workers.sync_weights()
    if config.algorithm.kl is not None:
        components.workers.calls.snapshot_reference()
    if config.validation.before_training or config.validation.only:
        run.log(0, validate(run, components, 0))
    if config.warm_start or not config.validation.only:
        run.save(0, components.save, **components.extra_state())
    return components


def _restore(run: Run, checkpoint: Checkpoint, components: RobotComponents) -> None:
    components.load(checkpoint)
    components.workers.sync_weights()
    run.progress.note(f"resuming from {checkpoint.directory}")
    if run.config.validation.only:
        run.log(checkpoint.step, validate(run, components, checkpoint.step))


def _policy_directory(run: Run) -> Path:
    """Return the directory of the policy; create a preset there if there is none yet."""
    config = run.config
    if run.checkpoint:
        return run.checkpoint.directory / "hf"
    if config.policy.path is not None:
        return Path(config.policy.path)
    if not run.directory.policy.is_dir():
        with translate_os_errors(run.directory.policy):
            create_action_preset(run.directory.policy, config, derive_seed(config.seed, "policy"))
    return run.directory.policy
