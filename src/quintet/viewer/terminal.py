"""`quintet view --terminal`: the viewer in a terminal, for login nodes without a browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Label, Sparkline, Static, TabbedContent, TabPane

from quintet.diagnosis.diagnose import diagnose_run, read_coverage, read_run
from quintet.tracking.episode_words import answers_prompt, checks_format, outcome_text
from quintet.tracking.metrics import describe, healthy_text, ordered_names
from quintet.tracking.progress import KEY_METRICS, duration
from quintet.viewer.episode_filter import EpisodeFilter
from quintet.viewer.episodes import changed_episodes, list_rows, read_episode
from quintet.viewer.run_catalog import RunCatalog, ViewedRun, run_row
from quintet.viewer.timeline import step_phases
from quintet.viewer.trajectory_index import EpisodeSummary

REFRESH_SECONDS = 3.0
INDEX_SECONDS = 2.0
MAX_EPISODES, MAX_STEPS = 500, 40
"""Episodes of the newest steps, and steps of the timeline, that are shown."""
CURVE_POINTS = 120
LISTS = {"runs": "#run-list", "charts": "#curves", "episodes": "#episode-list", "changes": "#change-list"}
"""What is focused in each tab that has a list."""


class TerminalViewer(App[None]):
    """Runs, curves, diagnosis, episodes, changes, phases and settings of the runs of a catalog."""

    TITLE = "Quintet"
    CSS = """
    DataTable { height: 1fr; }
    #episode-list, #change-list { width: 45%; }
    #episode-detail, #change-detail { width: 55%; padding: 0 1; border-left: solid $panel; }
    .curve { height: 4; margin: 0 1 1 1; }
    .curve Sparkline { height: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        *((str(number), f"show('{name}')", name.capitalize()) for number, name in enumerate(
            ("runs", "charts", "diagnosis", "episodes", "changes", "timeline", "settings"), 1
        )),
        ("slash", "search", "Search"),
        ("escape", "leave_search", "Leave search"),
    ]  # fmt: skip

    def __init__(self, catalog: RunCatalog) -> None:
        super().__init__()
        self._catalog = catalog
        self._run: ViewedRun | None = None
        self._episodes: list[EpisodeSummary] = []
        self._pairs: list[tuple[EpisodeSummary, EpisodeSummary]] = []

    def compose(self) -> ComposeResult:
        with TabbedContent(initial="runs"):
            with TabPane("Runs", id="runs"):
                yield DataTable(id="run-list", cursor_type="row")
            with TabPane("Charts", id="charts"):
                yield Input(placeholder="Filter metrics", id="metric-filter")
                yield VerticalScroll(id="curves")
            with TabPane("Diagnosis", id="diagnosis"), VerticalScroll():
                yield Static(id="findings")
            with TabPane("Episodes", id="episodes"):
                yield Input(placeholder="Search observations and responses", id="episode-search")
                with Horizontal():
                    yield DataTable(id="episode-list", cursor_type="row")
                    with VerticalScroll(id="episode-detail"):
                        yield Static(id="episode")
            with TabPane("Changes", id="changes"), Horizontal():
                yield DataTable(id="change-list", cursor_type="row")
                with VerticalScroll(id="change-detail"):
                    yield Static(id="change")
            with TabPane("Timeline", id="timeline"), VerticalScroll():
                yield Static(id="phases")
            with TabPane("Settings", id="settings"), VerticalScroll():
                yield Static(id="config")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#run-list", DataTable).add_columns("run", "state", "progress", "time", "metric", "last value")
        self.query_one("#episode-list", DataTable).add_columns(
            "", "reward", "split", "step", "seed", "turns", "response"
        )
        self.query_one("#change-list", DataTable).add_columns("", "reward", "seed", "response")
        self._show_runs()
        self.set_interval(REFRESH_SECONDS, self._refresh)

    def action_show(self, name: str) -> None:
        """Show a tab, with its list focused."""
        self.query_one(TabbedContent).active = name
        self.action_leave_search()

    def action_search(self) -> None:
        """Move to the search of the current tab."""
        fields = {"charts": "#metric-filter", "episodes": "#episode-search"}
        if field := fields.get(self.query_one(TabbedContent).active):
            self.query_one(field, Input).focus()

    def action_leave_search(self) -> None:
        """Move to the list of the current tab."""
        target = LISTS.get(self.query_one(TabbedContent).active)
        self.set_focus(self.query_one(target) if target else None)

    def _refresh(self) -> None:
        active = self.query_one(TabbedContent).active
        if active in ("runs", "charts"):
            self._show(active)

    @on(TabbedContent.TabActivated)
    def _tab_activated(self, event: TabbedContent.TabActivated) -> None:
        self._show(str(event.pane.id))

    def _show(self, tab: str) -> None:
        if tab == "runs":
            self._show_runs()
        elif self._run is not None:
            views: Mapping[str, Callable[[ViewedRun], None]] = {
                "charts": self._show_curves,
                "diagnosis": self._show_findings,
                "episodes": self._show_episodes,
                "changes": self._show_changes,
                "timeline": self._show_timeline,
                "settings": self._show_config,
            }
            self.sub_title = self._run.name
            views[tab](self._run)

    def _show_runs(self) -> None:
        runs, table = self._catalog.runs(), self.query_one("#run-list", DataTable)
        chosen = table.cursor_row
        table.clear()
        for run in runs:
            row = run_row(run)
            progress = f"{row['phase']} {row['done']}/{row['total']}" if row["phase"] else "–"
            value = f"{row['values'][-1]:.3g}" if row["values"] else "–"
            time = duration(row["seconds"]) if row["seconds"] is not None else "–"
            table.add_row(run.name, row["state"], progress, time, row["metric"], value, key=run.name)
        if runs:
            table.move_cursor(row=min(chosen, len(runs) - 1))
            self._run = self._run or runs[0]

    @on(DataTable.RowHighlighted, "#run-list")
    def _run_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.row_key.value is not None:
            self._run = self._catalog.get(event.row_key.value)

    @on(DataTable.RowSelected, "#run-list")
    def _run_selected(self) -> None:
        self.action_show("charts")

    @on(Input.Changed, "#metric-filter")
    def _metric_filter_changed(self) -> None:
        self._show("charts")

    def _show_curves(self, run: ViewedRun) -> None:
        parts = self.query_one("#metric-filter", Input).value.lower().split()
        names = [name for name in run.metrics.names() if all(part in name.lower() for part in parts)]
        names.sort(key=_curve_order)
        panel = self.query_one("#curves", VerticalScroll)
        panel.remove_children()
        panel.mount_all(_curve(run, name) for name in names)

    def _show_findings(self, run: ViewedRun) -> None:
        text = Text()
        stages = read_run(run.directory.path)
        for finding in diagnose_run(run.directory.path, stages):
            style = "bold red" if finding.severity == "critical" else "bold yellow"
            text.append(f"{finding.title}\n", style).append(f"{finding.evidence}\n")
            for suggestion in finding.suggestions:
                text.append(f"  • {suggestion}\n", "dim")
            text.append("\n")
        coverage = read_coverage(run.directory.path, stages)
        if not text:
            text.append(f"{coverage.verdict[0].upper()}{coverage.verdict[1:]}.\n\n")
        if lines := coverage.waiting_lines():
            text.append("Not judged yet\n", "bold").append("\n".join(f"  • {line}" for line in lines), "dim")
        self.query_one("#findings", Static).update(text)

    @on(Input.Submitted, "#episode-search")
    def _episode_search_submitted(self) -> None:
        self._show("episodes")
        self.query_one("#episode-list", DataTable).focus()

    def _show_episodes(self, run: ViewedRun) -> None:
        run.trajectories.refresh(INDEX_SECONDS)
        conditions = EpisodeFilter(text=self.query_one("#episode-search", Input).value)
        selected = conditions.apply(run.trajectories.episodes(), run.trajectories.file)
        self._episodes = selected[:MAX_EPISODES]
        table = self.query_one("#episode-list", DataTable)
        table.clear()
        for row in list_rows(run.trajectories, self._episodes):
            cells = (row["split"], row["step"], row["seed"], row["turns"], row["failure"] or row["preview"])
            table.add_row(_mark(row["success"]), f"{row['reward']:.3g}", *map(_cell, cells))

    @on(DataTable.RowHighlighted, "#episode-list")
    def _episode_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if self._run is not None and event.cursor_row < len(self._episodes):
            episode = read_episode(self._run.trajectories, self._episodes[event.cursor_row])
            self.query_one("#episode", Static).update(episode_text(episode))

    def _show_changes(self, run: ViewedRun) -> None:
        run.trajectories.refresh(INDEX_SECONDS)
        stored = [episode for episode in run.trajectories.episodes() if episode.split == "validation"]
        steps = sorted({episode.step for episode in stored})
        table = self.query_one("#change-list", DataTable)
        table.clear()
        if len(steps) < 2:
            self.query_one("#change", Static).update("Comparison needs the episodes of two validations.")
            return
        before, after = ([entry for entry in stored if entry.step == step] for step in (steps[0], steps[-1]))
        self._pairs = list(changed_episodes(before, after))[:MAX_EPISODES]
        for (old, new), row in zip(
            self._pairs, list_rows(run.trajectories, [pair[1] for pair in self._pairs]), strict=True
        ):
            marks = Text.assemble(_mark(old.success), "→", _mark(new.success))
            table.add_row(marks, f"{old.reward:.3g}→{new.reward:.3g}", str(new.seed), _cell(row["preview"]))

    @on(DataTable.RowHighlighted, "#change-list")
    def _change_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if self._run is not None and event.cursor_row < len(self._pairs):
            texts = [
                Text(f"{label}\n", "bold").append_text(episode_text(read_episode(self._run.trajectories, entry)))
                for label, entry in zip(("Before", "After"), self._pairs[event.cursor_row], strict=True)
            ]
            self.query_one("#change", Static).update(Text("\n").join(texts))

    def _show_timeline(self, run: ViewedRun) -> None:
        text = Text()
        metrics = run.metrics.columns()
        lines = map(metrics.line, range(max(0, len(metrics) - MAX_STEPS), len(metrics)))
        for step in step_phases(lines):
            text.append(f"step {step['step']}  {duration(step['phase']['seconds'])}\n", "bold")
            text.append_text(_phase_lines(step["phase"]["parts"], step["phase"]["seconds"]))
        self.query_one("#phases", Static).update(text if text else Text("No steps yet."))

    def _show_config(self, run: ViewedRun) -> None:
        table = Table(box=None, pad_edge=False)
        for column in ("key", "value", "source"):
            table.add_column(column, overflow="fold")
        for key, (value, source) in run.config().items():
            table.add_row(Text(key), Text(value), Text(source, "dim"), style="dim" if source == "default" else "")
        self.query_one("#config", Static).update(table)


def _curve_order(metric: str) -> tuple[int, str]:
    """Return the rank of a metric: those of the progress bar first, then as `metrics.yaml` lists them."""
    order = [*KEY_METRICS, *ordered_names()]
    try:
        return order.index(describe(metric).name), metric
    except KeyError:  # logged by a newer version or by user code
        return len(order), metric


def _curve(run: ViewedRun, name: str) -> VerticalScroll:
    """Return a sparkline of a metric with its last value and meaning."""
    values = run.metrics.curve(name).downsampled(CURVE_POINTS).values
    try:
        metric = describe(name)
        meaning = f"{metric.meaning}. Healthy: {healthy_text(metric.healthy)}."
    except KeyError:  # logged by a newer version or by user code
        meaning = ""
    last = f"{values[-1]:.4g}" if values else "–"
    label = Text.assemble((name, "bold"), f"  {last}  ", (meaning, "dim"), no_wrap=True, overflow="ellipsis")
    return VerticalScroll(Label(label), Sparkline(list(values)), classes="curve")


def _mark(success: bool) -> Text:
    return Text("✓", "green") if success else Text("✗", "red")


def _cell(value: object) -> Text:
    """Return untrusted text on one line; brackets are not markup."""
    return Text(" ".join(str(value).split()))


def episode_text(episode: Mapping[str, Any]) -> Text:
    """Return an episode turn by turn: observation, response, actions and reward."""
    text = Text(f"{episode['env']} seed {episode['seed']}, {outcome_text(episode)}, reward {episode['reward']:.3g}\n\n")
    for number, turn in enumerate(episode["turns"], 1):
        text.append(f"Turn {number}\n", "bold").append(f"{turn['observation']}\n")
        is_invalid = checks_format(episode) and not turn["valid_format"]
        text.append(f"{turn['text']}\n", "red" if is_invalid else "cyan")
        actions = " ".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in turn["actions"])
        facts = [actions or ("" if answers_prompt(episode) else "no action"), f"reward {turn['reward']:.3g}"]
        text.append(f"{', '.join(filter(None, facts))}, {turn['finish_reason']}\n\n", "dim")
    return text


def _phase_lines(parts: Sequence[Mapping[str, Any]], total: float, indent: int = 1) -> Text:
    """Return the phases of a step with bars of their share, nested ones indented."""
    text = Text()
    for part in parts:
        share = part["seconds"] / total
        if share >= 0.001:
            bar = "█" * max(1, round(40 * share))
            text.append(f"{'  ' * indent}{part['name']:<16} {part['seconds']:8.2f} s ").append(f"{bar}\n", "cyan")
            text.append_text(_phase_lines(part["parts"], total, indent + 1))
    return text
