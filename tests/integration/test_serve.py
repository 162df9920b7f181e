"""`forebay serve` as its operator sees it: TLS, drain, idle connections, figures that add up, engines that die."""

from __future__ import annotations

import datetime as dt
import http.client
import ipaddress
import json
import re
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.faults.rig import scripts
from tests.faults.rig.backend import FakeBackend
from tests.faults.rig.client import RawClient, ask, chat
from tests.faults.rig.gateway import GatewayProcess, config_for, key, serving
from tests.faults.rig.waiting import eventually, in_parallel

from .processes import SimulatedEngine, simulated

FAST = ("--time-scale", "20", "--model-name", "m")
SLOW = ("--time-scale", "1", "--model-name", "m")  # about 7 ms per token


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedEngine]:
    with simulated(tmp_path_factory.mktemp("engine"), *FAST) as started:
        yield started


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SimulatedEngine]:
    with simulated(tmp_path, *SLOW) as started:
        yield started


def long_stream(tokens: int) -> dict[str, object]:
    return chat(stream=True, max_tokens=tokens, ignore_eos=True)


# ---- TLS ---------------------------------------------------------------------------------------------------------


class Certificate(NamedTuple):
    certificate: Path
    key: Path

    def section(self) -> dict[str, str]:
        return {"certificate": str(self.certificate), "key": str(self.key)}


def self_signed(folder: Path, name: str = "tls") -> Certificate:
    """A certificate for 127.0.0.1 that is its own authority."""
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forebay test")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return made


class TlsGateway(GatewayProcess):
    """A gateway whose data port speaks TLS."""

    def _line(self, pattern: re.Pattern[str]) -> str:
        if "listening" in pattern.pattern:
            pattern = re.compile(pattern.pattern.replace("http:", "https:"))
        return super()._line(pattern)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(
    engine: SimulatedEngine, certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TlsGateway]:
    config = config_for(engine.url, tls=certificate.section())
    gateway = TlsGateway(config, tmp_path_factory.mktemp("secure"))
    try:
        yield gateway
        gateway.stop()
    finally:
        gateway.kill()


def connect(gateway: GatewayProcess, certificate: Certificate) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=str(certificate.certificate))
    return http.client.HTTPSConnection("127.0.0.1", gateway.port, timeout=5, context=context)


def test_tls_towards_clients(secure: TlsGateway, certificate: Certificate) -> None:
    connection = connect(secure, certificate)
    for stream in (False, True, False):  # on one connection
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(chat(stream=stream, max_tokens=50)),
            {"content-type": "application/json"},
        )  # fmt: skip
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200
        assert (b"data: [DONE]" in body) == stream
    assert connection.sock.version() in {"TLSv1.2", "TLSv1.3"}
    connection.close()


def test_a_large_body_and_a_long_answer_pass_through_tls(secure: TlsGateway, certificate: Certificate) -> None:
    connection = connect(secure, certificate)
    body = chat(messages=[{"role": "user", "content": "word " * 60_000}], max_tokens=2_000, ignore_eos=True)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    assert answer["usage"]["completion_tokens"] == 2_000
    assert answer["usage"]["prompt_tokens"] > 60_000
    connection.close()


def test_plain_http_on_a_tls_port_harms_nobody(secure: TlsGateway, certificate: Certificate) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), timeout=2) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not client.recv(4096).startswith(b"HTTP/")
    connection = connect(secure, certificate)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()


def test_tls_towards_engines(secure: TlsGateway, certificate: Certificate, tmp_path: Path) -> None:
    """The secure gateway is the engine here."""
    tls = {"ca": str(certificate.certificate)}
    with serving(config_for(secure.url, engine={"tls": tls}), tmp_path) as gateway:
        assert ask(gateway.port, chat(max_tokens=5)).status == 200
        answer = ask(gateway.port, long_stream(50))
        assert answer.body.endswith(b"data: [DONE]\n\n")


def test_an_engine_with_a_certificate_that_is_not_trusted_gets_nothing(secure: TlsGateway, tmp_path: Path) -> None:
    offered = secure.snapshot()["offered"]
    with serving(config_for(secure.url), tmp_path / "strict", ready=False) as gateway:
        answer = ask(gateway.port, chat(max_tokens=5))
        assert (answer.status, answer.reason) == (503, "no_engine")
    assert secure.snapshot()["offered"] == offered
    with serving(config_for(secure.url, engine={"tls": {"verify": False}}), tmp_path / "lax") as gateway:
        assert ask(gateway.port, chat(max_tokens=5)).status == 200


# ---- the end -----------------------------------------------------------------------------------------------------


def test_sigterm_lets_streams_and_the_queue_finish_and_admits_nobody(slow: SimulatedEngine, tmp_path: Path) -> None:
    config = config_for(slow.url, slots=2, mode="backpressure", server={"drain_timeout_s": 20})
    gateway = GatewayProcess(config, tmp_path / "gateway")
    idle, late, *busy = (RawClient(gateway.port) for _ in range(5))
    try:
        for client in (idle, late):
            client.request(chat(max_tokens=1))
            assert client.read_answer().status == 200
        for client in busy:
            client.request(long_stream(150))
        eventually(lambda: gateway.gauges() == (2, 1), what="two run, one waits")
        late.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: app")  # its head is not whole
        time.sleep(0.05)
        gateway.signal(signal.SIGTERM)
        assert idle.closed_by_peer(2), "an idle connection is closed at once"
        late.send(b"lication/json\r\ncontent-length: 2\r\n\r\n{}")
        refused = late.read_answer()
        assert (refused.status, refused.reason) == (503, "draining")
        assert refused.header("connection") == "close"
        for client in busy:
            answer = client.read_answer(within=15)
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert answer.body.count(b'"content":" ') >= 150
        assert gateway.process.wait(5) == 0
        assert "Traceback" not in gateway.stderr
    finally:
        gateway.kill()
        for client in (idle, late, *busy):
            client.close()


def test_a_body_that_is_still_being_sent_is_refused_at_once(engine: SimulatedEngine, tmp_path: Path) -> None:
    gateway = GatewayProcess(config_for(engine.url), tmp_path)
    with RawClient(gateway.port) as client:
        try:
            client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
            eventually(lambda: json.loads(gateway.admin("/api/v1/status"))["buffered_body_bytes"] == 1)
            gateway.signal(signal.SIGTERM)
            answer = client.read_answer()
            assert (answer.status, answer.reason, answer.header("connection")) == (503, "draining", "close")
            assert answer.retry_after in {1, 2}, "a second, spread"
            assert gateway.process.wait(5) == 0
        finally:
            gateway.kill()


def test_a_slow_reader_gets_the_end_of_its_answer_after_the_engine_is_done(tmp_path: Path) -> None:
    """The lease is closed while the last bytes wait for the client: nothing is in flight, but not all has left."""
    backend = FakeBackend()
    backend.script = scripts.says("x" * 6_000_000)
    gateway = GatewayProcess(config_for(backend, server={"drain_timeout_s": 20}), tmp_path)
    try:
        with RawClient(gateway.port, receive_buffer=4096) as client:
            client.request(chat())
            head = client.read_head()
            got = 0
            while gateway.gauges() == (1, 0):
                got += len(client.read_piece() or b"")
            gateway.signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                gateway.process.wait(0.7)  # it lingers for less than that
            got += len(client.read_rest())
            assert got == int(head.get("content-length") or 0)
            assert gateway.process.wait(5) == 0
    finally:
        gateway.kill()
        backend.close()


def test_a_control_request_is_answered_before_the_end(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.script = scripts.says(after=0.6)
    gateway = GatewayProcess(config_for(backend, server={"drain_timeout_s": 20}), tmp_path)
    try:
        with RawClient(gateway.port) as client:
            client.request({"prompt": "x"}, path="/tokenize")
            eventually(lambda: gateway.metric("forebay_control_requests_total") == 1)
            gateway.signal(signal.SIGTERM)
            assert client.read_answer().status == 200
            assert gateway.process.wait(5) == 0
    finally:
        gateway.kill()
        backend.close()


def test_readiness_turns_first_when_draining(slow: SimulatedEngine, tmp_path: Path) -> None:
    gateway = GatewayProcess(config_for(slow.url, server={"drain_timeout_s": 20}), tmp_path / "gateway")
    with RawClient(gateway.port) as client:
        try:
            client.request(long_stream(200))
            eventually(lambda: gateway.gauges() == (1, 0))
            assert ask(gateway.port, path="/readyz", method="GET").status == 200
            gateway.signal(signal.SIGTERM)
            eventually(lambda: ask(gateway.port, path="/readyz", method="GET").status == 503, what="not ready")
            assert ask(gateway.port, path="/healthz", method="GET").status == 200
            assert json.loads(gateway.admin("/api/v1/status"))["draining"] is True
            assert client.read_answer(10).body.endswith(b"data: [DONE]\n\n")
            assert gateway.process.wait(5) == 0
        finally:
            gateway.kill()


@pytest.mark.parametrize("hurried", [True, False], ids=["second signal", "drain timeout"])
def test_what_is_left_at_the_end_is_told_so(slow: SimulatedEngine, tmp_path: Path, hurried: bool) -> None:
    timeout_s = 60 if hurried else 0.5
    gateway = GatewayProcess(config_for(slow.url, slots=1, server={"drain_timeout_s": timeout_s}), tmp_path / "gateway")
    with RawClient(gateway.port) as running:
        try:
            running.request(long_stream(100_000))
            assert running.read_head().status == 200
            gateway.signal(signal.SIGTERM)
            if hurried:
                eventually(lambda: json.loads(gateway.admin("/api/v1/status"))["draining"], what="draining")
                gateway.signal(signal.SIGINT)
            began = time.monotonic()
            rest = running.read_rest(5)
            assert b"[DONE]" not in rest
            last = rest.rstrip().rpartition(b"data: ")[2]
            assert json.loads(last)["error"]["message"]
            assert gateway.process.wait(3) == 0
            assert time.monotonic() - began < 3
            assert "Traceback" not in gateway.stderr
            eventually(lambda: slow.metric("vllm:num_requests_running") == 0, what="the engine was told")
        finally:
            gateway.kill()


def test_an_engine_started_here_ends_with_its_gateway_even_when_that_is_killed(tmp_path: Path) -> None:
    config = {"engines": [{"name": "own", "kind": "simulated"}]}
    gateway = GatewayProcess(config, tmp_path)
    try:
        (child,) = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split()
        gateway.kill()
        eventually(lambda: not _runs(int(child)), within=5, what="its engine has ended")
    finally:
        gateway.kill()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


# ---- ports -------------------------------------------------------------------------------------------------------


def test_idle_connections_are_kept_for_their_time_and_no_longer(engine: SimulatedEngine, tmp_path: Path) -> None:
    config = config_for(engine.url, server={"keep_alive_s": 0.5, "header_timeout_s": 0.3})
    with serving(config, tmp_path) as gateway, RawClient(gateway.port) as client, RawClient(gateway.port) as fresh:
        for _ in range(4):
            client.request(chat(max_tokens=1))
            assert client.read_answer().status == 200
            time.sleep(0.2)
        idle_since = time.monotonic()
        client.request(chat(max_tokens=1))
        assert client.read_answer().status == 200, "0.8 s in all, but never idle for 0.5 s"
        assert client.closed_by_peer(2)
        assert time.monotonic() - idle_since >= 0.45
        assert fresh.closed_by_peer(0.1), "one that never said a word, too"
        with RawClient(gateway.port) as slow_head:
            slow_head.send(b"POST /v1/chat")
            assert slow_head.read_answer().status == 408


def test_the_admin_token_opens_the_admin_port_and_is_shown_nowhere(engine: SimulatedEngine, tmp_path: Path) -> None:
    token = "a-token-that-is-shown-nowhere"
    config = config_for(engine.url, admin={"host": "0.0.0.0", "token": token})
    gateway = GatewayProcess(config, tmp_path, ready=False)
    try:
        for path in ("/metrics", "/api/v1/status", "/api/v1/snapshot"):
            for headers, status in (
                ([], 401),
                ([("authorization", "Bearer wrong")], 401),
                ([("authorization", f"Bearer {token}")], 200),
            ):
                answer = ask(gateway.admin_port, path=path, method="GET", headers=headers)
                assert answer.status == status
                assert token.encode() not in answer.head.raw + answer.body
        assert ask(gateway.admin_port, path="/healthz", method="GET").status == 200
        assert token not in gateway.stdout + gateway.stderr
        gateway.stop()
    finally:
        gateway.kill()


# ---- figures -----------------------------------------------------------------------------------------------------


def test_the_figures_add_up(engine: SimulatedEngine, tmp_path: Path) -> None:
    """Every kind of end, a known number of times: clients, snapshot and metrics tell the same story."""
    keys = [key("free"), key("poor", requests_per_minute=3)]
    config = config_for(engine.url, slots=8, keys=keys)
    with serving(config, tmp_path) as gateway:

        def send(key_name: str) -> tuple[int, int]:
            answer = ask(gateway.port, chat(max_tokens=20, ignore_eos=True), key=f"sk-{key_name}")
            used = answer.json()["usage"]["total_tokens"] if answer.status == 200 else 0
            return answer.status, used

        answers = in_parallel(send, ["free"] * 12 + ["poor"] * 5)
        statuses = [status for status, _ in answers]
        assert (statuses.count(200), statuses.count(429)) == (15, 2)
        streamed = ask(gateway.port, long_stream(30), key="sk-free")
        assert streamed.status == 200
        assert b'"usage"' not in streamed.body, "it was not asked for by the client"
        engine.faults(error_after_tokens=5)
        assert b"Injected" in ask(gateway.port, long_stream(30), key="sk-free").body
        engine.faults(error_rate=1.0, error_status=500)
        assert ask(gateway.port, chat(), key="sk-free").status == 500
        engine.faults(hang_rate=1.0)
        with RawClient(gateway.port) as leaving:
            leaving.request(chat(), key="sk-free")
            eventually(lambda: gateway.gauges() == (1, 0), what="it hangs")
        engine.faults()
        gateway.settles()
        assert ask(gateway.port, b"{", key="sk-free").status == 400
        assert ask(gateway.port, chat(), key="sk-wrong").status == 401
        assert ask(gateway.port, path="/v1/models", method="GET", key="sk-free").status == 200

        snapshot = gateway.snapshot()
        outcomes = snapshot["outcomes"]
        assert snapshot["offered"] == sum(outcomes.values()) == 12 + 5 + 1 + 3
        assert (outcomes["shed"], outcomes["cancelled"], outcomes["evicted"]) == (2, 1, 0)
        assert outcomes["completed"] + outcomes["failed"] == 18
        assert outcomes["failed"] >= 1
        for outcome, count in outcomes.items():
            assert gateway.metric("forebay_requests_total", outcome=outcome) == count, outcome
        assert gateway.metric("forebay_requests_total", reason="key_requests") == 2
        assert gateway.metric("forebay_offered_total") == snapshot["offered"]
        assert gateway.metric("forebay_rejected_total", status="400") == 1
        assert gateway.metric("forebay_rejected_total", status="401") == 1
        assert gateway.metric("forebay_control_requests_total", route="models") == 1
        assert gateway.metric("forebay_in_flight") == gateway.metric("forebay_queued") == 0
        assert gateway.metric("forebay_queue_wait_seconds_count") == snapshot["offered"] - outcomes["shed"]
        prompt = sum(used - 20 for _, used in answers if used) // 15
        known = sum(used for _, used in answers) + (prompt + 30)
        used = gateway.metric("forebay_tokens_total", kind="used")
        assert known <= used <= known + 3 * (prompt + 30), "and of the broken ones what was generated"


# ---- an engine that dies -----------------------------------------------------------------------------------------


def test_an_engine_killed_amid_streams_costs_these_and_no_more(slow: SimulatedEngine, tmp_path: Path) -> None:
    with serving(config_for(slow.url, slots=8), tmp_path / "gateway") as gateway, ExitStack() as sockets:
        clients = [sockets.enter_context(RawClient(gateway.port)) for _ in range(8)]
        for client in clients:
            client.request(long_stream(5_000))
        for client in clients:
            assert client.read_head().status == 200
        slow.kill()
        for client in clients:
            rest = client.read_rest(3)
            assert b"[DONE]" not in rest
            assert json.loads(rest.rstrip().rpartition(b"data: ")[2])["error"]["code"] == "engine_error"
            assert client.closed_by_peer()
        gateway.settles()
        assert gateway.outcome("failed") == 8
        answer = ask(gateway.port, chat(max_tokens=3))
        assert answer.reason in {"no_engine", "engine_error"}
        assert answer.status in {502, 503}
        assert ask(gateway.port, path="/healthz", method="GET").status == 200
        slow.start()
        eventually(lambda: ask(gateway.port, chat(max_tokens=3)).status == 200, within=5, what="service again")


def test_another_engine_takes_over_at_once(slow: SimulatedEngine, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with (
        simulated(tmp_path / "other", *FAST) as other,
        serving(config_for(slow.url, other.url, slots=8), tmp_path / "gateway") as gateway,
    ):
        slow.kill()
        answers = in_parallel(lambda _: ask(gateway.port, chat(max_tokens=3)).status, range(24))
        assert answers == [200] * 24, "what could not be delivered went to the other one"


def test_the_process_says_where_it_listens_and_nothing_else_on_stdout(engine: SimulatedEngine, tmp_path: Path) -> None:
    with serving(config_for(engine.url), tmp_path) as gateway:
        ask(gateway.port, chat(max_tokens=1))
        lines = gateway.stdout.splitlines()
        assert lines == [f"listening on {gateway.url}", f"admin on http://127.0.0.1:{gateway.admin_port}"]
