"""infc: a compiler for inference graphs.

    infc.compile("smollm2", "smollm2.infc")         in a build step (needs torch)
    infc.load("smollm2.infc").generate("Hello")     in a service (needs neither torch nor the compiler)

Importing this package imports neither half; each name is looked up when it is first used.
"""
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from .compiler.driver import Options, Result, compile
    from .compiler.errors import CheckFailed, InfcError, UserError
    from .runtime.errors import RuntimeFault
    from .runtime.session import Model, Output, load

__all__ = [
    "CheckFailed", "InfcError", "Model", "Options", "Output", "Result", "RuntimeFault", "UserError", "__version__", "compile", "load",
]  # fmt: skip

_HOMES = {
    "compile": "compiler.driver", "Options": "compiler.driver", "Result": "compiler.driver",
    "CheckFailed": "compiler.errors", "InfcError": "compiler.errors", "UserError": "compiler.errors",
    "load": "runtime.session", "Model": "runtime.session", "Output": "runtime.session", "RuntimeFault": "runtime.errors",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
