"""Kinds of values that settings have, and what every section of them is."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

DAY_S = 86_400

Count = Annotated[int, Meta(ge=1, le=1 << 53)]
Amount = Annotated[int, Meta(ge=0, le=1 << 53)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Seconds = Annotated[float, Meta(gt=0, le=DAY_S)]
Milliseconds = Annotated[float, Meta(gt=0, le=DAY_S * 1000)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
ModelName = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]

NAME_RULE = "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"
"""Names become metric labels and parts of engine names, so they are short and plain."""


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""
