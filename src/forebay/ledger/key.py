"""A stored key as people see and ask for it. The same types decode requests, describe the API and print.

What is asked is checked here once, for the command line and the admin port alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from forebay.config.fields import Count, Name, Section, Text
from forebay.config.schema import ROUTE_NAMES, Config, Limits, ModelLimits
from forebay.core.model import Mode
from forebay.errors import UsageError

NameOfKey = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
Instant = Annotated[datetime, Meta(tz=True)]
Models = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(min_length=1, max_length=256)]
Routes = Annotated[tuple[Text, ...], Meta(min_length=1, max_length=64)]
State = Literal["active", "expired", "revoked"]
ANY = ("*",)


class InvalidError(UsageError):
    """What is asked of a key cannot be; `field` says where, as in the request."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class NotFoundError(UsageError):
    """No such key."""


class ConflictError(UsageError):
    """It does not go with what is there."""


class NewKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"class_": "class"}):
    """A key to be made. Only the name is asked for."""

    name: Annotated[NameOfKey, Meta(description="For people: whose it is, and what for.", examples=["alice laptop"])]
    team: Annotated[Name | None, Meta(description="Team whose limits it shares: [teams.NAME].")] = None
    class_: Annotated[Name, Meta(description="One of [classes], or default.")] = "default"
    mode: Annotated[Mode | None, Meta(description="Mode of its requests. null: that of its class.")] = None
    models: Annotated[Models, Meta(description="Models it may use; * is any.")] = ANY
    routes: Annotated[Routes, Meta(description="Routes it may use, by name or path; * is any.")] = ANY
    limits: Annotated[Limits | None, Meta(description="Its own limits. null: those of [limits.default].")] = None
    cap_output_tokens: Annotated[
        Count | None, Meta(description="Most output tokens of one request; larger wishes are capped.")
    ] = None
    prepaid: Annotated[bool, Meta(description="It spends credit, and is refused when that is used up.")] = False
    expires_at: Annotated[Instant | None, Meta(description="From when on it is refused. null: never.")] = None


LimitsChange = msgspec.defstruct(
    "LimitsChange",
    [(field.name, field.type | None | UnsetType, UNSET) for field in msgspec.structs.fields(Limits)],
    forbid_unknown_fields=True,
    frozen=True,
    kw_only=True,
    namespace={"__doc__": "Limits to set; null takes one away, and what is not named stays."},
)


class KeyChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"class_": "class"}):
    """What is to be changed; what is not named stays as it is."""

    name: NameOfKey | UnsetType = UNSET
    team: Name | UnsetType | None = UNSET
    class_: Name | UnsetType = UNSET
    mode: Mode | UnsetType | None = UNSET
    models: Models | UnsetType = UNSET
    routes: Routes | UnsetType = UNSET
    limits: Annotated[
        LimitsChange | UnsetType | None,  # type: ignore[valid-type]  # made above
        Meta(description="Single limits; null takes all of them away, for those of [limits.default]."),
    ] = UNSET
    cap_output_tokens: Count | UnsetType | None = UNSET
    prepaid: bool | UnsetType = UNSET
    expires_at: Instant | UnsetType | None = UNSET


class Key(Struct, frozen=True, kw_only=True, rename={"class_": "class"}):
    """A key as it stands. Its secret is not part of it: nothing keeps that."""

    id: Annotated[str, Meta(description="Public: it stands in logs, and in the key itself between sk-fb- and the -.")]
    name: str
    state: State
    team: str | None
    class_: str
    mode: Mode | None
    models: tuple[str, ...]
    routes: tuple[str, ...]
    limits: Limits | None
    cap_output_tokens: int | None
    prepaid: bool
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class Known(NamedTuple):
    """The names of a configuration that keys may refer to."""

    classes: frozenset[str]
    routes: frozenset[str]
    teams: frozenset[str]  # empty: teams are names without limits, and any will do


def known(config: Config) -> Known:
    """Those of a configuration."""
    routes = {"*", *ROUTE_NAMES, *(route.path for route in config.routes)}
    return Known(frozenset({"default", *config.classes}), frozenset(routes), frozenset(config.teams))


def check(asked: NewKey | KeyChange, names: Known | None, now: datetime) -> None:
    """Everything that types cannot say. `names` None: no configuration is at hand. Raises InvalidError."""
    if isinstance(asked.expires_at, datetime) and asked.expires_at <= now:
        raise InvalidError(f"{asked.expires_at.isoformat()} is in the past; to end a key now, revoke it", "expires_at")
    if names is not None:
        if asked.class_ is not UNSET:
            _one_of(asked.class_, names.classes, "class")
        if isinstance(asked.team, str) and names.teams:
            _one_of(asked.team, names.teams, "team")
        if asked.routes is not UNSET:
            for place, route in enumerate(asked.routes):
                _one_of(route, names.routes, f"routes[{place}]")
    if isinstance(asked, NewKey) and asked.limits is not None:
        check_limits(asked.limits)


def check_limits(limits: ModelLimits, field: str = "limits") -> None:
    """Limits that fit each other. Raises InvalidError."""
    if limits.tokens_per_second and limits.tokens_per_second * limits.burst_s < 1:
        raise InvalidError("allows less than one token at once; raise it", f"{field}.burst_s")
    if isinstance(limits, Limits):
        for model, own in limits.models.items():
            check_limits(own, f"{field}.models.{model}")


def what_is_set(section: Section) -> dict[str, Any]:
    """The fields of a section that differ from their defaults, as plain data."""
    plain = {}
    for field in msgspec.structs.fields(type(section)):
        value = getattr(section, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default:
            plain[field.encode_name] = _plain(value)
    return plain


def with_change(limits: Limits | None, change: Any) -> Limits | None:
    """The limits after a LimitsChange; None when none of its own are left. Raises InvalidError."""
    values = {} if limits is None else what_is_set(limits)
    for field in msgspec.structs.fields(LimitsChange):
        value = getattr(change, field.name)
        if value is None:
            values.pop(field.name, None)
        elif value is not UNSET:
            values[field.name] = _plain(value)
    changed = msgspec.convert(values, Limits)
    check_limits(changed)
    return changed if values else None


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return what_is_set(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return msgspec.to_builtins(value)


def _one_of(name: str, names: Collection[str], field: str) -> None:
    if name not in names:
        raise InvalidError(f"{name!r} is not known here; {suggestion(name, sorted(names))}", field)


def suggestion(name: str, names: Collection[str]) -> str:
    """What was probably meant, or all that could be."""
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(names)}"


def fields_of(change: KeyChange) -> Iterator[tuple[str, Any]]:
    """(column, value) of what a change names, limits left out."""
    for field in msgspec.structs.fields(KeyChange):
        value = getattr(change, field.name)
        if value is not UNSET and field.name != "limits":
            yield field.encode_name, value
