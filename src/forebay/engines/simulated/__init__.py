"""A simulated GPU: calibrated step times, continuous batching, a KV limit, and faults on demand."""
