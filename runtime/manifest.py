"""The manifest: everything an artifact says about itself, readable without running any of its code."""

import hashlib

import msgspec

from .errors import RuntimeFault
from .program import Kernel

SCHEMA = 2
MANIFEST = "manifest.json"
BLOCK = 32
"""Tokens in one KV block."""

GPU = "cuda"
"""The `machine` of an artifact that runs on an NVIDIA GPU, whatever the host."""

_NO_DIGEST = "0" * 64


class FileInfo(msgspec.Struct, frozen=True):
    """What a file must be: checked before anything in it is used."""

    sha256: str
    bytes: int


class BucketInfo(msgspec.Struct, frozen=True):
    """One bucket: its maxima ({"T": 16, "N": 16, "R": 16, "M": 256}) and the file of its program."""

    name: str
    file: str
    bucket: dict[str, int]
    arena_bytes: int
    steps: int
    aten_steps: int = 0


class KvBuffer(msgspec.Struct, frozen=True):
    """One cache of one layer. `name` is the name of the KV buffer in every program."""

    name: str
    dtype: str
    block_bytes: int  # one block of `BLOCK` tokens
    heads: int  # of equal parts of it


class ModelInfo(msgspec.Struct, frozen=True):
    """What serving needs to know of the model."""

    name: str
    vocab: int
    max_positions: int
    eos_ids: tuple[int, ...] = ()
    layers: int = 0
    chat_template: str = ""
    special_tokens: dict[str, str] = {}  # for the chat template: {"bos_token": "<s>", "eos_token": "</s>"}
    parameters: int = 0
    license: str = ""
    source: str = ""  # where the weights came from: a name or a hash, never a local path


class PassInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pass that changed the graph."""

    name: str
    contract: str
    fired: int = 0
    bound: str = ""  # what an APPROXIMATE pass promises


class WeightsInfo(msgspec.Struct, frozen=True):
    """Where the tensors lie in weights.safetensors, and one crc32c per chunk of that region, checked while it is copied."""

    file: str
    data_offset: int
    data_bytes: int
    chunk: int
    crc32c: tuple[int, ...]
    header_sha256: str


class GoldenInfo(msgspec.Struct, frozen=True):
    """How close a replay of the golden prompts must come to the recorded logits.

    metric "max_abs": largest absolute difference; "mean_kl": mean over rows of KL(recorded || replayed), in nats.
    """

    file: str
    metric: str
    bound: float


class QualityInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a quantized model lost beside the model as captured (fp32), on held-out data; verified=False: nobody measured."""

    verified: bool
    data: str = ""  # the name of the text
    data_sha256: str = ""
    tokens: int = 0
    ppl: float | None = None
    reference_ppl: float | None = None
    kl: float | None = None  # nats
    kl_p99: float | None = None
    top1: float | None = None
    limits: str = ""  # what had to hold
    by: str = ""  # the artifact, or why its graph in eager PyTorch
    bits_per_weight: float | None = None


class TunedInfo(msgspec.Struct, frozen=True):
    """Where `infc tune` measured; the times stand in the programs. An artifact that was tuned runs on other cards all the same."""

    gpu: str
    driver: str
    rounds: int
    context: int  # the most tokens before those of a step that attention was measured at
    margin: float  # by which a candidate had to be faster than the one before
    choices: int
    changed: int


class Manifest(msgspec.Struct, frozen=True):
    """The compiler fills the first part; `artifact.write` fills the second."""

    name: str
    version: str  # the key: a hash of all that decided what this artifact is
    target: str  # as given to --target
    machine: str  # "x86_64", "aarch64"; GPU
    isa: tuple[str, ...]  # CPU flags every kernel may use, as /proc/cpuinfo spells them
    dtype: str
    contract: str  # the weakest class any pass used: exact, distribution, approximate
    model: ModelInfo
    passes: tuple[PassInfo, ...] = ()
    created_with: dict[str, str] = {}  # {"infc": "0.1.0", "torch": "2.13.0", "compiler": "g++ 13.2"}
    kv: tuple[KvBuffer, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    golden: GoldenInfo | None = None
    quality: QualityInfo | None = None  # None where nothing was quantized and nothing measured
    tuned: TunedInfo | None = None

    schema: int = SCHEMA
    buckets: tuple[BucketInfo, ...] = ()
    code: str = ""  # "code/<sha256>.so"
    tokenizer: str = ""  # "tokenizer.json", or "" where the model has none
    weights: WeightsInfo | None = None
    files: dict[str, FileInfo] = {}
    digest: str = _NO_DIGEST  # sha256 of this file with the digest itself as 64 zeros


class _Schema(msgspec.Struct):
    schema: int


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json, with the digest over themselves filled in."""
    plain = msgspec.structs.replace(manifest, digest=_NO_DIGEST)
    raw = msgspec.json.format(msgspec.json.encode(plain), indent=1)
    digest = hashlib.sha256(raw).hexdigest()
    return _set_digest(raw, _NO_DIGEST, digest)


def decode(raw: bytes, where: str) -> Manifest:
    """Read manifest.json. Raises RuntimeFault where it was altered or belongs to another version of infc."""
    try:
        schema = msgspec.json.decode(raw, type=_Schema).schema
        if schema != SCHEMA:
            raise RuntimeFault(f"{where}: {MANIFEST} has schema {schema}, this infc reads schema {SCHEMA}; compile it again")
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RuntimeFault(f"{where}: {MANIFEST} is damaged ({error}); compile it again") from error
    if hashlib.sha256(_set_digest(raw, manifest.digest, _NO_DIGEST)).hexdigest() != manifest.digest:
        raise RuntimeFault(f"{where}: {MANIFEST} was altered (its sha256 differs from the one it records); compile it again")
    return manifest


def _set_digest(raw: bytes, old: str, new: str) -> bytes:
    head, key, tail = raw.rpartition(b'"digest": "')  # the last field
    return head + key + tail.replace(old.encode(), new.encode(), 1)
