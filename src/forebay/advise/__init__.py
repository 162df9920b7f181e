"""Which mode, preset and settings suit a service: a table of rules one can read, and the figures behind each advice."""
