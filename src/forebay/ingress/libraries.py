"""What client libraries do with a time to come back, by the name that they give themselves."""

from __future__ import annotations

import re

from forebay.core.instant import SECOND
from forebay.core.model import OBEYED_NS

PATIENT_NS = 120 * SECOND
PATIENT_FROM = (3, 57)
"""The release of `openai` for Python whose source was read: it keeps to 120 s, and gives up beyond."""

_OPENAI = re.compile(rb"(?:Async)?OpenAI/Python (\d{1,4})\.(\d{1,4})\.")


def obeys_ns(user_agent: bytes) -> int:
    """The longest time to come back that a library keeps to; a name that is not known keeps to what all do."""
    known = _OPENAI.match(user_agent)
    if known is not None and (int(known[1]), int(known[2])) >= PATIENT_FROM:
        return PATIENT_NS
    return OBEYED_NS
