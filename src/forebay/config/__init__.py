"""Configuration: what may be set (schema), how it is read (load), shown (render) and turned into the core's (build)."""

from __future__ import annotations

from forebay.config.load import Loaded, load, loads
from forebay.config.schema import Config

__all__ = ["Config", "Loaded", "load", "loads"]
