"""Client models, compared with the official package where it can be asked."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from forebay.errors import UsageError
from forebay.workload.retry import (
    CONNECTION_ERROR,
    NaiveRetry,
    NoRetry,
    SdkRetry,
    client_model,
    retry_after_s,
)

NOW_S = 1_800_000_000.0


def delay(status: int, headers: dict[str, str], retries_done: int = 0, policy: SdkRetry | None = None) -> float | None:
    return (policy or SdkRetry()).delay_s(retries_done, status, headers, Random(1), NOW_S)


CASES = [
    (503, {}),
    (503, {"retry-after": "3"}),
    (503, {"retry-after": "3", "retry-after-ms": "250"}),
    (503, {"retry-after-ms": "soon", "retry-after": "2.5"}),
    (503, {"retry-after": "0"}),
    (503, {"retry-after": "-1"}),
    (503, {"retry-after": "59"}),
    (503, {"retry-after": "119"}),
    (503, {"retry-after": "121"}),
    (503, {"retry-after": "121", "x-should-retry": "true"}),
    (503, {"retry-after": "nan"}),
    (503, {"retry-after": "inf"}),
    (503, {"retry-after": "1e999"}),
    (503, {"retry-after": "later"}),
    (503, {"x-should-retry": "false"}),
    (429, {"retry-after-ms": "1500", "x-should-retry": "true"}),
    (429, {"x-should-retry": "false", "retry-after": "1"}),
    (400, {}),
    (400, {"x-should-retry": "true"}),
    (404, {"retry-after": "1"}),
    (408, {}),
    (409, {}),
    (413, {}),
    (500, {}),
    (599, {"x-should-retry": "maybe"}),
]


@pytest.fixture(scope="module")
def official() -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(api_key="unused", base_url="http://127.0.0.1:9/v1")


@pytest.mark.parametrize("retries_done", [0, 1, 2])
@pytest.mark.parametrize(("status", "headers"), CASES)
def test_the_sdk_model_decides_as_the_official_package(
    official: Any, status: int, headers: dict[str, str], retries_done: int
) -> None:
    from openai._base_client import httpx2 as transport  # type: ignore[attr-defined]
    from openai._models import FinalRequestOptions

    response = transport.Response(status, headers=headers)
    retries = retries_done < 2 and official._should_retry(response)
    ours = delay(status, headers, retries_done)
    assert (ours is not None) == retries
    if ours is None:
        return
    options = FinalRequestOptions.construct(method="post", url="/x")
    theirs = [official._calculate_retry_timeout(2 - retries_done, options, response.headers) for _ in range(40)]
    # Their jitter is their own: a value without jitter is met exactly, one with it lies within its 25 %.
    if max(theirs) == min(theirs):
        assert ours == pytest.approx(theirs[0])
    else:
        base = 0.5 * 2**retries_done
        assert 0.75 * base <= ours <= base
        assert all(0.75 * base <= theirs_one <= base for theirs_one in theirs)


def test_a_date_is_understood() -> None:
    headers = {"retry-after": "Fri, 15 Jan 2027 08:00:07 GMT"}
    assert retry_after_s(headers, 1_800_000_000.0) == pytest.approx(7.0)


def test_older_releases_fall_back_to_their_own_backoff_beyond_a_minute() -> None:
    older = client_model("sdk-2025")
    ours = older.delay_s(0, 503, {"retry-after": "90"}, Random(1), NOW_S)
    assert ours is not None
    assert 0.375 <= ours <= 0.5
    assert older.delay_s(0, 503, {"retry-after": "60"}, Random(1), NOW_S) == 60.0
    assert client_model("sdk").delay_s(0, 503, {"retry-after": "90"}, Random(1), NOW_S) == 90.0


def test_a_connection_error_is_retried_with_backoff_twice() -> None:
    delays = [delay(CONNECTION_ERROR, {}, retries) for retries in range(3)]
    assert delays[2] is None
    first, second = (value for value in delays if value is not None)
    assert 0.375 <= first <= 0.5
    assert 0.75 <= second <= 1.0


def test_backoff_is_capped() -> None:
    patient = SdkRetry(max_retries=10)
    late = delay(503, {}, 9, patient)
    assert late is not None
    assert 6.0 <= late <= 8.0


def test_the_sdk_model_tells_its_retry_count_and_patience() -> None:
    assert client_model("sdk", 12.5).request_headers(1) == (
        b"x-stainless-retry-count: 1\r\nx-stainless-read-timeout: 12.5\r\n"
    )
    assert client_model("naive").request_headers(1) == b""


def test_one_sdk_model_shows_retry_tickets() -> None:
    assert client_model("sdk-tickets", 9.0) == SdkRetry(read_timeout_s=9.0, shows_tickets=True)
    assert client_model("sdk") == SdkRetry()


def test_the_naive_model_comes_back_at_once_whatever_it_is_told() -> None:
    naive = NaiveRetry(max_retries=2)
    refusal = {"retry-after": "30", "x-should-retry": "false"}
    assert [naive.delay_s(done, 503, refusal, Random(1), NOW_S) for done in range(3)] == [0.0, 0.0, None]
    assert naive.delay_s(0, 400, {}, Random(1), NOW_S) is None


def test_no_retry_takes_the_first_answer() -> None:
    assert NoRetry().delay_s(0, 503, {"retry-after": "1"}, Random(1), NOW_S) is None


def test_an_unknown_client_model_is_named() -> None:
    with pytest.raises(UsageError, match=r"'curl'.*sdk"):
        client_model("curl")
