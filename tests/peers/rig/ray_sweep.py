"""Run by an interpreter that has Ray: one sweep in a process and one on Ray, compared byte for byte.

Prints JSON: whether they are the same, how many there were, and the addresses on which Ray's processes listened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forebay.sim.policies import Sizing, config_text
from forebay.sim.scenario import EngineSpec, Scenario, WorkloadSpec
from forebay.sim.sweep import sweep

PROC = Path("/proc")
LISTEN = "0A"


def scenarios() -> list[Scenario]:
    return [
        Scenario(
            name=f"{mode} {seed}",
            policy=mode,
            config=config_text(mode, Sizing(1, 8), slo_ms=100.0),
            engines=EngineSpec(profile="a100-40gb/bert-large/fp16/seq128"),
            workload=WorkloadSpec(rate=1500.0, duration_s=0.5, prompt_tokens="128", output_tokens="1"),
            seed=seed,
            latency_ms=100.0,
        )
        for mode in ("hybrid", "admission", "backpressure")
        for seed in (1, 2)
    ]


def descendants() -> Iterator[Path]:
    """Processes that this one started, directly or not."""
    parents = {}
    for entry in PROC.glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for process in parents:
        ancestor = process
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid():
            yield PROC / str(process)


def listening() -> set[str]:
    """Local addresses, in the kernel's hexadecimal, on which those listen."""
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                addresses[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    found = set()
    for process in descendants():
        try:
            links = [os.readlink(entry) for entry in (process / "fd").iterdir()]
        except OSError:
            continue
        found |= {addresses[link] for link in links if link in addresses}
    return found


def main() -> None:
    heard: set[str] = set()
    local = sweep(scenarios(), processes=1)
    on_ray = sweep(scenarios(), processes=2, backend="ray", progress=lambda *_: heard.update(listening()))
    same = msgspec.json.encode(local) == msgspec.json.encode(on_ray)
    print(json.dumps({"same": same, "runs": len(on_ray), "listening": sorted(heard)}))


if __name__ == "__main__":
    main()
