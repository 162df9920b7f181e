"""The budgets of all keys: what each may do, its groups, and what is left. Made when a key first calls, and bounded by
the keys that are known: whoever is not known shares one budget without limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forebay.core.instant import Instant
from forebay.core.quota.calendar import Wall
from forebay.core.quota.credits import CreditLine
from forebay.core.quota.level import Holder, Level
from forebay.core.quota.path import Path
from forebay.core.quota.terms import KeyLimits, KeyTerms

KEY_LEVEL = "this key"
UNKNOWN = KeyTerms()

_Before = tuple[str, int, int, int]
"""Model or '', the tokens of it that were used in a day and in a month, and the wall time that says which, in ns."""


class KeyBudget:
    """One key: its own levels, its credit, and the paths of its requests."""

    __slots__ = ("credit", "holder", "models", "path")

    def __init__(self, terms: KeyTerms, groups: Mapping[str, Holder], wall: Wall, now: Instant) -> None:
        self.holder = Holder(KEY_LEVEL, terms.limits, wall, now)
        self.credit: CreditLine | None = None
        self._lay_paths(terms, groups)

    def change(self, terms: KeyTerms, groups: Mapping[str, Holder], wall: Wall, now: Instant) -> None:
        """Take other terms. Requests that are open end where they began."""
        self.holder.relimit(terms.limits, wall, now)
        self._lay_paths(terms, groups)

    def _lay_paths(self, terms: KeyTerms, groups: Mapping[str, Holder]) -> None:
        if terms.prepaid and self.credit is None:
            self.credit = CreditLine()
        credit = self.credit if terms.prepaid else None
        holders = [self.holder, *(groups[name] for name in terms.groups if name in groups)]
        self.path = Path(tuple(holder.level for holder in holders), credit)
        self.models: dict[str, Path] | None = None
        for name in dict.fromkeys(model for holder in holders for model in holder.models or ()):
            levels: list[Level] = []
            for holder in holders:
                levels.append(holder.level)
                if holder.models is not None and name in holder.models:
                    levels.append(holder.models[name])
            counted = any(h.models[name].counts_days for h in holders if h.models is not None and name in h.models)
            self.models = self.models or {}
            self.models[name] = Path(tuple(levels), credit, name if counted else "")

    def path_for(self, model: str) -> Path:
        """The limits that a request for this model meets."""
        if self.models is None:
            return self.path
        return self.models.get(model, self.path)

    @property
    def open(self) -> int:
        """Requests of the key that are queued or in flight."""
        return self.holder.level.open

    @property
    def concurrency(self) -> int | None:
        """Most that may be open; None: any number."""
        return self.holder.level.concurrency


class Quota:
    """The budgets of one gateway."""

    def __init__(self, keys: Mapping[str, KeyTerms], groups: Mapping[str, KeyLimits]) -> None:
        self.wall = Wall()
        self.budgets: dict[str, KeyBudget] = {}  # of known keys that have called
        self._configured = keys
        self._set: dict[str, KeyTerms] = {}  # those of a store, which a reload leaves alone
        self._removed: list[KeyBudget] = []  # of keys that are gone, until their requests have ended
        self._before: dict[str, tuple[_Before, ...]] = {}  # of keys that have not called yet
        self._groups = {name: Holder(_spelt(name), limits, self.wall, 0) for name, limits in groups.items()}
        self._unknown = KeyBudget(UNKNOWN, {}, self.wall, 0)

    def terms(self, key: str) -> KeyTerms | None:
        """What was agreed for a key; None when it is not known."""
        return self._set.get(key) or self._configured.get(key)

    def budget(self, key: str) -> KeyBudget:
        """The state of a key's limits."""
        budget = self.budgets.get(key)
        if budget is None:
            terms = self.terms(key)
            if terms is None:
                return self._unknown
            budget = self.budgets[key] = KeyBudget(terms, self._groups, self.wall, 0)
            for before in self._before.pop(key, ()):
                self._restore(budget.holder, before)
        return budget

    def all(self) -> Iterator[tuple[str, KeyBudget]]:
        """Every budget that is held, with its key."""
        yield from self.budgets.items()
        yield from (("a removed key", budget) for budget in self._removed)
        yield "an unknown key", self._unknown

    def groups(self) -> Iterator[Level]:
        """Every level that keys share."""
        for holder in self._groups.values():
            yield holder.level
            yield from (holder.models or {}).values()

    def reconfigure(self, keys: Mapping[str, KeyTerms], groups: Mapping[str, KeyLimits], now: Instant) -> None:
        """Take other terms for all keys but those of a store, and other limits of groups. Nothing is refilled."""
        self._configured = keys
        kept = self._groups
        self._groups = {}
        for name, limits in groups.items():
            holder = self._groups[name] = kept.get(name) or Holder(_spelt(name), limits, self.wall, now)
            holder.relimit(limits, self.wall, now)
        for key, budget in list(self.budgets.items()):
            if (terms := self.terms(key)) is None:
                self._forget(key)
            else:
                budget.change(terms, self._groups, self.wall, now)

    # ---- what a store of keys may say ------------------------------------------------------------------------

    def set_key(self, key: str, terms: KeyTerms, now: Instant) -> None:
        """Make a key known, or give it other terms. What is open and what was spent stays; a reload leaves it alone."""
        self._set[key] = terms
        if (budget := self.budgets.get(key)) is not None:
            budget.change(terms, self._groups, self.wall, now)

    def remove_key(self, key: str) -> None:
        """Forget a key that was set: its open requests end as they would have. Take its credit back first."""
        self._set.pop(key, None)
        self._before.pop(key, None)
        if key not in self._configured:
            self._forget(key)

    def set_wall(self, offset_ns: int) -> None:
        """Say by how much nanoseconds since 1970 are ahead of instants; again whenever the wall clock was set."""
        self.wall.offset_ns = offset_ns

    def restore_usage(self, key: str, day_tokens: int, month_tokens: int, now: Instant, model: str = "") -> None:
        """Count what a key used of the running day and month before this process began, once, after `set_wall`.

        It counts for its groups too. `model`: what of that was of this model, for the limits of the model alone.
        """
        terms = self.terms(key)
        if terms is None:
            return
        before = (model, day_tokens, month_tokens, now + self.wall.offset_ns)
        for name in terms.groups:
            if name in self._groups:
                self._restore(self._groups[name], before)
        if (budget := self.budgets.get(key)) is not None:
            self._restore(budget.holder, before)
        elif terms.limits.counts_days:  # its budget is made when it calls: there may be a hundred thousand keys
            self._before[key] = (*self._before.get(key, ()), before)

    def _restore(self, holder: Holder, before: _Before) -> None:
        model, day_tokens, month_tokens, wall_ns = before
        if (level := holder.of(model)) is not None:
            level.restore(day_tokens, month_tokens, wall_ns - self.wall.offset_ns)

    def lease_credit(self, key: str, tokens: int, *, last: bool = False) -> None:
        """Give a prepaid key so many tokens more to spend here; `last`: its account has no more.

        Raises KeyError for a key that is not prepaid.
        """
        self._credit(key).lease(tokens, last=last)

    def cover_credit(self, key: str, tokens: int) -> None:
        """Say that a prepaid key's account has paid, or owes, so much of what went beyond its leases.

        Raises KeyError for a key that is not prepaid.
        """
        self._credit(key).cover(tokens)

    def return_credit(self, key: str) -> int:
        """Take back all of a key's credit that is neither held nor spent; returns how many tokens that is.

        Raises KeyError for a key that is not prepaid.
        """
        return self._credit(key).give_back()

    def _credit(self, key: str) -> CreditLine:
        line = self.budget(key).credit
        if line is None:
            raise KeyError(key)
        return line

    def _forget(self, key: str) -> None:
        budget = self.budgets.pop(key, None)
        self._removed = [removed for removed in self._removed if removed.open]
        if budget is not None and budget.open:
            self._removed.append(budget)


def _spelt(group: str) -> str:
    """The name of a group for a person: `team ops`, `class batch`, `all keys together`."""
    kind, _, name = group.partition(":")
    return f"{kind} {name}" if name else "all keys together"
