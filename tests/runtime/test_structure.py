"""What no hash shows: a program that is whole, and cannot be run."""
from collections.abc import Callable

import msgspec
import pytest
from infc.runtime.manifest import BucketInfo, FileInfo, Manifest, ModelInfo
from infc.runtime.program import DIMS, Buffer, Call, Candidate, Choice, Kernel, Program, Step
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


# ---- candidates

ONE = Candidate("one", (Step("aa", (0, 1), "", grid=(4, 1, 1), scalars=((2, -3), (3, 0.5))),))
TWO = Candidate("two", (Step("aa", (0, 2), "", grid=(2, 1, 1), scalars=((2, 1), (3, 0.5))),
                        Step("aa", (2, 1), "", grid=(8, 1, 1), scalars=((2, 2), (3, 0.5)), part=1)))
LAST = msgspec.structs.replace(STEP, args=(1, 0), flops=7, bytes=9, origin=("layers.1",))
CHOICE = Choice("infc.linear", (ONE, TWO), (Call(0, (0, 1, 2)), Call(1, (1, 0, 2))))
OFFERED = msgspec.structs.replace(PROGRAM, buffers=(*PROGRAM.buffers, Buffer("scratch", "arena", "u8", (32,), 32, 32)), steps=(STEP, LAST),
                                  choices=(CHOICE,))


def offered(**changes) -> Program:
    return msgspec.structs.replace(OFFERED, choices=(msgspec.structs.replace(CHOICE, **changes),))


def candidate(**changes) -> Program:
    return offered(candidates=(ONE, msgspec.structs.replace(TWO, **changes)))


def test_another_choice_moves_what_is_behind_it_and_back() -> None:
    """Two launches in place of one: the steps keep what they count and where they come from, and calls know where they went."""
    assert fault(OFFERED, BUCKET, MANIFEST) == ""
    other = OFFERED.with_choices([msgspec.structs.replace(CHOICE, chosen=1)])
    assert fault(other, BUCKET, MANIFEST) == "" and other.chosen() == {0: "two", 2: "two"} and OFFERED.chosen() == {0: "one", 1: "one"}
    assert [(step.args, step.part, step.flops, step.bytes, step.origin) for step in other.steps] == [
        ((0, 2), 0, 0, 0, ()), ((2, 1), 1, 0, 0, ()), ((1, 2), 0, 7, 9, ("layers.1",)), ((2, 0), 1, 0, 0, ("layers.1",))]
    assert other.with_choices([msgspec.structs.replace(other.choices[0], chosen=0)]) == OFFERED


@pytest.mark.parametrize(("program", "says"), [
    (lambda: offered(chosen=2), "takes candidate 2 of 2"), (lambda: offered(candidates=()), "takes candidate 0 of 0"),
    (lambda: offered(candidates=(ONE, msgspec.structs.replace(TWO, name="one"))), "have one name"),
    (lambda: candidate(steps=()), "candidate two has no step"),
    (lambda: candidate(steps=(msgspec.structs.replace(TWO.steps[0], kernel="bb"),)), "has the step 0, whose kernel bb is not there"),
    (lambda: candidate(steps=(msgspec.structs.replace(TWO.steps[0], args=(0, 3)),)), "names buffer 3 of 3"),
    (lambda: candidate(steps=(msgspec.structs.replace(TWO.steps[0], grid=(0, 1, 1)),)), "has the grid"),
    (lambda: candidate(steps=(msgspec.structs.replace(TWO.steps[0], scalars=()),)), "2 values, and it takes 4"),
    (lambda: offered(calls=(Call(0, (0, 1, 2)), Call(2, (1, 0, 2)))), "steps 2 to 2 of 2"),
    (lambda: offered(calls=(Call(-1, (0, 1, 2)),)), "steps -1 to -1 of 2"),
    (lambda: offered(calls=(Call(0, (0, 1, 2)), Call(0, (0, 1, 2)))), "or others are too"),
    (lambda: offered(calls=(Call(0, (0, 1, 9)),)), "names buffer 9 of 3"),
    (lambda: offered(calls=(Call(0, (1, 0, 2)),)), "runs something else at step 0"),
    (lambda: offered(chosen=1, calls=(Call(0, (0, 1, 2)),)), "runs something else at step 0"),
])
def test_faults_of_candidates(program: Callable[[], Program], says: str) -> None:
    assert says in fault(program(), BUCKET, MANIFEST)


def test_a_candidate_needs_a_gpus_kernel() -> None:
    assert "which is none of a GPU" in fault(OFFERED, BUCKET, kernel(file=""))
