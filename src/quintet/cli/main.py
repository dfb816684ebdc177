"""The `quintet` command: argument parsing, dispatch to one module per command, and error messages."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from quintet import __version__
from quintet.cli import check, data
from quintet.cli.ranks import silence_other_ranks
from quintet.errors import UserError
from quintet.runtime.signals import exit_on_second_signal

app = typer.Typer(
    name="quintet",
    help="Post-train language models by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(check.app, name="check")
app.add_typer(data.app, name="data")

Config = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG", help="YAML file, run script or file of key=value lines (default: built-in configuration)."
    ),
]
DialectName = Annotated[
    str | None,
    typer.Option(
        "--dialect", help="Source framework of CONFIG: native, ragen, verl, vagen, rlinf or roll (default: detected)."
    ),
]
UnknownKeys = Annotated[
    str, typer.Option(help="Unknown keys of another framework's configuration: `refuse`, or `warn` and ignore them.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Start one process per device through Ray: local, auto or HOST:PORT; http://HOST:8265 submits a job.",
    ),
]
MaxRestarts = Annotated[
    int, typer.Option(help="With --ray: how often to continue from the last checkpoint after a failure.", min=0)
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Configuration overrides.")]


def _split(config: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """Split the arguments: the first one is a file unless it is a `key=value` override."""
    remaining = list(overrides or [])
    if config is not None and "=" in config:
        return None, [config, *remaining]
    return config, remaining


@app.command()
def train(
    config: Config = None,
    overrides: Overrides = None,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
    ray: RayAddress = None,
    max_restarts: MaxRestarts = 3,
) -> None:
    """Train a policy by reinforcement learning, after an optional warm start."""
    words = _split(config, overrides)
    if ray is not None:
        from quintet.cli import ray_launch

        raise typer.Exit(ray_launch.run("train", ray, *words, dialect, unknown_keys, max_restarts))
    from quintet.cli.train import run

    raise typer.Exit(run(*words, dialect, unknown_keys))


@app.command()
def sft(
    config: Config = None,
    overrides: Overrides = None,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
    ray: RayAddress = None,
    max_restarts: MaxRestarts = 3,
) -> None:
    """Fine-tune a model on conversations or expert demonstrations."""
    words = _split(config, overrides)
    if ray is not None:
        from quintet.cli import ray_launch

        raise typer.Exit(ray_launch.run("sft", ray, *words, dialect, unknown_keys, max_restarts))
    from quintet.cli.sft import run

    raise typer.Exit(run(*words, dialect, unknown_keys))


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


@app.command(name="eval")
def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG|MODEL",
            help="Model, checkpoint or run directory; or a configuration with `evaluation` or `validation.only`.",
        ),
    ] = None,
    overrides: Overrides = None,
    data_file: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="Data file with prompts for the model.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="Environment to evaluate in.")] = None,
    samples: Annotated[int, typer.Option(help="Responses per prompt, or episodes per start state.", min=1)] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy (default: 0 for one sample, 1 for several).", min=0.0)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per response.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of prompts.", min=1)] = None,
    episodes: Annotated[int, typer.Option(help="Number of start states.", min=1)] = 256,
    confidence: Annotated[float, typer.Option(help="Confidence level of the intervals.", min=0.01, max=0.999)] = 0.95,
    name: Annotated[str | None, typer.Option(help="Name of the results directory.")] = None,
    output_dir: Annotated[str, typer.Option(help="Parent directory of the results.")] = "runs",
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible endpoint to evaluate, http://…/v1.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(metavar="NAME", help="Model name at the endpoint.")] = None,
    endpoint_key: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Environment variable with the API key.")
    ] = "OPENAI_API_KEY",
    endpoint_concurrent: Annotated[int, typer.Option(help="Maximum concurrent requests.", min=1)] = 16,
    endpoint_retries: Annotated[int, typer.Option(help="Retries of a failed request.", min=0)] = 2,
    endpoint_timeout: Annotated[float, typer.Option(help="Timeout of a request in seconds.", min=0.001)] = 300.0,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Score stored answers, or generate and score answers of a model or an endpoint."""
    from quintet.cli.evaluate import EvalOptions, run

    options = EvalOptions(
        data_file,
        env,
        samples,
        temperature,
        max_tokens,
        limit,
        episodes,
        confidence,
        name,
        output_dir,
        endpoint,
        endpoint_model,
        endpoint_key,
        endpoint_concurrent,
        endpoint_retries,
        endpoint_timeout,
    )
    raise typer.Exit(run(*_split(target, overrides), dialect, unknown_keys, options, as_json=as_json))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Model, checkpoint or run directory.")],
    overrides: Overrides = None,
    engine: Annotated[
        str | None, typer.Option(help="hf, vllm or sglang (default: the engine of the run, else hf).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind; other than loopback only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 selects a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help="Bearer token that clients must send; prefer the environment variable QUINTET_TOKEN."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name in requests (default: name of the directory).")] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Maximum number of concurrently decoded requests.", min=1)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Maximum context length in tokens, prompt and completion.", min=2)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code from the model directory.")
    ] = False,
) -> None:
    """Serve a model as an OpenAI-compatible endpoint, with token ids and log-probs."""
    from quintet.cli.serve import ServeOptions, run

    options = ServeOptions(engine, host, port, token, name, max_concurrent, context, dtype, trust_remote_code)
    raise typer.Exit(run(model, list(overrides or []), options))


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Checkpoint, run, model or adapter directory.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Output directory.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: unchanged).")] = None,
) -> None:
    """Export a trained model for transformers: adapters merged, dtype converted, with a model card."""
    from quintet.cli.export import run

    run(source, target, dtype)


@app.command()
def plan(
    config: Config = None,
    overrides: Overrides = None,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    device_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", help="Memory per device in GiB; exit with an error if the run does not fit.", min=0.001
        ),
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Propose parallel sizes, micro-batches and offloads with which the run fits.")
    ] = False,
    devices: Annotated[int | None, typer.Option(help="With --fit: number of devices of all nodes.", min=1)] = None,
    nodes: Annotated[
        int | None, typer.Option(help="With --fit: number of nodes (default: 8 devices each).", min=1)
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --fit: such as a100 or h100 (default: this machine's).")
    ] = None,
    write: Annotated[
        int | None, typer.Option(metavar="N", help="With --fit: number of the proposal to write (default: 1).", min=1)
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="With --fit: file for the configuration of a proposal."),
    ] = None,
) -> None:
    """Check a configuration and show its batches, updates, devices and memory without running it."""
    from quintet.cli import plan, plan_fit

    options = plan_fit.FitOptions(devices, nodes, device, device_memory, write, output)
    if fit:
        plan_fit.run(*_split(config, overrides), dialect, unknown_keys, options, as_json=as_json)
    else:
        plan_fit.refuse_without_fit(options)
        plan.run(*_split(config, overrides), dialect, unknown_keys, as_json=as_json, device_memory=device_memory)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the hardware and packages of this machine and which engines and backends can run."""
    from quintet.cli.doctor import run

    run(as_json=as_json)


@app.command()
def explain(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG] KEY", help="Dotted key; with CONFIG, also its value there.")
    ] = None,
    dialect: Annotated[
        str | None, typer.Option(help="Framework of the key: native, ragen, verl, vagen, rlinf or roll.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List all documented keys of all frameworks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per key.")] = False,
) -> None:
    """Explain a configuration key."""
    from quintet.cli.explain import run

    run(arguments or [], dialect, every=list_all, as_json=as_json)


@app.command()
def translate(
    config: Config = None,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option(help="Target format: native, ragen, verl, vagen, rlinf or roll.")] = "native",
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Output file (default: stdout).")
    ] = None,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
) -> None:
    """Translate a configuration to another framework's format."""
    from quintet.cli.translate import run

    run(*_split(config, overrides), dialect, unknown_keys, to=to, output=output)


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


def _limit_openmp_spinning() -> None:
    """Let OpenMP threads sleep at barriers if other processes keep the CPUs busy.

    A thread that spins keeps a CPU from the thread it waits for. Alone, spinning saves about a tenth; beside another
    process it costs more (`benchmarks/competing_load.py`). libgomp reads the variables when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ and os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1):
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main() -> NoReturn:
    """Run the command line; a user error ends with one message and exit status 2."""
    _limit_openmp_spinning()
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
    sys.exit(0)


if __name__ == "__main__":
    main()
