"""Traces: what ships is what its index says, others' logs are understood, broken ones are told by line and field."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.workload.arrival import NS_PER_S, Arrival
from forebay.workload.trace import find_trace, load_trace, shipped, shipped_folder, sizes_of
from forebay.workload.tracefile import NAMES

OURS = (
    "arrival_s,prompt_tokens,output_tokens,key_id,session_id,reusable_prefix_tokens\n"
    "5.0,10,3,a,s1,4\n2.5,20,0,,,\n2.5,21,1,b,,\n"
)


def written(folder: Path, text: str | bytes, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def dispersion(arrivals: list[Arrival], bin_s: float, duration_s: float) -> float:
    counts = [0] * int(duration_s / bin_s)
    for arrival in arrivals:
        index = int(arrival.at_ns / NS_PER_S / bin_s)
        if index < len(counts):
            counts[index] += 1
    mean = fmean(counts)
    return fmean((count - mean) ** 2 for count in counts) / mean


# ---- what ships ----------------------------------------------------------------------------------------------------


def test_every_shipped_file_is_described_and_its_licence_stands_beside_it() -> None:
    present = {path.name for path in shipped_folder().glob("*.csv*")}
    tables = {"servegen_clients.csv", "servegen_rates_10min.csv.gz"}
    assert {f"{name}.csv.gz" for name in shipped()} | tables == present
    readme = (shipped_folder() / "README.md").read_text()
    for name, trace in shipped().items():
        assert f"`{name}`" in readme
        assert list(shipped_folder().glob(f"*{trace.licence}*.txt")), trace.licence


@pytest.mark.parametrize("name", [name for name in shipped() if "24h" not in name])
def test_a_shipped_trace_is_what_the_index_says(name: str) -> None:
    info = shipped()[name]
    if info.duration_s is None:
        sizes = sizes_of(name)
        assert len(sizes) == info.requests
        with pytest.raises(UsageError, match="no times: give a rate"):
            load_trace(name)
        return
    arrivals = load_trace(name)
    assert len(arrivals) == info.requests
    assert arrivals == sorted(arrivals, key=lambda arrival: arrival.at_ns)
    assert arrivals[0].at_ns == 0
    assert arrivals[-1].at_ns / NS_PER_S == pytest.approx(info.duration_s, abs=0.002)
    assert fmean(arrival.prompt_tokens or 0 for arrival in arrivals) == pytest.approx(info.prompt_tokens_mean, rel=1e-3)
    assert fmean(arrival.output_tokens or 0 for arrival in arrivals) == pytest.approx(info.output_tokens_mean, rel=1e-3)
    assert any(arrival.key for arrival in arrivals) == info.keys
    assert any(arrival.session for arrival in arrivals) == info.sessions
    if info.sessions:
        assert all(arrival.prefix_tokens <= (arrival.prompt_tokens or 0) for arrival in arrivals)


def test_jitter_takes_an_artificial_grid_away() -> None:
    name = "mooncake_fast25_conversation"
    assert dispersion(load_trace(name), 1.0, 3500.0) == pytest.approx(7.9, rel=0.05)
    spread = load_trace(name, jitter_s=shipped()[name].grid_s, seed=5)
    assert dispersion(spread, 1.0, 3500.0) < 2.0
    assert len(spread) == shipped()[name].requests
    assert spread == load_trace(name, jitter_s=3.0, seed=5) != load_trace(name, jitter_s=3.0, seed=6)


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(UsageError, match="is azure_llm_2023_conv meant"):
        find_trace("azure_llm_2023_con")
    with pytest.raises(UsageError, match=r"no such file.*shipped are azure_llm_2023_code, "):
        find_trace("/nowhere/x.csv")


# ---- what is made of a trace ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_sorted_shifted_and_sped_up(tmp_path: Path, packed: bool) -> None:
    path = written(tmp_path, gzip.compress(OURS.encode()) if packed else OURS, "log")
    assert load_trace(path, speed=2.0) == [
        Arrival(0, "trace", 20, 1),
        Arrival(0, "trace", 21, 1, "b"),
        Arrival(1_250_000_000, "trace", 10, 3, "a", "s1", 4),
    ]
    assert len(load_trace(path, duration_s=1.0)) == 2
    assert load_trace(path, start_s=2.0) == [Arrival(500_000_000, "trace", 10, 3, "a", "s1", 4)]


def test_thinning_keeps_a_share_of_the_requests_or_of_the_keys(tmp_path: Path) -> None:
    lines = [f"{n / 10},{n % 7 + 1},2,k{n % 50}" for n in range(5000)]
    path = written(tmp_path, "arrival_s,prompt_tokens,output_tokens,key\n" + "\n".join(lines))
    whole = load_trace(path)
    some = load_trace(path, thin=0.3, seed=1)
    assert len(some) == pytest.approx(1500, rel=0.08)
    assert set(some) <= set(whole)
    assert some == load_trace(path, thin=0.3, seed=1) != load_trace(path, thin=0.3, seed=2)
    by_key = load_trace(path, thin=0.4, thin_by="key", seed=1)
    kept = {arrival.key for arrival in by_key}
    assert 8 <= len(kept) <= 32
    assert by_key == [arrival for arrival in whole if arrival.key in kept]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"speed": 0.0}, "0 times as fast"),
        ({"speed": float("nan")}, "nan times as fast"),
        ({"speed": 1e-300}, "1e-300 times as fast"),
        ({"jitter_s": 1e300}, r"a jitter of 1e\+300 s"),
        ({"thin": 0.0}, "keeps a share"),
        ({"thin": 1.5}, "keeps a share"),
        ({"start_s": -1.0}, "a start of -1 s"),
        ({"duration_s": 0.0}, "a duration of 0 s"),
        ({"jitter_s": float("inf")}, "a jitter of inf s"),
        ({"start_s": 99.0}, "no request is left of 3: it spans 2.5 s"),
        ({"thin": 1e-9}, "leaves no request"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, how: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_trace(written(tmp_path, OURS), **how)  # type: ignore[arg-type]


# ---- logs of others ------------------------------------------------------------------------------------------------

LOGS = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,396,109\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,374,44,418,x\n6.5,GPT-4,396,109,505,x\n",
    "mooncake": '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [1]}\n'
    '{"timestamp": 1500, "input_length": 396, "output_length": 109, "hash_ids": [1, 2]}\n',
    "openai": '\n{"created": 1700000000, "usage": {"prompt_tokens": 374, "completion_tokens": 44}}\n\n'
    '{"created": 1700000001.5, "usage": {"completion_tokens": 109, "prompt_tokens": 396}}',
    "spreadsheet": "\ufefftime_ms;input_tokens;output_tokens\r\n1000;374;44\r\n2500;396.0;109\r\n",
    "epoch ms": "ts\tprompt_len\toutput_len\n1700000000000\t374\t44\n1700000001500\t396\t109\n",
    "quoted": 'note,arrival_s,prompt_tokens,output_tokens\n"two\nlines",1,374,44\n"a ""b"", c",2.5,396,1.09e2\n',
    "zones": "time,prompt_tokens,output_tokens\n2026-03-29T01:59:59Z,374,44\n2026-03-29T04:00:00.5+02:00,396,109\n",
}


@pytest.mark.parametrize("text", LOGS.values(), ids=LOGS)
def test_the_common_logs_are_understood(tmp_path: Path, text: str) -> None:
    arrivals = load_trace(written(tmp_path, text))
    assert [(a.prompt_tokens, a.output_tokens) for a in arrivals] == [(374, 44), (396, 109)]
    assert [a.at_ns for a in arrivals] == pytest.approx([0, 1_500_000_000], abs=300)


HEAD = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"log.csv, line 1: no column `arrival_s`, nor one of arrived_at, .* \(found: a, b\)"),
        ("time,prompt_token,output_tokens\n", "line 1: no column `prompt_tokens`: is `prompt_token` meant"),
        ("1.0,20,30\n2.0,20,30\n", "line 1: the file begins with figures: put a line of names before it"),
        (HEAD + "soon,1,1\n", "log.csv, line 2, field `arrival_s`: the time 'soon' is neither seconds nor an ISO date"),
        (HEAD + "1,1,1\n\n2,abc,1\n", "line 4, field `prompt_tokens`: 'abc' is not a whole number"),
        (HEAD + "1,1,2.5\n", "line 2, field `output_tokens`: '2.5' is not a whole number"),
        (HEAD + "1,nan,1\n", "field `prompt_tokens`: 'nan' is not a whole number"),
        (HEAD + "1,inf,1\n", "field `prompt_tokens`: 'inf' is not a whole number"),
        (HEAD + "nan,1,1\n", "field `arrival_s`: 'nan' is not a time"),
        (HEAD + "1,1,1\n,1,1\n", "line 3, field `arrival_s`: is empty"),
        (HEAD + "1,,1\n", "line 2, field `prompt_tokens`: is empty"),
        (HEAD + "1,-4,1\n", "field `prompt_tokens`: '-4' is no number of tokens"),
        (HEAD + "1,4,10000001\n", "field `output_tokens`: '10000001' is no number of tokens: 0 to 10000000"),
        (HEAD + "1," + "9" * 5000 + ",1\n", "field `prompt_tokens`: '999.*… is not a whole number"),
        (HEAD + "1,1\n", "line 2: 2 fields where the header names 3"),
        (HEAD + "1,1,1,1\n", "line 2: 4 fields where the header names 3"),
        (HEAD + "1,1,1\n5e9,1,1\n", "line 3 is 57870 days after line 2: are the times in one unit"),
        (HEAD, "holds no request"),
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        (HEAD.encode() + b"1,1,1\n2,\xff,1\n", "line 3: byte 0xff is not UTF-8"),
        ((HEAD + "1,1,1\n").encode("utf-16"), "line 1: this is UTF-16"),
        (b"PAR1....", "this is Parquet"),
        (b"PK\x03\x04....", "this is a zip archive"),
        ('[{"time": 1}]', "one JSON object per line"),
        (
            '{"time": 1, "prompt_tokens": 1, "output_tokens": 1}\n{"time": 2, "prompt_',
            "line 2: Input data was truncated",
        ),
        ('{"time": 1, "prompt_tokens": 1, "output_tokens": 1}\n7\n', "line 2: this is not a JSON object"),
        (
            '{"time": 1, "prompt_tokens": 1, "output_tokens": 1}\n{"time": 2}\n',
            "line 2, field `prompt_tokens`: is empty",
        ),
        ('{"time": 1, "prompt_tokens": 1.5, "output_tokens": 1}\n', "field `prompt_tokens`: 1.5 is not a whole number"),
        ('{"time": 1, "prompt_tokens": true, "output_tokens": 1}\n', "field `prompt_tokens`: True is no number"),
        ('{"time": [1], "prompt_tokens": [1], "output_tokens": 1}\n', r"field `arrival_s`|field `time`"),
        ("{" * 4 + "\n", "line 1:"),
    ],
)
def test_a_broken_trace_is_told_by_line_and_field(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_trace(written(tmp_path, text))


def test_damaged_gzip_data_is_told(tmp_path: Path) -> None:
    whole = gzip.compress((HEAD + "".join(f"{n},{n * 7919 % 1009},1\n" for n in range(3000))).encode())
    with pytest.raises(UsageError, match=r"after line \d+: the gzip data breaks off"):
        load_trace(written(tmp_path, whole[: len(whole) // 2], "cut.csv.gz"))
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    with pytest.raises(UsageError, match=r"damaged|line \d+"):
        load_trace(written(tmp_path, bytes(damaged), "bad.csv.gz"))


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read as a trace: Is a directory"):
        load_trace(tmp_path)


def test_csv_and_json_lines_say_the_same(tmp_path: Path) -> None:
    name = "azure_llm_2023_code"
    with gzip.open(shipped()[name].path, "rt") as file:
        lines = [json.dumps(row) for row in csv.DictReader(file)]
    assert load_trace(written(tmp_path, "\n".join(lines), "log.jsonl")) == load_trace(name)


# ---- whatever the bytes --------------------------------------------------------------------------------------------

CELL = st.one_of(
    st.integers(-5, 10**12).map(str),
    st.floats().map(str),
    st.text(max_size=6),
    st.sampled_from(
        ["", "1", "2026-01-01", "2026-01-01T25:00", '"', '"a,b"', "1e999", "\x00", "0x10", "١٢", "9" * 400]
    ),
)
HEADER_CELL = st.one_of(st.sampled_from([name for names in NAMES.values() for name in names]), st.text(max_size=5))
CSV_LIKE = st.builds(
    lambda header, rows: "\n".join([",".join(header), *(",".join(row) for row in rows)]).encode("utf-8", "replace"),
    st.one_of(st.just(["time", "prompt_tokens", "output_tokens"]), st.lists(HEADER_CELL, max_size=5)),
    st.lists(st.lists(CELL, max_size=4), max_size=5),
)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just("2026-01-01")),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=3,
)
JSON_LIKE = st.lists(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("time", "prompt_tokens", "output_tokens", "key", "usage", "cached_tokens"), VALUE),
    ),
    max_size=4,
).map(lambda rows: "\n".join(json.dumps(row) for row in rows).encode())


@settings(max_examples=80)
@given(data=st.one_of(CSV_LIKE, JSON_LIKE, st.binary(max_size=60)), packed=st.booleans())
def test_no_file_ends_in_anything_but_arrivals_or_a_message(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    message, arrivals = "", []
    try:
        arrivals = load_trace(path)
    except UsageError as error:
        message = str(error)
    assert arrivals or message.startswith(str(path))
    assert [arrival.at_ns for arrival in arrivals] == sorted(arrival.at_ns for arrival in arrivals)
    assert all((arrival.prompt_tokens or 0) >= 1 <= (arrival.output_tokens or 0) for arrival in arrivals)
