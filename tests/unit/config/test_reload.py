"""What a running gateway may take, and what needs a restart."""

from __future__ import annotations

import pytest

from forebay.config import loads
from forebay.config.reload import needs_restart
from forebay.config.schema import Config

BASE = """
[server]
port = 8080
[slo]
ttft_ms = 1000
[[engines]]
name = "e"
urls = ["http://127.0.0.1:8000"]
concurrency = { kind = "guarded", limit = 64 }
[classes.gold]
priority = 1
[[keys.static]]
id = "k"
secret = "s1"
limits = { requests_per_minute = 5 }
"""


def config(text: str) -> Config:
    return loads(text, environment={}).config


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "ttft_ms = 1000",
            "ttft_ms = 500\n[admission]\nmode = 'admission'\nfair_share = true\n[queue]\ndepth_limit = 3",
        ),
        ("limit = 64", "limit = 8, most = 32, kv_tokens = 1000"),
        ("[classes.gold]", "[estimate]\ncap_output_tokens = 7\n[teams.a.limits]\ntokens_per_day = 5\n[classes.gold]"),
        ("priority = 1", "priority = 9\n[classes.silver]"),
        ('"guarded"', '"fixed"'),
        ("limit = 64", 'limit = 64, shadow = { kind = "aimd", most = 9 }'),
        ("[slo]", '[tuner]\nkind = "stepwise"\nfrozen = true\nshadow = "derived"\n[slo]'),
        ("[slo]", "[admission.shadow]\nwait_budget_ms = 9\nfair_share = true\nretry = { headroom = 0.5 }\n[slo]"),
        ("[slo]", "[admission]\ntail_z = 2\nretry = { headroom = 0.5 }\n[queue.shadow]\ndepth_limit = 9\n[slo]"),
        ("[classes.gold]", 'shadow = { balance = "p2c" }\n[classes.gold]\nshadow = { hold_back = 0.1 }'),
        ("[classes.gold]", 'balance = "affinity"\nprefix_bytes = 512\nslow_start_s = 0\n[classes.gold]'),
        ("[slo]", "[gpu]\nmemory_high = 0.9\n[slo]"),
        ("[slo]", "[estimate]\noutput_tokens_default = 9\ncached_weight = 0.5\ntokenizers = { '*' = 'o200k' }\n[slo]"),
        ('"s1"', '"s2"'),
        ("requests_per_minute = 5 }", 'requests_per_minute = 9 }\n[[keys.static]]\nid = "l"\nsecret = "s3"'),
        ("[slo]", f'[admission]\nretry_tickets = true\nretry_ticket_secret = "{"s" * 32}"\n[slo]'),
        ("[slo]", "[responses]\noverload_status = 529\n[slo]"),
    ],
)
def test_policy_may_change(old: str, new: str) -> None:
    assert needs_restart(config(BASE), config(BASE.replace(old, new))) == []


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("port = 8080", "port = 8090", "[server] port"),
        ("8000", "8001", "[engines] 0.urls.0"),
        ("[slo]", '[telemetry]\nlog_level = "debug"\n[slo]', "[telemetry] log_level"),
        ("[slo]", '[gpu]\nsource = "nvml"\n[slo]', "[gpu] source"),
        ("[classes.gold]", "metrics_port = 8002\n[classes.gold]", "[engines] 0.metrics_port"),
    ],
)
def test_what_is_built_in_needs_a_restart(old: str, new: str, named: str) -> None:
    assert needs_restart(config(BASE), config(BASE.replace(old, new))) == [named]


def test_another_engine_needs_a_restart() -> None:
    more = BASE + '[[engines]]\nname = "f"\nurls = ["http://127.0.0.1:8002"]\nmodels = ["x"]\n'
    assert needs_restart(config(BASE), config(more)) == ["[engines]"]
