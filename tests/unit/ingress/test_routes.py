"""Which paths are proxied, and how: the contract's list, and nothing that merely looks like it."""

from __future__ import annotations

import pytest

from forebay.config.schema import ROUTE_NAMES
from forebay.core.model import Mode
from forebay.ingress.http.routes import EXACT, Dialect, Route, Routes, kserve_model

GATED = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
    "/v1/classify": "classify",
    "/pooling": "pooling",
    "/v1/audio/transcriptions": "audio",
    "/v1/audio/translations": "audio",
    "/v1/audio/speech": "audio",
    "/v2/models/m/infer": "infer",
    "/v2/models/m/versions/1/infer": "infer",
}
CONTROL = {
    "/v1/models": "models",
    "/v1/models/m": "models",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v2": "kserve_meta",
    "/v2/health/live": "kserve_meta",
    "/v2/health/ready": "kserve_meta",
    "/v2/models/m": "kserve_meta",
    "/v2/models/m/ready": "kserve_meta",
    "/v2/models/m/versions/1": "kserve_meta",
    "/v2/models/m/versions/1/ready": "kserve_meta",
}


@pytest.mark.parametrize(("path", "name"), [*GATED.items(), *CONTROL.items()])
def test_the_paths_of_the_contract(path: str, name: str) -> None:
    route = Routes().find(path.encode())
    assert route is not None
    assert (route.name, route.gated) == (name, path in GATED)
    assert name in ROUTE_NAMES
    if route.gated:
        assert route.methods == (b"POST",), "what reaches a GPU has a body"


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "*", "/v1", "/v1/chat/completions/", "/v1//chat/completions", "/V1/chat/completions",
        "/v1/chat/completions;x",
        "/v1/models/", "/v1/models/a/b", "/v1/models/%2e%2e", "/v1/models/..", "/v2/", "/v2/health", "/v2/health/",
        "/v2/health/dead", "/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/../infer",
        "/v2/models/./infer",
        "/v2/models/%6d/infer", "/v2/models/m/infer/", "/v2/models/m/generate", "/v2/models/m/versions/infer/x",
        "/v2/repository/index", "/metrics", "/api/v1/status", "/healthz",
    ],
)  # fmt: skip
def test_what_is_not_a_route(path: str) -> None:
    assert Routes().find(path.encode()) is None


def test_only_streams_with_stream_options_are_asked_for_usage() -> None:
    assert {path for path, route in EXACT.items() if route.usage_events} == {
        b"/v1/chat/completions",
        b"/v1/completions",
    }


def test_dialects() -> None:
    routes = Routes()
    for path, dialect in [
        ("/v1/messages", Dialect.ANTHROPIC),
        ("/v2/models/m/infer", Dialect.KSERVE),
        ("/pooling", Dialect.OPENAI),
    ]:
        route = routes.find(path.encode())
        assert route is not None
        assert route.dialect is dialect


def test_routes_of_the_config_add_and_replace() -> None:
    routes = Routes([("/v1/custom", Route("/v1/custom")), ("/v1/models", Route("models", mode=Mode.ADMISSION))])
    custom, models = routes.find(b"/v1/custom"), routes.find(b"/v1/models")
    assert custom is not None
    assert custom.gated
    assert models is not None
    assert models.mode is Mode.ADMISSION
    assert Routes().find(b"/v1/custom") is None, "the built-in table is not changed"


@pytest.mark.parametrize(
    ("path", "model"), [("/v2/models/m/infer", "m"), ("/v2/models/a.b-c/versions/2/infer", "a.b-c")]
)
def test_the_model_in_a_path(path: str, model: str) -> None:
    assert kserve_model(path.encode()) == model
