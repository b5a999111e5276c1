"""What the compiler says of a GPU is what kernels for it are judged by."""
import pytest

pytest.importorskip("triton", reason="needs the extra `gpu`")

from infc.backends.triton import build, worker
from infc.compiler.targets import ARCHS, TARGETS


def test_the_same_architectures_with_the_same_shared_memory() -> None:
    limits = {arch: (limit.shared, limit.shared_of_one) for arch, limit in build.LIMITS.items()}
    assert limits == {name: (arch.shared_per_sm, arch.shared_per_program) for name, arch in ARCHS.items()}
    assert set(worker.ARCHS) == set(ARCHS) == {target.isa for target in TARGETS.values() if target.gpu}
    assert all(number == int(ARCHS[arch].capability.replace(".", "")) for arch, number in worker.ARCHS.items())
