"""The rig: a scripted fake backend, a raw-socket client and a gateway process, with waiting by condition."""

from . import scripts
from .backend import Call, FakeBackend, Script
from .client import Answer, EndedShortError, Head, RawClient, ask, chat, marker
from .crowd import Crowd
from .gateway import GatewayProcess, config_for, key, serving
from .waiting import eventually, in_parallel

__all__ = [
    "Answer",
    "Call",
    "Crowd",
    "EndedShortError",
    "FakeBackend",
    "GatewayProcess",
    "Head",
    "RawClient",
    "Script",
    "ask",
    "chat",
    "config_for",
    "eventually",
    "in_parallel",
    "key",
    "marker",
    "scripts",
    "serving",
]
