"""The process around a model: threads, forks, quotas, moved memory, an ATen step."""
import os
import threading
import weakref
import zipfile

import msgspec
import numpy as np
import pytest
from infc.runtime import artifact, library
from infc.runtime.errors import RuntimeFault
from infc.runtime.program import Kernel, Step
from infc.runtime.session import load


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(fake, threads):
    with load(fake.write(), threads=threads) as model:
        assert model.generate([3, 1, 4], max_tokens=20, ignore_eos=True)[0].token_ids == fake.answer([3, 1, 4], 20)


def test_callers_of_several_threads_take_turns(fake):
    found: dict[int, list[int]] = {}
    with load(fake.write(), threads=2) as model:
        def ask(i: int) -> None:
            found[i] = model.generate([i, i + 1], max_tokens=40, ignore_eos=True)[0].token_ids

        callers = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for caller in callers: caller.start()
        for caller in callers: caller.join()
        assert model.pool.free == model.pool.count
    assert found == {i: fake.answer([i, i + 1], 40) for i in range(4)}


def test_a_forked_child_is_told(fake):
    with load(fake.write(), threads=2) as model:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                model.generate([1])
            except RuntimeFault as fault:
                os.write(write, str(fault).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert b"loaded before this process was forked" in os.read(read, 1000)
        os.close(read), os.close(write)
        assert model.generate([1, 2], max_tokens=4)[0].token_ids == fake.answer([1, 2], 4)


@pytest.mark.parametrize("packed", [False, True])
def test_a_dropped_model_leaves_nothing(fake, packed):
    path = fake.write()
    if packed:
        with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
            for file in path.rglob("*"): archive.write(file, file.relative_to(path))
        path = path.with_suffix(".zip")
    before = left()
    model = load(path, threads=3)
    executor = weakref.ref(model.executor)
    assert model.generate([1, 2], max_tokens=4)[0].token_ids == fake.answer([1, 2], 4)
    during = left()
    child = os.fork()
    if child == 0:                                                  # the pool's threads are not here to be joined
        del model
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert model.generate([1, 2], max_tokens=4)[0].token_ids == fake.answer([1, 2], 4)
    del model
    assert executor() is None
    assert during[0] == before[0] + 2 and during[1] > before[1]
    assert left() == before


def left() -> tuple[int, int, int]:
    """Threads, open files, and mappings of 2 MiB and more of this process."""
    with open("/proc/self/maps") as file:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in file if len(line.split()) == 5]
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), sum(end - begin >> 21 for begin, end in spans)


def test_default_threads_respect_affinity():
    everyone = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(everyone)})
        assert library.default_threads() == 1
    finally:
        os.sched_setaffinity(0, everyone)


def test_memory_that_moved_gets_a_new_table(fake):
    with load(fake.write()) as model:
        first = model.generate([1, 2], max_tokens=3)
        assert model.counters["stale"] == 0
        model.executor._regions[1].address += 64                    # as if the arena had been allocated again
        model.executor._arena_bytes -= 64                           # it is larger than what the small buckets need
        assert model.generate([1, 2], max_tokens=3) == first
        assert model.counters["stale"] > 0


def test_an_aten_step_runs_between_kernels(fake):
    torch = pytest.importorskip("torch")
    parts = fake.parts()
    programs = []
    for program in parts.programs:
        names = [b.name for b in program.buffers]
        token, hash_ = names.index("token"), names.index("hash")
        step = Step("haten", (hash_, token), "aten.remainder.Scalar")            # token = hash % 97, by torch
        programs.append(msgspec.structs.replace(program, steps=(*program.steps, step, program.steps[0])))
    aten = Kernel("haten", "aten_remainder", 'aten::remainder.Scalar [{"in":0},97]', "aten.remainder.Scalar", "portable")
    manifest = msgspec.structs.replace(parts.manifest, kernels=(*parts.manifest.kernels, aten))
    written = artifact.write(fake.folder / "aten.infc", parts._replace(manifest=manifest, programs=programs))
    assert [b.aten_steps for b in written.buckets] == [1, 1, 1]
    with load(fake.folder / "aten.infc") as model, model.sequence() as s:
        assert model.step([s], [[1, 2, 3]]).tokens == [fake.hash([1, 2, 3]) % 97]
        assert [op for op, _ in model.profile(s, [4])][2:] == ["infc.sample.default", "aten.remainder.Scalar", "infc.write.default"]
    assert torch is not None


def test_logits_survive_close(fake):
    model = load(fake.write())
    with model.sequence() as s:
        logits = model.step([s], [[1, 2, 3]]).logits[0]
    model.close()
    assert np.array_equal(logits, [fake.logits([1, 2, 3])])
