"""One line of live progress while a load runs; silent where nobody watches."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class LiveLine:
    """Shows `label`, a bar over time, and the outcomes so far. A no-op when the console is no terminal or `quiet`."""

    def __init__(self, console: Console, label: str, duration_s: float, *, quiet: bool = False) -> None:
        self._duration_s = duration_s
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("[bold]{task.description:<22}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("{task.fields[state]}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(label, total=duration_s, state="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, elapsed_s: float, sent: int, in_flight: int, outcomes: dict[str, int]) -> None:
        """Moves the bar to a time of the run and shows the counts."""
        if self._bar is None:
            return
        refused = outcomes.get("shed", 0) + outcomes.get("evicted", 0)
        parts = [f"sent {sent}", f"in flight {in_flight}", f"done {outcomes.get('completed', 0)}", f"refused {refused}"]
        if outcomes.get("failed"):
            parts.append(f"[red]failed {outcomes['failed']}[/red]")
        self._bar.update(self._task, completed=max(0.0, min(elapsed_s, self._duration_s)), state="  ".join(parts))
