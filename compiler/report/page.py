"""Join skeleton, style, script and data to one HTML file that needs nothing beside it."""
import html
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec

_MARK = re.compile(r"\{\{(\w+)\}\}")
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""In JSON these stand only inside strings, where the escapes mean the same: no name of a model can close the script tag."""


def page(data: Mapping[str, Any]) -> str:
    """The whole page of what `collect` found. NaN and infinities become null, as JSON has neither."""
    parts = {
        "title": html.escape(f"{data['head']['name']} · infc report"),
        "style": _file("style.css"), "script": _file("report.js"), "data": embedded(data),
    }
    return _MARK.sub(lambda mark: parts[mark[1]], _file("template.html"))   # one sweep: marks inside the data stay text


def embedded(data: Any) -> str:
    """JSON that may stand inside a script tag."""
    text = msgspec.json.encode(data).decode()
    return re.sub("[<>&\u2028\u2029]", lambda found: _UNSAFE[found[0]], text)


def _file(name: str) -> str:
    return (resources.files(__name__.rpartition(".")[0]) / name).read_text(encoding="utf-8")
