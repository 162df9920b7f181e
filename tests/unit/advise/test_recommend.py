"""The decision matrix, its overrides, the figures, and the file that comes of them."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest

from forebay.advise.answers import CLIENTS, ENGINES, Answers, Clients
from forebay.advise.capacity import choose_profile
from forebay.advise.document import config_file
from forebay.advise.recommend import recommend
from forebay.advise.rules import LATER, SITUATIONS, exists
from forebay.config.load import loads
from forebay.config.preset import PRESETS
from forebay.core.model import Mode
from forebay.errors import UsageError

H100: dict[str, Any] = {"gpu": "h100", "model": "8b"}


@pytest.mark.parametrize(
    ("answers", "mode", "preset"),
    [
        # The five rows of the matrix.
        ({"clients": "internal"}, Mode.BACKPRESSURE, "internal"),
        ({"clients": "public"}, Mode.ADMISSION, "public-api"),
        ({"clients": "b2b"}, Mode.ADMISSION, "b2b"),
        ({"clients": "offline"}, Mode.BACKPRESSURE, "offline"),
        ({"clients": "realtime"}, Mode.HYBRID, "realtime"),
        # What overrides them.
        ({"clients": "internal", "bounded": False}, Mode.HYBRID, "internal"),
        ({"clients": "internal", "ttft_ms": 800.0}, Mode.HYBRID, "internal"),
        ({"clients": "internal", "ttft_ms": 800.0, "may_drop": False, "bounded": True}, Mode.BACKPRESSURE, "internal"),
        ({"clients": "realtime", "ttft_ms": 3000.0, "may_drop": False}, Mode.BACKPRESSURE, "realtime"),
        ({"clients": "public", "engine": "encoder"}, Mode.HYBRID, "public-api"),
        ({"clients": "offline", "engine": "encoder"}, Mode.BACKPRESSURE, "offline"),
        ({"clients": "public", "sells": True}, Mode.ADMISSION, "b2b"),
    ],
)
def test_the_matrix(answers: dict[str, Any], mode: Mode, preset: str) -> None:
    advice = recommend(Answers(**answers))
    assert (advice.mode, advice.preset) == (mode, preset)
    assert advice.reasons


def test_rows_name_what_exists() -> None:
    assert tuple(SITUATIONS) == CLIENTS == get_args(Clients)
    for row in SITUATIONS.values():
        assert row.preset in PRESETS
        assert set(row.later) <= set(LATER)


def test_presets_begin_as_the_matrix_does() -> None:
    for row in SITUATIONS.values():
        assert PRESETS[row.preset]["admission"]["mode"] == row.mode.value


def test_what_is_promised_is_asked_of_the_schema() -> None:
    assert exists(("engines", "concurrency", "tokens"))
    assert exists(("keys", "static", "limits", "tokens_per_second"))
    assert exists(("classes", "hold_back"))
    assert exists(("keys", "store"))
    assert exists(("tuner", "kind"))
    assert not exists(("tuner", "anything"))
    assert not exists(("shared",))
    assert not exists(("shared", "anything"))
    assert not exists(("admission", "magic"))
    assert not exists(("server", "port", "deeper"))
    offered = {one.setting: one.available for one in recommend(Answers(clients="b2b")).later}
    assert offered == {
        "keys.static.limits.tokens_per_second": True,
        "admission.mode": True,
        "keys.store": True,
        "shared": False,
    }


@pytest.mark.parametrize(("clients", "engine"), list(product(CLIENTS, ENGINES)))
def test_every_file_is_accepted(clients: Clients, engine: Any) -> None:
    """Without figures and with them; the mode and the preset are those that were advised."""
    gpu = {"gpu": "a100", "model": "bert-large"} if engine == "encoder" else H100
    for more in ({}, gpu | {"rate_per_s": 20.0, "replicas": 2, "bursty": True}):
        answers = Answers(clients=clients, engine=engine, **more)
        advice = recommend(answers)
        config, warnings = loads(config_file(answers, advice), environment={})
        assert config.admission.mode is advice.mode
        assert config.admission.preset == advice.preset
        assert [w for w in warnings if "nobody may call" not in w] == []
        assert len(config.engines[0].urls) == (0 if engine == "embedded" else answers.replicas)


def test_the_example_key_is_accepted_when_its_marks_are_removed() -> None:
    answers = Answers(clients="b2b", prompt_tokens=1000, output_tokens=200, customers=4, **H100)
    advice = recommend(answers)
    lines = config_file(answers, advice).splitlines()
    text = "\n".join(line[1:] if line.startswith("#") and line[1:2] != " " else line for line in lines)
    config, warnings = loads(text, environment={"TEAM_A_KEY": "sk-a"})
    (key,) = config.keys.static
    assert advice.capacity is not None
    assert key.limits.tokens_per_second == round(advice.capacity.rate_per_s * 1200 / 4)
    assert warnings == ()


def test_places_are_what_the_pace_allows() -> None:
    sizes: dict[str, Any] = {"prompt_tokens": 1155, "output_tokens": 211, **H100}
    slow = recommend(Answers(clients="realtime", tpot_ms=50.0, **sizes)).capacity
    fast = recommend(Answers(clients="realtime", tpot_ms=15.0, **sizes)).capacity
    assert slow is not None
    assert fast is not None
    assert fast.step_ms <= 15.0 < slow.step_ms <= 50.0
    assert fast.places < slow.places
    assert fast.rate_per_s < slow.rate_per_s
    assert "15 ms per token" in fast.bound_by


def test_a_peak_above_the_capacity_says_what_becomes_of_the_rest() -> None:
    sizes: dict[str, Any] = {"prompt_tokens": 1155, "output_tokens": 211, **H100}
    advice = recommend(Answers(clients="realtime", rate_per_s=100.0, **sizes))
    assert advice.capacity is not None
    assert advice.figures["load"] == pytest.approx(100.0 / advice.capacity.rate_per_s)
    needed = int(advice.figures["replicas_needed"])
    assert any(f"{needed} engines would carry it" in reason for reason in advice.reasons)
    enough = recommend(Answers(clients="realtime", rate_per_s=100.0, replicas=needed, **sizes))
    assert enough.figures["load"] <= 1


def test_a_budget_shorter_than_a_slot_is_told_as_it_will_be() -> None:
    sizes: dict[str, Any] = {"prompt_tokens": 1155, "output_tokens": 211, **H100}
    few = recommend(Answers(clients="realtime", **sizes))
    many = recommend(Answers(clients="realtime", replicas=10, **sizes))
    assert few.figures["slots_in_budget"] < 3 <= many.figures["slots_in_budget"]
    assert few.figures["wait_budget_ms"] > 50
    assert many.figures["wait_budget_ms"] == 50


def test_the_limit_finds_itself_where_there_is_a_pace_to_keep() -> None:
    def concurrency(**said: Any) -> Any:
        answers = Answers(**said)
        return loads(config_file(answers, recommend(answers)), environment={}).config.engines[0].concurrency

    chat = concurrency(clients="realtime", tpot_ms=30.0, **H100)
    assert chat.kind == "guarded"
    assert chat.kv_tokens is None, "vLLM tells it"
    assert concurrency(clients="realtime", engine="other", **H100).kv_tokens == 435_000
    assert concurrency(clients="public").kind == "guarded"
    offline = concurrency(clients="offline", **H100)
    assert (offline.kind, offline.tokens) == ("fixed", int(0.9 * 435_000))
    assert concurrency(clients="offline", costs_vary=False, **H100).tokens is None
    assert concurrency(clients="realtime", engine="llama.cpp").limit == 4
    assert concurrency(clients="realtime", engine="encoder").limit == 1


def test_an_encoder_gives_half_of_the_objective_to_the_batch_and_half_to_the_wait() -> None:
    answers = Answers(clients="realtime", engine="encoder", gpu="t4", model="bert-base/fp16/seq128", ttft_ms=40.0)
    advice = recommend(answers)
    config = loads(config_file(answers, advice), environment={}).config
    assert advice.capacity is not None
    assert advice.capacity.step_ms <= 20.0
    batching = config.engines[0].batching
    assert batching is not None
    assert (batching.kind, batching.max_size, batching.linger_ms) == ("dynamic", advice.capacity.places, 0)
    assert config.admission.wait_budget_ms == 20.0


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"clients": "realtime", "gpu": "h900"}, "no calibrated engine is called h900; there are "),
        ({"clients": "realtime", "tpot_ms": 2.0, **H100}, "ms per token for a single request, and 2 ms are asked"),
        ({"clients": "realtime", "prompt_tokens": 900_000, **H100}, "do not fit the KV cache"),
        ({"clients": "realtime", "engine": "encoder", "gpu": "t4", "ttft_ms": 1.0}, "for a single input"),
    ],
)
def test_what_no_engine_can_do_is_said(answers: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        recommend(Answers(**answers))
    assert says in str(caught.value)


def test_the_nearest_possible_pace_is_possible() -> None:
    with pytest.raises(UsageError) as caught:
        recommend(Answers(clients="realtime", tpot_ms=2.0, **H100))
    allowed = float(str(caught.value).split("allow ")[1].split(" ms")[0])
    assert recommend(Answers(clients="realtime", tpot_ms=allowed, **H100)).capacity is not None


def test_the_best_measured_of_several_profiles_is_taken() -> None:
    profile = choose_profile("h100", "8b", encoder=False)
    assert profile is not None
    assert profile.name == "h100-80g/llama-3.1-8b/bf16/tp1/trtllm"
    assert choose_profile(None, None, encoder=False) is None
