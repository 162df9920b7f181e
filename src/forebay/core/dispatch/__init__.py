"""To which engine, and how much at once? Leases, concurrency limits, balance and health."""
