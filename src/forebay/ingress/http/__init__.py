"""The HTTP/1.1 data plane, at protocol level: no task, future or context per request."""
