"""`forebay serve`: run the gateway."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import click


@click.command("serve")
@click.option("--config", "config_file", type=click.Path(dir_okay=False), help="Configuration file (TOML).")
@click.option("--upstream", "upstreams", multiple=True, metavar="URL", help="An OpenAI-style engine; may be repeated.")
@click.option(
    "--mode", type=click.Choice(["backpressure", "admission", "hybrid"]), help="What happens when it is busy."
)
@click.option("--preset", type=click.Choice(["internal", "public-api", "b2b", "offline", "realtime"]), help="Defaults for a kind of use.")  # fmt: skip  # noqa: E501
@click.option("--keys", metavar="URL", help="Database of keys, such as sqlite:///forebay.db; see forebay keys.")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes any free one.")
@click.option("--admin-port", type=click.IntRange(0, 65535), help="Port of /metrics and /api/v1; 0 takes any free one.")
def command(
    config_file: str | None,
    upstreams: tuple[str, ...],
    mode: str | None,
    preset: str | None,
    keys: str | None,
    host: str | None,
    port: int | None,
    admin_port: int | None,
) -> None:
    """Run the gateway. With neither a config nor an upstream it serves the embedded model."""
    from forebay.config import load
    from forebay.telemetry.log import configure

    flags: dict[str, Any] = {
        "admission.mode": mode,
        "admission.preset": preset,
        "keys.store": keys,
        "server.host": host,
        "server.port": port,
        "admin.port": admin_port,
    }
    flags = {path: value for path, value in flags.items() if value is not None}
    if upstreams:
        flags["engines"] = [{"name": "upstream", "urls": list(upstreams)}]

    def read() -> Any:
        loaded = load(config_file, flags=flags)
        if not loaded.config.engines:
            flags["engines"] = [{"name": "embedded", "kind": "embedded", "concurrency": {"kind": "fixed", "limit": 32}}]
            loaded = load(config_file, flags=flags)
        return loaded

    loaded = read()
    configure(loaded.config.telemetry.log_level)
    for warning in loaded.warnings:
        click.echo(f"forebay: warning: {warning}", err=True)
    runner_options = _loop_options()
    with asyncio.Runner(**runner_options) as runner:
        runner.run(_serve(loaded.config, read))


async def _serve(config: Any, read: Callable[[], Any]) -> None:
    from forebay.app import App

    app = App(config, read)
    try:
        await app.start()
    except BaseException:
        await app.close()
        raise
    click.echo(f"listening on {app.url}")
    click.echo(f"admin on {app.admin_url}")
    sys.stdout.flush()
    await app.run()


def _loop_options() -> dict[str, Any]:
    """uvloop where it exists."""
    try:
        import uvloop
    except ImportError:
        return {}
    return {"loop_factory": uvloop.new_event_loop}
