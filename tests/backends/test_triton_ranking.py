"""The model that ranks cuts: known cases by hand, and monotone in what the compiler reports."""
import pytest

pytest.importorskip("triton", reason="needs the extra `gpu`")

from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.backends.program import Store
from infc.backends.triton import ranking
from infc.backends.triton.backend import GpuLaunch
from infc.backends.triton.build import LIMITS
from infc.backends.triton.ranking import Estimate, candidate_of, launch
from infc.backends.triton.registry import Launch, Work
from infc.backends.triton.shortlist import choose
from infc.compiler.errors import CheckFailed
from infc.compiler.targets import ARCHS, TARGETS
from infc.runtime.program import Buffer, Call, Candidate, Choice, Kernel, Program, Step

H100, H200 = TARGETS["h100"].gpu, TARGETS["h200"].gpu
assert H100 and H200
STREAM = Work(cold=64 << 10, warm=1 << 10, stores=64, ahead=24 << 10, rounds=8)
LARGE = 1 << 40                          # bytes of a call that no program shares
KILO = 1024


def kernel(registers: int = 64, shared: int = 32 << 10, threads: int = 128, spills: int = 0, cores: str = "") -> Kernel:
    return Kernel("aa", "k", "k", "infc.linear", "sm_90a", registers, shared, spills, "code/aa.cubin", threads, tensor_cores=cores)


def estimate(programs: int, work: Work = STREAM, unique: int = LARGE, gpu=H100, **report) -> Estimate:
    return launch(kernel(**report), work, (programs, 1, 1), unique, gpu)


def test_figures_of_a_stream_by_hand() -> None:
    """H100: clock 1.98 GHz, 6 programs of 33 KiB on each of 132 multiprocessors, 144 KiB on their way: more than the 48 that fill it."""
    found = estimate(792)
    assert (found.programs_per_sm, found.waves) == (6, 1.0)
    assert found.us == pytest.approx(792 * (64 << 10) / 3350e3 + 478.8 / 1982.7 + ranking.GAP_US, rel=1e-3)
    assert estimate(396, shared=200 << 10).us == pytest.approx(3 * (132 * (64 << 10) / 3350e3 * 2 + 478.8 / 1982.7) + 0.5, rel=1e-3)
    assert estimate(792, unique=10 * KILO).us < found.us            # read by many, from memory once


def test_a_tail_costs_a_wave() -> None:
    compute = Work(cold=1, ahead=1, flops=10**8)
    whole, more = estimate(264, compute, cores="wgmma", shared=100 << 10), estimate(265, compute, cores="wgmma", shared=100 << 10)
    assert whole.waves == 1 and 1 < more.waves < 1.01
    each = 10**8 * 132 / 989.5e6
    assert whole.us == pytest.approx(2 * each + 0.2415 + 0.5, rel=1e-3) and more.us == pytest.approx(3 * each + 2 * 0.2415 + 0.5, rel=1e-3)


def test_what_a_product_runs_on_decides() -> None:
    compute = Work(cold=1, ahead=1, flops=10**8)
    wgmma, mma, none = (estimate(132, compute, cores=cores).us - 0.7415 for cores in ("wgmma", "mma", ""))
    assert mma == pytest.approx(wgmma / 0.629, rel=1e-3) and none == pytest.approx(wgmma * 989.5 / 67, rel=1e-3)


def test_few_programs_with_little_on_its_way_starve_the_memory() -> None:
    """64 programs read 4 MiB: those with twice as much on its way take half as long, until the memory is full; then its rate decides."""
    times = [estimate(64, replace(STREAM, ahead=ahead << 10), gpu=H200).us - 0.5 - 478.8 / 1982.7 for ahead in (8, 16, 32)]
    assert times[0] == pytest.approx(2 * times[1]) == pytest.approx(4 * times[2])
    assert times[2] == pytest.approx(64 * (64 << 10) / 4800e3 * (48 * 132) / (64 * 32), rel=1e-3)
    assert estimate(792, gpu=H200).us < estimate(792).us


REPORT = st.tuples(st.integers(24, 255), st.integers(0, 200 << 10), st.sampled_from([128, 256]), st.sampled_from(["", "mma", "wgmma"]))
WORK = st.builds(Work, cold=st.integers(0, 1 << 20), warm=st.integers(1, 1 << 20), stores=st.integers(0, 1 << 16),
                 ahead=st.integers(1, 1 << 17), flops=st.integers(0, 10**9), rounds=st.integers(1, 64))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(WORK, REPORT, st.integers(1, 5000), st.integers(1, 1 << 30), st.sampled_from(["h100", "h200", "h100-pcie"]), st.data())
def test_more_of_anything_is_never_faster(work: Work, report: tuple, programs: int, unique: int, target: str, data: st.DataObject) -> None:
    """Registers, shared memory, spills, bytes, flops, programs; fewer bytes on their way; a slower memory."""
    registers, shared, threads, cores = report
    gpu = TARGETS[target].gpu

    def us(work: Work = work, programs: int = programs, unique: int = unique, registers: int = registers, shared: int = shared,
           spills: int = 0) -> float:
        return launch(kernel(registers, shared, threads, spills, cores), work, (programs, 1, 1), unique, gpu).us

    plain = us() * (1 - 1e-9)
    more = data.draw(st.integers(1, 1 << 20))
    for name in ("cold", "warm", "stores", "flops"):
        if name in ("cold", "warm"):      # what is on its way is given: a program that loads less than that has less of it
            assert us(replace(work, **{name: getattr(work, name) + more}, ahead=min(work.ahead, work.cold + work.warm))) >= us(
                replace(work, ahead=min(work.ahead, work.cold + work.warm))) * (1 - 1e-9)
        else: assert us(replace(work, **{name: getattr(work, name) + more})) >= plain
    assert us(replace(work, ahead=max(1, work.ahead // 2))) >= plain
    assert us(registers=min(255, registers + data.draw(st.integers(0, 100)))) >= plain
    assert us(shared=min(227 << 10, shared + data.draw(st.integers(0, 1 << 17)))) >= plain
    assert us(spills=data.draw(st.integers(0, 4096))) >= plain and us(unique=unique + more) >= plain


def test_a_call_adds_its_launches_and_shows_the_longest() -> None:
    steps = (Step("a", (), "", grid=(792, 1, 1)), Step("b", (), "", grid=(8, 1, 1)))
    kernels, works = {"a": kernel(), "b": kernel(registers=32, shared=0)}, {"a": STREAM, "b": Work(warm=KILO, ahead=KILO)}
    found = candidate_of(Candidate("split", steps), kernels, works, LARGE, H100)
    first, last = (launch(kernels[step.kernel], works[step.kernel], step.grid, LARGE, H100) for step in steps)
    assert found.predicted_us == pytest.approx(first.us + last.us, abs=2e-3) and last.us > ranking.GAP_US
    assert (found.programs_per_sm, found.waves) == (6, 1.0)
    assert msgspec.structs.replace(found, programs_per_sm=0, waves=0.0, predicted_us=0.0) == Candidate("split", steps)


# ---- shortlists

NAMES = "abcde"                          # a is the rule's, and the slowest; e the fastest


def offered() -> tuple[Store, Program]:
    """One call with five candidates, each a kernel of its own that loads less than the one before, and a step that has no choice."""
    candidates = tuple(Candidate(name, (Step(name, (0,), "infc.linear", grid=(792, 1, 1)),)) for name in NAMES)
    steps = (Step("a", (0,), "infc.linear", bytes=LARGE, grid=(792, 1, 1)), Step("x", (0,), "infc.sample", grid=(1, 1, 1)))
    program = Program("step_T1", {"T": 1}, (), 0, (Buffer("y", "output", "f32", (1,), 4),), steps,
                      (Choice("infc.linear", candidates, (Call(0, (0,)),)),))
    store = Store("sm_90a", "")
    for at, name in enumerate((*NAMES, "x")):
        store.kernels[name] = msgspec.structs.replace(kernel(), hash=name)
        work = replace(STREAM, cold=(10 - at) << 16)
        store.launches[name] = GpuLaunch(name, name, (), (), made=Launch(None, (792,), (), {}, work=work))
    return store, program


def test_the_likeliest_runs_and_the_rule_stays() -> None:
    store, program = offered()
    (chosen,), told = choose(store, [program], H100)
    assert [one.name for one in chosen.choices[0].candidates] == ["e", "d", "c", "a"] and chosen.choices[0].chosen == 0
    times = [one.predicted_us for one in chosen.choices[0].candidates]
    assert times == sorted(times) and [step.kernel for step in chosen.steps] == ["e", "x"] and chosen.steps[0].bytes == LARGE
    assert [*store.kernels] == ["a", "c", "d", "e", "x"] and told == {"kernels_tried": 6, "kernels_kept": 5, "dropped": []}


def test_what_was_not_built_is_left_out_with_its_reason() -> None:
    store, program = offered()
    store.refused = {"e": "kernel e spills 8 bytes", "a": "kernel a does not fit"}
    (chosen,), told = choose(store, [program], H100)
    assert [one.name for one in chosen.choices[0].candidates] == ["d", "c", "b"]
    assert told["dropped"] == [{"bucket": "step_T1", "op": "infc.linear", "candidate": "a", "reason": "kernel a does not fit"},
                               {"bucket": "step_T1", "op": "infc.linear", "candidate": "e", "reason": "kernel e spills 8 bytes"}]
    store, program = offered()
    store.refused = {name: f"kernel {name} does not fit" for name in NAMES}
    with pytest.raises(CheckFailed, match="kernel a does not fit"): choose(store, [program], H100)


def test_equals_keep_the_rule() -> None:
    store, program = offered()
    store.launches = {name: replace(launched, made=Launch(None, (792,), (), {}, work=STREAM)) for name, launched in store.launches.items()}
    (chosen,), _ = choose(store, [program], H100)
    assert [one.name for one in chosen.choices[0].candidates] == ["a", "b", "c"] and chosen.steps[0].kernel == "a"


def test_every_architecture_has_its_constants() -> None:
    for table in (ranking.IN_FLIGHT, ranking.LATENCY, ranking.LANES): assert set(table) == set(ARCHS) == set(LIMITS)
    clocks = {t.name: t.gpu.fp32_tflops * 1e6 / (2 * ranking.LANES[t.isa] * t.gpu.sms) for t in TARGETS.values() if t.gpu}
    assert all(1300 < mhz < 2600 for mhz in clocks.values()), clocks       # from data sheets, so a lane count that is wrong shows
