"""Records of requests in, results out: percentiles, goodput, tables and one self-contained page.

The records may come from a live run or a simulated one; nothing here knows which.
"""
