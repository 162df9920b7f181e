"""Requests are valid, of the asked size, and the same for the same seed."""

from __future__ import annotations

import json

import pytest

from forebay.errors import UsageError
from forebay.load.campaign import Load, plan_for
from forebay.load.target import Target
from forebay.load.workload import Key, Magazine, Workload, parse_keys
from forebay.report.records import Objective
from forebay.workload.arrival import Arrival
from forebay.workload.sizes import Sizes

NOW = Arrival(0, "x")


def magazine(workload: Workload, seed: int = 1) -> Magazine:
    return Magazine(workload, "127.0.0.1:8000", "", seed)


@pytest.mark.parametrize("route", ["chat", "completions", "embeddings"])
def test_bodies_are_json_of_the_asked_length(route: str) -> None:
    workload = Workload(route=route, model='m"x', prompt_tokens=Sizes(50, 50), output_tokens=Sizes(7, 7))  # type: ignore[arg-type]
    shot = magazine(workload).shot(NOW)
    body = json.loads(shot.body)
    prompt = body.get("prompt") or body.get("input") or body["messages"][0]["content"]
    assert len(prompt.split()) == 50
    assert body["model"] == 'm"x'
    assert body.get("max_tokens") == (None if route == "embeddings" else 7)
    assert f"content-length: {len(shot.body)}\r\n".encode() in shot.head
    assert shot.head.startswith(b"POST /v1/")


def test_one_seed_gives_the_same_requests() -> None:
    workload = Workload(prompt_tokens=Sizes(4, 40), output_tokens=Sizes(1, 9))
    shots = [[magazine(workload, seed).shot(NOW) for _ in range(1)] for seed in (3, 3, 4)]
    assert shots[0] == shots[1]
    assert shots[0] != shots[2]


def test_a_trace_dictates_the_sizes() -> None:
    body = json.loads(magazine(Workload()).shot(Arrival(0, "trace", 6000, 11)).body)
    assert len(body["messages"][0]["content"].split()) == 6000
    assert body["max_tokens"] == 11


def test_keys_share_by_weight_and_stay_out_of_the_label() -> None:
    keys = parse_keys(["heavy*3=sk-1", "light=sk-2"])
    assert keys == (Key("heavy", "sk-1", 3.0), Key("light", "sk-2", 1.0))
    shots = magazine(Workload(keys=keys))
    drawn = [shots.shot(NOW) for _ in range(2000)]
    assert sum(shot.key == "heavy" for shot in drawn) == pytest.approx(1500, rel=0.1)
    assert all((b"Bearer sk-1\r\n" in shot.head) == (shot.key == "heavy") for shot in drawn)


@pytest.mark.parametrize("text", ["a*x=s", "a*-1=s", "a=", "sp ace\n", "a=k\r\nx: y"])
def test_a_bad_key_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(UsageError, match="number 1 is not") as error:
        parse_keys([text])
    assert text not in str(error.value)


def test_target_urls() -> None:
    assert Target.parse("http://127.0.0.1:8080/v1/").prefix == ""
    assert Target.parse("https://host/base/v1") == Target("host", 443, "/base", tls=True)
    assert Target.parse("http://[::1]:8000").authority == "[::1]:8000"
    assert Target.parse("http://host").authority == "host"


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:8000", "http://", "http://h:99999", "http://u:p@h", "http://h/?a=1", "http://h/a b"]
)
def test_targets_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--target"):
        Target.parse(url)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({}, "say how much load"),
        ({"load_factor": 2.0}, "--capacity"),
        ({"rate": 5.0, "load_factor": 2.0, "capacity": 9.0}, "same thing"),
        ({"rate": 0.0}, "out of range"),
        ({"rate": float("nan")}, "out of range"),
        ({"rate": 1e9}, "out of range"),
        ({"rate": 5.0, "duration_s": 0.0}, "--duration"),
        ({"rate": 5.0, "duration_s": 1e9}, "--duration"),
        ({"rate": 90000.0, "duration_s": 3600.0}, "more than"),
        ({"rate": 5.0, "arrivals": "trace"}, "go together"),
        ({"rate": 5.0, "trace": "x"}, "go together"),
        ({"rate": 5.0, "cv": 0.0}, "--cv"),
        ({"rate": 5.0, "arrivals": "ramp", "rate_to": -1.0}, "out of range"),
    ],
)
def test_absurd_loads_are_refused(load: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Load(**load)  # type: ignore[arg-type]


def test_the_warm_up_is_a_phase_of_its_own() -> None:
    load = Load(load_factor=2.0, capacity=10.0, arrivals="constant", duration_s=2.0, warm_up_s=1.0)
    arrivals, phases = load.arrivals_and_phases(1)
    assert [(phase.name, phase.from_s, phase.to_s) for phase in phases] == [("warm-up", 0, 1), ("constant", 1, 3)]
    assert sum(arrival.phase == "constant" for arrival in arrivals) == 40
    assert load.offered_load == 2.0


def test_targets_may_be_named() -> None:
    load = Load(rate=5.0)
    named = plan_for("gated=http://h:1", load, Workload(), objective=Objective())
    plain = plan_for("http://h:1/?"[:-2], load, Workload(), objective=Objective())
    assert (named.header.mode, named.target.port) == ("gated", 1)
    assert plain.header.mode == "http://h:1"
    assert named.arrivals == plain.arrivals


def test_a_trace_that_ships_is_a_load() -> None:
    load = Load(arrivals="trace", trace="azure_llm_2023_conv", speed=20.0, duration_s=5.0)
    arrivals, phases = load.arrivals_and_phases(1)
    assert [(phase.name, phase.to_s) for phase in phases] == [("trace", 5.0)]
    assert len(arrivals) == pytest.approx(5.5 * 20 * 5, rel=0.5)
    assert load.describe() == "Trace azure_llm_2023_conv at 20 times its speed"
    with pytest.raises(UsageError, match="no shipped trace"):
        Load(arrivals="trace", trace="none.csv").arrivals_and_phases(1)
