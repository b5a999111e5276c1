"""A whole artifact without the compiler: a real thread pool, and a "model" of three kernels whose answers can be computed by hand.

Its next token is a hash of every token and position it reads back through the block table, so a wrong slot, block, position, chunk
or batch mate changes the answer. `Fake.next` is the same function in Python.
"""
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from fake_cuda import FakeDriver
from infc.runtime import artifact
from infc.runtime.artifact import Parts
from infc.runtime.cuda import CudaDevice
from infc.runtime.isa import this_cpu
from infc.runtime.manifest import GoldenInfo, KvBuffer, Manifest, ModelInfo
from infc.runtime.program import DIMS, Buffer, Kernel, Program, Step
from infc.runtime.tensors import Tensor, tensor
from tokenizers import Tokenizer

KERNELS = Path(__file__).resolve().parents[2] / "backends" / "cpu" / "kernels"
VOCAB, EOS, BLOCK, POSITIONS = 512, 511, 32, 256
BUCKETS = ((1, 1), (8, 4), (64, 4))          # (T, N)

SOURCE = r"""
#include "pool.h"
constexpr int V = 512, BLOCK = 32;
// dims: T, N, R, M, P
extern "C" void k_write(void* const* b, const infc_run* r) {         // ids, positions, slots, k, v, kept(arena)
    auto *ids = (const int32_t*)b[0], *pos = (const int32_t*)b[1], *slots = (const int32_t*)b[2];
    auto *k = (float*)b[3], *v = (float*)b[4], *kept = (float*)b[5];
    for (int64_t t = r->thread; t < r->dims[0]; t += r->threads) {
        kept[t] = float(ids[t]);
        if (slots[t] >= 0) k[slots[t]] = float(ids[t]), v[slots[t]] = float(pos[t]) + 0.5f;
    }
}
extern "C" void k_hash(void* const* b, const infc_run* r) {          // rows, starts, lengths, table, k, v, kept, weight, hash(arena)
    auto *rows = (const int32_t*)b[0], *starts = (const int32_t*)b[1], *lengths = (const int32_t*)b[2], *table = (const int32_t*)b[3];
    auto *k = (const float*)b[4], *v = (const float*)b[5], *kept = (const float*)b[6];
    auto *w = (const int32_t*)b[7];
    auto *out = (int32_t*)b[8];
    for (int64_t i = r->thread; i < r->dims[2]; i += r->threads) {
        int64_t t = rows[i], n = 0;
        while (n + 1 < r->dims[1] && starts[n + 1] <= t) n++;
        int64_t position = lengths[n] - (starts[n + 1] - t);
        int64_t h = 7;
        for (int64_t p = 0; p <= position; p++) {
            int64_t slot = int64_t(table[n * r->dims[3] + p / BLOCK]) * BLOCK + p % BLOCK;
            if (v[slot] != float(p) + 0.5f) h += 100003;             // someone else's, or never written
            h = (h * 31 + w[int(k[slot])] + 7 * p) % 1000003;
        }
        for (int64_t p = position + 1; p % BLOCK; p++) {             // behind the end: zeros, or this step's own later tokens
            int64_t slot = int64_t(table[n * r->dims[3] + p / BLOCK]) * BLOCK + p % BLOCK;
            if (p >= lengths[n] && (k[slot] != 0 || v[slot] != 0)) h += 500009;
        }
        out[i] = int32_t((h + int64_t(kept[t])) % 1000003);
    }
}
extern "C" void k_sample(void* const* b, const infc_run* r) {        // hash, temperature, top_k, top_p, uniform, token, logits
    auto *hash = (const int32_t*)b[0], *top_k = (const int32_t*)b[2];
    auto *temperature = (const float*)b[1], *top_p = (const float*)b[3], *uniform = (const float*)b[4];
    auto *token = (int32_t*)b[5];
    auto *logits = (float*)b[6];
    for (int64_t i = r->thread; i < r->dims[2]; i += r->threads) {
        int64_t next = hash[i] % V;
        if (temperature[i] > 0) next = (next + int64_t(double(uniform[i]) * 100003) + top_k[i] + int64_t(top_p[i] * 64)) % V;
        token[i] = int32_t(next);
        for (int64_t j = 0; j < V; j++) logits[i * V + j] = float((hash[i] + 131 * j) % 97) / 97 + (j == hash[i] % V ? 4.f : 0.f);
    }
}
"""


class Fake:
    """Builds fake artifacts, and says what they must answer."""

    def __init__(self, library: bytes, folder: Path, start: int = 7) -> None:
        self.library = library
        self.start = start
        self.folder = folder
        self.weight = np.random.default_rng(5).integers(0, 1000, VOCAB).astype(np.int32)
        self.big = np.random.default_rng(6).integers(0, 256, 3_000_017).astype(np.uint8)     # several chunks, an odd end
        self.vocab, self.positions, self.eos = VOCAB, POSITIONS, EOS

    def parts(self, *, isa: Sequence[str] = (), buckets: Sequence[tuple[int, int]] = BUCKETS, version: str = "v1",
              golden: dict[str, Tensor] | None = None, bound: float = 0.0, template: str = "", with_tokenizer: bool = True) -> Parts:
        """Everything of an artifact."""
        manifest = Manifest(
            name="fake", version=version, target="cpu", machine=this_cpu().machine, isa=tuple(isa), dtype="fp32", contract="exact",
            model=ModelInfo("fake", VOCAB, POSITIONS, (EOS,), layers=1, chat_template=template, special_tokens={"eos_token": "<end>"}),
            created_with={"infc": "0"},
            kv=(KvBuffer("k_cache_0", "f32", BLOCK * 4, 1), KvBuffer("v_cache_0", "f32", BLOCK * 4, 1)),
            kernels=tuple(Kernel(f"h{s}", s, f"k_{s}", f"infc.{s}.default", "portable") for s in ("write", "hash", "sample")),
            golden=GoldenInfo("golden.safetensors", "max_abs", bound) if golden else None,
        )
        weights = {"w": tensor(self.weight), "big": tensor(self.big), "packed": Tensor("bf16", (3, 5), np.arange(15, dtype=np.uint16))}
        return Parts(manifest, [self.program(t, n) for t, n in buckets], self.library, weights, golden or {},
                     self.tokenizer() if with_tokenizer else b"", {"passes": []})

    def program(self, t: int, n: int) -> Program:
        """The program of one bucket."""
        m = POSITIONS // BLOCK
        names = {"input_ids": t, "positions": t, "slots": t, "query_start": n + 1, "context_len": n, "block_table": n * m,
                 "sample_rows": n, "temperature": n, "top_k": n, "top_p": n, "uniform": n}
        dims: dict[str, tuple[int | str, ...]] = {"query_start": ("N+1",), "context_len": ("N",), "block_table": ("N", "M")}
        buffers = [
            Buffer(k, "input", "f32" if k in ("temperature", "top_p", "uniform") else "i32",
                   dims.get(k, ("T",) if v == t else ("R",)), 4 * v)
            for k, v in names.items()
        ]
        buffers += [
            Buffer("k_cache_0", "kv", "f32", ("P", 1, BLOCK, 1), BLOCK * 4),
            Buffer("v_cache_0", "kv", "f32", ("P", 1, BLOCK, 1), BLOCK * 4),
            Buffer("w", "weight", "i32", (VOCAB,), VOCAB * 4, tensor="w"),
            Buffer("kept", "arena", "f32", ("T",), 4 * t, offset=0),
            Buffer("hash", "arena", "i32", ("R",), 4 * n, offset=-(-4 * t // 64) * 64),
            Buffer("token", "output", "i32", ("R",), 4 * n), Buffer("logits", "output", "f32", ("R", VOCAB), 4 * n * VOCAB),
        ]
        at = {b.name: i for i, b in enumerate(buffers)}

        def step(kernel: str, *args: str) -> Step:
            return Step(f"h{kernel}", tuple(at[a] for a in args), f"infc.{kernel}.default")

        return Program(
            f"step_T{t}", {"T": t, "N": n, "R": n, "M": m}, DIMS, -(-4 * t // 64) * 64 + 64, tuple(buffers),
            (step("write", "input_ids", "positions", "slots", "k_cache_0", "v_cache_0", "kept"),
             step("hash", "sample_rows", "query_start", "context_len", "block_table", "k_cache_0", "v_cache_0", "kept", "w", "hash"),
             step("sample", "hash", "temperature", "top_k", "top_p", "uniform", "token", "logits")),
        )

    def tokenizer(self) -> bytes:
        """One token a byte: ids 0..255 are bytes, the rest words that are never encoded."""
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        by_byte = {letter: i for i, letter in enumerate(sorted(letters))}
        vocab = {**by_byte, **{f"w{i}": i for i in range(256, VOCAB - 1)}, "<end>": EOS}
        model = Tokenizer(tokenizers.models.BPE(vocab, []))
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        model.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
        return model.to_str().encode()

    def write(self, name: str = "fake.infc", force: bool = False, **options: object) -> Path:
        """Write an artifact and return its path."""
        artifact.write(self.folder / name, self.parts(**options), force)      # type: ignore[arg-type]
        return self.folder / name

    def hash(self, tokens: Sequence[int]) -> int:
        """What k_hash gives for the last of these tokens."""
        h = self.start
        for p, token in enumerate(tokens):
            h = (h * 31 + int(self.weight[token]) + 7 * p) % 1000003
        return (h + tokens[-1]) % 1000003

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """What k_sample gives for the last of these tokens."""
        h = self.hash(tokens)
        row = (((h + 131 * np.arange(VOCAB)) % 97).astype(np.float32) / np.float32(97))
        row[h % VOCAB] += 4
        return row

    def answer(self, prompt: Sequence[int], count: int, draw: Callable[[], int] | None = None, eos: bool = False) -> list[int]:
        """The tokens after a prompt. `draw` gives what sampling adds to each."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append((self.hash(tokens) + (draw() if draw else 0)) % VOCAB)
            if eos and tokens[-1] == EOS:
                break
        return tokens[len(prompt):]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The shared library of the fake model, compiled once."""
    return compiled(SOURCE, tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library of the same symbols whose hash starts at 8."""
    return compiled(SOURCE.replace("h = 7;", "h = 8;"), tmp_path_factory.mktemp("other"))


def compiled(source: str, folder: Path) -> bytes:
    """A shared library of C++ with pool.h."""
    (folder / "fake.cpp").write_text(source)
    command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", "-pthread", f"-I{KERNELS}", "fake.cpp", "-o", "fake.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return (folder / "fake.so").read_bytes()


@pytest.fixture
def fake(library: bytes, tmp_path: Path) -> Fake:
    """A builder of fake artifacts in a fresh folder."""
    return Fake(library, tmp_path)


@pytest.fixture
def other(other_library: bytes, tmp_path: Path) -> Fake:
    """A builder of artifacts in the same folder whose kernels answer differently."""
    return Fake(other_library, tmp_path, start=8)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver) -> Iterator[CudaDevice]:
    """A CUDA device of the fake driver, of which nothing is left behind."""
    device = CudaDevice(driver=driver)
    yield device
    device.close()
    assert driver.left() == 0 and driver.stack == [None]
