"""What types and ranges cannot say: how settings must fit each other. Every check yields problems; none raises."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path as FilePath
from urllib.parse import urlsplit

from forebay.config.lines import Path
from forebay.config.read import Problem
from forebay.config.schema import ANONYMOUS, ROUTE_NAMES, Batching, Config, Engine, Limits, ModelLimits, wait_budget_ms
from forebay.core.model import Mode

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")

TICKET_SECRET_LENGTH_MIN = 32

PRESENT = frozenset({"openai", "embedded", "simulated"})


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def problems(config: Config) -> Iterator[Problem]:
    """Everything that makes the configuration unusable."""
    yield from _ports(config)
    yield from _origins(config)
    yield from _tls(config)
    yield from _sizes(config)
    yield from _waits(config)
    yield from _retry_tickets(config)
    yield from _tuner(config)
    yield from _retry(config)
    yield from _engines(config)
    yield from _routes(config)
    yield from _keys(config)
    yield from _gpu(config)
    yield from _limits(config)


def warnings(config: Config) -> Iterator[Problem]:
    """What works, but hardly as meant."""
    taken: set[str] = set()
    for number, engine in enumerate(config.engines):
        served = [model for model in engine.models if model not in taken and "*" not in taken]
        if not served:
            yield Problem(
                ("engines", number, "models"),
                f"engine {engine.name!r} gets no work: all of its models are served by an earlier engine",
                "list its URLs under that engine, or name other models",
            )
        taken.update(engine.models)
    if config.gpu.source != "none" and not any(engine.gpus for engine in config.engines):
        yield Problem(("gpu", "source"), "changes nothing: no engine names its GPUs", "give [[engines]] gpus")
    if config.estimate.tokenizers and find_spec("quicktok") is None:
        yield Problem(
            ("estimate", "tokenizers"),
            "names tokenizers that are not installed: prompts are priced by their bytes",
            "pip install 'forebay[tokenizers]'",
        )
    if not config.keys.anonymous and not config.keys.static and config.keys.store is None:
        todo = "add [[keys.static]] entries, or a [keys] store"
        yield Problem(("keys", "anonymous"), "nobody may call: no keys are given", todo)
    if config.admin.read_token is not None and config.admin.token is None:
        yield Problem(
            ("admin", "read_token"), "has no effect without [admin] token: everybody may change everything", "set both"
        )


def _ports(config: Config) -> Iterator[Problem]:
    server, admin = config.server, config.admin
    if server.port and server.port == admin.port:
        yield Problem(("admin", "port"), f"is {admin.port}, the data port's own", "choose another")
    if admin.token is not None and admin.token == admin.read_token:
        yield Problem(("admin", "read_token"), "is the same as [admin] token", "give it a value of its own")
    if admin.token is None and not is_loopback(admin.host):
        yield Problem(
            ("admin", "host"),
            f'is "{admin.host}", which others can reach, and no token is set',
            "set [admin] token, or listen on 127.0.0.1",
        )


def _origins(config: Config) -> Iterator[Problem]:
    for number, origin in enumerate(config.server.cors_origins):
        if origin != "*" and not ORIGIN.fullmatch(origin):
            todo = "write it as browsers do: https://HOST or https://HOST:PORT, in lower case, without a path; or *"
            yield Problem(("server", "cors_origins", number), f'"{origin}" is no origin of a web page', todo)


def _tls(config: Config) -> Iterator[Problem]:
    tls = config.tls
    if (tls.certificate is None) != (tls.key is None):
        missing = "key" if tls.key is None else "certificate"
        yield Problem(("tls", missing), "is missing", "TLS needs both certificate and key")
    elif tls.certificate is not None and tls.key is not None:
        yield from _certificate(tls.certificate, tls.key)
    for number, engine in enumerate(config.engines):
        if engine.tls.ca is not None:
            yield from _authorities(engine.tls.ca, ("engines", number, "tls", "ca"))


def _certificate(certificate: str, key: str) -> Iterator[Problem]:
    for path, name in ((("tls", "certificate"), certificate), (("tls", "key"), key)):
        reason = _unreadable(name)
        if reason:
            yield Problem(path, f'"{name}" cannot be read ({reason})', "check path and rights")
            return
    try:
        # Without a password callback an encrypted key would be asked for on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        todo = "give a PEM certificate and its own key, without a password"
        yield Problem(("tls", "certificate"), f'"{certificate}" and its key cannot be used ({error})', todo)


def _authorities(name: str, path: Path) -> Iterator[Problem]:
    reason = _unreadable(name)
    if reason:
        yield Problem(path, f'"{name}" cannot be read ({reason})', "check path and rights")
        return
    try:
        ssl.create_default_context(cafile=name)
    except (OSError, ValueError) as error:
        yield Problem(path, f'"{name}" holds no certificates ({error})', "give a PEM file of authorities")


def _unreadable(name: str) -> str | None:
    try:
        with FilePath(name).open("rb"):
            return None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return getattr(error, "strerror", None) or str(error)


def _sizes(config: Config) -> Iterator[Problem]:
    server = config.server
    if server.max_buffered_body_bytes < server.max_body_bytes:
        yield Problem(
            ("server", "max_buffered_body_bytes"),
            f"is {server.max_buffered_body_bytes}, less than one largest body ({server.max_body_bytes})",
            "raise it, or lower max_body_bytes",
        )


def _waits(config: Config) -> Iterator[Problem]:
    budget = wait_budget_ms(config)
    if budget > config.queue.deadline_s * 1000:
        yield Problem(
            ("admission", "wait_budget_ms"),
            f"is {budget:g}, longer than queue.deadline_s ({config.queue.deadline_s:g} s)",
            "lower it, or raise the deadline",
        )
    yield from _linger(config, config.batching, ("batching", "linger_ms"))
    for number, engine in enumerate(config.engines):
        if engine.batching is not None:
            yield from _linger(config, engine.batching, ("engines", number, "batching", "linger_ms"))


def _retry_tickets(config: Config) -> Iterator[Problem]:
    secret = config.admission.retry_ticket_secret
    if secret is not None and len(secret.value) < TICKET_SECRET_LENGTH_MIN:
        reason = f"has {len(secret.value)} characters, must have {TICKET_SECRET_LENGTH_MIN} or more"
        yield Problem(("admission", "retry_ticket_secret"), reason, "make one with: openssl rand -hex 32")


def _tuner(config: Config) -> Iterator[Problem]:
    tuner = config.tuner
    if tuner.most is not None and tuner.least is not None and tuner.most < tuner.least:
        yield Problem(("tuner", "most"), f"is {tuner.most}, below tuner.least ({tuner.least})", "raise it")


def _retry(config: Config) -> Iterator[Problem]:
    admission = config.admission
    for path, retry in ((("admission",), admission.retry), (("admission", "shadow"), admission.shadow.retry)):
        if retry is not None and retry.share_most < retry.share_least:
            said = f"is {retry.share_most:g}, below share_least ({retry.share_least:g})"
            yield Problem((*path, "retry", "share_most"), said, "raise it")


def _linger(config: Config, batching: Batching, path: Path) -> Iterator[Problem]:
    if batching.kind != "dynamic":
        return
    hybrid = config.admission.mode is Mode.HYBRID
    longest = wait_budget_ms(config) if hybrid else config.queue.deadline_s * 1000
    if batching.linger_ms >= longest:
        name = "the wait budget" if hybrid else "queue.deadline_s"
        yield Problem(
            path,
            f"is {batching.linger_ms:g}, not less than {name} ({longest:g} ms): what lingers would expire",
            "lower it",
        )


def _engines(config: Config) -> Iterator[Problem]:
    names: set[str] = set()
    for number, engine in enumerate(config.engines):
        path: Path = ("engines", number)
        if engine.name in names:
            yield Problem((*path, "name"), f'"{engine.name}" is given twice', "engine names must be unique")
        names.add(engine.name)
        if engine.kind not in PRESENT:
            yield Problem((*path, "kind"), f'"{engine.kind}" is not in this version', "use openai for HTTP engines")
        if engine.kind == "openai" and not engine.urls:
            yield Problem((*path, "urls"), "is empty", "give at least one base URL, such as http://127.0.0.1:8000")
        yield from _urls(engine, path)
        if engine.api_key is not None and engine.forward_key:
            yield Problem((*path, "forward_key"), "is true beside an api_key", "an engine takes one credential: choose")


def _gpu(config: Config) -> Iterator[Problem]:
    gpu = config.gpu
    if gpu.source == "dcgm" and not gpu.urls:
        yield Problem(("gpu", "urls"), "is empty", "give the exporter's page, such as http://127.0.0.1:9400/metrics")
    for number, url in enumerate(gpu.urls):
        reason = _url_fault(url)
        if reason:
            shown = "a URL" if "@" in url else f'"{url}"'
            yield Problem(("gpu", "urls", number), f"{shown} {reason}", "write it like http://HOST:PORT/metrics")
    for number, engine in enumerate(config.engines):
        urls = max(1, len(engine.urls))
        if engine.gpus and len(engine.gpus) != urls:
            yield Problem(
                ("engines", number, "gpus"),
                f"names the GPUs of {len(engine.gpus)} URLs, there are {urls}",
                "give one list for each URL, in their order",
            )


def _urls(engine: Engine, path: Path) -> Iterator[Problem]:
    seen: set[str] = set()
    for number, url in enumerate(engine.urls):
        where = (*path, "urls", number)
        if url.rstrip("/") in seen:
            yield Problem(where, f'"{url}" is given twice', "each URL is one engine")
        seen.add(url.rstrip("/"))
        reason = _url_fault(url)
        if reason:
            shown = "a URL" if "@" in url else f'"{url}"'  # what stands before an @ is a credential
            yield Problem(where, f"{shown} {reason}", "write it like http://HOST:PORT")


def _url_fault(url: str) -> str | None:
    if any(not 0x21 <= ord(character) <= 0x7E for character in url):
        return "has spaces or non-ASCII characters"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "has a host or port that cannot be understood"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    if not parts.hostname or port == 0:
        return "names no host or port to connect to"
    if parts.username is not None or parts.query or parts.fragment:
        return "holds a credential, query or fragment (a credential goes into api_key)"
    if parts.path.rstrip("/").endswith("/v1"):
        return "ends in /v1, which callers send as part of the path"
    return None


def _routes(config: Config) -> Iterator[Problem]:
    engines = {engine.name for engine in config.engines}
    seen: set[str] = set()
    for number, route in enumerate(config.routes):
        if route.path in seen:
            yield Problem(("routes", number, "path"), f'"{route.path}" is given twice', "remove one")
        seen.add(route.path)
        if route.engine is not None and route.engine not in engines:
            known = ", ".join(sorted(engines)) or "none are given"
            yield Problem(("routes", number, "engine"), f'"{route.engine}" is no engine', f"engines: {known}")


def _keys(config: Config) -> Iterator[Problem]:
    ids: set[str] = set()
    secrets: dict[bytes, str] = {}
    classes = {"default", *config.classes}
    routes = {"*", *ROUTE_NAMES, *(route.path for route in config.routes)}
    for number, key in enumerate(config.keys.static):
        path: Path = ("keys", "static", number)
        if key.id in ids or key.id == ANONYMOUS:
            why = "is reserved for callers without a key" if key.id == ANONYMOUS else "is given twice"
            yield Problem((*path, "id"), f'"{key.id}" {why}', "key ids must be unique")
        ids.add(key.id)
        other = secrets.setdefault(key.secret.digest(), key.id)
        if other != key.id:
            yield Problem((*path, "secret"), f"is the same as that of {other!r}", "give each key a secret of its own")
        if key.class_ not in classes:
            yield Problem(
                (*path, "class"), f'"{key.class_}" is no class', f"use one of {', '.join(sorted(classes))}, or add it"
            )
        for place, route in enumerate(key.routes):
            if route not in routes:
                close = get_close_matches(route, routes, n=1)
                todo = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(sorted(routes))}"
                yield Problem((*path, "routes", place), f'"{route}" is no route', todo)
        if key.team and key.team not in config.teams:
            known = ", ".join(sorted(config.teams)) or "none are given"
            yield Problem((*path, "team"), f'"{key.team}" is no team', f"add [teams.{key.team}]; teams: {known}")


def _limits(config: Config) -> Iterator[Problem]:
    """Limits that allow less than they seem to."""
    levels: list[tuple[Path, Limits]] = [
        (("limits", "default"), config.limits.default),
        (("limits", "all"), config.limits.all),
        *((("teams", name, "limits"), team.limits) for name, team in config.teams.items()),
        *((("classes", name, "limits"), group.limits) for name, group in config.classes.items()),
        *((("keys", "static", number, "limits"), key.limits) for number, key in enumerate(config.keys.static)),
    ]
    for path, limits in levels:
        yield from _bursts(limits, path)
        for model, of_model in limits.models.items():
            yield from _bursts(of_model, (*path, "models", model))


def _bursts(limits: ModelLimits, path: Path) -> Iterator[Problem]:
    if limits.tokens_per_second and limits.tokens_per_second * limits.burst_s < 1:
        yield Problem((*path, "burst_s"), "allows less than one token at once", "raise it")
    day, month = limits.tokens_per_day, limits.tokens_per_month
    if day is not None and month is not None and day > month:
        yield Problem((*path, "tokens_per_day"), f"is {day}, more than the {month} of a month", "lower it")
