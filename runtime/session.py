"""Model: what infc.load returns. Text or token ids in, answers out; many sequences in one step graph."""
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from time import perf_counter
from typing import TYPE_CHECKING

from . import options
from .artifact import Artifact, read
from .blocks import blocks_for
from .cpu import Executor, default_threads, free_memory, kv_bytes_per_token
from .errors import RuntimeFault
from .generate import Request, run_requests
from .manifest import BLOCK, GPU, Manifest
from .options import Prompt, Sampling
from .outputs import Output, Piece, Timing
from .requests import make_requests
from .stepper import Limits, Stepper
from .text import LazyTokenizer

if TYPE_CHECKING:
    from .device import Device
    from .golden import GoldenReport
    from .gpu import GpuExecutor
    from .tokenizer import Tokenizer

Stop = str | int | Sequence[str | int] | None
"""Strings and token ids that end an answer, or a single one; None as well as () is none."""


class Model(Stepper):
    """A loaded artifact. Calls from several threads take turns, step by step. Close it, or use it in a `with`.

    For your own loop: `sequence` and `step`.
    """

    def __init__(self, artifact: Artifact, executor: "Executor | GpuExecutor", limits: Limits, text: LazyTokenizer) -> None:
        super().__init__(artifact, executor, limits)
        self.timing = Timing()
        self._text = text

    @property
    def manifest(self) -> Manifest:
        """What the artifact says about itself."""
        return self.artifact.manifest

    @property
    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer. Raises RuntimeFault where the artifact has none."""
        return self._text.get()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, max_tokens: int = 128, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0, seed: int | Sequence[int] | None = None, stop: Stop = (), ignore_eos: bool = False,
        chat: bool = False, system: str | None = None, on_token: Callable[[int, Piece], object] | None = None,
    ) -> list[Output]:
        """Answer one prompt or several, in one batch; one Output a prompt, in order.

        A prompt is text, token ids, or the messages of a conversation ({"role", "content"}); chat=True makes a conversation
        of a text, `system` is its first message. seed: one for all or one for each; the same seed gives a prompt the same
        answer whatever else is in the batch. on_token(index of the prompt, Piece) is called as tokens come. An answer that
        reaches the model's last position ends with "length". Raises RuntimeFault before anything runs where a value is out
        of its limits.
        """
        start = perf_counter()
        if on_token is not None and not callable(on_token):
            raise RuntimeFault(f"on_token is {on_token!r}; give a function of the prompt's index and a Piece")
        requests = make_requests(
            self, self._text, options.split_prompts(prompts), max_tokens=max_tokens,
            sampling=Sampling(temperature, top_k, top_p), seed=seed, stop=stop, ignore_eos=ignore_eos, chat=chat,
            system=system, live=on_token is not None,
        )
        for request, token, shown in run_requests(self, requests):
            if on_token is not None:
                on_token(request.index, Piece(shown, token, request.finish_reason))
        self._take_times(start, requests)
        return [Output(r.text(), r.ids, r.finish_reason or "length", len(r.prompt)) for r in requests]

    def stream(
        self, prompt: Prompt, *, max_tokens: int = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        seed: int | None = None, stop: Stop = (), ignore_eos: bool = False, chat: bool = False, system: str | None = None,
    ) -> Iterator[Piece]:
        """Answer one prompt token by token; options as in `generate`. Stop iterating and the rest is never computed."""
        start = perf_counter()
        requests = make_requests(
            self, self._text, [prompt], max_tokens=max_tokens, sampling=Sampling(temperature, top_k, top_p), seed=seed,
            stop=stop, ignore_eos=ignore_eos, chat=chat, system=system, live=True,
        )
        return self._stream(requests, start)

    def _stream(self, requests: list[Request], start: float) -> Iterator[Piece]:
        for request, token, shown in run_requests(self, requests):
            self._take_times(start, requests)
            yield Piece(shown, token, request.finish_reason)

    def swap_weights(self, path: str | PathLike[str]) -> "GoldenReport":
        """Take the weights of another artifact of the same model, a fine-tuned one, in place of these; its golden prompts are replayed.

        Nothing moves and nothing is compiled: programs, kernels and places must be the same. Raises RuntimeFault, and answers as
        before, where they are not, where a sequence is open, where the file is damaged, or where an answer is not the recorded one.
        """
        with self.lock, ExitStack() as opened:
            self.executor.require_ready()
            old, new = self.artifact, read(path)
            opened.callback(new.close)
            if why := _other_model(old, new): raise RuntimeFault(f"{path}: {why}; load it as a model of its own")
            self.pool.recover()
            if self.pool.free != self.pool.count:
                raise RuntimeFault(f"{path}: a sequence is open, and its keys are of the old weights; close it first")
            try:
                report = self._take(new)
                if not report.passed:
                    raise RuntimeFault(f"{path}: its golden prompts are off by {report.error:.3g}, {report.bound:.3g} is allowed; "
                                       "the old weights are back")
            except BaseException:
                self._take(old)
                raise
            opened.pop_all()
            old.close()
            return report

    def _take(self, artifact: Artifact) -> "GoldenReport":
        from .golden import replay

        self.executor.upload(artifact)
        self.artifact = self.executor.artifact = artifact
        self.cache.clear()
        self.prepare()
        return replay(self)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_times(self, start: float, requests: Sequence[Request]) -> None:
        self.timing.ttft_s = min(r.first for r in requests if r.first) - start
        spans = [(r.last - r.first) / (len(r.ids) - 1) for r in requests if len(r.ids) > 1]
        self.timing.tpot_s = sum(spans) / len(spans) if spans else 0.0


def load(
    path: str | PathLike[str], *, threads: int | None = None, max_sequences: int | None = None, kv_tokens: int | None = None,
    text: bool = False, device: "Device | None" = None,
) -> Model:
    """Load an artifact. Raises RuntimeFault where it is damaged, or not for this machine.

    device: what an artifact for a GPU runs on, the model's from then on, closed with it; default, the first GPU. All buckets are
    recorded before this returns.
    threads: default, the CPUs this process may use. max_sequences: in one step; default, what the buckets hold. kv_tokens:
    room of the KV pool; default, every sequence at full length, or what a quarter of the free memory holds if that is less
    (pages become real when they are first written), on a GPU of the device's, nine tenths. text: prompts will be text, so
    read the tokenizer meanwhile.
    """
    start = perf_counter()
    if not isinstance(path, (str, PathLike)): raise RuntimeFault(f"the artifact's path is {path!r}; give a string or a path")
    for name, number in (("threads", threads), ("max_sequences", max_sequences), ("kv_tokens", kv_tokens)):
        if number is not None and (not hasattr(number, "__index__") or isinstance(number, bool)):
            raise RuntimeFault(f"{name} is {number!r}; it must be a whole number")
    options.flag("text", text)
    artifact = read(path)
    try:
        if threads is not None and not 1 <= threads <= 4096:
            raise RuntimeFault(f"threads is {threads}; it must lie in 1..4096")
        if device is not None and artifact.manifest.machine != GPU:
            raise RuntimeFault(f"{path}: is for a CPU, and a device is given to run it on; leave it out, or compile for a GPU")
        limits = _limits(artifact.manifest, str(path), max_sequences)
        tokenizer = LazyTokenizer(artifact)
        if text:
            tokenizer.start()
        if artifact.manifest.machine == GPU:
            executor = _on_gpu(artifact, device, limits, kv_tokens)
        else:
            executor = Executor(artifact, threads or default_threads(), _kv_blocks(artifact, limits, kv_tokens, free_memory() // 4))
    except BaseException:
        artifact.close()
        raise
    model = Model(artifact, executor, limits, tokenizer)
    if artifact.manifest.machine == GPU: model.prepare()
    model.timing.load_s = perf_counter() - start
    return model


def _other_model(one_of: Artifact, other_of: Artifact) -> str:
    """Why an artifact's weights do not fit another's programs; empty where they do, tuned or not."""
    old, new = one_of.manifest, other_of.manifest
    for what, one, other in (("target", old.target, new.target), ("kernels", old.kernels, new.kernels), ("KV cache", old.kv, new.kv)):
        if one != other: return f"its {what} is not that of the model that is loaded" if what != "kernels" else "its kernels are others"
    programs = [{name: file.sha256 for name, file in m.files.items() if name.startswith("programs/")} for m in (old, new)]
    if programs[0] != programs[1]:
        plain = [[artifact.program(bucket.name).untuned() for bucket in artifact.manifest.buckets] for artifact in (one_of, other_of)]
        if plain[0] != plain[1]: return "its programs are others"
    if (old.weights and old.weights.header_sha256) != (new.weights and new.weights.header_sha256): return "its weights lie elsewhere"
    return ""


def _on_gpu(artifact: Artifact, device: "Device | None", limits: Limits, kv_tokens: int | None) -> "GpuExecutor":
    from .gpu import GpuExecutor

    if device is None:
        from .cuda import CudaDevice

        device = CudaDevice()
    manifest = artifact.manifest
    taken = (manifest.weights.data_bytes if manifest.weights else 0) + max((b.arena_bytes for b in manifest.buckets), default=0)
    return GpuExecutor(artifact, device, _kv_blocks(artifact, limits, kv_tokens, max(0, device.free_memory() - taken) * 9 // 10))


def _limits(manifest: Manifest, where: str, max_sequences: int | None) -> Limits:
    if not manifest.buckets:
        raise RuntimeFault(f"{where}: has no program to run; compile it again")
    largest = max(manifest.buckets, key=lambda b: b.bucket["T"]).bucket
    fit = min(largest["N"], largest["R"], largest["T"])
    if max_sequences is not None and not 1 <= max_sequences <= fit:
        raise RuntimeFault(f"max_sequences is {max_sequences}; the buckets of {where} hold 1..{fit}; compile with larger "
                           "buckets for more")
    positions = min(manifest.model.max_positions, largest["M"] * BLOCK)
    return Limits(largest["T"], max_sequences or fit, largest["R"], positions)


def _kv_blocks(artifact: Artifact, limits: Limits, kv_tokens: int | None, room: int) -> int:
    """room: bytes the pool may take by default."""
    if kv_tokens is not None:
        if kv_tokens < 1:
            raise RuntimeFault(f"kv_tokens is {kv_tokens}; it must be >= 1")
        return blocks_for(kv_tokens)
    wanted = limits.sequences * blocks_for(limits.positions)
    affordable = room // max(1, kv_bytes_per_token(artifact) * BLOCK)
    return max(1, min(wanted, affordable))
