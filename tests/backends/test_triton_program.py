"""Whole programs for a GPU, their kernels interpreted: every bucket, chunked prompts, a mixed batch, padding; against fp64."""
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton_env import kernels  # first: kernels of this process are interpreted

from decoders import llama  # isort: skip
from step_decoders import VOCAB, Decoder  # isort: skip
from infc.backends.host_device import HostDevice, Recording
from infc.backends.triton.device import interpreter
from infc.compiler import driver
from infc.compiler.driver import Hooks, Options
from infc.compiler.errors import CheckFailed
from infc.compiler.frontends import capture_decoder
from infc.compiler.frontends.model_meta import UNKNOWN
from infc.compiler.ir import Graph
from infc.runtime import golden
from infc.runtime.artifact import read
from infc.runtime.device import Copy, OutOfMemory, Work
from infc.runtime.errors import RuntimeFault
from infc.runtime.session import Model, load
from torch import nn

BUCKETS = (1, 4, 16)
KINDS = {"bf16": Options(), "fp16": Options(dtype="fp16"), "fp32": Options(dtype="fp32"),
         "int8 KV": Options(kv_quant="int8", unverified=True), "fp8 KV": Options(kv_quant="fp8", unverified=True),
         "w4": Options(quant="w4", quant_method="rtn", unverified=True), "fp8": Options(quant="fp8", unverified=True),
         "fp8a8": Options(quant="fp8a8:tensor", unverified=True), "w8a8": Options(quant="w8a8", unverified=True),
         "sinks": Options(), "sinks, fp8 KV": Options(kv_quant="fp8", unverified=True)}
FAST = ("bf16", "int8 KV", "sinks")


def sunk() -> Graph:
    """Sinks in both layers, the first in a window, as gpt-oss alternates."""
    meta = dict(UNKNOWN) | {"name": "sunk", "vocab_size": VOCAB, "max_positions": 128, "source": {"kind": "module"}}
    return capture_decoder(Decoder((5, 0), sinks=True).eval(), meta)


def compiled(folder: Path, options: Options, bounds: driver.Bounds, model: Callable[[], Graph | nn.Module] = llama) -> Path:
    """A decoder of two layers with 4 query heads on 2 kv heads; nothing of it has run yet."""
    def rewrite(graph):
        return driver._run_passes(graph, options, lambda event: None)

    def keep(_: Path, found: driver.Bounds) -> dict[str, object]:
        bounds.update(found)
        return {"replayed": False}

    options = replace(options, target="h100", buckets=BUCKETS, max_sequences=3)
    return driver.compile(model(), folder / "llama.infc", options=options, hooks=Hooks(rewrite, keep)).artifact


@pytest.fixture(scope="module", params=[k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    bounds = driver.Bounds()
    path = compiled(tmp_path_factory.mktemp("program"), KINDS[request.param], bounds, sunk if "sinks" in request.param else llama)
    with read(path) as artifact:
        device = interpreter("sm_90a", [artifact.program(name) for name in bounds], bounds)
    with load(path, device=device, kv_tokens=256) as loaded:
        loaded.pool.poison()
        yield loaded


@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (4, 9), (16, 37)])
def test_a_bucket_gives_what_fp64_gives(model: Model, tokens: int, length: int) -> None:
    """As many steps as the bucket needs, the last of them padded; the tokens drawn are those of the logits."""
    bucket = next(b for b in model.manifest.buckets if b.bucket["T"] == tokens)
    case = next(c for c in golden._cases(model) if len(c.tokens) == length)
    found, wrong = golden._run(model, case, bucket)
    error = golden._error("max_abs", case.logits, found)
    print(f"{model.manifest.dtype} {bucket.name}: largest error against fp64 {error:.3g}, bound {model.manifest.golden.bound:.3g}")
    assert error <= model.manifest.golden.bound and not wrong


def test_a_mixed_batch_gives_what_each_prompt_gives_alone(model: Model) -> None:
    """Three sequences of other lengths in chunks of a step, then decoding together, in blocks that others gave back."""
    cases = [case for case in golden._cases(model) if len(case.tokens) in (1, 9)]
    for case, found in zip(cases, golden._run_mixed(model, cases), strict=True):
        assert golden._error("max_abs", case.logits, found) <= model.manifest.golden.bound


def test_no_step_calls_aten_and_every_kernel_is_built(model: Model) -> None:
    manifest = model.manifest
    assert manifest.machine == "cuda" and not manifest.isa and all(b.aten_steps == 0 for b in manifest.buckets)
    for kernel in manifest.kernels:
        assert kernel.arch == "sm_90a" and kernel.file.endswith(".cubin") and kernel.threads and kernel.spill_bytes == 0
        assert manifest.files[kernel.file].bytes > 0


def test_replays_move_nothing(model: Model) -> None:
    """Ten decode steps: the same recording, the same places."""
    places, before = model.executor.places, model.counters
    with model.sequence() as sequence:
        for _ in range(3): model.step([sequence], [[1]])
    assert model.executor.places == places
    assert model.counters["misses"] == before["misses"] and model.counters["hits"] == before["hits"] + 3


def test_the_static_buffer_of_the_device_is_handed_out(model: Model) -> None:
    """Where the last step left its logits: the same place each time, overwritten by the next step; a copy by default."""
    with model.sequence() as sequence:
        first = model.step([sequence], [[1, 2]], logits="all", copy=False).logits[0]
        assert first.shape == (2, model.manifest.model.vocab) and (first == model.executor.logits(2)).all() and not first.flags.writeable
        kept = first.copy()
        copied = model.step([sequence], [[3]]).logits[0]
        assert (first[0] == copied[0]).all() and (first[0] != kept[0]).any() and copied.flags.writeable
        assert model.step([sequence], [[4]], copy=False).logits[0].ctypes.data == first.ctypes.data


def test_wrong_work_is_seen() -> None:
    device = HostDevice("sm_90a")
    first, second = device.allocate(64, "arena"), device.host(64)
    device.record([Copy(first, second, 64, "in")]).replay()
    with pytest.raises(CheckFailed, match="no region"): device.record([Copy(first, second, 65, "in")])
    with pytest.raises(CheckFailed, match="no region"): device.upload(first + 60, b"12345")
    import ctypes

    ctypes.memset(first + 64, 0, 1)
    with pytest.raises(CheckFailed, match="outside the arena"): device.record([]).replay()


class Failing(HostDevice):
    """A device that is lost while it takes the weights."""

    def upload(self, address: int, data: memoryview | bytes) -> None:
        raise RuntimeFault("the GPU's context is lost")


class Full(HostDevice):
    """A device with room for two recordings."""

    def __init__(self, arch: str) -> None:
        super().__init__(arch)
        self.kept: list[Recording] = []

    def record(self, work: Sequence[Work]) -> Recording:
        if sum(bool(one.work) for one in self.kept) == 2: raise OutOfMemory("no room for a recording", 4096, 512)
        self.kept.append(super().record(work))
        return self.kept[-1]


def test_a_full_device_keeps_fewer_buckets_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "infc"), load(path, device=Full("sm_90a"), kv_tokens=64) as model:
        assert {k: model.counters[k] for k in ("entries", "crowded", "evictions")} == {"entries": 2, "crowded": 1, "evictions": 0}
        model._table(model._buckets[0])                                   # decode is prepared again, and the next one goes
        model._table(model._buckets[2])
        assert model.counters["crowded"] == 2
    assert [record.name for record in caplog.records] == ["infc"] * 2
    assert "bucket step_T16: it takes at least 4096 bytes, 512 are free; step_T1 goes" in caplog.text
    assert "bucket step_T1: " in caplog.text


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("plain"), KINDS["bf16"], driver.Bounds())


def test_what_cannot_be_loaded_says_why(path: Path) -> None:
    with pytest.raises(RuntimeFault, match="context is lost"): load(path, device=Failing("sm_90a"))
    with pytest.raises(RuntimeFault, match=r"built for sm_90a.*sm_80"): load(path, device=HostDevice("sm_80"))


def test_every_operator_has_kernels() -> None:
    assert len(kernels()) >= 20 and torch.ops.aten.embedding.default in {k.call for k in kernels().values()}
