"""The picture of `make bench`: one bar an engine, grouped by the bits of its weights, ours in colour."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS, THEIRS = "#d1495b", "#8d99ae"
SHORT = 0.15
"""Of the longest bar: a shorter one has its figure beside it, where there is room."""


def draw(peers: Sequence[Mapping[str, Any]], workload: Mapping[str, Any], path: Path) -> None:
    """Draw the medians of `peers` (as in peers.json) to a PNG file, a line from the least to the greatest sample on each bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [p for p in peers if not p["reason"]]
    prompt, new = workload["decode"]
    panels = [
        (f"decode, tokens/s\n{new} tokens after {prompt}", [p["decode_tok_s"] for p in shown]),
        (f"decode of {workload['batch']}, tokens/s\n{new} tokens after {prompt} each", [p["batch_tok_s"] for p in shown]),
        *((f"prefill, tokens/s\n{n} tokens", [p["prefill_tok_s"][str(n)] for p in shown]) for n in workload["prefill"]),
        (f"fresh process to first token, s\n{workload['cold']} tokens, less is better", [p["cold_s"] for p in shown]),
    ]
    labels = [f"{p['name']}" for p in shown]
    places = _places([p["bits"] for p in shown])
    colours = [OURS if p["name"].startswith("infc") else THEIRS for p in shown]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15.5, 0.34 * len(shown) + 1.6), sharey=True, layout="constrained")
    for axis, (title, spreads) in zip(axes, panels, strict=True):
        medians = [s["median"] or 0 for s in spreads]
        axis.barh(places, medians, color=colours, height=0.78)
        for place, median, s in zip(places, medians, spreads, strict=True):
            if s["samples"]:
                axis.plot([min(s["samples"]), max(s["samples"])], [place, place], color="#222", linewidth=0.8)
            short = median < SHORT * max(medians)
            axis.annotate(
                "-" if not s["samples"] else f"{median:.0f}" if median >= 10 else f"{median:.2f}",
                (max([median, *s["samples"]]) if short else 0, place),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color="#222" if short else "white",
                fontweight="bold",
            )
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks(places, labels)
    axes[0].invert_yaxis()
    figure.suptitle(f"SmolLM2-135M, {workload['threads']} threads, medians of {workload['rounds']} interleaved rounds", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _places(bits: Sequence[int]) -> list[float]:
    """One place a bar, with a gap where the number of bits changes."""
    place, places = 0.0, []
    for index, own in enumerate(bits):
        if index and own != bits[index - 1]:
            place += 0.6
        places.append(place)
        place += 1
    return places
