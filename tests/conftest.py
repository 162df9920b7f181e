"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples every time, and no clock: a test that fails here fails everywhere.
settings.register_profile("forebay", derandomize=True, deadline=None, database=None)
settings.load_profile("forebay")
