"""Say which line of a model fixed a size that was asked to be dynamic."""
import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

LOGGER = "torch.fx.experimental.symbolic_shapes"                  # logs "eval Eq(s27, 5) [guard added] ..." as it happens


class _GuardLog(logging.Handler):
    """Remembers each guard's text and the line of the model that was running when it was added."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.guards: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "[guard added]" not in message:
            return
        torch_folder = Path(torch.__file__).parent
        frames = [f for f in traceback.extract_stack() if not Path(f.filename).is_relative_to(torch_folder)]
        inner = [f for f in frames if "/logging/" not in f.filename and Path(f.filename) != Path(__file__)]
        self.guards.append((message, f"{Path(inner[-1].filename).name}:{inner[-1].lineno} {inner[-1].line}" if inner else ""))


def explain(module: nn.Module, inputs: Sequence[Tensor], names: Sequence[str],
            dynamic: Mapping[str, Mapping[int, str]], message: str, called: str) -> str:
    """One line for a failed export of what a person calls so: each dim that became a constant, and the model's line that made it so.

    `message` is export's own ("... marked S as dynamic but your code specialized it to be a constant (5)"). The export is
    run once more with sizes free to specialize, listening to the guards as they are added.
    """
    fixed = re.findall(r"marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)", message)
    if not fixed:
        return f"{called} cannot keep its sizes dynamic: {message.strip().splitlines()[0]}"
    shapes = tuple(dict.fromkeys(dynamic.get(name, {}), Dim.AUTO) for name in names)
    log, logger = _GuardLog(), logging.getLogger(LOGGER)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        with torch.no_grad():
            torch.export.export(module, tuple(inputs), dynamic_shapes=shapes, strict=False)
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
        logger.propagate = propagate
    parts = []
    for dim, value in fixed:
        line = next((line for guard, line in log.guards if re.search(rf"Eq\(\w+, {value}\)", guard)), "")
        axes = [f"axis {axis} of {name}" for name in names for axis, d in dynamic.get(name, {}).items() if d == dim]
        parts.append(f"{dim} ({', '.join(axes)}) can only be {value}" + (f": {line}" if line else ""))
    return f"{called} fixes a size that was asked to be dynamic: {'; '.join(parts)}"
