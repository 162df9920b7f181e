"""The frame of every page with plots: one self-contained HTML file, no request to anywhere, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

import msgspec


def framed(
    main: str,
    *,
    title: str,
    summary: Sequence[str],
    environment: str,
    data: object,
    script: str,
    style: str = "",
) -> str:
    """A whole page around what stands in its middle.

    `main` is HTML, the texts are plain. `data` is what `script` draws from, with what plots.js has for it; `style` is
    added to that of all pages.
    """
    return fill(
        static("report", "frame.html"),
        {
            "TITLE": escape(title),
            "SUMMARY": "".join(f"<p>{escape(line)}</p>" for line in summary),
            "ENVIRONMENT": escape(environment),
            "MAIN": main,
            "STYLE": static("report", "uplot/uPlot.min.css") + static("report", "frame.css") + style,
            "UPLOT_LICENSE": static("report", "uplot/LICENSE"),
            "UPLOT": static("report", "uplot/uPlot.iife.min.js").partition("\n")[2],
            "DATA": _inline_json(data),
            "SCRIPT": static("report", "plots.js") + script,
        },
    )


def fill(template: str, pieces: Mapping[str, str]) -> str:
    """The template with every `{{NAME}}` replaced, in one pass: a piece that holds a marker is not expanded again."""
    head, *rest = template.split("{{")
    page = [head]
    for part in rest:
        name, _, tail = part.partition("}}")
        page += [pieces[name], tail]
    return "".join(page)


def static(package: str, name: str) -> str:
    """A file of the static folder of `forebay.<package>`, by its path there."""
    return files(f"forebay.{package}").joinpath("static", *name.split("/")).read_text(encoding="utf-8")


def _inline_json(data: object) -> str:
    """Data for a script element. No `<` in it: a name from a config file cannot end the element."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")
