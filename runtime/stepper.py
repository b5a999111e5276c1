"""One step at a time: choose the smallest bucket that holds it, fill its inputs, replay its program."""
from collections.abc import Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import options
from .artifact import Artifact
from .batch import SequenceState, Work, sizes
from .blocks import BlockPool, blocks_for
from .cache import Key, ReplayCache
from .errors import RuntimeFault
from .manifest import BLOCK, BucketInfo
from .outputs import StepResult

if TYPE_CHECKING:
    from .cpu import Executor
    from .gpu import GpuExecutor, GpuTable
    from .table import StepTable

Rows = Literal["last", "all", "none"]


class Limits(NamedTuple):
    """What a step and a sequence can hold."""

    tokens: int                # T of the largest bucket
    sequences: int             # in one step
    rows: int                  # sampled rows in one step
    positions: int             # of one sequence


class OpenSequence(SequenceState):
    """A sequence of your own loop: `length` tokens in the KV pool. Close it, or use it in a `with`."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self._pool = pool
        self.closed = False

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        if not hasattr(length, "__index__") or isinstance(length, bool):
            raise RuntimeFault(f"cannot truncate a sequence to {length!r}; give a whole number of tokens")
        if not 0 <= length <= self.length:
            raise RuntimeFault(f"cannot truncate a sequence of {self.length} tokens to {length}")
        self._pool.shrink(self, blocks_for(length))
        self.length = length

    def close(self) -> None:
        """Give its blocks back. It is of no use after."""
        self.truncate(0)
        self.closed = True

    def __enter__(self) -> "OpenSequence":
        if self.closed: raise RuntimeFault("the sequence is closed; make another with sequence()")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stepper:
    """Runs steps of any mix of sequences. Callers of several threads take turns."""

    def __init__(self, artifact: Artifact, executor: "Executor | GpuExecutor", limits: Limits) -> None:
        self.artifact = artifact
        self.executor = executor
        self.limits = limits
        self.pool = BlockPool(executor.kv_blocks, executor.clear)
        self.cache: ReplayCache[StepTable | GpuTable] = ReplayCache(executor.cache_bytes)
        self.steps = 0
        self.lock = RLock()                                 # a step checks, runs and undoes what it did in one turn
        self._buckets = sorted(artifact.manifest.buckets, key=lambda b: (b.bucket["T"], b.bucket["N"]))

    def run(self, works: Sequence[Work]) -> list[int]:
        """One step of `works`: the sampled tokens, in order."""
        return self.run_logits(works, False)[0]

    def run_logits(self, works: Sequence[Work], logits: bool, bucket: str = "", copy: bool = True) -> tuple[list[int], Any]:
        """The sampled tokens, and a copy of their logits [rows, vocab] if asked for (None without a row).

        bucket: the name of the one to run through; by default the smallest that holds the step. copy: as in `step`.
        """
        with self.lock:
            dims, table = self._prepare(works, bucket)
            table.run(dims)
            self._advance(works)
            rows = dims["R"]
            return self.executor.tokens(rows), self.executor.logits(rows, copy) if logits and rows else None

    def prepare(self) -> None:
        """Make every bucket ready now, rather than when a step first needs it."""
        with self.lock:
            for bucket in self._buckets: self._table(bucket)

    def profile(self, sequence: OpenSequence, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Append tokens to a sequence in one step; (operator, nanoseconds with its barrier) of each step of the program.

        The launches of one call are one entry.
        """
        return self.profile_batch([sequence], [tokens])

    def profile_batch(self, sequences: Sequence[OpenSequence], tokens: Sequence[Sequence[int]], rows: int = 1) -> list[tuple[str, int]]:
        """As `profile`, tokens[i] appended to sequences[i] in one step; of each sequence the last `rows` tokens are sampled."""
        with self.lock:
            lists = self._checked(sequences, tokens, "last")
            works = [Work(sequence, ids, rows) for sequence, ids in zip(sequences, lists, strict=True)]
            dims, table = self._prepare(works)
            times = table.profile(dims)
            self._advance(works)
            found: list[tuple[str, int]] = []
            for step, ns in zip(table.program.steps, times, strict=True):
                found.append((step.op, ns + found.pop()[1]) if step.part else (step.op, ns))
            return found

    def sequence(self) -> OpenSequence:
        """An empty sequence, for `step`."""
        return OpenSequence(self.pool)

    def step(
        self, sequences: Sequence[OpenSequence], tokens: Sequence[Sequence[int]], *, logits: Rows = "last", copy: bool = True,
    ) -> StepResult:
        """Append tokens[i] to sequences[i] and return what the model says next: for your own loop.

        logits: of each sequence's last new token, of all its new tokens, or of none. More tokens than the largest bucket holds run in
        chunks; with "all", so do more than the artifact has sequences (16 by default): a step gives no more rows of logits. Raises
        RuntimeFault, and changes no sequence, where a value is out of its limits, the KV pool is full, or a sequence is not of this model.

        copy: arrays are copies, and stay what they are. With copy=False they are the model's own buffer, the same at every step: read
        them, do not write, before the next call of `step`, `generate`, `stream`, `swap_weights` or `close` on this model, in whatever
        thread; that call overwrites them or gives their memory back. On a CPU they are read-only numpy arrays. On a GPU they stay on the
        device, complete, as objects with `__cuda_array_interface__`, which torch.as_tensor and cupy.asarray take without a copy.
        RuntimeFault where the tokens do not fit one step, whose logits the next would overwrite.
        """
        sequences, tokens = _listed("sequences", sequences), _listed("tokens", tokens)
        with self.lock:
            lists = self._checked(sequences, tokens, logits)
            before = [s.length for s in sequences]
            try:
                return self._append(sequences, lists, logits, copy)
            except RuntimeFault:
                for sequence, length in zip(sequences, before, strict=True):
                    sequence.truncate(length)
                raise

    @property
    def counters(self) -> dict[str, int]:
        """Steps run, replay cache events, padded tokens, KV blocks in use at the peak."""
        return {
            "steps": self.steps, "kv_blocks": self.pool.count, "kv_blocks_free": self.pool.free,
            "kv_blocks_peak": self.pool.peak, **self.cache.counters(),
        }

    def memory(self) -> dict[str, int]:
        """Bytes reserved: weights, arena, kv."""
        return self.executor.memory()

    def close(self) -> None:
        """Stop the threads, give the memory back. It is of no use after."""
        with self.lock:
            self.cache.clear()
            self.executor.close()

    def check_length(self, what: str, tokens: int) -> None:
        """Raise RuntimeFault where no sequence can have so many tokens."""
        if tokens > self.limits.positions:
            raise RuntimeFault(f"{what} has {tokens} tokens; the model's limit is {self.limits.positions}")
        if blocks_for(tokens) > self.pool.count:
            room = self.pool.count * BLOCK
            raise RuntimeFault(f"{what} has {tokens} tokens; the KV pool holds {room} (load with a larger kv_tokens=)")

    def _prepare(self, works: Sequence[Work], name: str = "") -> tuple[dict[str, int], "StepTable | GpuTable"]:
        self.executor.require_ready()
        for work in works:
            more = blocks_for(work.sequence.length + len(work.tokens)) - len(work.sequence.blocks)
            if more > 0:
                self.pool.grow(work.sequence, more)
        dims = sizes(works) | {"P": self.pool.count}
        bucket = self._bucket(dims, name)
        self.executor.fill(works, dims, bucket.bucket)
        self.cache.padded_tokens += bucket.bucket["T"] - dims["T"]
        return dims, self._table(bucket)

    def _table(self, bucket: BucketInfo) -> "StepTable | GpuTable":
        manifest = self.artifact.manifest
        key = Key(manifest.version, manifest.dtype, bucket.name)
        return self.cache.get(key, self.executor.places, lambda: self.executor.table(bucket.name))

    def _bucket(self, dims: Mapping[str, int], name: str = "") -> BucketInfo:
        for bucket in self._buckets:
            if name in ("", bucket.name) and all(dims[d] <= bucket.bucket[d] for d in ("T", "N", "R", "M")):
                return bucket
        there = ", ".join(f"{b.name} ({' '.join(f'{d}={n}' for d, n in b.bucket.items())})" for b in self._buckets)
        raise RuntimeFault(f"{self.artifact.path}: a step of {dict(dims)} fits no bucket; there are {there}; compile with larger buckets")

    def _advance(self, works: Sequence[Work]) -> None:
        self.steps += 1
        for work in works:
            work.sequence.length += len(work.tokens)

    def _checked(self, sequences: Sequence[OpenSequence], tokens: Sequence[Sequence[int]], logits: str) -> list[list[int]]:
        self.executor.require_ready()
        if logits not in ("last", "all", "none"):
            raise RuntimeFault(f"logits is {logits!r}; it must be last, all or none")
        if len(sequences) != len(tokens) or not sequences or len(set(map(id, sequences))) != len(sequences):
            raise RuntimeFault(f"step got {len(sequences)} sequences and {len(tokens)} token lists; give each one list, "
                               "and no sequence twice")
        if len(sequences) > self.limits.sequences:
            raise RuntimeFault(f"step got {len(sequences)} sequences; the limit is {self.limits.sequences} "
                               "(max_sequences= when loading)")
        for i, sequence in enumerate(sequences):
            if not isinstance(sequence, OpenSequence):
                raise RuntimeFault(f"sequence {i} is {options.kind(sequence)}; make one with sequence()")
            if sequence.closed:
                raise RuntimeFault(f"sequence {i} is closed, and what it held is gone; make another with sequence()")
            if sequence._pool is not self.pool:
                raise RuntimeFault(f"sequence {i} belongs to another model, whose KV blocks it names; make one with this "
                                   "model's sequence()")
        vocab = self.artifact.manifest.model.vocab
        lists = [options.token_ids(t, vocab, f"sequence {i}") for i, t in enumerate(tokens)]
        for i, (sequence, ids) in enumerate(zip(sequences, lists, strict=True)):
            self.check_length(f"sequence {i}", sequence.length + len(ids))
        return lists

    def _append(self, sequences: Sequence[OpenSequence], lists: Sequence[Sequence[int]], logits: str, copy: bool) -> StepResult:
        found: list[list[Any]] = [[] for _ in sequences]
        likeliest = [-1] * len(sequences)
        chunks = _chunks([len(ids) for ids in lists], self.limits, logits == "all")
        if not copy and logits != "none" and sum(any(rows for *_, rows in parts) for parts in chunks) > 1:
            raise RuntimeFault(f"copy is False, and these tokens run in {len(chunks)} steps, each of which overwrites the logits of the "
                               f"one before; give at most {self.limits.tokens} tokens and {self.limits.rows} rows, or leave copy out")
        for parts in chunks:
            works = [Work(sequences[i], lists[i][start:stop], rows) for i, start, stop, rows in parts]
            tokens, values = self.run_logits(works, logits != "none", copy=copy)
            row = 0
            for i, _, _, rows in parts:
                if rows:
                    likeliest[i] = tokens[row + rows - 1]
                    if values is not None:
                        found[i].append(values[row:row + rows])
                row += rows
        if logits == "none":
            return StepResult([], likeliest)
        if not copy: return StepResult([piece for piece, in found], likeliest)
        import numpy as np

        return StepResult([np.concatenate(pieces) for pieces in found], likeliest)


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError as error:
        raise RuntimeFault(f"{name} is {options.kind(values)}; give a list, one item a sequence") from error


def _chunks(lengths: Sequence[int], limits: Limits, all_rows: bool) -> list[list[tuple[int, int, int, int]]]:
    """Steps of parts (sequence, first token, end, rows sampled) that together cover all tokens of all sequences."""
    steps: list[list[tuple[int, int, int, int]]] = []
    at = [0] * len(lengths)
    while any(done < length for done, length in zip(at, lengths, strict=True)):
        tokens, rows, parts = limits.tokens, limits.rows, []
        for i, length in enumerate(lengths):
            count = min(length - at[i], tokens, rows if all_rows else tokens)
            sampled = count if all_rows else int(at[i] + count == length)
            if count and sampled <= rows:
                parts.append((i, at[i], at[i] + count, sampled))
                at[i] += count
                tokens, rows = tokens - count, rows - sampled
        steps.append(parts)
    return steps
