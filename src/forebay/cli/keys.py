"""`forebay keys`: API keys of a store. Works beside a running gateway, which takes changes within a second."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click
import msgspec

from forebay.cli.options import json_flag, together
from forebay.cli.store import actor, opened, store_options
from forebay.config.schema import Limits
from forebay.core.model import Mode
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.ledger.key import Key


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}
FACTORS = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
NONE = "none"

MODES = click.Choice([*(mode.value for mode in Mode), NONE])
PLAIN_LIMITS = tuple(field for field in msgspec.structs.fields(Limits) if field.name != "models")


class Figure(click.ParamType[Any]):
    """A number as people write it: 60, 1.5, 100_000, 100k, 2M; or `none`."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = re.fullmatch(r"(-?\d[\d_]*)(\.\d+)?([kMG]?)", str(value))
        if value == NONE or value is None:
            return value
        if found is None:
            self.fail(f"{value!r} is no number; write 60, 100_000, 100k or 2M, or none", param, ctx)
        number = float(found[1] + (found[2] or "")) * FACTORS[found[3]] if found[2] else None
        return int(found[1]) * FACTORS[found[3]] if number is None else (int(number) if number % 1 == 0 else number)


class Moment(click.ParamType[Any]):
    """A time to come: 90m, 30d, 2027-01-31, 2027-01-31T12:00:00+01:00; or `none`."""

    name = "WHEN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == NONE or isinstance(value, datetime):
            return value
        if (span := re.fullmatch(r"(\d{1,9})([smhdwy])", value)) is not None:
            try:
                return datetime.now(UTC) + timedelta(seconds=int(span[1]) * UNITS[span[2]])
            except OverflowError:
                self.fail(f"{value!r} is too far away", param, ctx)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time; write 30d, 12h, 2027-01-31 or 2027-01-31T12:00:00+01:00", param, ctx)
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _described(kind: Any) -> str:
    for part in (kind, *getattr(kind, "__args__", ())):
        for meta in getattr(part, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description:
                return meta.description
    return ""


# One option for each limit that a key may have.
limit_options = together(
    *(
        click.option(f"--{field.name.replace('_', '-')}", field.name, type=Figure(), help=_described(field.type))
        for field in PLAIN_LIMITS
    ),
    click.option(
        "--for-model", "for_models", nargs=2, multiple=True, metavar="MODEL LIMIT=N",
        help="A limit for one model, such as: --for-model llama tokens_per_minute=50k",
    ),
)  # fmt: skip

# What else is agreed on with a key.
term_options = together(
    click.option("--team", help="Team whose limits it shares; none takes it out of one."),
    click.option("--class", "class_", metavar="NAME", help="Class of [classes], or default."),
    click.option("--mode", type=MODES, help="Mode of its requests instead of its class's."),
    click.option("--model", "models", multiple=True, metavar="M", help="Only this model; repeat. * is any."),
    click.option("--route", "routes", multiple=True, metavar="R", help="Only this route (chat, …); repeat."),
    click.option("--cap-output-tokens", type=Figure(), help="Cap on the output of one request."),
    click.option("--expires", "expires_at", type=Moment(), help="30d, 12h, 2027-01-31, or none."),
    click.option("--prepaid/--not-prepaid", default=None, help="It spends credit, and stops when that is used up."),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """API keys: make, list, limit, credit and revoke them.

    \b
    forebay keys create "alice laptop" --tokens-per-minute 100k --expires 90d
    forebay keys limit "alice laptop" --requests-per-minute 60
    forebay keys list --state active

    Run it on the machine of the store, with or without a gateway: a running one takes changes within a second.
    """


@command.command()
@click.argument("name")
@term_options
@limit_options
@click.option("--credit", type=Figure(), help="Tokens of credit to begin with; makes it prepaid.")
@store_options
@json_flag
def create(
    name: str, for_models: tuple[tuple[str, str], ...], credit: int | None, store: str | None, config_file: str | None,
    as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Make a key called NAME. The key itself is printed once, alone on stdout; nothing keeps it.

    \b
    KEY=$(forebay keys create "alice laptop" --team research --requests-per-minute 60)
    forebay keys create reseller --prepaid --credit 10M --model llama-3.1-8b
    """
    from forebay.ledger.asking import converted
    from forebay.ledger.key import NewKey
    from forebay.ledger.keys import By, KeyStore

    limits = _limits(options, for_models)
    terms = {field: value for field, value in _terms(options).items() if value is not None}
    if credit is not None:
        if not isinstance(credit, int) or credit <= 0:
            raise UsageError(f"--credit {credit}: a number of tokens above 0 is asked")
        terms["prepaid"] = True
    if limits:
        terms["limits"] = {name: value for name, value in limits.items() if value is not None}
    asked = converted({"name": name, **terms}, NewKey)
    with opened(store, config_file, make=True) as (database, known):
        made = KeyStore(database, known).create(asked, By(actor()))
        if credit is not None:
            _top_up(database, made.key.id, credit, "")
        where = database.name
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(made), indent=2).decode())
        return
    click.echo(f"key {made.key.id} ({made.key.name}) was made in {where}; it is shown only now:", err=True)
    click.echo(made.secret)


@command.command("list")
@click.option("--name", help="Only keys with this in their name.")
@click.option("--team", help="Only keys of this team.")
@click.option("--class", "class_", metavar="NAME", help="Only keys of this class.")
@click.option("--state", type=click.Choice(["active", "expired", "revoked"]), help="Only keys in this state.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most to show at once.")
@click.option("--cursor", metavar="C", help="Go on after a list that was cut.")
@store_options
@json_flag
def list_keys(
    name: str | None, team: str | None, class_: str | None, state: Any, limit: int, cursor: str | None,
    store: str | None, config_file: str | None, as_json: bool,
) -> None:  # fmt: skip
    """List keys, the newest first.

    \b
    forebay keys list --team research
    forebay keys list --state revoked --json
    """
    from forebay.ledger.keys import Filter, KeyStore

    with opened(store, config_file) as (database, _):
        page = KeyStore(database).page(Filter(name, team, class_, state), cursor=cursor, limit=limit)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(page), indent=2).decode())
        return
    _print_keys(page.data)
    if page.next_cursor is not None:
        click.echo(f"there are more: forebay keys list --cursor {page.next_cursor}", err=True)


@command.command()
@click.argument("key")
@store_options
@json_flag
def show(key: str, store: str | None, config_file: str | None, as_json: bool) -> None:
    """Show one key, by its id or name, with its credit and who changed it.

    \b
    forebay keys show "alice laptop"
    """
    from forebay.ledger.keys import KeyStore
    from forebay.ledger.statement import balance

    with opened(store, config_file) as (database, _):
        keys = KeyStore(database)
        found = keys.show(key)
        credit = balance(database, found.id) if found.prepaid else None
        trail = keys.trail(found.id, limit=20).data
    plain: dict[str, Any] = msgspec.to_builtins(found)
    plain["credit"] = None if credit is None else msgspec.to_builtins(credit)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())
        return
    plain["limits"] = _spelt(found) or "those of [limits.default]"
    for field, value in plain.items():
        click.echo(f"{field:>18}  {_shown(value)}")
    click.echo()
    for line in trail:
        what = ", ".join(f"{name}: {_shown(a)} -> {_shown(b)}" for name, (a, b) in line.detail.items() if a != b)
        click.echo(f"{line.at:%Y-%m-%d %H:%M}  {line.actor}  {line.action}  {what}")


@command.command()
@click.argument("key")
@click.option("--default", "as_default", is_flag=True, help="Take all of its own limits away, for [limits.default].")
@limit_options
@store_options
@json_flag
def limit(
    key: str, as_default: bool, for_models: tuple[tuple[str, str], ...], store: str | None, config_file: str | None,
    as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Change limits of a key; those that are not named stay. `none` takes one away, 0 allows nothing.

    \b
    forebay keys limit "alice laptop" --tokens-per-minute 50k --concurrency none
    """
    limits = _limits(options, for_models)
    if as_default == bool(limits):
        raise UsageError("say which limit to change, such as --requests-per-minute 60, or --default; see --help")
    _change(key, {"limits": None if as_default else limits}, store, config_file, as_json)


@command.command()
@click.argument("key")
@click.option("--name", help="Another name.")
@term_options
@store_options
@json_flag
def change(
    key: str, name: str | None, store: str | None, config_file: str | None, as_json: bool, **options: Any
) -> None:
    """Change what else is agreed on with a key.

    \b
    forebay keys change "alice laptop" --expires none --class interactive
    """
    terms = _terms(options) | ({} if name is None else {"name": name})
    if not terms:
        raise UsageError("say what to change, such as --expires 30d; see --help")
    _change(key, terms, store, config_file, as_json)


@command.command()
@click.argument("key")
@store_options
@json_flag
def revoke(key: str, store: str | None, config_file: str | None, as_json: bool) -> None:
    """End a key for good. New requests get 401 within a second; those that wait or run are finished.

    \b
    forebay keys revoke "alice laptop"
    """
    from forebay.ledger.keys import By, KeyStore

    with opened(store, config_file) as (database, _):
        _say_changed(KeyStore(database).revoke(key, By(actor())), as_json, "is revoked")


@command.command()
@click.argument("key")
@click.argument("tokens", type=Figure())
@click.option("--take", is_flag=True, help="Take so many tokens away instead.")
@click.option("--note", default="", help="What it is for; kept in the ledger.")
@click.option("--idempotency-key", metavar="WORD", help="A word of your own: with it, a repeated command counts once.")
@store_options
@json_flag
def credit(
    key: str, tokens: int, take: bool, note: str, idempotency_key: str | None, store: str | None,
    config_file: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Give a prepaid key credit, in tokens.

    \b
    forebay keys credit reseller 10M --note "invoice 2027-114" --idempotency-key invoice-2027-114
    """
    from forebay.ledger.keys import KeyStore
    from forebay.ledger.statement import balance

    if not isinstance(tokens, int) or tokens <= 0:
        raise UsageError(f"{tokens} tokens: a number above 0 is asked; --take takes some away")
    with opened(store, config_file) as (database, _):
        found = KeyStore(database).show(key)
        if not found.prepaid:
            raise UsageError(f"key {found.id} ({found.name}) is not prepaid; first: forebay keys change KEY --prepaid")
        _top_up(database, found.id, -tokens if take else tokens, note, idempotency_key)
        left = balance(database, found.id)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(left), indent=2).decode())
    else:
        click.echo(f"key {found.id} ({found.name}) has {left.available} tokens available, and {left.held} in use")


@command.command()
@click.argument("key", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most to show at once.")
@click.option("--cursor", metavar="C", help="Go on after a list that was cut.")
@store_options
@json_flag
def audit(
    key: str | None, limit: int, cursor: str | None, store: str | None, config_file: str | None, as_json: bool
) -> None:
    """Who changed what, the newest first: of one key, or of all."""
    from forebay.ledger.keys import KeyStore

    with opened(store, config_file) as (database, _):
        keys = KeyStore(database)
        page = keys.trail(None if key is None else keys.show(key).id, cursor=cursor, limit=limit)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(page), indent=2).decode())
        return
    for line in page.data:
        what = ", ".join(f"{name}: {_shown(a)} -> {_shown(b)}" for name, (a, b) in line.detail.items() if a != b)
        click.echo(f"{line.at:%Y-%m-%d %H:%M:%S}  {line.key_id}  {line.actor}  {line.action}  {what}")
    if page.next_cursor is not None:
        click.echo(f"there are more: forebay keys audit --cursor {page.next_cursor}", err=True)


def _change(key: str, values: dict[str, Any], store: str | None, config_file: str | None, as_json: bool) -> None:
    from forebay.ledger.asking import converted
    from forebay.ledger.key import KeyChange
    from forebay.ledger.keys import By, KeyStore

    asked = converted(values, KeyChange)
    with opened(store, config_file) as (database, known):
        _say_changed(KeyStore(database, known).change(key, asked, By(actor())), as_json, "is changed")


def _say_changed(key: Key, as_json: bool, what: str) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(key), indent=2).decode())
    else:
        limits = "" if key.revoked_at else f"; limits: {_spelt(key) or 'those of [limits.default]'}"
        click.echo(f"key {key.id} ({key.name}) {what}{limits}")


def _top_up(database: Any, key_id: str, tokens: int, note: str, word: str | None = None) -> None:
    from forebay.ledger.credits import Credits

    word = word or f"cli-{secrets.token_hex(8)}"
    if tokens < 0:
        Credits(database).adjust(key_id, tokens, idempotency=word, actor=actor(), note=note)
    else:
        Credits(database).top_up(key_id, tokens, idempotency=word, actor=actor(), note=note)


def _limits(options: dict[str, Any], for_models: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The limits that were named, `none` as None; they are taken out of the options."""
    given = {field.name: options.pop(field.name) for field in PLAIN_LIMITS}
    limits: dict[str, Any] = {n: None if value == NONE else value for n, value in given.items() if value is not None}
    for model, text in for_models:
        name, _, value = text.partition("=")
        figure = Figure().convert(value, None, None)
        own = limits.setdefault("models", {}).setdefault(model, {})
        own[name.replace("-", "_")] = None if figure == NONE else figure
    return limits


def _terms(options: Mapping[str, Any]) -> dict[str, Any]:
    """The terms that were named, by the names of the API; `none` as None."""
    terms = {"class" if name == "class_" else name: value for name, value in options.items() if value not in (None, ())}
    return {name: None if value == NONE else value for name, value in terms.items()}


def _spelt(key: Key) -> str:
    """The limits of a key on one line."""
    from forebay.ledger.key import what_is_set

    return "" if key.limits is None else ", ".join(f"{name} {_shown(v)}" for name, v in what_is_set(key.limits).items())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _print_keys(keys: list[Key]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("ID", "NAME", "TEAM", "CLASS", "STATE", "EXPIRES", "LIMITS"):
        table.add_column(title, overflow="fold", no_wrap=title == "ID")
    for key in keys:
        expires = "-" if key.expires_at is None else f"{key.expires_at:%Y-%m-%d %H:%M}"
        limits = ("prepaid, " if key.prepaid else "") + (_spelt(key) or "default")
        table.add_row(key.id, key.name, key.team or "-", key.class_, key.state, expires, limits)
    console = Console(markup=False, highlight=False)
    (console if console.is_terminal else Console(markup=False, highlight=False, width=200)).print(table)
