"""May this key spend this much now? Requests, tokens and concurrency, each a limit of its own."""
