"""The `quintet` command: argument parsing, dispatch to one module per command, and error messages."""

from __future__ import annotations

import errno
import importlib
import sys
import tempfile
from typing import Annotated, Literal, NoReturn

import typer

from quintet import __version__
from quintet.cli import check, data, examples, model
from quintet.cli.messages import describe_long_name
from quintet.cli.options import (
    Config,
    DialectName,
    EvalOptions,
    GenerateOptions,
    IgnoreForkKeys,
    MaxRestarts,
    Overrides,
    PlanOptions,
    RayAddress,
    Release,
    RunOptions,
    ServeEnvsOptions,
    ServeOptions,
    UnknownKeys,
    split,
    unknown_key_policy,
    with_options,
    with_release,
)
from quintet.cli.ranks import silence_other_ranks
from quintet.cli.terminal_output import replace_unencodable_characters, show_control_characters
from quintet.errors import UserError
from quintet.runtime.signals import exit_on_second_signal
from quintet.sandbox.seccomp import hide_memory

ConfigSource = tuple[str | None, list[str]]
"""Configuration and overrides."""

app = typer.Typer(
    name="quintet",
    help="Post-train language models by reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(check.app, name="check")
app.add_typer(data.app, name="data")
app.add_typer(examples.app, name="examples")
app.add_typer(model.app, name="model")


def _start(command: Literal["train", "sft", "generate"], source: ConfigSource, options: RunOptions) -> NoReturn:
    """Run a command in this process or, with `--ray`, in the processes that Ray starts."""
    if options.ray is not None:
        from quintet.cli import ray_launch

        restarts = options.max_restarts
        raise typer.Exit(
            ray_launch.run(command, options.ray, *source, options.source_format, options.unknown_key_policy, restarts)
        )
    module = importlib.import_module(f"quintet.cli.{command}")
    raise typer.Exit(module.run(*source, options.source_format, options.unknown_key_policy))


@app.command()
@with_options
def train(config: Config = None, overrides: Overrides = None, *, options: RunOptions) -> None:
    """Train a policy by reinforcement learning, after an optional warm start."""
    _start("train", split(config, overrides), options)


@app.command()
@with_options
def sft(config: Config = None, overrides: Overrides = None, *, options: RunOptions) -> None:
    """Fine-tune a model on conversations or expert demonstrations."""
    _start("sft", split(config, overrides), options)


@app.command()
def status(
    target: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run directory or name, or a directory of runs (default: runs).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show whether runs are running, their progress, processes, checkpoints and logs."""
    from quintet.cli.status import run

    run(target, as_json=as_json)


@app.command()
def diagnose(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run directory or name; several are allowed.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    fail: Annotated[bool, typer.Option("--fail", help="End with status 1 if a finding is critical.")] = False,
) -> None:
    """Report what looks wrong in runs, with evidence and what to try."""
    from quintet.cli.diagnose import run

    raise typer.Exit(run(runs, as_json=as_json, fail=fail))


@app.command()
def stop(
    target: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run directory or name (default: the only one that is running).")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the end of the run.", min=0)] = 60.0,
    now: Annotated[bool, typer.Option("--now", help="End the run at once, without a checkpoint.")] = False,
) -> None:
    """Stop a run after its current step and a checkpoint, from any machine that shares its directory."""
    from quintet.cli.stop import run

    run(target, timeout_seconds=timeout, now=now)


@app.command()
def view(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUNS", help="Run directories or names, or directories of runs (default: runs)."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than 127.0.0.1 need QUINTET_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 selects a free one.", min=0, max=65535)] = 8080,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show them in the terminal instead.")] = False,
) -> None:
    """Show runs in the browser: curves, diagnosis, episodes, timeline, settings."""
    from quintet.cli.view import run

    run(runs or [], host, port, in_terminal=terminal)


@app.command(name="eval")
@with_options
def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG|MODEL",
            help="Model, checkpoint or run directory; or a configuration with `evaluation` or `validation.only`.",
        ),
    ] = None,
    overrides: Overrides = None,
    *,
    options: EvalOptions,
    dialect: DialectName = None,
    release: Release = None,
    unknown_keys: UnknownKeys = "refuse",
    ignore_fork_keys: IgnoreForkKeys = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Score stored answers, or generate and score answers of a model or an endpoint."""
    from quintet.cli.evaluate import run

    policy = unknown_key_policy(unknown_keys, ignore_fork_keys)
    raise typer.Exit(run(*split(target, overrides), with_release(dialect, release), policy, options, as_json=as_json))


@app.command()
@with_options
def generate(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG|MODEL",
            help="Configuration with `generation`; or with --data a model, checkpoint or run directory.",
        ),
    ] = None,
    overrides: Overrides = None,
    *,
    options: GenerateOptions,
    dialect: DialectName = None,
    release: Release = None,
    unknown_keys: UnknownKeys = "refuse",
    ignore_fork_keys: IgnoreForkKeys = False,
    ray: RayAddress = None,
    max_restarts: MaxRestarts = 3,
) -> None:
    """Generate responses to a file of prompts, and write them beside the prompts."""
    from quintet.cli.generate import as_config

    source = as_config(*split(target, overrides), dialect, options)
    _start("generate", source, RunOptions(dialect, release, unknown_keys, ignore_fork_keys, ray, max_restarts))


@app.command()
@with_options
def serve(
    model: Annotated[str, typer.Argument(help="Model, checkpoint or run directory.")],
    overrides: Overrides = None,
    *,
    options: ServeOptions,
) -> None:
    """Serve a model as an OpenAI-compatible endpoint, with token ids and log-probs."""
    from quintet.cli.serve import run

    raise typer.Exit(run(model, list(overrides or []), options))


@app.command("serve-envs")
@with_options
def serve_envs(
    env: Annotated[list[str], typer.Option(metavar="NAME", help="Environment to serve, or file.py:Class; repeatable.")],
    *,
    options: ServeEnvsOptions,
) -> None:
    """Serve environments to the training runs of other machines, also those of VAGEN."""
    from quintet.cli.serve_envs import run

    raise typer.Exit(run(env, options))


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Checkpoint, run, model or adapter directory.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Output directory.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: unchanged).")] = None,
    *,
    trust_remote_code: Annotated[bool, typer.Option(help="Allow code from the model directory.")] = False,
) -> None:
    """Export a trained model for transformers: adapters merged, dtype converted, with a model card, and checked."""
    from quintet.cli.export import run

    run(source, target, dtype, trust_remote_code=trust_remote_code)


@app.command()
@with_options
def plan(
    config: Config = None,
    overrides: Overrides = None,
    dialect: DialectName = None,
    release: Release = None,
    unknown_keys: UnknownKeys = "refuse",
    ignore_fork_keys: IgnoreForkKeys = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    only_keys: Annotated[
        bool, typer.Option("--keys", help="List each key that is set: its value, source, native keys, and state.")
    ] = False,
    *,
    options: PlanOptions,
) -> None:
    """Check a configuration and show its batches, updates, devices and memory without running it."""
    policy = unknown_key_policy(unknown_keys, ignore_fork_keys)
    source = (*split(config, overrides), with_release(dialect, release), policy)
    if options.fit:
        from quintet.cli import plan_fit

        plan_fit.run(*source, options, as_json=as_json)
    else:
        options.refuse_without_fit()
        if options.here:
            from quintet.cli import plan_here

            plan_here.run(*source, options.device_memory, as_json=as_json)
            return
        if options.prompt:
            from quintet.cli import plan_prompt

            plan_prompt.run(*source, as_json=as_json)
            return
        from quintet.cli import plan

        plan.run(*source, as_json=as_json, only_keys=only_keys, device_memory=options.device_memory)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Directory, run or published model: say instead which code computes it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the hardware and packages of this machine, which engines and backends can run, and active protections."""
    if model is not None:
        from quintet.cli import doctor_model

        doctor_model.run(model, as_json=as_json)
        return
    from quintet.cli.doctor import run

    run(as_json=as_json)


@app.command()
def explain(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] KEY|METRIC", help="Dotted key, with CONFIG its value there too; or a metric."),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option(help="Framework of the key: native, ragen, verl, vagen, rlinf or roll.")
    ] = None,
    release: Release = None,
    list_all: Annotated[bool, typer.Option("--list", help="List all documented keys of all frameworks.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Explain or list metrics instead of keys.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per key or metric.")] = False,
) -> None:
    """Explain a configuration key or a metric."""
    from quintet.cli.explain import run

    run(arguments or [], with_release(dialect, release), every=list_all, metrics=metrics, as_json=as_json)


@app.command()
def translate(
    config: Config = None,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option(help="Target format: native, ragen, verl, vagen, rlinf or roll.")] = "native",
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Output file (default: stdout).")
    ] = None,
    dialect: DialectName = None,
    release: Release = None,
    unknown_keys: UnknownKeys = "refuse",
    ignore_fork_keys: IgnoreForkKeys = False,
) -> None:
    """Translate a configuration to another framework's format."""
    from quintet.cli.translate import run

    policy = unknown_key_policy(unknown_keys, ignore_fork_keys)
    run(*split(config, overrides), with_release(dialect, release), policy, to=to, output=output)


@app.command()
def schema() -> None:
    """Print the JSON schema of the native configuration, for editors."""
    import json

    from quintet.config.native.experiment import Experiment

    print(json.dumps(Experiment.model_json_schema(), indent=1))


@app.command(name="list")
def list_entries() -> None:
    """List environments, engines, advantage estimators, losses, loggers and presets."""
    from quintet.cli.list import run

    run()


def _print_version(requested: bool) -> None:
    if requested:
        print(f"quintet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Post-train language models by reinforcement learning."""


def _keep_script_arguments() -> None:
    """Double the `--` before the arguments of a run script, since the parser removes one."""
    if "--" in sys.argv[3:]:
        sys.argv.insert(sys.argv.index("--"), "--")


NO_HOME = "Could not determine home directory."
"""Python's message for a path with ~ of a user that has no home."""


def main() -> NoReturn:
    """Run the command line, hidden from other programs; a user error ends with one message and exit status 2."""
    hide_memory()
    replace_unencodable_characters()
    show_control_characters()
    _keep_script_arguments()
    try:
        with exit_on_second_signal(), silence_other_ranks():
            app(standalone_mode=True)
    except UserError as error:
        print(f"quintet: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("quintet: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except RuntimeError as error:
        if str(error) != NO_HOME:
            raise
        print(f"quintet: {error} Write paths without ~, or set the environment variable HOME.", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = f"cannot write {error.filename or tempfile.gettempdir()}"
            print(f"quintet: disk full: {place}; free some space, or set TMPDIR to another disk", file=sys.stderr)
            sys.exit(2)
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"quintet: {describe_long_name(str(error.filename), sys.argv[1:])}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


if __name__ == "__main__":
    main()
