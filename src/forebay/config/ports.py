"""The sections of the two ports: who may connect, how large and how slow a request may be, how refusals are spelt."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from forebay.config.fields import DAY_S, Count, Milliseconds, Port, Seconds, Section, Text
from forebay.config.secret import Secret


class Server(Section, frozen=True):
    """The data port, and the bounds on what one client may take of it."""

    host: Annotated[Text, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0 takes any free one.")] = 8080
    max_connections: Annotated[
        Count, Meta(description="Client connections open at once; above it new ones are closed at once.")
    ] = 10_000
    max_header_bytes: Annotated[
        Annotated[int, Meta(ge=1024)], Meta(description="Request line and headers together; larger ones get 431.")
    ] = 64 * 1024
    max_headers: Annotated[Count, Meta(description="Header fields of one request; more get 431.")] = 128
    max_body_bytes: Annotated[
        Count, Meta(description="Body of one request; larger ones get 413. Room for long prompts and images.")
    ] = 32 * 1024 * 1024
    max_buffered_body_bytes: Annotated[
        Count, Meta(description="Bodies held in memory over all requests, so that uploads cannot exhaust it.")
    ] = 256 * 1024 * 1024
    header_timeout_s: Annotated[
        Seconds, Meta(description="Time for a request's headers to arrive, in seconds; against slow senders.")
    ] = 10
    body_timeout_s: Annotated[
        Seconds, Meta(description="Time that any body may take, in seconds, before the least rate is asked of it.")
    ] = 30
    min_body_rate_bytes_s: Annotated[
        Count, Meta(description="Least average rate of a body, bytes per second, after body_timeout_s.")
    ] = 1024
    keep_alive_s: Annotated[
        Seconds, Meta(description="Idle time after which a kept connection is closed; above the usual 60 s of clients.")
    ] = 75
    hold_status_ms: Annotated[
        Milliseconds,
        Meta(
            description="Longest that a streamed 200 waits for its first event, in ms: engines send some refusals "
            "as the first event of a 200, and those are relayed as the refusals they are."
        ),
    ] = 75
    cors_origins: Annotated[
        tuple[Text, ...],
        Meta(
            description="Origins of web pages whose scripts may call, as browsers spell them; * is any. Empty: none "
            "but those that the engine itself allows.",
            examples=[["https://app.example.com"]],
        ),
    ] = ()
    stalled_reader_s: Annotated[
        Seconds, Meta(description="Time after which a client that reads nothing of its answer is cut off, in seconds.")
    ] = 120
    drain_delay_s: Annotated[
        Annotated[float, Meta(ge=0, le=DAY_S)],
        Meta(
            description="Time after SIGTERM in which requests are still served and /readyz is 503, in seconds: load "
            "balancers hear of it some seconds later, and send until then."
        ),
    ] = 0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="Time that requests get to end after that, in seconds; then they are aborted.")
    ] = 30


class Admin(Section, frozen=True):
    """The admin port: metrics, status and snapshot."""

    host: Annotated[Text, Meta(description="Address to listen on; any but a loopback one requires a token.")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="Port to listen on; 0 takes any free one.")] = 8081
    token: Annotated[
        Secret | None,
        Meta(
            description="Bearer token asked of every request but /healthz; may be env:NAME or file:PATH.",
            examples=["env:FOREBAY_ADMIN_TOKEN"],
        ),
    ] = None
    read_token: Annotated[
        Secret | None,
        Meta(
            description="A second token, that may read everything here and change nothing.",
            examples=["env:FOREBAY_ADMIN_READ_TOKEN"],
        ),
    ] = None


class Tls(Section, frozen=True):
    """TLS of the data port. Without a certificate it speaks plain HTTP."""

    certificate: Annotated[Text | None, Meta(description="PEM file of the certificates.", examples=["tls.crt"])] = None
    key: Annotated[Text | None, Meta(description="PEM file of the private key.", examples=["tls.key"])] = None


class Responses(Section, frozen=True):
    """How refusals are spelt."""

    overload_status: Annotated[
        Literal[503, 429, 529],
        Meta(description="Status of refusals for shared capacity; 503 tells them apart from a caller's own 429."),
    ] = 503
