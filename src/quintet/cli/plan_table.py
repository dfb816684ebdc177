"""A planned run as tables for people: in colour on a terminal, plain elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quintet.config.faults import Fault
from quintet.config.plan.fit import gib
from quintet.config.plan.loads import Load
from quintet.config.plan.memory import Peak
from quintet.config.plan.placement import Component, Placement, ranges
from quintet.config.plan.steps import epochs_of, fine_tuning
from quintet.config.plan.survey import Survey

__all__ = ["numbers_table", "page", "print_survey", "section"]

WIDTH = 100
NODES = 4
"""Machines that get a column of their own."""
BAR = 30
TITLES = {
    "actor": "actor",
    "rollout": "engines",
    "reference": "reference",
    "critic": "critic",
    "reward": "reward model",
    "worlds": "worlds",
}
Row = tuple[str, str, str]


@contextmanager
def page() -> Iterator[Console]:
    """A console whose text goes to standard output at the end, without blanks at the ends of lines. Text is never read
    as markup."""
    terminal, kept = sys.stdout.isatty(), io.StringIO()
    width = None if terminal else WIDTH
    yield Console(file=kept, force_terminal=terminal, width=width, markup=False, emoji=False, highlight=False)
    print("\n".join(line.rstrip() for line in kept.getvalue().splitlines()))


def section(out: Console, title: str) -> None:
    """A heading with space above."""
    out.print()
    out.print(Text(title, style="bold cyan"))


def print_survey(
    found: Survey,
    *,
    start: str | None = None,
    waits: Sequence[Fault] = (),
    missing: Sequence[Fault] = (),
    remarks: Sequence[str] = (),
) -> None:
    """Print it all; `start` is how torchrun starts it, where it does."""
    with page() as out:
        _print_run(out, found)
        if rows := list(_arithmetic(found)):
            section(out, "Arithmetic")
            out.print(numbers_table(rows))
        if found.placement.components:
            section(out, "Placement")
            _print_placement(out, found.placement)
            if start is not None:
                out.print(f"  Start: {start}", style="dim", markup=False, highlight=False)
            section(out, "Memory of one device, estimated")
            _print_memory(out, found)
        _print_lines(out, "Warnings", found.warnings, "yellow")
        _print_lines(out, "Not yet: this version can't run it because", [fault.message for fault in waits], "red")
        _print_lines(out, "Not on this machine", map(str, missing), "yellow")
        _print_lines(out, "Remarks", remarks, "dim")


def _clean(text: str) -> str:
    """Without characters that would move the cursor."""
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in text)


def _print_run(out: Console, found: Survey) -> None:
    run = dict(found.run)
    heading = Text(f"{run.pop('name')}  ", style="bold")
    out.print(heading.append(run.pop("kind"), style="not bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, line in run.items():
        table.add_row(f"  {name}", _clean(line))
    out.print(table)


def numbers_table(rows: Iterable[Row]) -> Table:
    """Name, number, and how it comes about."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    for name, number, how in rows:
        table.add_row(f"  {name}", number, how)
    return table


def _number(number: float | None) -> str:
    return "unknown" if number is None else f"{number:,.10g}" if isinstance(number, float) else f"{number:,}"


def _arithmetic(found: Survey) -> Iterator[Row]:
    numbers, config = found.numbers, found.composed.experiment
    if config.evaluation is not None:
        yield "questions", _number(numbers["rows"]), "with stored answers"
        yield "k", ", ".join(map(str, numbers["samples"])), "of pass@k and maj@k, as far as there are answers"
    elif fine_tuning(config) is not None:
        yield from _of_fine_tuning(found)
    elif numbers:
        yield from _of_a_step(found)
        yield from _of_ranks(found)
        yield from _of_the_run(found)


def _of_fine_tuning(found: Survey) -> Iterator[Row]:
    numbers = found.numbers
    yield "sequences a step", _number(numbers["sequences_per_step"]), "in one optimizer step"
    yield "micro-batches", _most(numbers["passes_per_step"]), "in each optimizer step, their gradients add up"
    yield "epochs", _number(numbers["epochs"]), "passes over the data"
    if "games" in numbers:
        yield "games", _number(numbers["games"]), "solved, a row for each of their moves"
    yield "steps", _number(numbers["steps"]), _steps(found)
    yield "validations", _number(numbers["validations"]), "of the held-out loss"
    yield from _dropped(found)


def _dropped(found: Survey) -> Iterator[Row]:
    if found.data and found.data.dropped:
        yield "rows dropped", _number(found.data.dropped), "of each pass: they fill no whole step"


def _of_a_step(found: Survey) -> Iterator[Row]:
    numbers, training = found.numbers, found.composed.experiment.training
    what = "prompts" if found.data else "start states"
    starts = f"{training.groups_per_step:,} {what} × {_counted(training.samples_per_group, 'sample')} each"
    yield "games a step", _number(numbers["games_per_step"]), starts
    if numbers["sequences_per_step"] > numbers["games_per_step"]:
        yield "sequences a step", _most(numbers["sequences_per_step"]), "as the window slides, one a turn"
    cut = f"of {_counted(numbers['games_per_mini_batch'], 'game')} each, "
    cut += f"{_counted(numbers['groups_per_mini_batch'], 'group')}"
    yield "mini-batches", _number(training.mini_batches), cut
    yield "epochs", _number(training.epochs), "passes over the games of a step"
    how = f"{_counted(training.mini_batches, 'mini-batch')} × {_counted(training.epochs, 'epoch')}"
    yield "optimizer steps a step", _number(numbers["optimizer_steps_per_step"]), how


def _of_ranks(found: Survey) -> Iterator[Row]:
    for name, one in found.shares.items():
        many = f" ({_most(one.sequences)} sequences)" if one.sequences > one.games else ""
        how = f"data-parallel, {_counted(one.games, 'game')}{many} of a mini-batch on each"
        yield f"{name}: ranks", _number(one.ranks), how
        how = f"in each optimizer step, their gradients add up;\n{one.budget.words} in one ({one.budget.key})"
        yield f"{name}: micro-batches", _most(one.passes), how


def _of_the_run(found: Survey) -> Iterator[Row]:
    numbers, config = found.numbers, found.composed.experiment
    if numbers["warm_start_updates"]:
        yield "warm start", _most(numbers["warm_start_updates"]), "optimizer steps"
    yield "steps", _number(numbers["steps"]), _steps(found)
    drop = config.algorithm.drop_groups_without_signal and not config.needs_critic
    updates = numbers["optimizer_steps"]
    yield "optimizer steps", _most(updates) if drop else _number(updates), "groups without signal need none" * drop
    yield "games", _number(numbers["games"]), ""
    many = numbers["validation_games"]
    games = "the held-out rows" if many is None else _counted(many, "answer" if found.data else "game")
    yield "validations", _number(numbers["validations"]), f"of {games} each"
    keep, made = config.checkpoint.keep, numbers["checkpoints"]
    yield "checkpoints", _number(made), f"the last {keep:,} are kept" if made and keep < made else "all are kept"
    yield from _dropped(found)


def _counted(number: float, word: str) -> str:
    """`1 game`, `2 games`, `3 mini-batches`."""
    return f"{_number(number)} {word}{'' if number == 1 else 'es' if word.endswith('ch') else 's'}"


def _most(number: int | None) -> str:
    return _number(number) if number is None else f"≤ {number:,}"


def _steps(found: Survey) -> str:
    data, config = found.data, found.composed.experiment
    if data is None or not data.decide:
        return ""
    if data.rows is None:
        return "data.epochs × the rows of the files, which aren't here to be counted"
    rows = f"{data.rows:,} rows{', less those that are too long' if data.at_most else ''}"
    most = config.data.max_steps if config.data else None
    limit = f"; at most {most:,}, data.max_steps" if most is not None and data.steps == most else ""
    return f"{epochs_of(config)} × {rows}, {data.batch:,} in each step{limit}"


def _table() -> Table:
    """One line below the heads of columns, and no other."""
    return Table(box=SIMPLE_HEAD, show_edge=False, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)


def _print_placement(out: Console, placement: Placement) -> None:
    table = _table()
    table.add_column("component")
    nodes = range(placement.nodes) if placement.nodes <= NODES else ()
    for node in nodes:
        table.add_column(f"node {node}", style="bold")
    if not nodes:
        table.add_column(f"{placement.nodes:,} nodes × {placement.devices_per_node}", style="bold")
    table.add_column("copies", justify="right")
    table.add_column("each split")
    for component in placement.components:
        places = placement.by_node(component)
        here = [ranges(places.get(node, ())) for node in nodes] or [ranges(component.devices)]
        here = here if component.devices else ["CPU", *[""] * (len(here) - 1)]
        table.add_row(f"{TITLES[component.name]}", *here, f"{component.copies:,}", _split(component))
    out.print(Padding(table, (0, 0, 0, 2)))
    turns = "take turns on them" if placement.colocated else "hold them side by side"
    if len(placement.components) > 1:
        out.print(f"  Devices are counted over all nodes; components {turns}.", style="dim")


def _split(component: Component) -> str:
    """As people say it: `tensor 2 × pipeline 2`, and how what is left is sharded."""
    words = " × ".join(f"{word} {size}" for word, size in component.split.words.items())
    if component.name in ("rollout", "worlds"):
        return words or "whole"
    backend = component.split.backend if component.name != "reward" else ""
    if len(component.devices) < 2:
        return "one process"
    group = component.split.group or len(component.devices)
    sharded = "" if backend == "megatron" else f"sharded over {group}"
    return ", ".join(filter(None, [backend, words, sharded]))


def _print_memory(out: Console, found: Survey) -> None:
    for key, unknown in found.models.unknown.items():
        out.print(Text(f"  {key}: ", style="yellow").append(_clean(f"unknown, {unknown.reason}")), soft_wrap=True)
        out.print(Text(f"  to know it: {_clean(unknown.hint)}"), soft_wrap=True)
    if not found.memory.working:
        return
    table = _table()
    table.add_column("component")
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "KV cache", "sum", "idle"):
        table.add_column(part, justify="right", no_wrap=True)
    for name, load in found.memory.working.items():
        table.add_row(f"{TITLES[name]}", *_loads(load), gib(found.memory.idle[name].total))
    out.print(Padding(table, (0, 0, 0, 2)))
    for peak in found.memory.peaks:
        out.print(_peak(peak, found.device_bytes))
    out.print("  By formulas: CUDA, communication and fragmentation come on top, 2 to 4 GiB.", style="dim")


def _loads(load: Load) -> list[str]:
    parts = [load.weights + load.copies, load.gradients, load.optimizer, load.activations, load.logits, load.cache]
    return [*(gib(part) if part else "–" for part in parts), gib(load.total)]


def _peak(peak: Peak, device_bytes: int | None) -> Text:
    """One line about the fullest moment, with a bar where the device's size is known."""
    device = "device" if len(peak.devices) == 1 else "devices"
    line = Text(f"  {device} {ranges(peak.devices)}  ").append(gib(peak.total), style="bold")
    if device_bytes is not None:
        filled = min(BAR, round(BAR * peak.total / device_bytes))
        style = "green" if peak.total < 0.9 * device_bytes else "yellow"
        line.append(f" of {gib(device_bytes)}  ").append("█" * filled, style=style).append("░" * (BAR - filled))
    return line.append(f"  {peak.phase}", style="dim")


def _print_lines(out: Console, title: str, lines: Iterable[str], style: str) -> None:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style=style)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row("  •", _clean(line))
    if table.row_count:
        section(out, title)
        out.print(table)
