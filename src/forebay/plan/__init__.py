"""Before you deploy: the cheapest GPUs and the configuration that keep an objective under your traffic.

Reading guide: `planner.make_plan` is the whole procedure; `search` finds a number of engines; `trials` runs and
remembers simulations; `traffic`, `candidates` and `prices` are what goes in, `result` what comes out.
"""
