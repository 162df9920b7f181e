"""Takes a request apart, strictly, and turns refusals of the store into answers."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from forebay.errors import ForebayError
from forebay.ingress.api.table import Asked, Problem
from forebay.ledger.asking import converted, decoded
from forebay.ledger.database import StoreGoneError
from forebay.ledger.key import ConflictError, InvalidError, NotFoundError

S = TypeVar("S", bound=msgspec.Struct)

QUERY_FIELDS_MOST = 16


def body_of(asked: Asked, kind: type[S]) -> S:
    """The JSON body as this type. Raises Problem."""
    if not asked.body:
        raise Problem(400, "invalid_request", "a JSON body is needed; see /openapi.json")
    if "json" not in asked.content_type.lower():
        raise Problem(415, "unsupported_media_type", "send 'content-type: application/json'")
    try:
        return decoded(asked.body, kind)
    except InvalidError as error:
        raise refused(error) from None


def query_of(asked: Asked, kind: type[S]) -> S:
    """The query as this type; a field that is given twice, or not known, is refused. Raises Problem."""
    try:
        pairs = parse_qsl(asked.query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MOST, errors="strict")
    except ValueError:
        raise Problem(400, "invalid_request", "the query cannot be read") from None
    values = dict(pairs)
    if len(values) != len(pairs):
        raise Problem(400, "invalid_request", "a field of the query is given twice")
    try:
        return converted(values, kind, strict=False)
    except InvalidError as error:
        raise refused(error) from None


def refused(error: ForebayError) -> Problem:
    """The answer to a request that the store or the ledger refused."""
    if isinstance(error, InvalidError):
        return Problem(400, "invalid_request", str(error), error.field)
    if isinstance(error, NotFoundError):
        return Problem(404, "not_found", str(error))
    if isinstance(error, ConflictError):
        return Problem(409, "conflict", str(error))
    if isinstance(error, StoreGoneError):
        return Problem(503, "store_unavailable", str(error), extra=b"retry-after: 1\r\n")
    return Problem(409 if error.exit_code == 2 else 500, "refused", str(error))
