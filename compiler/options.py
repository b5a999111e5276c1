"""What a user may choose of a compile, what is chosen where nothing is, and what no compile can follow."""
import operator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from . import debug, targets
from .dump.dump_files import refuse_filled
from .errors import UserError
from .judge import CheckLevel
from .quality import compile_gate, limits
from .quality.text import CALIBRATION, HELD_OUT
from .quality.text import read as read_text
from .quant import recipe, search
from .quant.kv import parse_kv
from .quant.plan import METHODS, Plan, blind, check_floats
from .quant.scheme import Scheme

DTYPES = ("bf16", "fp16", "fp32")
BUCKETS = {"cpu": (1, 16, 128, 512), "cuda": (1, 8, 64, 512, 2048)}
"""Tokens per step. CPU kernels take the live count, so a bucket only bounds memory; 512 is where products reach their peak. A GPU runs a
step at its bucket's size: decode at 1, 8 and 64 sequences, prompts in chunks of up to 2048."""

SEQUENCES = {"cpu": 16, "cuda": 64}
"""Sequences in one step."""

MAX_BUCKET = 16384

AUTO = "auto"
"""--quant auto: formats are searched for."""


@dataclass(frozen=True)
class Options:
    """What a user may choose. Every field reaches the version key."""

    target: str = "cpu"
    dtype: str = "bf16"
    allow: str = "approximate"
    check: str = "fast"
    buckets: tuple[int, ...] | None = None            # None: BUCKETS
    max_sequences: int | None = None                  # None: SEQUENCES
    strict: bool = False
    dump: Path | None = None
    dump_asm: bool = False                            # the kernels' assembly as well
    force: bool = False
    reuse: bool = True                                # copy a finished compile of the same model, options, sources and toolchain
    cache: bool = True                                # take what an earlier compile found out: that, and answers and verdicts (kept.py)
    expect: tuple[tuple[str, int], ...] = ()          # (pass, how often it must fire), else CheckFailed
    keep_going: bool = False                          # drop a pass that breaks its contract, rather than fail
    quant: str = "none"                               # a scheme (compiler.quant.scheme), a recipe's file or text, or "auto": searched for
    quant_method: str = "auto"                        # how codes are chosen (compiler.quant.plan.METHODS); auto: rtn for 8 bits, gptq for 4
    calib: Path | None = None                         # the text they are chosen on; None: the one that travels with infc
    kv_quant: str = "none"                            # how each layer's KV cache is held (compiler.quant.kv)
    data: Path | None = None                          # held-out text (or token ids, .json); None: the text that travels with infc
    quality: str | None = None                        # limits (compiler.quality.limits); None: its DEFAULT
    unverified: bool = False                          # go on without measuring what quantization costs
    keep_slow: bool = False                           # use a format also where it makes a decode step slower
    candidates: str = search.CANDIDATES               # with quant "auto": the formats to choose among, for each weight
    search_for: str = "bytes"                         # with quant "auto": the fewest bytes, or the least decode time

    def __post_init__(self) -> None:
        """From Python a path may be a string, a recipe's file a path, buckets any numbers, and what is expected a dict; UserError for a
        value of another type: `unverified="no"` would be true."""
        def settle(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("dump", "calib", "data"):
            if isinstance(value := getattr(self, name), str): settle(name, Path(value))
            if not isinstance(getattr(self, name), (Path, NoneType)): raise UserError(f"{name} is {value!r}: give a path, or leave it out")
        if isinstance(self.quant, Path): settle("quant", str(self.quant))
        if self.buckets is not None: settle("buckets", _whole_numbers("buckets", self.buckets, "(1, 16)"))
        if self.max_sequences is not None: settle("max_sequences", *_whole_numbers("max_sequences", [self.max_sequences], "16"))
        settle("expect", _expected(self.expect))
        if not isinstance(self.quality, (str, NoneType)):
            raise UserError(f"quality is {self.quality!r}: give limits, as quality='ppl<=+1%'")
        for one in fields(self):
            default, value = one.default, getattr(self, one.name)
            if isinstance(default, str) and not isinstance(value, str):
                raise UserError(f"{one.name} is {value!r}: give a string, as {one.name}={default!r}, or leave it out")
            if isinstance(default, bool) and not isinstance(value, bool):
                raise UserError(f"{one.name} is {value!r}: give True or False, or leave it out")


def _whole_numbers(name: str, values: Any, example: str) -> tuple[int, ...]:
    """UserError for what are none."""
    try:
        if any(isinstance(value, bool) for value in values): raise TypeError
        return tuple(operator.index(value) for value in values)
    except TypeError:
        given = values[0] if name == "max_sequences" else values
        raise UserError(f"{name} is {given!r}: give whole numbers, as {name}={example}, or leave it out") from None


def _expected(given: Any) -> tuple[tuple[str, int], ...]:
    pairs = tuple(given.items()) if isinstance(given, dict) else given
    if isinstance(pairs, tuple) and all(isinstance(pair, tuple) and list(map(type, pair)) == [str, int] for pair in pairs): return pairs
    raise UserError(f"expect is {given!r}: give a dict, as expect={{'fuse_rms_norm': 61}}, or leave it out")


def settled(options: Options, target: targets.Target) -> Options:
    """With what the target decides filled in."""
    return replace(options, buckets=options.buckets or _buckets(options, target),
                   max_sequences=options.max_sequences or SEQUENCES[target.kind])


def _buckets(options: Options, target: targets.Target) -> tuple[int, ...]:
    """The default ones; where products are of bf16 from some number of rows on, one ends where all of them are, whatever the format: see
    compiler.bucket_graph."""
    found = BUCKETS[target.kind]
    rows = max(target.bf16_rows.values(), default=0) if options.quant != "none" and options.dtype == "bf16" else 0
    return (*found[:-2], rows - 1, found[-1]) if found[-3] + 1 < rows <= found[-1] else found


def gated(options: Options) -> bool:
    """Is quality measured before the artifact gets its name?"""
    return not options.unverified and (quantized(options) or options.data is not None)


def quantized(options: Options) -> bool:
    return options.quant != "none" or options.kv_quant != "none"


def check_options(options: Options) -> None:
    """UserError for options that no compile can follow."""
    if options.check not in get_args(CheckLevel):
        raise UserError(f"unknown check {options.check!r}: choose one of {', '.join(get_args(CheckLevel))}")
    if options.dtype not in DTYPES:
        raise UserError(f"unknown dtype {options.dtype!r}: choose one of {', '.join(DTYPES)}")
    if options.dtype != "fp32" and options.allow != "approximate":
        raise UserError(f"--allow {options.allow} forbids rounding weights to {options.dtype}, which is approximate: add --dtype fp32")
    if options.dtype == "fp16" and targets.find(options.target).kind == "cpu":
        raise UserError(f"--dtype fp16: no kernel of the target {options.target} multiplies it, only those of GPUs: use bf16, or fp32")
    plan_of(options)
    if options.quant == AUTO:
        search.check(limits.parse(options.quality or limits.DEFAULT), options.search_for)
        search.parse_candidates(options.candidates)
    elif (options.candidates, options.search_for) != (Options.candidates, Options.search_for):
        raise UserError("--candidates and --search-for are about a search for formats: give --quality and no --quant, or --quant auto")
    if options.quant != "none" and options.allow != "approximate":
        raise UserError(f"--allow {options.allow} forbids --quant {options.quant}, which is approximate: choose one of them")
    if options.quant == "none" and options.quant_method != Options.quant_method:
        raise UserError(f"--quant-method {options.quant_method} chooses codes, and nothing is quantized: add --quant, or leave it out")
    if options.keep_slow and options.quant == "none":
        raise UserError("--keep-slow keeps formats that are slower than what they replace, and nothing is quantized: leave it out")
    _check_calibration(options)
    _check_kv(options)
    compile_gate.check_options(quantized(options), options.data, options.quality, options.unverified)
    if options.buckets is not None and (not options.buckets or any(b < 1 for b in options.buckets)):
        raise UserError(f"buckets are {list(options.buckets)}: give at least one number of tokens, each 1 or more")
    if options.buckets and max(options.buckets) > MAX_BUCKET:
        raise UserError(f"a bucket of {max(options.buckets)} tokens: {MAX_BUCKET} is the largest; longer prompts run in chunks")
    if options.buckets and options.max_sequences and options.max_sequences > max(options.buckets):
        raise UserError(f"max_sequences is {options.max_sequences}, and the largest bucket has {max(options.buckets)} tokens: a step "
                        "decodes one of each sequence, so give a larger bucket, or fewer sequences")
    if options.keep_going and options.check == "off":
        raise UserError("--keep-going leaves out passes that break their contract, and --check off checks none: choose one of them")
    if options.max_sequences is not None and not 1 <= options.max_sequences <= 256:
        raise UserError(f"max_sequences is {options.max_sequences}: choose 1..256")
    if options.dump_asm and targets.find(options.target).kind == "cuda":
        raise UserError("--dump-asm writes a CPU's assembly; for a GPU read the artifact's code/*.cubin with nvdisasm")
    if options.dump_asm and not (options.dump or debug.dump()):
        raise UserError("assembly is part of a dump: name its folder with --dump DIR")
    refuse_filled(options.dump or debug.dump())


def _check_kv(options: Options) -> None:
    kv = parse_kv(options.kv_quant)
    if kv is None: return
    if options.allow != "approximate":
        raise UserError(f"--allow {options.allow} forbids --kv-quant {options.kv_quant}, which is approximate: choose one of them")
    target = targets.find(options.target)
    if missing := sorted(kv.used - set(target.kv_formats)):
        raise UserError(f"--kv-quant {options.kv_quant}: the target {options.target} has no {missing[0]} KV cache, only "
                        f"{', '.join(target.kv_formats)}: choose one of those, or none")


def pass_options(options: Options) -> dict[str, Any]:
    """What passes may read of a compile's options. wide_rows: rows that are to be rounded to 16 bits stay as they are. norm_codes: norms
    write the codes that products read. bf16_rows: with so many rows, products of codes become products of bf16."""
    target = targets.find(options.target)
    options = settled(options, target)
    return {"dtype": options.dtype, "max_sequences": options.max_sequences, "quantization": plan_of(options),
            "kv": parse_kv(options.kv_quant), "wide_rows": target.kind == "cuda", "norm_codes": target.kind == "cuda",
            "bf16_rows": target.bf16_rows}


def plan_of(options: Options) -> Plan | None:
    """What the options ask to be quantized; UserError for what they do not spell right."""
    asked = recipe.Recipe(()) if options.quant == AUTO else recipe.read(options.quant)
    return None if asked is None else Plan(asked, options.quant_method, options.calib or CALIBRATION)


def check_formats(options: Options, target: targets.Target) -> None:
    """UserError for formats that no kernel of the target multiplies: e4m3 on all but newer GPUs; wide rows on a CPU, whose products of
    codes are of integers."""
    plan = plan_of(options)
    asked = search.parse_candidates(options.candidates) if options.quant == AUTO else [] if plan is None else plan.choices
    check_floats(options.quant_method, asked)
    floats = next((choice for choice in asked if isinstance(choice, Scheme) and choice.e4m3), None)
    if floats is not None and not target.e4m3:
        having = ", ".join(t.name for t in targets.TARGETS.values() if t.e4m3)
        raise UserError(f"{floats} is e4m3, which the target {options.target} does not multiply; {having} do: choose one of them, or "
                        f"write {'w8a8' if floats.act_bits else 'w8'} here")
    wide = next((choice for choice in asked if choice is not None and choice.act_bits == 0), None)
    if wide is not None and target.kind == "cpu":
        raise UserError(f"{wide} leaves activations wide, and products of codes on a CPU are of integers: write "
                        f"{str(wide).replace('a32', '')} (activations in 16 bits, finer than bf16) or a8")


def _check_calibration(options: Options) -> None:
    plan = plan_of(options)
    reads = plan is not None and (plan.reads_text or (options.quant == AUTO and options.quant_method not in blind()))
    chosen_on, measured_on = (options.calib or CALIBRATION), (options.data or HELD_OUT)
    given = [path for path in (chosen_on, measured_on) if path.is_file()]
    if reads and not options.unverified and len({path.read_bytes() for path in given}) < len(given):
        raise UserError(f"scales would be chosen on {chosen_on.name} and measured on the same text: name another with --calib or --data")
    if options.calib is None: return
    if not reads:
        raise UserError(f"--calib does nothing for --quant {options.quant} with --quant-method {options.quant_method}: name a method that "
                        f"looks at a text ({', '.join(name for name in METHODS if name not in blind())}), or leave it out")
    read_text(options.calib)
