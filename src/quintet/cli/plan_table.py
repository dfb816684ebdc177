"""Output of `quintet plan`: tables, in colour on a terminal and plain elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from quintet.cli.tables import Row, clean, numbers_table, page, plain_table, section
from quintet.config.native.experiment import Experiment
from quintet.config.plan.component_memory import MemoryUse
from quintet.config.plan.disk import free_bytes
from quintet.config.plan.format_sizes import format_bytes
from quintet.config.plan.memory import TITLES, MemoryPeak
from quintet.config.plan.models import policy_path
from quintet.config.plan.placement import Component, Placement, format_ranges
from quintet.config.plan.row_counts import num_epochs
from quintet.config.plan.run_plan import RunPlan, describe_run
from quintet.config.plan.weight_transfer import weight_transfers
from quintet.config.problems import ConfigProblem
from quintet.data.tables import cached_data
from quintet.errors import UserError

MAX_NODE_COLUMNS = 4
"""With more nodes, one column stands for all of them."""
BAR_WIDTH = 30


def print_plan(
    plan: RunPlan,
    *,
    start: str | None = None,
    release: str = "",
    unsupported: Sequence[ConfigProblem] = (),
    missing: Sequence[ConfigProblem] = (),
    remarks: Sequence[str] = (),
    keys: str = "",
    step_seconds: float | None = None,
) -> None:
    """Print the plan; `start` is the torchrun command of a run that needs one, `release` the release of its defaults,
    `keys` the numbers of keys by state, `step_seconds` the time of a step on this machine."""
    with page() as out:
        _print_run(out, plan, release)
        if rows := [*_arithmetic_rows(plan), *_time_rows(step_seconds)]:
            section(out, "Arithmetic")
            out.print(numbers_table(rows))
        if plan.placement.components:
            section(out, "Placement")
            _print_placement(out, plan.placement)
            _print_robots(out, plan)
            _print_weight_transfers(out, plan.config)
            if start is not None:
                out.print(f"  Start: {start}", style="dim", markup=False, highlight=False)
            on_cpu = plan.machine is not None and plan.machine.on_cpu
            section(out, f"Memory of {'the process' if on_cpu else 'one device'}, estimated")
            _print_memory(out, plan)
            _print_disk(out, plan)
        if keys:
            section(out, "Keys that are set")
            out.print(f"  {keys}; `quintet plan --keys` lists them", soft_wrap=True)
        _print_lines(out, "Warnings", plan.warnings, "yellow")
        _print_lines(out, "Not supported yet", [problem.message for problem in unsupported], "red")
        _print_lines(out, "Not on this machine", map(str, missing), "yellow")
        _print_lines(out, "Remarks", remarks, "dim")


def _print_run(out: Console, plan: RunPlan, release: str) -> None:
    run = describe_run(plan.config, plan.models) | ({"defaults": release} if release else {})
    if "data" in run and (form := _form_of_rows(plan.config)):
        run["data"] += f"; read as {form}"
    heading = Text(f"{run.pop('name')}  ", style="bold")
    out.print(heading.append(run.pop("kind"), style="not bold"))
    table = Table.grid(Column(style="dim"), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, line in run.items():
        table.add_row(f"  {name}", clean(line))
    config = plan.config
    has_prompts = config.sft_only is None and config.evaluation is None and not config.env.is_simulator
    if has_prompts and policy_path(config) is not None:
        table.add_row("  prompts", "`quintet plan --prompt` shows the first one as the policy sees it")
    out.print(table)


def _form_of_rows(config: Experiment) -> str:
    """Return the form of the first row that a run trains on; empty if its files are not here."""
    from quintet.data.data_files import LOCAL_SCHEME
    from quintet.data.prompt_source import open_rows
    from quintet.data.row_forms import describe_form

    data = config.data
    if data is None or data.dataset_class is not None:
        return ""
    if any("://" in name.removeprefix(LOCAL_SCHEME) for name in data.train_files):
        return ""
    with suppress(UserError):  # reported by the check of the files
        rows, _ = open_rows(data.train_files, "data.train_files", data.cache_dir)
        return describe_form(data, rows[0]) if len(rows) else ""
    return ""


def _number(number: float | None) -> str:
    return "unknown" if number is None else f"{number:,.10g}" if isinstance(number, float) else f"{number:,}"


def _arithmetic_rows(plan: RunPlan) -> Iterator[Row]:
    numbers, config = plan.numbers, plan.config
    if config.evaluation is not None:
        yield "prompts", _number(numbers["rows"]), "with stored responses"
        yield "k", ", ".join(map(str, numbers["samples"])), "of pass@k and maj@k, up to the number of responses"
    elif config.generation is not None:
        samples = _counted(config.generation.samples, "sample")
        yield "prompts", _number(numbers["prompts"]), "of the data files"
        yield "responses", _number(numbers["responses"]), f"{samples} of each prompt"
        yield "batches", _number(numbers["batches"]), f"of {config.generation.batch_size:,} prompts"
    elif config.sft_only is not None:
        yield from _sft_rows(plan)
    elif numbers:
        yield from _robot_rows(plan) if config.env.is_simulator else _step_rows(plan)
        yield from _rank_rows(plan)
        yield from _image_rows(plan)
        yield from _run_rows(plan)


def _time_rows(seconds: float | None) -> Iterator[Row]:
    if seconds is not None:
        how = "on this machine with sequences of maximum length,\nwithout environments, rewards and optimizer steps"
        yield "time of a step", f"≤ {format_time(seconds)}", how


def format_time(seconds: float) -> str:
    """Format seconds with two or three digits."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"


def _sft_rows(plan: RunPlan) -> Iterator[Row]:
    numbers = plan.numbers
    yield "sequences per step", _number(numbers["sequences_per_step"]), "in one optimizer step"
    yield (
        "micro-batches",
        _upper_bound(numbers["passes_per_step"]),
        "in each optimizer step, with gradient accumulation",
    )
    yield "epochs", _number(numbers["epochs"]), "passes over the data"
    if "episodes" in numbers:
        yield "episodes", _number(numbers["episodes"]), "demonstrations, one row per action"
    yield "steps", _number(numbers["steps"]), _steps(plan)
    yield "validations", _number(numbers["validations"]), "of the held-out loss"
    yield from _dropped_rows(plan)


def _dropped_rows(plan: RunPlan) -> Iterator[Row]:
    if plan.data and plan.data.dropped:
        yield "rows dropped", _number(plan.data.dropped), "of each epoch: they do not fill a step"


def _step_rows(plan: RunPlan) -> Iterator[Row]:
    numbers, training = plan.numbers, plan.config.training
    unit = "prompts" if plan.data else "start states"
    starts = f"{training.groups_per_step:,} {unit} × {_counted(training.samples_per_group, 'sample')} each"
    yield "episodes per step", _number(numbers["episodes_per_step"]), starts
    if (per_round := plan.config.algorithm.filter.groups_per_round) is not None:
        samples, rounds = training.samples_per_group, plan.config.algorithm.filter.refill_rounds
        how = f"{per_round:,} {unit} × {_counted(samples, 'sample')}; the first with a signal train,\n"
        yield "episodes per round", _number(per_round * samples), f"{how}in at most {_counted(1 + rounds, 'round')}"
    if plan.config.data is not None and plan.config.data.domains:
        counts = plan.config.data.prompts_per_domain(training.groups_per_step)
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        yield "domains", _number(len(counts)), f"of the prompts of a step: {parts}"
    if numbers["sequences_per_step"] > numbers["episodes_per_step"]:
        yield "sequences per step", _upper_bound(numbers["sequences_per_step"]), "one per turn as the window slides"
    episodes = _counted(numbers["episodes_per_mini_batch"], "episode")
    groups = _counted(numbers["groups_per_mini_batch"], "group")
    updates = numbers["optimizer_steps_per_step"]
    trained = updates // training.epochs
    if training.mini_batch_sequences is not None:
        size = _counted(training.mini_batch_sequences, "sequence")
        yield "mini-batches", _upper_bound(trained), f"of {size} each, as many as the turns of a step fill"
    else:
        yield "mini-batches", _number(training.mini_batches), f"of {episodes} each, {groups}"
    yield "epochs", _number(training.epochs), "passes over the episodes of a step"
    how = f"{_counted(trained, 'mini-batch')} × {_counted(training.epochs, 'epoch')}"
    if trained < training.mini_batches and training.mini_batch_sequences is None:
        how += f",\nof the groups kept by {plan.setting('algorithm.filter.keep_share')}"
    bounded = _number if training.mini_batch_sequences is None else _upper_bound
    yield "optimizer steps per step", bounded(updates), how


def _robot_rows(plan: RunPlan) -> Iterator[Row]:
    numbers, training = plan.numbers, plan.config.training
    robots = numbers["robots"]
    processes = robots["processes"]
    parts = f"{processes:,} process{'es' * (processes > 1)}, {robots['robots_per_stage']:,} robots per stage"
    yield "robots", _number(robots["robots"]), f"simulated at the same time, by {parts}"
    epochs, actions = f"{robots['epochs']:,} × {robots['actions_per_epoch']:,} actions", robots["actions_per_chunk"]
    how = f"{epochs}, in chunks of {actions:,}"
    yield "chunk steps", _number(robots["epochs"] * robots["chunk_steps_per_epoch"]), f"in each rollout: {how}"
    if robots["executed_dimensions"]:
        how = "of each action are executed, position and gripper; the policy is trained on all"
        yield "dimensions", _number(robots["executed_dimensions"]), how
    yield "samples per step", _number(robots["samples"]), "robots × chunk steps; each is one chunk of one robot"
    if robots["images"]:
        yield "images", _number(robots["images"]), f"of all samples, {format_bytes(robots['image_bytes'])}"
    samples = _counted(robots["samples_per_mini_batch"], "sample")
    yield "mini-batches", _number(training.mini_batches), f"of {samples} each"
    yield "epochs", _number(training.epochs), "passes over the samples of a step"
    how = f"{_counted(training.mini_batches, 'mini-batch')} × {_counted(training.epochs, 'epoch')}"
    yield "optimizer steps per step", _number(numbers["optimizer_steps_per_step"]), how


def _rank_rows(plan: RunPlan) -> Iterator[Row]:
    for name, work in plan.workloads.items():
        episodes, sequences = work.episodes_per_rank, work.sequences_per_rank
        cut = f" ({_upper_bound(sequences)} sequences)" if sequences > episodes else ""
        unit = "sample" if plan.config.env.is_simulator else "episode"
        unit = "sequence" if plan.config.training.mini_batch_sequences is not None else unit
        how = f"data-parallel, {_counted(episodes, unit)}{cut} per mini-batch"
        yield f"{name}: ranks", _number(work.data_parallel_ranks), how
        how = f"in each optimizer step, with gradient accumulation;\n{work.budget.description} each ({work.budget.key})"
        yield f"{name}: micro-batches", _upper_bound(work.micro_batches), how


def _image_rows(plan: RunPlan) -> Iterator[Row]:
    images = plan.images
    if images is None:
        return
    tokens = images["tokens_per_image"]
    size = f"each image of {images['key']}" if images["is_exact"] else "each image, by policy.vision.max_pixels"
    yield "image tokens", _number(tokens) if images["is_exact"] else _upper_bound(tokens), size
    yield "images", _upper_bound(images["images_per_sequence"]), "in each sequence; their tokens are part of the prompt"
    activations = format_bytes(images["encoder_activations"])
    share = f"{images['encoder_share_of_update']:.0%} of the FLOPs of an update; activations {activations}"
    yield "vision encoder", _number(images["encoder_parameters"]), f"parameters, {share}"


def _run_rows(plan: RunPlan) -> Iterator[Row]:
    numbers, config = plan.numbers, plan.config
    if numbers["warm_start_updates"]:
        yield "warm start", _upper_bound(numbers["warm_start_updates"]), "optimizer steps"
    yield "steps", _number(numbers["steps"]), _steps(plan)
    drop = config.algorithm.drop_groups_without_signal and not config.needs_critic
    updates = numbers["optimizer_steps"]
    is_bound = drop or config.training.mini_batch_sequences is not None
    yield (
        "optimizer steps",
        _upper_bound(updates) if is_bound else _number(updates),
        "groups without signal need none" * drop,
    )
    yield "episodes", _number(numbers["episodes"]), ""
    count = numbers["validation_episodes"]
    episodes = "the held-out rows" if count is None else _counted(count, "response" if plan.data else "episode")
    yield "validations", _number(numbers["validations"]), f"of {episodes} each"
    keep, total = config.checkpoint.keep, numbers["checkpoints"]
    yield "checkpoints", _number(total), f"the last {keep:,} are kept" if total and keep < total else "all are kept"
    yield from _dropped_rows(plan)


def _counted(number: float, word: str) -> str:
    """`1 episode`, `2 episodes`, `3 mini-batches`."""
    return f"{_number(number)} {word}{'' if number == 1 else 'es' if word.endswith('batch') else 's'}"


def _upper_bound(number: int | None) -> str:
    return _number(number) if number is None else f"≤ {number:,}"


def _steps(plan: RunPlan) -> str:
    data, config = plan.data, plan.config
    if data is None or not data.sets_steps:
        return ""
    if data.rows is None:
        return "data.epochs × the rows of the files, which are not on this machine"
    rows = f"{data.rows:,} rows{', minus those that are too long' if data.may_be_filtered else ''}"
    max_steps = config.data.max_steps if config.data else None
    limit = f"; at most {max_steps:,}, data.max_steps" if max_steps is not None and data.steps == max_steps else ""
    return f"{num_epochs(config)} × {rows}, {data.batch:,} in each step{limit}"


def _print_placement(out: Console, placement: Placement) -> None:
    nodes = range(placement.nodes) if placement.nodes <= MAX_NODE_COLUMNS else ()
    titles = [f"node {node}" for node in nodes] or [f"{placement.nodes:,} nodes × {placement.devices_per_node}"]
    columns = (Column(title, style="bold") for title in titles)
    table = plain_table("component", *columns, Column("copies", justify="right"), "parallelism")
    for component in placement.components:
        places = placement.by_node(component)
        cells = [format_ranges(places.get(node, ())) for node in nodes] or [format_ranges(component.devices)]
        if not component.devices:
            cells[0] = "CPU"
        table.add_row(component.title, *cells, f"{component.copies:,}", describe_parallelism(component))
    out.print(Padding(table, (0, 0, 0, 2)))
    turns = "take turns on shared devices" if placement.colocated else "use shared devices at the same time"
    if all(len(names) == 1 for names in placement.groups()):
        turns = "share no device"
    if len(placement.components) > 1:
        out.print(f"  Device numbers are global; components {turns}.", style="dim")


def _print_robots(out: Console, plan: RunPlan) -> None:
    """Print which devices simulate robots and sample their actions; the placement may ask for others."""
    if not plan.config.env.is_simulator or not plan.numbers:
        return
    robots = plan.numbers["robots"]
    used = {"envs": robots["simulated_on"], "rollout": robots["sampled_on"]}
    simulated, sampled = map(format_ranges, used.values())
    out.print(f"  Robots are simulated on {simulated}; their actions are sampled on {sampled}.", style="dim")
    listed = {name: tuple(component.devices) for name in used if (component := plan.placement.of(name))}
    if any(listed[name] not in ((), used[name]) for name in listed):
        out.print("  Only devices without the actor have processes for this; otherwise the actor's do it.", style="dim")


def _print_weight_transfers(out: Console, config: Experiment) -> None:
    names = {"shared_memory": "shared memory", "process_group": "a process group", "tcp": "their connections"}
    for each in () if config.sft_only else weight_transfers(config):
        ranks = f"rank{'s' if len(each.ranks) > 1 else ''} {format_ranges(each.ranks)}"
        line = f"  Weights reach the engines of {ranks} through {names[each.transfer]} ({each.reason})."
        out.print(line, style="dim")


def describe_parallelism(component: Component) -> str:
    """Describe degrees, such as `tensor 2 × pipeline 2`, and sharding."""
    degrees = " × ".join(f"{name} {size}" for name, size in component.parallelism.degrees.items())
    if component.name in ("rollout", "envs"):
        return degrees or "none"
    backend = component.parallelism.backend if component.name != "reward" else ""
    if len(component.devices) < 2:
        return "one process"
    group = component.parallelism.group or len(component.devices)
    sharded = "" if backend == "megatron" else f"sharded over {group}"
    return ", ".join(filter(None, [backend, degrees, sharded]))


def _print_memory(out: Console, plan: RunPlan) -> None:
    for key, unknown in plan.models.unknown.items():
        out.print(Text(f"  {key}: ", style="yellow").append(clean(f"unknown, {unknown.reason}")), soft_wrap=True)
        out.print(Text(f"  hint: {clean(unknown.hint)}"), soft_wrap=True)
    if not plan.memory.active:
        return
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "KV cache", "sum", "idle")
    table = plain_table("component", *(Column(part, justify="right", no_wrap=True) for part in parts))
    titles = {**TITLES, **{component.name: component.title for component in plan.placement.components}}
    for name, use in plan.memory.active.items():
        table.add_row(titles[name], *_memory_cells(use), format_bytes(plan.memory.idle[name].total))
    out.print(Padding(table, (0, 0, 0, 2)))
    for peak in plan.memory.peaks:
        out.print(_peak(peak, plan.machine.device_bytes if plan.machine else plan.device_bytes))
    if plan.machine is None or not plan.machine.on_cpu:
        out.print("  Estimates; on a GPU, CUDA, communication and fragmentation need another 2 to 4 GiB.", style="dim")


def _print_disk(out: Console, plan: RunPlan) -> None:
    use = plan.disk
    if use is None:
        return
    section(out, "Disk, estimated")
    sizes = f"{_counted(use.checkpoints, 'checkpoint')} of up to {format_bytes(use.checkpoint)}"
    free = "" if plan.machine is None else f"; {format_bytes(free_bytes(plan.config))} are free"
    line = (
        f"  {sizes} at a time and final weights take {format_bytes(use.total)} of {clean(plan.config.output_dir)}{free}"
    )
    out.print(line, soft_wrap=True)
    if plan.config.data is not None:
        directory, used, limit = cached_data(plan.config.data)
        sizes = f"{format_bytes(used)} of at most {format_bytes(limit)}"
        out.print(f"  copies of Parquet tables and encoded rows: {sizes} in {clean(str(directory))}", soft_wrap=True)


def _memory_cells(use: MemoryUse) -> list[str]:
    parts = [use.weights + use.copies, use.gradients, use.optimizer, use.activations, use.logits, use.cache]
    return [*(format_bytes(part) if part else "–" for part in parts), format_bytes(use.total)]


def _peak(peak: MemoryPeak, device_bytes: int | None) -> Text:
    """Return one line about a memory peak, with a bar if the device size is known."""
    device = "device" if len(peak.devices) == 1 else "devices"
    line = Text(f"  {device} {format_ranges(peak.devices)}  ").append(format_bytes(peak.total), style="bold")
    if device_bytes is not None:
        filled = min(BAR_WIDTH, round(BAR_WIDTH * peak.total / device_bytes))
        style = "green" if peak.total < 0.9 * device_bytes else "yellow"
        line.append(f" of {format_bytes(device_bytes)}  ")
        line.append("█" * filled, style=style).append("░" * (BAR_WIDTH - filled))
    return line.append(f"  {peak.phase}", style="dim")


def _print_lines(out: Console, title: str, lines: Iterable[str], style: str) -> None:
    table = Table.grid(Column(style=style), Column(overflow="fold"), padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row("  •", clean(line))
    if table.row_count:
        section(out, title)
        out.print(table)
