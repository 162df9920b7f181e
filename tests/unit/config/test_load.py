"""Reading a configuration: precedence, presets, environment, flags, secrets, and the messages of every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.config import Loaded, load, loads
from forebay.config.schema import Config, wait_budget_ms
from forebay.core.model import Mode
from forebay.errors import ConfigError

CONTRACT_SAMPLE = """\
[server]
host = "127.0.0.1"
port = 8080
[admin]
port = 8081
token = "env:FOREBAY_ADMIN_TOKEN"       # optional on loopback
[slo]                                   # the objective; the rest derives from it
ttft_ms = 1000
tpot_ms = 50
[admission]
mode = "hybrid"                         # backpressure | admission | hybrid
wait_budget_ms = 50                     # optional: else min(50, 0.1 x ttft_ms), raised when below one slot
[queue]
depth_limit = 256                       # optional: else derived and tuned
deadline_s = 30                         # longest a request is held in backpressure mode
[[engines]]
name = "llama"
kind = "openai"                         # openai | kserve | function | embedded | simulated
urls = ["http://127.0.0.1:8000"]
models = ["*"]
concurrency = { kind = "fixed", limit = 64 }   # default: the tuned window
[classes.interactive]
priority = 1
[keys]
anonymous = false
store = "sqlite:///forebay.db"          # or postgresql://…; static keys need none
[[keys.static]]
id = "team-a"
secret = "sk-team-a"
class = "interactive"
limits = { requests_per_minute = 600, tokens_per_minute = 100000, tokens_per_second = 5000, burst_s = 2.0, concurrency = 8 }
"""  # noqa: E501


def read(text: str, environment: dict[str, str] | None = None, **flags: object) -> Loaded:
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return loads(text, name="f.toml", environment=environment or {}, flags=dotted)


def faults(text: str, environment: dict[str, str] | None = None, **flags: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, environment, **flags)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_nothing_given_is_the_defaults() -> None:
    assert read("") == Loaded(Config(), ())


def test_the_public_sample_stays_valid() -> None:
    config, warnings = read(CONTRACT_SAMPLE)
    assert config.engines[0].concurrency.limit == 64
    assert config.keys.static[0].class_ == "interactive"
    assert config.keys.static[0].limits.tokens_per_second == 5000
    assert config.admin.token is None
    assert config.keys.store == "sqlite:///forebay.db"
    assert len(warnings) == 1
    assert warnings[0].startswith("f.toml:6: [admin] token: environment variable 'FOREBAY_ADMIN_TOKEN' is not set")


@pytest.mark.parametrize("section", ["grpc", "shared"])
def test_sections_of_later_versions_are_accepted_aloud(section: str) -> None:
    (warning,) = read(f"\n[{section}]\nanything = 1").warnings
    assert warning.startswith(f"f.toml:2: [{section}]: is accepted, but has no effect in this version")


def test_flags_over_environment_over_file_over_preset_over_defaults() -> None:
    text = '[admission]\npreset = "offline"\n[queue]\nheld_limit = 7\n[server]\nport = 1000\nhost = "127.0.0.2"'
    environment = {"FOREBAY_SERVER__PORT": "2000", "FOREBAY_SERVER__HOST": "127.0.0.3", "FOREBAY_OTHER": "ignored"}
    config = read(text, environment, server__port=3000, server__host=None).config
    assert (config.server.port, config.server.host) == (3000, "127.0.0.3")
    assert config.queue.held_limit == 7
    assert config.queue.deadline_s == 3600
    assert config.admission.mode is Mode.BACKPRESSURE
    assert read(text, {"FOREBAY_QUEUE__DEADLINE_S": "5"}).config.queue.deadline_s == 5


@pytest.mark.parametrize(
    ("preset", "mode"),
    [("internal", "backpressure"), ("public-api", "admission"), ("b2b", "admission"), ("offline", "backpressure"),
     ("realtime", "hybrid")],
)  # fmt: skip
def test_presets_set_the_mode_and_the_file_may_set_another(preset: str, mode: str) -> None:
    assert read("", admission__preset=preset).config.admission.mode == mode
    assert read('[admission]\nmode = "hybrid"', admission__preset=preset).config.admission.mode is Mode.HYBRID


def test_the_wait_budget_derives_from_the_objective() -> None:
    assert wait_budget_ms(read("").config) == 50
    assert wait_budget_ms(read("[slo]\nttft_ms = 200").config) == 20
    assert wait_budget_ms(read("[admission]\nwait_budget_ms = 80").config) == 80


def test_environment_values_take_the_type_of_their_field() -> None:
    config = read(
        '[classes.back-office]\n[[engines]]\nname = "a"\nurls = ["http://h"]',
        {
            "FOREBAY_KEYS__ANONYMOUS": "false",
            "FOREBAY_SLO__TTFT_MS": "250.5",
            "FOREBAY_ADMIN__TOKEN": "12345",
            "FOREBAY_ENGINES__0__NAME": "007",
            "FOREBAY_ENGINES__0__URLS": '["http://x", "http://y"]',
            "FOREBAY_ROUTES": '[{path = "/v1/custom"}]',
            "FOREBAY_CLASSES__BACK_OFFICE__PRIORITY": "-3",
            "FOREBAY_KEYS__STATIC": '[{id = "k", secret = "s", class = "back-office"}]',
            "FOREBAY_RESPONSES__OVERLOAD_STATUS": "429",
        },
    ).config
    assert config.keys.anonymous is False
    assert config.slo.ttft_ms == 250.5
    assert config.admin.token is not None
    assert config.admin.token.value == "12345"
    assert config.engines[0].name == "007"
    assert config.engines[0].urls == ("http://x", "http://y")
    assert config.routes[0].path == "/v1/custom"
    assert config.classes["back-office"].priority == -3
    assert config.keys.static[0].id == "k"
    assert config.responses.overload_status == 429


def test_every_problem_is_told_at_once_each_with_its_line() -> None:
    text = """\
[server]
port = 99999
prot = 3
max_size = 4

[nope]
[[engines]]
name = "a b"
urls = ["http://x", 3]
[[engines]]
kind = "opnai"
concurrency = { limit = 0, knd = 3 }
[admission]
mode = "hybird"
[[keys.static]]
id = "x"
secret = "env:NOPE"
limits = { concurrency = -1, burst_s = nan }
"""
    told = faults(text)
    expected = [
        'f.toml:2: [server] port: is 99999, must be a whole number <= 65535; change it',
        "f.toml:3: [server] prot: unknown field; did you mean 'port'?",
        "f.toml:4: [server] max_size: unknown field; it belongs in [batching] or [engines.batching]",
        "f.toml:6: [nope]: unknown section; use one of: server, admin,",
        'f.toml:8: [[engines]] name: is "a b", which is not allowed; use 1 to 64 letters',
        "f.toml:9: [[engines]] urls[1]: is 3, must be a string in quotes; change it",
        "f.toml:10: [[engines]] name: is missing; add it",
        'f.toml:11: [[engines]] kind: is "opnai", must be one of openai,',
        "f.toml:12: [[engines]] concurrency.knd: unknown field; did you mean 'kind'?",
        "f.toml:12: [[engines]] concurrency.limit: is 0, must be a whole number >= 1; change it",
        'f.toml:14: [admission] mode: is "hybird", must be one of backpressure, admission, hybrid; did you mean',
        "f.toml:17: [[keys.static]] secret: environment variable 'NOPE' is not set; export it",
        "f.toml:18: [[keys.static]] limits.concurrency: is -1, must be a whole number >= 0; change it",
        "f.toml:18: [[keys.static]] limits.burst_s: is nan, must be a finite number; give a number",
    ]  # fmt: skip
    assert len(told) == len(expected)
    for line in expected:
        assert any(message.startswith(line) for message in told), line


def test_a_value_from_the_environment_or_a_flag_is_named_by_it() -> None:
    told = faults("[server]\nport = 1", {"FOREBAY_QUEUE__DEPTH_LIMIT": "many"}, admin__port=70_000)
    assert told == [
        "--admin-port: [admin] port: is 70000, must be a whole number <= 65535; change it",
        'environment FOREBAY_QUEUE__DEPTH_LIMIT: [queue] depth_limit: is "many", must be a whole number; change it',
    ]
    (line,) = faults("", {"FOREBAY_ENGINES__2__NAME": "x"})
    assert line.startswith("environment FOREBAY_ENGINES__2__NAME: [[engines]] name: names item 2 of a list of 0; ")
    (line,) = faults("", {"FOREBAY_ENGINES__FIRST__NAME": "x"})
    assert line.startswith(
        "environment FOREBAY_ENGINES__FIRST__NAME: [[engines]]: is a table, must be a list of tables"
    )
    (line,) = faults("", {"FOREBAY_SERVER__HSOT": "x"})
    assert line == "environment FOREBAY_SERVER__HSOT: [server] hsot: unknown field; did you mean 'host'?"


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("[server]\nport = \n", "f.toml:2: is not valid TOML at column 8: Invalid value"),
        ("[server\n", "f.toml:1: is not valid TOML at column 8: "),
        ('a = "x', "f.toml:1: is not valid TOML at the end of the file: Unterminated string"),
        ("[server]\nport = 1\nport = 2", "f.toml:3: is not valid TOML at"),
        ("port = 80", "f.toml:1: [port]: unknown section; it belongs in [server]"),
        ("server = 3", "f.toml:1: [server]: is 3, must be a table"),
        ("engines = {}", "f.toml:1: [[engines]]: is a table, must be a list of tables"),
        ("classes = 3", "f.toml:1: [classes]: is 3, must be a table; write [classes.NAME]"),
        ('[classes."a b"]', 'f.toml:1: [classes.a b]: is "a b", which is not allowed'),
        ("[keys]\nanonymous = 1", "f.toml:2: [keys] anonymous: is 1, must be true or false"),
        ("[admin]\ntoken = 5", "f.toml:2: [admin] token: must be a string in quotes"),
        (
            '[admission]\nretry_ticket_secret = "short"',
            "f.toml:2: [admission] retry_ticket_secret: has 5 characters, must have 32 or more; make one with: openssl",
        ),
        ('[admin]\ntoken = "a b"', "f.toml:2: [admin] token: the secret has spaces"),
        ('[admin]\ntoken = "file:/does/not/exist"', "f.toml:2: [admin] token: file '/does/not/exist' cannot be read"),
        ('[admin]\nhost = "0.0.0.0"', 'f.toml:2: [admin] host: is "0.0.0.0", which others can reach, and no token'),
        ('[admin]\nhost = "0.0.0.0"\ntoken = "env:T"', "f.toml:3: [admin] token: environment variable 'T' is not set"),
        ("[admin]\nport = 8080", "f.toml:2: [admin] port: is 8080, the data port's own"),
        ('[tls]\ncertificate = "pyproject.toml"', "f.toml:1: [tls] key: is missing"),
        ('[tls]\ncertificate = "/none"\nkey = "/none"', 'f.toml:2: [tls] certificate: "/none" cannot be read (No such'),
        ('[tls]\ncertificate = "\\u0000"\nkey = "k"', 'f.toml:2: [tls] certificate: "\\x00" cannot be read (embedded'),
        ("[queue]\ndepth_limit = 99999999999999999999", "f.toml:2: [queue] depth_limit: is 99999999999999999999, must"),
        ("[server]\nmax_buffered_body_bytes = 5", "f.toml:2: [server] max_buffered_body_bytes: is 5, less than"),
        ("[queue]\ndeadline_s = 0.01", "f.toml: [admission] wait_budget_ms: is 50, longer than queue.deadline_s"),
        ('[batching]\nkind = "dynamic"\nlinger_ms = 60', "f.toml:3: [batching] linger_ms: is 60, not less than the"),
        ('[[routes]]\npath = "x"', 'f.toml:2: [[routes]] path: is "x", which is not allowed; use a path'),
        ('[[routes]]\npath = "/x"\nengine = "e"', 'f.toml:3: [[routes]] engine: "e" is no engine'),
        ('[[keys.static]]\nid = "a"\nsecret = "s"\nclass = "b"', 'f.toml:4: [[keys.static]] class: "b" is no class'),
        ('[[keys.static]]\nid = "a"\nsecret = "s"\nteam = "b"', 'f.toml:4: [[keys.static]] team: "b" is no team'),
        ("[limits.all]\ntokens_per_minute = -1", "f.toml:2: [limits.all] tokens_per_minute"),
        ("[limits.all]\ntokens_per_day = 9\ntokens_per_month = 8", "f.toml:2: [limits.all] tokens_per_day"),
        ("[teams.a.limits]\ntokens_per_second = 3\nburst_s = 0.1", "f.toml:3: [teams] a.limits.burst_s: allows less"),
        ("[teams.a.limits.models.m.models.n]", "f.toml: [teams] a.limits.models.m.models: unknown field"),
        ('[[keys.static]]\nid = "anonymous"\nsecret = "s"', 'f.toml:2: [[keys.static]] id: "anonymous" is reserved'),
        (
            '[[keys.static]]\nid = "a"\nsecret = "s"\nroutes = ["chta"]',
            'f.toml:4: [[keys.static]] routes[0]: "chta"',
        ),
        ('[[routes]]\npath = "/x*"', 'f.toml:2: [[routes]] path: is "/x*", which is not allowed'),
        ("[limits.default]\ntokens_per_second = 1\nburst_s = 0.5", "f.toml:3: [limits.default] burst_s: allows less"),
        ('[gpu]\nsource = "dcgm"', "f.toml:1: [gpu] urls: is empty"),
        ('[gpu]\nurls = ["localhost:9400"]', 'f.toml:2: [gpu] urls[0]: "localhost:9400" does not begin with http'),
    ],
)
def test_single_mistakes(text: str, start: str) -> None:
    (line,) = faults(text)
    assert line.startswith(start)
    assert "; " in line


@pytest.mark.parametrize(
    ("engine", "start"),
    [
        ("urls = []", "f.toml:3: [[engines]] urls: is empty"),
        ('urls = ["127.0.0.1:8000"]', 'f.toml:3: [[engines]] urls[0]: "127.0.0.1:8000" does not begin with http'),
        ('urls = ["http://h:99999"]', 'f.toml:3: [[engines]] urls[0]: "http://h:99999" has a host or port that'),
        ('urls = ["http://"]', 'f.toml:3: [[engines]] urls[0]: "http://" names no host'),
        ('urls = ["http://u:p@h"]', "f.toml:3: [[engines]] urls[0]: a URL holds a credential"),
        ('urls = ["http://h/v1/"]', 'f.toml:3: [[engines]] urls[0]: "http://h/v1/" ends in /v1'),
        ('urls = ["http://h\\r\\nx"]', 'f.toml:3: [[engines]] urls[0]: "http://h\\r\\nx" has spaces'),
        (
            'urls = ["http://h"]\ntls = { ca = "/none" }',
            'f.toml:4: [[engines]] tls.ca: "/none" cannot be read (No such',
        ),
        ('urls = ["http://h", "http://h/"]', 'f.toml:3: [[engines]] urls[1]: "http://h/" is given twice'),
        ('urls = ["http://h"]\ngpus = [["0"], ["1"]]', "f.toml:4: [[engines]] gpus: names the GPUs of 2 URLs"),
        ('kind = "kserve"', 'f.toml:3: [[engines]] kind: "kserve" is not in this version'),
        ('urls = ["http://h"]\nmodels = []', "f.toml:4: [[engines]] models: is a list, must be a list of length >= 1"),
    ],
)
def test_mistakes_in_an_engine(engine: str, start: str) -> None:
    line = faults(f'[[engines]]\nname = "e"\n{engine}')[0]
    assert line.startswith(start)


def test_names_ids_and_secrets_are_unique() -> None:
    text = """\
[[engines]]
name = "e"
urls = ["http://a"]
[[engines]]
name = "e"
urls = ["http://b"]
models = ["m"]
[[keys.static]]
id = "a"
secret = "s"
[[keys.static]]
id = "a"
secret = "t"
[[keys.static]]
id = "b"
secret = "s"
"""
    assert faults(text) == [
        'f.toml:5: [[engines]] name: "e" is given twice; engine names must be unique',
        'f.toml:12: [[keys.static]] id: "a" is given twice; key ids must be unique',
        "f.toml:16: [[keys.static]] secret: is the same as that of 'a'; give each key a secret of its own",
    ]


def test_what_works_but_hardly_as_meant_is_a_warning() -> None:
    engine = '[[engines]]\nname = "{}"\nurls = ["http://h"]\n'
    warnings = read(engine.format("a") + engine.format("b") + "[keys]\nanonymous = false").warnings
    assert warnings[0].startswith("f.toml:4: [[engines]] models: engine 'b' gets no work")
    assert warnings[1].startswith("f.toml:8: [keys] anonymous: nobody may call")


def test_gpus_that_no_engine_names_are_a_warning() -> None:
    _, warnings = read('[gpu]\nsource = "nvml"\n[[engines]]\nname = "a"\nurls = ["http://a"]\n')
    assert warnings == ("f.toml:2: [gpu] source: changes nothing: no engine names its GPUs; give [[engines]] gpus",)


def test_secrets_come_from_files_and_variables_and_are_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    text = f'[admin]\nhost = "0.0.0.0"\ntoken = "file:{tmp_path}/token"\n[[keys.static]]\nid = "k"\nsecret = "env:K"'
    config = read(text, {"K": "from-env"}).config
    assert config.admin.token is not None
    assert config.admin.token.value == "from-a-file"
    assert config.keys.static[0].secret.value == "from-env"
    assert "from-" not in repr(config)
    (line,) = faults(text, {"K": "secret value"})
    assert "secret value" not in line


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file or directory\); check path"):
        load(missing, environment={})
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, environment={})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"# ok\nx = '\xff'\n")
    with pytest.raises(ConfigError, match=r"binary\.toml:2: is not UTF-8 text"):
        load(binary, environment={})
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf[server]\r\nport = 5\r\n")
    assert load(marked, environment={}).config.server.port == 5


def test_keys_know_the_routes_of_the_data_port() -> None:
    from forebay.config.schema import ROUTE_NAMES
    from forebay.ingress.http import routes

    names = {route.name for route in routes.EXACT.values()}
    found = (routes.Routes().find(path) for path in (b"/v2/models/m/infer", b"/v2/health/ready", b"/v1/models/m"))
    assert names | {route.name for route in found if route is not None} == ROUTE_NAMES


def test_tls_files_are_tried_not_only_opened(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    pem, key = certificate
    assert read(f'[tls]\ncertificate = "{pem}"\nkey = "{key}"').warnings == ()
    (line,) = faults(f'[tls]\ncertificate = "{key}"\nkey = "{pem}"')
    assert line.startswith(f'f.toml:2: [tls] certificate: "{key}" and its key cannot be used (')
    (tmp_path / "empty.pem").write_text("")
    engine = f'[[engines]]\nname = "e"\nurls = ["https://h"]\ntls = {{ ca = "{tmp_path}/empty.pem" }}'
    (line,) = faults(engine)
    assert line.startswith(f'f.toml:4: [[engines]] tls.ca: "{tmp_path}/empty.pem" holds no certificates (')
