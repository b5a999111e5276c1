"""report.html: one self-contained page about one artifact. Python computes, the page's script only draws.

    with read("model.infc") as artifact:
        html = page(collect(artifact))
"""
from .collect import collect
from .page import page
from .roofline import phases

__all__ = ["collect", "page", "phases"]
