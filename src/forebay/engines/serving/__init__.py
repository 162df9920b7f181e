"""A small OpenAI-style HTTP/1.1 server for Forebay's own engines, at protocol level: no task per request."""

from forebay.engines.serving.engine import Job, ServedEngine, Sink
from forebay.engines.serving.server import serve
from forebay.engines.serving.stop import StopMatcher

__all__ = ["Job", "ServedEngine", "Sink", "StopMatcher", "serve"]
