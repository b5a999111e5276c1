"""The command line: every command by its name, and how one ends. What each does is in commands/.

Results go to stdout (with --json one JSON document and nothing else), progress and errors to stderr. A user's mistake is
one line and exit code 2, a failed check is 1, Ctrl-C is 130; with --json the document has "error" then. `infc run` must start
fast, so nothing heavy is imported before the command that needs it: typer takes 45 ms, rich 45, torch 2000.
"""

import codecs
import contextlib
import errno
import io
import os
import signal
import sys
from typing import Annotated, Any

import typer
import typer.core
from typer.exceptions import TyperException

from ..runtime.errors import RuntimeFault
from .commands import building, explaining, listing, measuring, running
from .commands.output import print_json
from .errors import InfcError, UserError


class _MeasureByDefault(typer.core.TyperGroup):
    """`infc bench ARTIFACT` is `infc bench measure ARTIFACT`; so with quality."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


_OPTIONS: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}
app = typer.Typer(help="infc: a compiler for inference graphs.", **_OPTIONS)
bench = typer.Typer(
    help="Measure an artifact, `infc bench ARTIFACT [--rounds N] [-o FILE]` (more: infc bench ARTIFACT --help), or compare two of them.",
    cls=_MeasureByDefault, **_OPTIONS,
)
app.add_typer(bench, name="bench")
quality = typer.Typer(
    help="Measure what an artifact's answers are worth, `infc quality ARTIFACT [--data FILE]` (more: infc quality ARTIFACT --help), or "
         "compare two of them.",
    cls=_MeasureByDefault, **_OPTIONS,
)
app.add_typer(quality, name="quality")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", "-V", help="of infc, and of what it works with")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --version: one JSON document on stdout")] = False,
) -> None:
    """infc: a compiler for inference graphs."""
    if not version:
        if as_json: raise UserError("--json stands behind a command, or beside --version: infc targets --json")
        return
    found = listing.versions()
    if as_json:
        print_json(found)
    else:
        print(f"infc {found['infc']} ({', '.join(f'{name} {number}' for name, number in found.items() if name != 'infc' and number)})")
    raise typer.Exit


app.command("compile")(building.compile_model)
app.command("run")(running.run)
app.command("inspect")(running.inspect)
app.command("verify")(running.verify)
app.command("tune")(running.tune)
app.command("check")(running.check)
app.command("diff")(explaining.diff)
app.command("bisect")(building.find_fault)
app.command("explain")(explaining.explain)
app.command("report")(explaining.write_report)
app.command("targets")(listing.list_targets)
app.command("models")(listing.list_models)
bench.command("measure", hidden=True)(measuring.measure)
bench.command("compare")(measuring.compare)
quality.command("measure", hidden=True)(measuring.measure_quality)
quality.command("compare")(measuring.compare_quality)


_SHOWN = "infc.shown"


def _shown(error: UnicodeError) -> tuple[str | bytes, int]:
    """What stdout gets for a character that its encoding lacks: \\u and four digits, as in JSON; a path's byte that was no text, itself."""
    assert isinstance(error, UnicodeEncodeError)
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff": return character.encode("utf-8", "surrogateescape"), error.start + 1
    halves = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{halves[i:i + 4]}" for i in range(0, len(halves), 4)), error.start + 1


codecs.register_error(_SHOWN, _shown)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Only a bug in infc leaves a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper): sys.stdout.reconfigure(errors=_SHOWN)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that unfinished files are removed
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout: sys.stdout.flush()                        # none where the caller closed it
        return code
    except OSError as error:                                     # of stdout: what waits to be written to it goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else _fail(_os_error(error), 2)     # the reader left
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(arguments: list[str]) -> int:
    """The exit code of a command, what went wrong told. BrokenPipeError where nobody reads what it prints."""
    asked = arguments[:arguments.index("--") if "--" in arguments else None]
    as_json = any(argument.partition("=")[0] == "--json" for argument in asked)                # also where they cannot be parsed
    try:
        command = typer.main.get_command(app)
        with command.make_context("infc", arguments) as context: command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except InfcError as error:
        return _fail(error.message, error.exit_code, as_json, error.document)
    except RuntimeFault as error:
        return _fail(str(error), error.exit_code, as_json)
    except TyperException as error:
        return _fail(_usage(error), 2, as_json)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, as_json)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(_os_error(error), 2, as_json)
    return 0


def _fail(message: str, code: int, as_json: bool = False, document: dict[str, Any] | None = None) -> int:
    """One line on stderr, whatever the message; as_json: the same in a document on stdout."""
    line = " ".join(message.split())
    with contextlib.suppress(OSError):                           # of a stderr that nothing can be written to: the exit code says it
        if sys.stderr: print(f"infc: {line}", file=sys.stderr)
    if as_json: print_json({**(document or {}), "error": {"message": line, "exit_code": code}})
    return code


def _usage(error: TyperException) -> str:
    """A wrong option or argument, with the command that lists the right ones."""
    context = getattr(error, "ctx", None)
    command = f" (see: {context.command_path} --help)" if context else ""
    return error.format_message().replace("Value error, ", "").rstrip(".") + command


def _os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{where}no space left on the disk"
    return f"{where}{error.strerror or error}"


