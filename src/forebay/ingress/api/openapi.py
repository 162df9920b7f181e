"""The OpenAPI 3.1 document of the admin port, made from the table and the types that decode its requests."""

from __future__ import annotations

from typing import Any

import msgspec

from forebay.ingress.api.table import Endpoint, Error, Table, phrase

IDEMPOTENCY = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "description": "A word of your own, up to 128 characters: a request that is repeated with it is carried out once.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}
ALWAYS = (401, 403)


def document(table: Table, version: str) -> dict[str, Any]:
    """All endpoints of a table, as plain JSON data."""
    kinds = [kind for endpoint in table.endpoints for kind in (endpoint.takes, endpoint.gives) if kind is not None]
    schemas, components = msgspec.json.schema_components([*kinds, Error], ref_template="#/components/schemas/{name}")
    known = list(zip([*kinds, Error], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in table.endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, known)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forebay admin API", "version": version, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "[admin] token."}},
        },
    }


def _operation(endpoint: Endpoint, known: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    good: dict[str, Any] = {"type": "object"} if endpoint.gives is None else _schema(endpoint.gives, known)
    kind = endpoint.kind.decode().partition(";")[0]
    responses = {str(endpoint.status): _response(endpoint.status, kind, {} if kind != "application/json" else good)}
    for status in (*(() if endpoint.open else ALWAYS), *endpoint.errors):
        responses[str(status)] = _response(status, "application/json", _schema(Error, known))
    said: dict[str, Any] = {
        "operationId": _name(endpoint),
        "summary": endpoint.summary,
        "parameters": _parameters(endpoint),
        "responses": responses,
    }
    if endpoint.takes is not None:
        body = {"application/json": {"schema": _schema(endpoint.takes, known)}}
        said["requestBody"] = {"required": True, "content": body}
    if endpoint.open:
        said["security"] = []
    return said


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    _, brace, rest = endpoint.path.partition("{")
    if brace:
        found.append({"name": rest.partition("}")[0], "in": "path", "required": True, "schema": {"type": "string"}})
    if endpoint.query is not None:
        for field in msgspec.structs.fields(endpoint.query):
            schema = msgspec.json.schema(field.type)
            parameter = {"name": field.encode_name, "in": "query", "required": field.required, "schema": schema}
            if text := schema.pop("description", None):
                parameter["description"] = text
            found.append(parameter)
    return [*found, IDEMPOTENCY] if endpoint.repeatable else found


def _response(status: int, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": phrase(status).decode(), "content": {kind: {"schema": schema}}}


def _schema(kind: Any, known: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    return next(schema for each, schema in known if each == kind)


def _name(endpoint: Endpoint) -> str:
    """A name for generated clients: get_keys, post_keys_revoke."""
    words = endpoint.path.replace("/api/v1", "").replace("{", "by_").replace("}", "")
    return f"{endpoint.method.lower()}{words.replace('/', '_').replace('.', '_')}"
