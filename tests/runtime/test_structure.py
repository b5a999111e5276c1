"""What no hash shows: a program that is whole, and cannot be run."""
from collections.abc import Callable

import msgspec
import pytest
from infc.runtime.manifest import BucketInfo, FileInfo, Manifest, ModelInfo
from infc.runtime.program import DIMS, Buffer, Kernel, Program, Step
from infc.runtime.structure import fault

KERNEL = Kernel("aa", "rows", "rows", "infc.linear", "sm_90a", 40, 0, 0, "code/aa.cubin", 128, ("u64", "u64", "u32", "f32", "u64", "u64"))
STEP = Step("aa", (0, 1), "infc.linear", grid=(4, 1, 1), scalars=((2, -3), (3, 0.5)))
PROGRAM = Program("step_T1", {"T": 1, "N": 1, "R": 1, "M": 2}, DIMS, 128, (
    Buffer("x", "arena", "f32", (16,), 64), Buffer("y", "arena", "f32", (16,), 64, 64)), (STEP,))
BUCKET = BucketInfo("step_T1", "programs/step_T1.json", PROGRAM.bucket, 128, 1)
MANIFEST = Manifest("m", "v", "h100", "cuda", (), "bf16", "exact", ModelInfo("m", 8, 64), kernels=(KERNEL,),
                    files={"code/aa.cubin": FileInfo("0" * 64, 4)}, buckets=(BUCKET,))


def step(**changes) -> Program:
    return msgspec.structs.replace(PROGRAM, steps=(msgspec.structs.replace(STEP, **changes),))


def kernel(**changes) -> Manifest:
    return msgspec.structs.replace(MANIFEST, kernels=(msgspec.structs.replace(KERNEL, **changes),))


def test_a_whole_program_has_no_fault() -> None:
    assert fault(PROGRAM, BUCKET, MANIFEST) == ""


@pytest.mark.parametrize(("program", "says"), [
    (lambda: step(kernel="bb"), "whose kernel bb is not there"), (lambda: step(args=(0, 9)), "names buffer 9 of 2"),
    (lambda: step(args=(0, -1)), "names buffer -1 of 2"), (lambda: step(grid=()), r"grid \(\)"), (lambda: step(grid=(4, 0, 1)), "grid"),
    (lambda: step(grid=(4, 65536, 1)), "grid"), (lambda: step(scalars=()), "2 values, and it takes 4"),
    (lambda: step(scalars=((2, 10**30), (3, 0.5))), "where u32 is taken"), (lambda: step(scalars=((3, 1), (2, 0.5))), "gives scalars at"),
    (lambda: msgspec.structs.replace(PROGRAM, arena_bytes=100), "outside an arena of 100"),
    (lambda: msgspec.structs.replace(PROGRAM, bucket={}), "is of the bucket {}"),
])
def test_faults_of_a_program(program: Callable[[], Program], says: str) -> None:
    import re

    assert re.search(says, fault(program(), BUCKET, MANIFEST))


@pytest.mark.parametrize(("changes", "says"), [
    ({"file": "code/../x"}, "not listed in the manifest"), ({"threads": 0}, "has 0 threads"), ({"params": ()}, "it takes -2"),
])
def test_faults_of_a_manifest(changes: dict, says: str) -> None:
    assert says in fault(PROGRAM, BUCKET, kernel(**changes))
