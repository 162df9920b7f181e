"""Open-loop load: intended send times fixed before the run, latency measured from them, flat records out."""
