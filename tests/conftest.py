"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# The same examples every time, and no clock: a test that fails here fails everywhere.
settings.register_profile("forebay", derandomize=True, deadline=None, database=None)
settings.load_profile("forebay")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so the programs that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
