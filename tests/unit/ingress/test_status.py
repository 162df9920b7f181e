"""The refusal table of the contract, row by row, and the forms in which times and errors are written."""

from __future__ import annotations

import json

import pytest

from forebay.core.instant import MILLISECOND, SECOND
from forebay.core.model import Demand, Refusal
from forebay.core.outcome import EvictReason, FailReason, Reason, ShedReason
from forebay.core.quota.budget import Quota
from forebay.core.quota.terms import KeyLimits, KeyTerms
from forebay.ingress.http.routes import Dialect
from forebay.ingress.status import (
    REASON_PHRASES,
    TABLE,
    Rejection,
    error_body,
    explain,
    go_duration,
    rate_limit_lines,
    retry_headers,
)

CONTRACT = {
    "invalid_key": (401, "authentication_error", "invalid_api_key"),
    "key_forbidden": (403, "permission_error", "model_not_allowed"),
    "key_requests": (429, "rate_limit_error", "rate_limit_exceeded"),
    "key_tokens": (429, "rate_limit_error", "token_limit_exceeded"),
    "key_concurrency": (429, "rate_limit_error", "concurrency_limit_exceeded"),
    "key_credits": (429, "insufficient_quota", "insufficient_quota"),
    "key_share": (429, "rate_limit_error", "fair_share_exceeded"),
    "retry_budget": (429, "rate_limit_error", "retry_budget_exceeded"),
    "never_fits": (413, "invalid_request_error", "request_too_large"),
    "malformed": (400, "invalid_request_error", "invalid_request"),
    "queue_full": (503, "overloaded_error", "queue_full"),
    "queue_wait": (503, "overloaded_error", "queue_wait_exceeded"),
    "expired": (503, "overloaded_error", "queue_timeout"),
    "displaced": (503, "overloaded_error", "displaced"),
    "warming": (503, "service_unavailable_error", "warming_up"),
    "no_engine": (503, "service_unavailable_error", "no_engine"),
    "ledger_away": (503, "service_unavailable_error", "ledger_unavailable"),
    "store_away": (503, "service_unavailable_error", "store_unavailable"),
    "draining": (503, "service_unavailable_error", "draining"),
    "engine_error": (502, "server_error", "engine_error"),
    "engine_timeout": (504, "server_error", "engine_timeout"),
    "over_budget": (429, "rate_limit_error", "token_limit_exceeded"),
}


@pytest.mark.parametrize("reason", CONTRACT)
def test_the_table_is_the_contract(reason: str) -> None:
    row = TABLE[reason]
    assert (row.status, row.type, row.code) == CONTRACT[reason]
    assert row.shared is (row.status == 503), "503 is the shared capacity, and only that may be mapped"
    assert row.advice
    assert row.status in REASON_PHRASES


def test_every_reason_has_its_row_and_every_row_a_reason() -> None:
    reasons = {str(each) for kind in (ShedReason, EvictReason, FailReason, Rejection) for each in kind}
    assert reasons == set(TABLE) == set(CONTRACT)


@pytest.mark.parametrize("reason", [*ShedReason, *EvictReason])
def test_a_refusal_says_which_limit_the_figures_and_what_to_do(reason: Reason) -> None:
    text = explain(Refusal(reason, SECOND, 256, 257.25, "requests"))
    assert "257.2 against a limit of 256 requests" in text
    assert text.endswith(TABLE[reason.value].advice + ".")
    assert text[0].isupper()
    assert "limit of" not in explain(Refusal(reason, SECOND))


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (Dialect.OPENAI, {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}),
        (Dialect.ANTHROPIC, {"type": "error", "error": {"type": "t", "message": "m"}}),
        (Dialect.KSERVE, {"error": "m"}),
    ],
)
def test_an_error_in_each_dialect(dialect: Dialect, body: dict[str, object]) -> None:
    assert json.loads(error_body(dialect, message="m", type="t", code="c", param="p")) == body


def test_text_from_a_caller_cannot_break_the_body() -> None:
    message = 'say "x"\r\n\u2028 </script> \ud7ff'
    assert json.loads(error_body(Dialect.OPENAI, message=message, type="t", code=None))["error"]["message"] == message


@pytest.mark.parametrize(
    ("after_ns", "seconds", "millis"),
    [
        (0, 1, 1), (1, 1, 1), (MILLISECOND, 1, 1), (MILLISECOND + 1, 1, 2), (SECOND, 1, 1000), (SECOND + 1, 2, 1001),
        (1_500 * MILLISECOND, 2, 1500), (55 * SECOND, 55, 55_000),
    ],
)  # fmt: skip
def test_times_to_come_back_are_never_too_early(after_ns: int, seconds: int, millis: int) -> None:
    expected = f"retry-after: {seconds}\r\nretry-after-ms: {millis}\r\nx-should-retry: true\r\n"
    assert retry_headers(after_ns) == expected.encode()


def test_where_a_retry_cannot_work_there_is_no_time() -> None:
    assert retry_headers(None) == b"x-should-retry: false\r\n"


@pytest.mark.parametrize(
    ("duration_ns", "written"),
    [
        (0, b"0ms"), (1, b"1ms"), (12 * MILLISECOND, b"12ms"), (999 * MILLISECOND, b"999ms"),
        (999 * MILLISECOND + 1, b"1s"),
        (SECOND, b"1s"), (SECOND + 1, b"2s"), (59 * SECOND, b"59s"), (60 * SECOND, b"1m0s"), (360 * SECOND, b"6m0s"),
        (3599 * SECOND, b"59m59s"), (3600 * SECOND, b"1h0m0s"), (90_061 * SECOND, b"25h1m1s"),
    ],
)  # fmt: skip
def test_durations_as_go_writes_them(duration_ns: int, written: bytes) -> None:
    assert go_duration(duration_ns) == written


def test_the_rate_limit_lines_of_one_kind_or_both_or_none() -> None:
    def lines(**limits: int) -> bytes:
        path = Quota({"k": KeyTerms(KeyLimits(**limits))}, {}).budget("k").path
        prices = path.prices(Demand(40, 20, 20))
        assert path.check(prices, SECOND, 0) is None
        path.charge(prices, 0)
        return rate_limit_lines(path, 0)

    requests = (
        b"x-ratelimit-limit-requests: 60\r\nx-ratelimit-remaining-requests: 59\r\nx-ratelimit-reset-requests: 1s\r\n"
    )
    tokens = b"x-ratelimit-limit-tokens: 600\r\nx-ratelimit-remaining-tokens: 540\r\nx-ratelimit-reset-tokens: 6s\r\n"
    assert lines(requests_per_minute=60) == requests
    assert lines(tokens_per_minute=600) == tokens
    assert lines(requests_per_minute=60, tokens_per_minute=600) == requests + tokens
    assert lines(concurrency=5) == lines() == b""
