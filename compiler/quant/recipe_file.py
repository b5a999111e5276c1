"""A recipe's file as text: found and read without torch, so that a name that is wrong is told before anything is loaded."""
from pathlib import Path

from ..errors import UserError

SUFFIXES = (".yaml", ".yml")


def text(quant: str) -> str | None:
    """What stands in the file that `--quant` names; None where it names none. UserError, one line, for one that is no recipe's."""
    if quant.startswith("format:"): return None
    path = Path(quant)
    if not quant.endswith(SUFFIXES):
        if not quant.startswith("keep") and path.is_file():
            raise UserError(f"--quant {quant} is a file without {' or '.join(SUFFIXES)} at its end: a recipe's name ends so")
        return None
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is no UTF-8: a recipe is YAML text") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()}); name a recipe, or a scheme like w8") from error
