"""Shows a run while it goes: a live table with progress on a terminal, a line now and then elsewhere."""

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadgen.stages import Stage
from loadgen.summary import StageSummary
from loadgen.tables import stage_table
from loadgen.worker import Snapshot

LINE_EVERY_S = 10.0
RECENT = 2000  # latencies that the live percentiles look at
RATE_SPAN_S = 5.0


@dataclass
class _Running:
    stage: Stage
    title: str
    began_s: float
    latest: dict[int, Snapshot] = field(default_factory=dict[int, Snapshot])
    e2e_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=RECENT))
    ttft_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=RECENT))
    history: deque[tuple[float, int, int]] = field(default_factory=lambda: deque[tuple[float, int, int]](maxlen=600))


class LiveWatcher:
    """Prints to `console`; quiet if it is not a terminal, apart from a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._running: _Running | None = None
        self._last_line_s = 0.0

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(Text(text, style="dim"))

    def begin_stage(self, stage: Stage, number: int, num_stages: int) -> None:
        """Opens the table."""
        title = stage.name if num_stages == 1 else f"{number}/{num_stages} {stage.name}"
        self._running = _Running(stage, title, time.monotonic())
        self._last_line_s = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(self._table(self._running), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Refreshes it."""
        running = self._running
        if running is None:
            return
        running.latest[snapshot.worker] = snapshot
        running.e2e_s.extend(snapshot.e2e_s)
        running.ttft_s.extend(snapshot.ttft_s)
        embeds = sum(one.embeds for one in running.latest.values())
        generations = sum(one.generations for one in running.latest.values())
        running.history.append((time.monotonic(), embeds, generations))
        if self._live is not None:
            self._live.update(self._table(running))
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self._console.print(_line(running))

    def end_stage(self, summary: StageSummary) -> None:
        """Closes the table and prints the stage's result."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._console.print(stage_table(summary))
        for warning in summary.warnings:
            self._console.print(Text(f"! {warning}", style="yellow"))
        for bottleneck in summary.client.bottlenecks:
            self._console.print(Text(f"!! the client was the bottleneck: {bottleneck}", style="bold red"))

    def _table(self, running: _Running) -> Group:
        table = Table(title=running.title, title_justify="left", expand=False)
        for column in ("", "embed", "generate", "in flight", "errors", "TTFT p50", "E2E p50", "E2E p99"):
            table.add_column(column, justify="right" if column else "left")
        snapshots = running.latest.values()
        embeds, generations = sum(one.embeds for one in snapshots), sum(one.generations for one in snapshots)
        latencies = (_at(running.ttft_s, 0.5), _at(running.e2e_s, 0.5), _at(running.e2e_s, 0.99))
        in_flight, errors = sum(one.in_flight for one in snapshots), sum(one.errors for one in snapshots)
        table.add_row("done", str(embeds), str(generations), str(in_flight), str(errors), *latencies)
        embed_rate, generate_rate = _rates(running)
        table.add_row("per second", f"{embed_rate:.1f}", f"{generate_rate:.1f}", "", "", "", "", "")
        return Group(table, _progress(running))


def _progress(running: _Running) -> ProgressBar | Text:
    stop = running.stage.stop
    started = sum(one.started for one in running.latest.values())
    elapsed_s = time.monotonic() - running.began_s
    parts = [started / stop.max_requests] if stop.max_requests is not None else []
    parts += [elapsed_s / stop.max_duration_s] if stop.max_duration_s is not None else []
    if not parts:
        return Text(f"{started} sent, {elapsed_s:.0f} s")
    return ProgressBar(total=1.0, completed=min(max(parts), 1.0), width=72)


def _line(running: _Running) -> str:
    snapshots = running.latest.values()
    embed_rate, generate_rate = _rates(running)
    return (
        f"{running.title}: {time.monotonic() - running.began_s:.0f} s, "
        f"{sum(one.embeds for one in snapshots)} embed ({embed_rate:.1f}/s), "
        f"{sum(one.generations for one in snapshots)} generate ({generate_rate:.1f}/s), "
        f"{sum(one.in_flight for one in snapshots)} in flight, {sum(one.errors for one in snapshots)} errors"
    )


def _rates(running: _Running) -> tuple[float, float]:
    """Per second over the last few seconds."""
    if len(running.history) < 2:
        return 0.0, 0.0
    now_s, embeds, generations = running.history[-1]
    then_s, embeds_then, generations_then = next(
        (point for point in running.history if point[0] >= now_s - RATE_SPAN_S), running.history[0]
    )
    span_s = max(now_s - then_s, 1e-9)
    return (embeds - embeds_then) / span_s, (generations - generations_then) / span_s


def _at(values: deque[float], share: float) -> str:
    return f"{float(np.quantile(np.array(values), share)):.3f} s" if values else "–"
