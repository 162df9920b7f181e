"""The GPUs that engines run on: how full their memory is, and how busy they are. Read from outside the engines."""

from forebay.engines.gpu.reading import GpuReading, GpuSource
from forebay.engines.gpu.watch import GpuWatch

__all__ = ["GpuReading", "GpuSource", "GpuWatch"]
