"""Every measured proxy: its configuration in front of one upstream, and how it is started.

All serve on loopback with one worker (the Rust routers size their own thread pool), keep-alive on both sides, no access
log, and buffering off where it would hold a stream back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from benchmarks import peers
from benchmarks.process import Process, free_port
from benchmarks.traffic import KEY, LIMITED_KEY, serves

Start = Callable[[Path, int], "Running"]


@dataclass(frozen=True, slots=True)
class Running:
    """A started proxy. ``refusal_port`` takes requests that the proxy refuses for being over a limit."""

    process: Process
    port: int
    refusal_port: int | None = None


@dataclass(frozen=True, slots=True)
class Proxy:
    """One row of the comparison. A ``slow`` one gets a small load, since it would need minutes for the full one."""

    name: str
    title: str
    peer: peers.Peer | None
    start: Start
    slow: bool = False

    def version(self) -> str:
        """The version of what is measured."""
        if self.peer is not None:
            return self.peer.version()
        return version("forebay")


def _up(name: str, command: list[str], folder: Path, port: int, *, env: dict[str, str] | None = None,
        timeout_s: float = 20, refusal_port: int | None = None) -> Running:  # fmt: skip
    process = Process.start(name, command, folder, env)
    try:
        process.wait_until(lambda: serves(port), timeout_s)
    except BaseException:
        process.stop()
        raise
    return Running(process, port, refusal_port)


# --- Forebay ---------------------------------------------------------------------------------------------------------

_FOREBAY_ENGINE: Final = """
[server]
host = "127.0.0.1"
port = {port}
[admin]
port = {admin_port}
[slo]
ttft_ms = 1000
tpot_ms = 50
[[engines]]
name = "bench"
kind = "openai"
urls = ["http://127.0.0.1:{upstream}"]
models = ["*"]
"""

_FOREBAY_OPEN: Final = """
concurrency = {{ kind = "fixed", limit = 4096 }}
[keys]
anonymous = true
"""

# Limits that every request is checked against and charged to, and that the load never reaches; and a key that is over
# its limit from its second request on.
_FOREBAY_KEYED: Final = """
concurrency = {{ kind = "fixed", limit = 4096 }}
[keys]
anonymous = false
[[keys.static]]
id = "admitted"
secret = "{key}"
[keys.static.limits]
requests_per_minute = 100_000_000
tokens_per_minute = 10_000_000_000
tokens_per_second = 1_000_000_000
burst_s = 2.0
concurrency = 4096
[[keys.static]]
id = "limited"
secret = "{limited_key}"
limits = {{ requests_per_minute = 1 }}
"""

# One request holds the engine, all others wait in the queue.
_FOREBAY_QUEUEING: Final = """
concurrency = {{ kind = "fixed", limit = 1 }}
[admission]
mode = "backpressure"
[queue]
depth_limit = 4096
deadline_s = 300
[keys]
anonymous = true
"""


def _forebay(name: str, rooms: str) -> Start:
    def start(folder: Path, upstream: int) -> Running:
        port = free_port()
        config = folder / f"{name}.toml"
        config.write_text(
            (_FOREBAY_ENGINE + rooms).format(
                port=port, admin_port=free_port(), upstream=upstream, key=KEY, limited_key=LIMITED_KEY
            )
        )
        command = [str(Path(sys.executable).with_name("forebay")), "serve", "--config", str(config)]
        return _up(name, command, folder, port, refusal_port=port if rooms is _FOREBAY_KEYED else None)

    return start


# --- general proxies -------------------------------------------------------------------------------------------------

_NGINX: Final = """
{user}
daemon off;
worker_processes 1;
worker_rlimit_nofile 16384;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log error;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  keepalive_requests 1000000000;
  keepalive_timeout 600s;
  tcp_nodelay on;
  limit_req_zone $http_authorization zone=limited:1m rate=1r/m;
  limit_req_status 429;
  limit_req_log_level info;
  upstream engine {{
    server 127.0.0.1:{upstream};
    keepalive 512;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
  server {{
    listen 127.0.0.1:{refusal_port};
    location / {{
      limit_req zone=limited;
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
    }}
  }}
}}
"""


def _nginx(folder: Path, upstream: int) -> Running:
    port, refusal_port = free_port(), free_port()
    config = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""  # the worker must reach the temporary folder
    config.write_text(_NGINX.format(user=user, folder=folder, upstream=upstream, port=port, refusal_port=refusal_port))
    command = [str(peers.NGINX.ensure()), "-p", str(folder), "-c", str(config), "-e", str(folder / "nginx-error.log")]
    return _up("nginx", command, folder, port, refusal_port=refusal_port)


_HAPROXY: Final = """
global
  maxconn 8192
  nbthread 1
defaults
  mode http
  option http-keep-alive
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend data
  bind 127.0.0.1:{port}
  default_backend engine
backend engine
  server engine 127.0.0.1:{upstream}
"""


def _haproxy(folder: Path, upstream: int) -> Running:
    port = free_port()
    config = folder / "haproxy.cfg"
    config.write_text(_HAPROXY.format(port=port, upstream=upstream))
    return _up("haproxy", [str(peers.HAPROXY.ensure()), "-db", "-f", str(config)], folder, port)


_ENVOY_LISTENER: Final = """
  - name: {name}
    address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: {name}
          generate_request_id: true
          stream_idle_timeout: 600s
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{ prefix: "/" }}
                route: {{ cluster: engine, timeout: 0s }}
          http_filters:
{filters}
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
"""

_ENVOY: Final = """
static_resources:
  listeners:
{listeners}
  clusters:
  - name: engine
    type: STATIC
    connect_timeout: 5s
    circuit_breakers:
      thresholds: [{{ max_connections: 16384, max_pending_requests: 16384, max_requests: 16384 }}]
    load_assignment:
      cluster_name: engine
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {upstream} }} }} }}
"""

_ENVOY_RATE_LIMIT: Final = """
          - name: envoy.filters.http.local_ratelimit
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit
              stat_prefix: limit
              token_bucket: {{ max_tokens: {tokens}, tokens_per_fill: {tokens}, fill_interval: {interval} }}
              filter_enabled: {{ default_value: {{ numerator: 100, denominator: HUNDRED }} }}
              filter_enforced: {{ default_value: {{ numerator: 100, denominator: HUNDRED }} }}
"""

# The adaptive limit starts and probes at 1,000, far above the load, so that the filter works on every request and
# refuses none; its default probe of 3 would answer most of a burst with 503.
_ENVOY_ADMISSION: Final = """
          - name: envoy.filters.http.admission_control
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.admission_control.v3.AdmissionControl
              enabled: { default_value: true }
              sampling_window: 30s
              sr_threshold: { default_value: { value: 95 } }
              aggression: { default_value: 1.0 }
              rps_threshold: { default_value: 1 }
              success_criteria: { http_criteria: { http_success_status: [{ start: 100, end: 500 }] } }
          - name: envoy.filters.http.adaptive_concurrency
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.adaptive_concurrency.v3.AdaptiveConcurrency
              enabled: { default_value: true }
              gradient_controller_config:
                sample_aggregate_percentile: { value: 90 }
                concurrency_limit_params: { max_concurrency_limit: 10000, concurrency_update_interval: 0.1s }
                min_rtt_calc_params: { min_concurrency: 1000, interval: 60s, request_count: 50, jitter: { value: 10 } }
"""


def _envoy(name: str, *, filtered: bool) -> Start:
    def start(folder: Path, upstream: int) -> Running:
        port = free_port()
        refusal_port = free_port() if filtered else None
        admitting = _ENVOY_RATE_LIMIT.format(tokens=1_000_000, interval="0.1s") + _ENVOY_ADMISSION if filtered else ""
        listeners = _ENVOY_LISTENER.format(name="data", port=port, filters=admitting)
        if refusal_port is not None:
            refusing = _ENVOY_RATE_LIMIT.format(tokens=1, interval="60s") + _ENVOY_ADMISSION
            listeners += _ENVOY_LISTENER.format(name="limited", port=refusal_port, filters=refusing)
        config = folder / f"{name}.yaml"
        config.write_text(_ENVOY.format(listeners=listeners, upstream=upstream))
        command = [str(peers.ENVOY.ensure()), "-c", str(config), "--concurrency", "1", "-l", "error"]
        command.append("--disable-hot-restart")  # two Envoys on one machine share memory for it unless told apart
        return _up(name, command, folder, port, refusal_port=refusal_port)

    return start


# --- routers and gateways for models ---------------------------------------------------------------------------------

# With one engine there is nothing to choose, so the routers run their cheapest policy. vllm-router's default,
# cache_aware, asks the engine to render every prompt first: two upstream requests for one of the client's.
_ROUTER_FLAGS: Final = ("--policy", "round_robin", "--max-concurrent-requests", "4096", "--log-level", "error")


def _vllm_router(folder: Path, upstream: int) -> Running:
    port = free_port()
    command = [
        str(peers.VLLM_ROUTER.ensure()), "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", f"http://127.0.0.1:{upstream}", *_ROUTER_FLAGS,
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    return _up("vllm-router", command, folder, port, timeout_s=60)


def _sglang_router(folder: Path, upstream: int) -> Running:
    port = free_port()
    command = [
        str(peers.SGLANG_ROUTER.ensure()), "launch", "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", f"http://127.0.0.1:{upstream}", *_ROUTER_FLAGS,
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    return _up("sglang-router", command, folder, port, timeout_s=60)


_LITELLM: Final = """
model_list:
  - model_name: bench
    litellm_params:
      model: openai/bench
      api_base: http://127.0.0.1:{upstream}/v1
      api_key: none
litellm_settings:
  telemetry: false
"""


def _litellm(folder: Path, upstream: int) -> Running:
    port = free_port()
    config = folder / "litellm.yaml"
    config.write_text(_LITELLM.format(upstream=upstream))
    command = [
        str(peers.LITELLM.ensure()), "--config", str(config), "--host", "127.0.0.1", "--port", str(port),
        "--num_workers", "1", "--telemetry", "False",
    ]  # fmt: skip
    env = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the price list comes with the package: no traffic off the machine
        "LITELLM_LOG": "ERROR",
    }
    return _up("litellm", command, folder, port, env=env, timeout_s=180)


PROXIES: Final = (
    Proxy("forebay", "Forebay, all rooms", None, _forebay("forebay", _FOREBAY_KEYED)),
    Proxy("forebay-bare", "Forebay, no keys", None, _forebay("forebay-bare", _FOREBAY_OPEN)),
    Proxy("nginx", "nginx", peers.NGINX, _nginx),
    Proxy("haproxy", "haproxy", peers.HAPROXY, _haproxy),
    Proxy("envoy", "Envoy, bare", peers.ENVOY, _envoy("envoy", filtered=False)),
    Proxy(
        "envoy-filters",
        "Envoy, local rate limit + admission control + adaptive concurrency",
        peers.ENVOY,
        _envoy("envoy-filters", filtered=True),
    ),
    Proxy("vllm-router", "vllm-router (Rust)", peers.VLLM_ROUTER, _vllm_router),
    Proxy("sglang-router", "sglang-router (Rust)", peers.SGLANG_ROUTER, _sglang_router),
    Proxy("litellm", "LiteLLM proxy", peers.LITELLM, _litellm, slow=True),
)

FOREBAY_QUEUEING: Final = _forebay("forebay-queueing", _FOREBAY_QUEUEING)
