"""The composition root: a Config becomes a running gateway, here and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import signal
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from forebay.config import schema
from forebay.config.build import anonymous_entry, engine_names, key_table, pipeline_config
from forebay.config.load import Loaded
from forebay.config.ports import Tls
from forebay.config.reload import needs_restart
from forebay.config.schema import Config
from forebay.config.summary import derived
from forebay.core import depths
from forebay.core.events import EngineDown, EngineUp, EngineWarming, Observer
from forebay.core.model import Demand, Request
from forebay.core.pipeline import Pipeline
from forebay.core.snapshot import Snapshot
from forebay.engines.local import LocalEngine
from forebay.engines.openai import EngineTimeouts, OpenAIEngine
from forebay.engines.probe import Probed, Prober
from forebay.errors import ForebayError, UsageError
from forebay.ingress.admin import AdminServer
from forebay.ingress.http.cors import Cors
from forebay.ingress.http.exact import load as exact_tokens
from forebay.ingress.http.peek import peek
from forebay.ingress.http.retry_ticket import configured as retry_tickets
from forebay.ingress.http.routes import EXACT, Route, Routes
from forebay.ingress.http.server import ServerConnection
from forebay.ingress.http.site import HttpLimits, Site
from forebay.ingress.status import TABLE
from forebay.live.clock import monotonic
from forebay.live.gateway import Gateway
from forebay.live.watch import Watch
from forebay.telemetry import Observers
from forebay.telemetry.ledger import LedgerMetrics
from forebay.telemetry.log import AccessLog
from forebay.telemetry.metrics import Metrics, Sources, registry
from forebay.telemetry.recent import Recent
from forebay.telemetry.recorder import Recorder, open_record
from forebay.telemetry.tuning import tuners

if TYPE_CHECKING:
    from forebay.ingress.stored import StoredKeys
    from forebay.ledger.database import Database
    from forebay.ledger.desk import Desk

log = logging.getLogger(__name__)

FIRST_PROBE_S = 1.0
DRAIN_CHECK_S = 0.02
LINGER_S = 0.2
WALL_S = 1.0  # between two looks at the wall clock
SWITCH_S = 0.0005  # longest that the loop waits for a thread of the ledger to let go of the interpreter
FLUSH_S = 0.5  # of the access log and the record

OF_A_STORE = ("/api/v1/keys", "/api/v1/ledger", "/api/v1/audit")
NO_STORE = "this gateway has no store of keys; start it with --keys sqlite:///forebay.db, or set [keys] store"

T = TypeVar("T")


class App:
    """One gateway process: the data port, the admin port, its engines and their probes."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Loaded] | None = None,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`read` reads the configuration anew, for a reload; without it there is none. `wall_ns`: ns since 1970."""
        self._wall_ns = wall_ns
        self.config = config
        self._read = read
        self.url = ""
        self.admin_url = ""
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._leaving = False
        self._counted_by: Mapping[str, str] = {}  # tokenizers in force
        self._counting: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bring everything up. Raises ForebayError with what to do when a part cannot start."""
        with _lasting():
            await self._open()

    async def _open(self) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        urls = {entry.name: entry.urls or (await self._start_local(entry),) for entry in config.engines}
        self.metrics = self._make_metrics()
        self.access_log, self.recorder = self._open_access_log(), self._open_record()
        self._writers = [writer for writer in (self.access_log, self.recorder) if writer is not None]
        self.recent = self._make_recent()
        database = await self._open_database()
        self.desk = self._open_desk(database)
        observers: tuple[Observer, ...] = (self.metrics, *self._writers)
        if self.desk is not None:
            observers += (self.desk,)
        if self.recent is not None:
            observers += (self.recent,)
        observer = Observers(observers) if len(observers) > 1 else self.metrics
        self._flush_writers(loop)
        self.pipeline = Pipeline(pipeline_config(config), random.Random(), observer)
        if self.recent is not None and config.telemetry.explain_completed:
            self.pipeline.on_admitted = self.recent.admitted
        self.gateway = Gateway(self.pipeline, loop)
        self._stack.callback(self.gateway.stop)
        self._read_wall(loop)
        self.engines = self._make_engines(urls, loop)
        self.probers = [self._prober(entry, name) for entry in config.engines for name in engine_names(entry)]
        self.watch = Watch(config, self.engines, self.gateway)
        self.site = self._make_site(loop)
        self._stack.callback(self.site.stop)
        self.stored = await self._open_keys(database)
        if self.stored is not None and self.desk is not None:
            self.stored.start(self.site, self.gateway, loop, self.desk)
        await self._open_admin()
        await self._probe_first()
        await self._open_data_port(loop)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends it at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        try:
            await self._stopping.wait()
            await self._drain()
        finally:
            await self.close()

    def _signalled(self) -> None:
        (self._hurry if self._stopping.is_set() else self._stopping).set()

    def _hung_up(self) -> None:
        """SIGHUP: read the configuration anew. Whatever is wrong with it is said in the log, and changes nothing."""
        try:
            for line in self.reload():
                log.warning("%s", line)
        except ForebayError as error:
            log.error("the configuration was not reloaded, nothing has changed: %s", error)
        else:
            log.info("the configuration was reloaded")

    def reload(self) -> tuple[str, ...]:
        """Read the configuration anew and take it whole, or not at all. Returns its warnings.

        Raises ForebayError that says what is wrong, or what needs a restart; then nothing has changed.
        """
        if self._read is None:
            raise UsageError("this gateway was started without a configuration that could be read anew")
        loaded = self._read()
        new = loaded.config
        if fixed := needs_restart(self.config, new):
            raise UsageError(f"{', '.join(fixed)}: cannot change while the gateway runs; restart it")
        try:
            self.gateway.reconfigure(pipeline_config(new))
        except ValueError as error:
            raise UsageError(f"{error}; restart the gateway") from None
        if self.stored is not None:
            self.stored.reconfigure(new)
        self.site.reload(key_table(new), anonymous_entry(new), new.responses.overload_status)
        self.site.retry_tickets = retry_tickets(new.admission, self.site.retry_tickets)
        self.metrics.know_classes(new.classes)
        recounts = new.estimate.tokenizers != self.config.estimate.tokenizers
        self.config = new
        if recounts:
            self._counting = asyncio.get_running_loop().create_task(self._count_by(new.estimate.tokenizers))
        self.watch.reload(new)
        return loaded.warnings

    async def _count_by(self, wanted: Mapping[str, str]) -> None:
        """Load tokenizers, which takes about a second each, and then count by them, unless others are wanted by now."""
        exact = await asyncio.to_thread(exact_tokens, wanted)
        if self.config.estimate.tokenizers is wanted:
            after = wanted if exact is not None else {}
            self.gateway.recount(self._counted_by, after)
            self.site.read, self._counted_by = peek if exact is None else exact.read, after

    async def _drain(self) -> None:
        """Serve on for as long as others take to hear of it; then admit nothing more, let what was admitted end, and
        end it."""
        site, pipeline, timeout_s = self.site, self.pipeline, self.config.server.drain_timeout_s
        self._leaving = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self.config.server.drain_delay_s)
        site.draining = True
        self.gateway.drain()
        if self.desk is not None:
            self.desk.drain()
        for connection in list(site.connections):
            connection.shut_down()
        deadline = site.loop.time() + timeout_s
        while site.loop.time() < deadline and not self._hurry.is_set():
            snapshot = pipeline.snapshot(self.gateway.clock())
            if not snapshot.queued and not snapshot.in_flight and not any(c.busy for c in site.connections):
                break
            await asyncio.sleep(DRAIN_CHECK_S)
        self.gateway.abandon()
        for connection in list(site.connections):
            connection.stop("the gateway is shutting down")
        await asyncio.sleep(0 if self._hurry.is_set() else LINGER_S)  # last bytes leave

    async def close(self) -> None:
        """Close every part, in the reverse of the order in which they were opened."""
        if self._counting is not None:
            self._counting.cancel()
        if self._server is not None:
            self._server.close()
        for engine in getattr(self, "engines", {}).values():
            engine.close()
        await self._stack.aclose()

    def snapshot(self) -> Snapshot:
        return self.pipeline.snapshot(self.gateway.clock())

    def status(self) -> dict[str, object]:
        """For /api/v1/status: what is in force, and what is degraded."""
        snapshot = self.snapshot()
        away = [e.name for pool in snapshot.pools for e in pool.engines if e.readiness != "up" or e.ejected]
        return {
            "ready": self.ready(),
            "draining": self.site.draining,
            "connections": len(self.site.connections),
            "buffered_body_bytes": self.site.buffered_bytes,
            "engines_away": away,
            "degraded": [
                *(trouble for part in self._parts() if (trouble := part.degraded) is not None),
                *self.watch.degraded(),
                *(() if self.desk is None else self.desk.degraded),
            ],
            "signal_ages_s": {name: round(age, 1) for name, age in self.watch.ages_s().items()},
            "retry_tickets": self._ticket_counts() if self.config.admission.retry_tickets else None,
            "gpus": [reading._asdict() for reading in self.watch.gpu_readings()],
            "effective": derived(self.config),
            "depth": {pool.name: pool.tuner for pool in snapshot.pools},
        }

    def _ticket_counts(self) -> dict[str, int]:
        tickets = self.site.retry_tickets
        return {} if tickets is None else dict(tickets.counts)

    def tuners(self, frozen: bool | None = None) -> dict[str, object]:
        """For /api/v1/tuner: what the depth tuners found; with True or False they are frozen first, or go on."""
        if frozen is not None:
            depths.freeze(self.pipeline.pools, frozen)
        return tuners(self.pipeline, self.gateway.clock())

    def _parts(self) -> Iterator[AccessLog | Recorder | StoredKeys]:
        """Those that may be degraded."""
        yield from self._writers
        if self.stored is not None:
            yield self.stored

    def ready(self) -> bool:
        """Would a request of any caller be admitted now, were there room?"""
        known = self.stored is None or self.stored.keyring.complete
        return known and not self._leaving and any(pool.up for pool in self.pipeline.pools)

    # ---- parts -----------------------------------------------------------------------------------------------

    def _make_metrics(self) -> Metrics:
        config = self.config
        return Metrics(
            Sources(
                snapshot=self.snapshot,
                connections=lambda: len(self.site.connections),
                buffered_body_bytes=lambda: self.site.buffered_bytes,
                retry_tickets=self._ticket_counts,
                signal_ages_s=lambda: self.watch.ages_s(),  # noqa: PLW0108 - made after this
                gpus=lambda: self.watch.named_gpus(),  # noqa: PLW0108 - made after this
            ),
            routes={route.name for route in EXACT.values()} | {"infer"} | {route.path for route in config.routes},
            classes=config.classes,
            reasons=TABLE,
            version=version("forebay"),
            models=sorted({model for engine in config.engines for model in engine.models if model != "*"}),
        )

    def _open_access_log(self) -> AccessLog | None:
        telemetry = self.config.telemetry
        if not telemetry.access_log:
            return None
        path = telemetry.access_log_path
        try:
            sink = sys.stdout.buffer if path is None else Path(path).open("ab")  # noqa: SIM115 - lives with the process
        except OSError as error:
            raise ForebayError(f"[telemetry] access_log_path {path!r} cannot be opened: {error.strerror}") from None
        access_log = AccessLog(sink, identify=lambda request: request.owner.request_id.decode("ascii"))
        self._stack.callback(access_log.close)
        return access_log

    def _open_record(self) -> Recorder | None:
        path = self.config.telemetry.record_path
        if path is None:
            return None
        recorder = Recorder(
            open_record(Path(path)),
            clock=monotonic,
            estimate=self._estimate,
            unread=lambda request: request.owner.peeked is None,
        )
        self._stack.callback(recorder.close)
        return recorder

    async def _open_database(self) -> Database | None:
        """The store, when there is one: SQLAlchemy is imported for nobody else."""
        url = self.config.keys.store
        if url is None:
            return None
        from forebay.ledger.database import open_store

        sys.setswitchinterval(SWITCH_S)
        wait = self.config.keys.at_start == "wait"
        database = await asyncio.to_thread(open_store, url, wait=wait, wall_ns=self._wall_ns)
        self._stack.callback(database.close)
        return database

    def _open_desk(self, database: Database | None) -> Desk | None:
        """The ledger, when there is a store."""
        if database is None:
            return None
        from forebay.ledger.desk import Desk, DeskConfig

        keys, ledger = self.config.keys, self.config.ledger
        desk = Desk(database, DeskConfig.of(ledger), wait=keys.at_start == "wait", wall_ns=self._wall_ns)
        self._stack.push_async_callback(asyncio.to_thread, desk.stop)
        return desk

    def _flush_writers(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._writers:
            return

        def flush() -> None:
            for writer in self._writers:
                writer.flush()
            self._flusher = loop.call_later(FLUSH_S, flush)

        flush()
        self._stack.callback(self._stop_flushing)

    def _read_wall(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the core what day it is, now and after the wall clock was set."""

        def read() -> None:
            self.gateway.read_wall(self._wall_ns())
            self._wall_reader = loop.call_later(WALL_S, read)

        read()
        self._stack.callback(self._stop_reading_wall)

    def _stop_reading_wall(self) -> None:
        self._wall_reader.cancel()

    def _stop_flushing(self) -> None:
        self._flusher.cancel()

    def _estimate(self, request: Request) -> Demand:
        return self.pipeline.estimator.estimate(request)

    def _make_recent(self) -> Recent | None:
        kept = self.config.telemetry.explain
        if not kept:
            return None
        return Recent(
            kept,
            completed=self.config.telemetry.explain_completed,
            identify=_request_id,
            estimate=lambda request: self.pipeline.estimator.estimate(request),  # noqa: PLW0108 - made after this
            pool_of=lambda request: self.pipeline.pool_for(request.model),
            path_of=lambda request: self.pipeline.budget(request.key).path_for(request.model),
            clock=lambda: self.gateway.clock(),  # noqa: PLW0108 - made after this
        )

    def explain(self, request_id: str) -> dict[str, object] | None:
        """For /api/v1/explain: every figure behind the decision on a request; None if it is not kept."""
        return None if self.recent is None else self.recent.explain(request_id)

    def rejected(self, status: int, reason: str, request_id: str, detail: str) -> None:
        """The data port refused a request before it was offered."""
        self.metrics.rejected(status, reason)
        if self.access_log is not None:
            self.access_log.rejected(status, reason, request_id, detail)

    def passed(self, route: str) -> None:
        """The data port passed a control request on."""
        self.metrics.passed(route)

    async def _start_local(self, entry: schema.Engine) -> str:
        engine = LocalEngine(entry.kind)
        self._stack.push_async_callback(engine.stop)
        return await engine.start()

    def _make_engines(
        self, urls: dict[str, tuple[str, ...]], loop: asyncio.AbstractEventLoop
    ) -> dict[str, OpenAIEngine]:
        engines = {}
        for entry in self.config.engines:
            for name, url in zip(engine_names(entry), urls[entry.name], strict=True):
                engines[name] = OpenAIEngine(
                    name,
                    url,
                    loop,
                    api_key=entry.api_key.value if entry.api_key is not None else None,
                    timeouts=EngineTimeouts(
                        entry.timeouts.connect_s, entry.timeouts.first_byte_s, entry.timeouts.idle_s
                    ),
                    tls=_client_tls(entry) if url.startswith("https") else None,
                    forward_key=entry.forward_key and entry.api_key is None,
                )
        return engines

    def _prober(self, entry: schema.Engine, name: str) -> Prober:
        probe = entry.probe
        paths = (probe.path, "/v1/models") if probe.path == "/health" else (probe.path,)
        return Prober(
            self.engines[name], self._probed, paths=paths, interval_s=probe.interval_s, timeout_s=probe.timeout_s
        )

    def _probed(self, engine: OpenAIEngine, state: Probed) -> None:
        if state is Probed.UP:
            self.gateway.report(EngineUp(engine.name))
        elif state is Probed.WARMING:
            self.gateway.report(EngineWarming(engine.name))
        else:
            engine.connections.drop_idle()
            self.gateway.report(EngineDown(engine.name))

    async def _probe_first(self) -> None:
        """Know the engines before the first request comes, if they answer soon."""
        probes = [asyncio.ensure_future(prober.once()) for prober in self.probers]
        await asyncio.wait(probes, timeout=FIRST_PROBE_S)
        for prober in self.probers:
            prober.start()
            self._stack.push_async_callback(prober.stop)
        self.watch.start()
        self._stack.push_async_callback(self.watch.stop)

    def _make_site(self, loop: asyncio.AbstractEventLoop) -> Site:
        config, server = self.config, self.config.server
        exact = exact_tokens(config.estimate.tokenizers)
        self._counted_by = config.estimate.tokenizers if exact is not None else {}
        return Site(
            loop=loop,
            gateway=self.gateway,
            engines=self.engines,
            routes=Routes((route.path, _route(route)) for route in config.routes),
            keys=key_table(config),
            anonymous=anonymous_entry(config),
            limits=HttpLimits(
                body_bytes=server.max_body_bytes,
                buffered_bytes=server.max_buffered_body_bytes,
                header_bytes=server.max_header_bytes,
                headers=server.max_headers,
                connections=server.max_connections,
                header_s=server.header_timeout_s,
                body_grace_s=server.body_timeout_s,
                body_bytes_per_s=server.min_body_rate_bytes_s,
                keep_alive_s=server.keep_alive_s,
                hold_status_s=server.hold_status_ms / 1000,
                stalled_reader_s=server.stalled_reader_s,
            ),
            audit=self,
            overload_status=config.responses.overload_status,
            desk=self.desk,
            retry_tickets=retry_tickets(config.admission, None),
            cors=Cors(server.cors_origins) if server.cors_origins else None,
            ready=self.ready,
            read=peek if exact is None else exact.read,
        )

    async def _open_keys(self, database: Database | None) -> StoredKeys | None:
        """The keys of the store, when there is one."""
        if database is None:
            return None
        from forebay.ingress.stored import StoredKeys

        stored = await StoredKeys.load(database, self.config, self._wall_ns)
        self._stack.callback(stored.stop)
        return stored

    async def _open_admin(self) -> None:
        admin = self.config.admin
        server = AdminServer(
            snapshot=self.snapshot,
            status=self.status,
            reload=self.reload,
            explain=self.explain,
            tuners=self.tuners,
            registry=registry(self.metrics, *(() if self.desk is None else (LedgerMetrics(self.desk),))),
            token=admin.token.value if admin.token is not None else None,
            read_token=admin.read_token.value if admin.read_token is not None else None,
            more=() if self.stored is None else self.stored.endpoints(),
            absent=dict.fromkeys(OF_A_STORE, NO_STORE) if self.stored is None else None,
            version=version("forebay"),
        )
        port = await _listening(server.start(admin.host, admin.port), admin.host, admin.port, "--admin-port")
        self._stack.push_async_callback(server.stop)
        self.admin_url = f"http://{admin.host}:{port}"

    async def _open_data_port(self, loop: asyncio.AbstractEventLoop) -> None:
        server = self.config.server
        tls = _server_tls(self.config.tls)
        opening = loop.create_server(
            lambda: ServerConnection(self.site), server.host, server.port, ssl=tls, backlog=4096
        )
        self._server = await _listening(opening, server.host, server.port, "--port")
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http{'s' if tls else ''}://{server.host}:{port}"


@contextlib.contextmanager
def _lasting() -> Iterator[None]:
    """What is made now lives long: the garbage collector need not look through it, and later not in anybody's p99."""
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
    finally:
        gc.enable()


async def _listening(opening: Awaitable[T], host: str, port: int, flag: str) -> T:
    """Await a server's start; a port that cannot be had is the user's to choose."""
    try:
        return await opening
    except OSError as error:
        reason = "it is in use" if error.errno == 98 else (error.strerror or str(error))
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another with {flag}") from None


def _request_id(request: Request) -> bytes:
    """The id that the request's answer carries."""
    request_id: bytes = request.owner.request_id
    return request_id


def _route(route: schema.Route) -> Route:
    """A route of the config: the built-in one with other settings, or a new one."""
    known = EXACT.get(route.path.encode())
    gated = route.kind == "gated"
    if known is not None:
        return Route(
            known.name, gated, known.dialect, known.generates, known.json and gated, known.usage_events,
            known.methods, route.mode, route.engine or "",
        )  # fmt: skip
    methods = (b"POST",) if gated else (b"GET", b"HEAD", b"POST")
    return Route(
        route.path, gated, generates=gated, json=gated, methods=methods, mode=route.mode, engine=route.engine or ""
    )


def _client_tls(entry: schema.Engine) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=entry.tls.ca)
    if not entry.tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _server_tls(tls: Tls) -> ssl.SSLContext | None:
    if tls.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ForebayError(f"[tls] certificate {tls.certificate!r} cannot be used: {error}") from None
    return context
