"""`quintet train`."""

from __future__ import annotations

from quintet.cli.choices import check_action_policy, check_choices
from quintet.cli.configuration import load_config, print_key_states
from quintet.cli.model_downloads import with_downloaded_models
from quintet.cli.ranks import run_on_all_ranks
from quintet.cli.result_warnings import warn_about_results
from quintet.cli.row_checks import check_graded_rows
from quintet.cli.transformers_setup import silence_transformers
from quintet.config.checks.models import check_models
from quintet.config.plan.images import check_images
from quintet.config.plan.placement import check_placement
from quintet.config.torchrun import current_rank


def run(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> int:
    """Check the configuration, then train, fine-tune (with only an `sft` section) or generate (with `generation`)."""
    composed = load_config(config, overrides, dialect, unknown_keys)
    sft = composed.experiment.sft
    if sft is not None and not sft.then_reinforce:
        from quintet.cli.sft import run_composed

        return run_composed(composed)
    if composed.experiment.generation is not None:
        from quintet.cli import generate

        return generate.run_composed(composed)
    check_models(composed)
    check_choices(composed)
    check_placement(composed)
    check_images(composed)
    check_action_policy(composed)
    warn_about_results(composed)
    composed = with_downloaded_models(composed)
    if current_rank().rank == 0:
        check_graded_rows(composed)
    from quintet.tracking.run_directory import RunDirectory

    if current_rank().rank == 0:
        RunDirectory.create_for(composed)
        print_key_states(composed)
    silence_transformers()
    from rich.console import Console

    from quintet.pipelines.rl import train

    return run_on_all_ranks(composed, lambda controller: train(composed, Console(), controller))
