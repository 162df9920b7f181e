"""Forebay: overload control for GPU inference.

It admits, queues, batches, or refuses early with an honest time to come back.
"""
