"""GPUs: an exporter's page as it is served, NVIDIA's library without a driver, and what becomes of both."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import SimpleNamespace
from typing import Any, Self

import pynvml
import pytest

from forebay.engines.gpu import GpuReading, GpuWatch
from forebay.engines.gpu.dcgm import DcgmSource, read_gpus
from forebay.engines.gpu.nvml import NOT_INSTALLED, NvmlSource

LABELS = (
    'gpu="{0}",UUID="GPU-f809e614-a528-4083-acbf-33460000000{0}",pci_bus_id="00000000:0{0}:00.0",device="nvidia{0}",'
    'modelName="NVIDIA H100 NVL",Hostname="gpu-node-1",DCGM_FI_DRIVER_VERSION="550.90.07"'
)
ONE, TWO = LABELS.format(0), LABELS.format(1)
PAGE = f"""\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{ONE}}} 1755
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{{{ONE}}} 71
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{ONE}}} 87
DCGM_FI_DEV_GPU_UTIL{{{TWO}}} 0
# HELP DCGM_FI_DEV_FB_FREE Framebuffer memory free (in MiB).
# TYPE DCGM_FI_DEV_FB_FREE gauge
DCGM_FI_DEV_FB_FREE{{{ONE}}} 3000
DCGM_FI_DEV_FB_FREE{{{TWO}}} 93999
# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{{ONE}}} 96000
DCGM_FI_DEV_FB_USED{{{TWO}}} 1
# HELP DCGM_FI_DEV_FB_RESERVED Framebuffer memory reserved (in MiB).
DCGM_FI_DEV_FB_RESERVED{{{ONE}}} 1000
# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{{{ONE},err_code="0",err_msg="No Error"}} 0
"""
UUID_ONE, UUID_TWO = (f"GPU-f809e614-a528-4083-acbf-33460000000{number}" for number in range(2))


class Told:
    """What a watch told of its engines."""

    def __init__(self) -> None:
        self.last: dict[str, float | None] = {}

    def __call__(self, engine: str, share: float | None) -> None:
        self.last[engine] = share


class Exporter:
    """A server with one page, over real sockets; `page` None: it hangs up without an answer."""

    def __init__(self, page: str | None) -> None:
        self.page = page

    async def __aenter__(self) -> Self:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/metrics"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if self.page is not None:
            status = b"200 OK" if request.startswith(b"GET /metrics ") else b"404 Not Found"
            writer.write(b"HTTP/1.0 " + status + b"\r\nContent-Type: text/plain\r\n\r\n" + self.page.encode())
        writer.close()


def test_the_page_of_an_exporter() -> None:
    assert read_gpus(PAGE) == [
        GpuReading("0", UUID_ONE, 0.97, 0.87),
        GpuReading("1", UUID_TWO, 1 / 94_000, 0.0),
    ]


def test_instances_of_a_partitioned_gpu_count_each_for_itself() -> None:
    instance = ONE + ',GPU_I_PROFILE="1g.10gb",GPU_I_ID="{0}"'
    page = "".join(
        f"DCGM_FI_DEV_FB_USED{{{instance.format(number)}}} {used}\n"
        f"DCGM_FI_DEV_FB_FREE{{{instance.format(number)}}} 50\n"
        for number, used in ((7, 50), (8, 150))
    )
    assert [reading.memory_share for reading in read_gpus(page)] == [0.5, 0.75]


def test_half_a_page_is_no_share() -> None:
    assert read_gpus(f"DCGM_FI_DEV_FB_USED{{{ONE}}} 5\nDCGM_FI_DEV_FB_FREE{{{ONE}}} NaN\n")[0].memory_share is None
    assert read_gpus("<html>") == []


def test_engines_are_told_of_their_fullest_gpu() -> None:
    async def scenario() -> None:
        async with Exporter(PAGE) as exporter:
            told = Told()
            engines = {"a/0": ["0"], "b/0": ["1", UUID_ONE], "c/0": [UUID_TWO], "d/0": ["1", "7"]}
            watch = GpuWatch(DcgmSource([exporter.url]), engines, told)
            await watch.once()
            assert told.last == {"a/0": 0.97, "b/0": 0.97, "c/0": 1 / 94_000, "d/0": None}
            assert set(watch.named()) == {"0", "1", UUID_ONE, UUID_TWO}
            assert watch.degraded == [f"[[engines]] gpus: d/0 names GPU '7', which is not among {UUID_ONE}, {UUID_TWO}"]

    asyncio.run(scenario())


def test_an_exporter_that_is_gone_hangs_up_or_serves_something_else_is_said() -> None:
    async def scenario() -> None:
        async with Exporter(PAGE) as exporter:
            told = Told()
            watch = GpuWatch(DcgmSource([exporter.url]), {"e/0": ["0"]}, told)
            await watch.once()
            assert (told.last, watch.degraded) == ({"e/0": 0.97}, [])
            heard = watch.read_at
            exporter.page = None
            await watch.once()
            assert told.last == {"e/0": None}, "not known: neither full nor free"
            assert "does not answer" in watch.degraded[0]
            assert watch.read_at == heard, "its age goes on"
            exporter.page = "<html>It works</html>"
            await watch.once()
            assert "tells of no GPU" in watch.degraded[0]
            exporter.page = PAGE
            await watch.once()
            assert (told.last, watch.degraded) == ({"e/0": 0.97}, [])
        await watch.once()
        assert told.last == {"e/0": None}
        assert "is it running" in watch.degraded[0]

    asyncio.run(scenario())


def test_an_exporter_that_repeats_itself_is_old() -> None:
    async def scenario() -> None:
        async with Exporter(PAGE) as exporter:
            told = Told()
            watch = GpuWatch(DcgmSource([exporter.url], unchanged_s=0.0), {"e/0": ["0"]}, told)
            await watch.once()
            assert told.last == {"e/0": None}
            assert "has told the same" in watch.degraded[0]
            exporter.page = PAGE.replace("} 71\n", "} 72\n")
            watch = GpuWatch(DcgmSource([exporter.url], unchanged_s=3600.0), {"e/0": ["0"]}, told)
            await watch.once()
            assert told.last == {"e/0": 0.97}

    asyncio.run(scenario())


# ---- NVIDIA's library -----------------------------------------------------------------------------------------


def nvml_has_a_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


@pytest.mark.skipif(nvml_has_a_driver(), reason="this machine has a GPU")
def test_the_real_library_without_a_driver_is_said_and_changes_nothing() -> None:
    async def scenario() -> None:
        told = Told()
        watch = GpuWatch(NvmlSource(), {"e/0": ["0"]}, told)
        for _ in range(2):
            await watch.once()
            assert told.last == {"e/0": None}
            (trouble,) = watch.degraded
            assert trouble.startswith("[gpu] NVIDIA's driver cannot be asked: NVML Shared Library Not Found")
            assert trouble.endswith("(no window is lowered for it)")

    asyncio.run(scenario())


@pytest.mark.skipif(not nvml_has_a_driver(), reason="this machine has no GPU")
def test_the_real_library_reads_real_gpus() -> None:
    async def scenario() -> None:
        source = NvmlSource()
        readings = await source.read()
        assert source.trouble is None
        assert readings
        assert all(reading.uuid.startswith("GPU-") for reading in readings)
        assert all(reading.memory_share is not None and 0 < reading.memory_share < 1 for reading in readings)

    asyncio.run(scenario())


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    async def scenario() -> None:
        source = NvmlSource()
        assert await source.read() == []
        assert source.trouble == NOT_INSTALLED

    asyncio.run(scenario())


class Driver(SimpleNamespace):
    """As much of the library's interface as is used, where there is no GPU to ask: its names, types and errors."""

    NVMLError = pynvml.NVMLError

    def nvmlInit(self) -> None:
        if self.fault is not None:
            raise pynvml.NVMLError(self.fault)

    def nvmlDeviceGetCount(self) -> int:
        self.asked.wait()
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 << 30, used=60 << 30, free=20 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)  # as partitioned GPUs answer

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return b"GPU-0"


def test_readings_go_on_after_a_driver_was_in_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fault=pynvml.NVML_ERROR_DRIVER_NOT_LOADED, asked=threading.Event())
    driver.asked.set()
    monkeypatch.setitem(sys.modules, "pynvml", driver)

    async def scenario() -> None:
        source = NvmlSource()
        assert await source.read() == []
        assert "Driver Not Loaded" in (source.trouble or "")
        driver.fault = None
        assert await source.read() == [GpuReading("0", "GPU-0", 0.75, None)]
        assert source.trouble is None

    asyncio.run(scenario())


def test_a_driver_that_hangs_is_asked_once_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fault=None, asked=threading.Event())
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr("forebay.engines.gpu.nvml.READ_S", 0.01)

    async def scenario() -> None:
        source = NvmlSource()
        for _ in range(3):
            assert await source.read() == []
            assert "has not answered" in (source.trouble or "")
        assert sum(thread.name == "nvml" for thread in threading.enumerate()) == 1
        driver.asked.set()
        monkeypatch.setattr("forebay.engines.gpu.nvml.READ_S", 10.0)
        assert len(await source.read()) == 1

    asyncio.run(scenario())
