"""Simulated trials in processes of their own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
R = TypeVar("R")

TELL_EVERY_S: Final = 10.0


def run(measure: Callable[[T], R], trials: Sequence[T], processes: int) -> Iterator[tuple[T, R]]:
    """Every trial and what was measured, as they end; they begin in this order. Says how far it is."""
    began = told = time.monotonic()
    for done, ended in enumerate(_ended(measure, trials, processes), start=1):
        yield ended
        if time.monotonic() - told > TELL_EVERY_S or done == len(trials):
            told = time.monotonic()
            left = (told - began) / done * (len(trials) - done)
            click.echo(f"  {done} of {len(trials)} runs, about {left:.0f} s to go", err=True)


def rows_of(measure: Callable[[T], R], trials: Sequence[T], processes: int) -> list[dict[str, Any]]:
    """A row for each trial, in their order: its fields and what was measured, as results files hold them."""
    found = dict(run(measure, trials, processes))
    return [{**asdict(trial), "figures": found[trial]} for trial in trials]


def _ended(measure: Callable[[T], R], trials: Sequence[T], processes: int) -> Iterator[tuple[T, R]]:
    if processes == 1:
        yield from ((trial, measure(trial)) for trial in trials)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(measure, trial): trial for trial in trials}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
