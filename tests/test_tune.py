"""infc tune: the fastest candidate of each call, by a clock that is scripted here, on a whole model whose kernels are interpreted."""
import triton_env  # noqa: F401  # isort: skip  # first: kernels of this process are interpreted

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from decoders import llama
from infc.backends.host_device import HostDevice, Recording
from infc.backends.launch import Scratch, candidates_of
from infc.backends.triton.device import InterpreterDevice, interpreter
from infc.compiler import driver, verification
from infc.runtime import tune as tuning
from infc.runtime.artifact import read, verify_files
from infc.runtime.device import Copy, Launch
from infc.runtime.errors import RuntimeFault
from infc.runtime.golden import GoldenReport
from infc.runtime.gpu import GpuExecutor
from infc.runtime.program import Program, steps_of
from infc.runtime.session import load
from infc.runtime.tune import Tuned, tune
from tiny_artifact import infc, tiny

BUCKETS = (1, 8)
Clock = Callable[[Sequence[Launch]], float]
PASSED = GoldenReport("max_abs", 1.0, 0.5, {}, 1.0, True)


@dataclass(frozen=True)
class Made:
    """An artifact, and a device that interprets its kernels."""

    path: Path
    device: InterpreterDevice
    bounds: driver.Bounds

    def programs(self) -> list[Program]:
        return programs(self.path)


def programs(path: Path) -> list[Program]:
    with read(path) as artifact: return [artifact.program(bucket.name) for bucket in artifact.manifest.buckets]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    bounds = driver.Bounds()

    def keep(_: Path, found: driver.Bounds) -> dict[str, object]:
        bounds.update(found)
        return {"replayed": False}

    options = driver.Options(target="h100", buckets=BUCKETS, max_sequences=3)
    hooks = driver.Hooks(lambda graph: driver._run_passes(graph, options, lambda event: None), keep)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verification, "SHORT", (3,))                      # golden prompts: a kernel that is interpreted takes its time
        folder = tmp_path_factory.mktemp("tune")
        path = driver.compile(llama(layers=1, max_positions=256), folder / "llama.infc", options=options, hooks=hooks).artifact
    yield Made(path, interpreter("sm_90a", programs(path), bounds), bounds)


class Scripted:
    """Of a device: what a list of launches takes."""

    name, driver_version = "NVIDIA H200", "13.1"
    clock: Clock
    asked: int = 0

    def timed(self, recorded: Recording, times: int, cold: tuple[int, int] | None = None) -> list[float]:
        assert cold and cold[1] == 2 * HostDevice.l2_bytes
        self.asked += 1
        return [self.clock([item for item in recorded.work if not isinstance(item, Copy)])] * times


class Interpreted(Scripted, InterpreterDevice):
    """It runs the kernels. wrong: of these, by hash, the first byte of each result is another."""

    def __init__(self, made: Made, clock: Clock, wrong: frozenset[str] = frozenset()) -> None:
        super().__init__("sm_90a", made.device._made)
        self.clock, self.wrong = clock, wrong

    def launch(self, launch: Launch) -> None:
        super().launch(launch)
        if launch.kernel.hash in self.wrong: self.poison_arena()


class Idle(Scripted, HostDevice):
    """It runs nothing."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("sm_90a")
        self.clock = clock

    def launch(self, launch: Launch) -> None: ...


def programs_run(work: Sequence[Launch]) -> float:
    """Few programs are fast: a time for which another than the default is the best of most calls."""
    return float(sum(one.grid[0] * one.grid[1] * one.grid[2] for one in work))


def chosen(found: Sequence[Program]) -> list[str]:
    return [choice.candidates[choice.chosen].name for program in found for choice in program.choices]


def test_the_fastest_is_picked_and_answers_as_recorded(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is what was replayed, in the interpreter, with the golden prompts."""
    taken, take = list[dict[str, Program]](), GpuExecutor.take
    monkeypatch.setattr(GpuExecutor, "take", lambda self, programs: (taken.append(dict(programs)), take(self, programs))[1])
    found = tune(made.path, tmp_path / "tuned.infc", device=Interpreted(made, programs_run), brief=True)
    assert found.written and found.golden.passed and found.info.gpu == "NVIDIA H200" and found.info.driver == "13.1"
    assert found.info.changed > 3 and found.info.choices == len(found.calls)
    for one in found.calls:
        best = min(one.us.values())
        assert one.us[one.after] == (best if best < (1 - tuning.MARGIN) * one.us[one.before] else one.us[one.before])
    assert sum(found.after_us.values()) < sum(found.before_us.values()) and taken[-1] == {
        program.name: program for program in programs(tmp_path / "tuned.infc")}
    with verify_files(tmp_path / "tuned.infc") as after, read(made.path) as before:
        assert after.manifest.tuned == found.info and after.manifest.version != before.manifest.version
        assert after.manifest.kernels == before.manifest.kernels and after.manifest.weights == before.manifest.weights
        assert after.report()["tuned"]["calls"][0]["us"] == found.calls[0].us
        costs = after.report()["costs"]
        for program in programs(tmp_path / "tuned.infc"):
            heads = [step.kernel for step in program.steps if not step.part]
            assert [costs["kernels"][i]["kernel"] for i in costs["steps"][program.name]] == heads
    assert chosen(programs(tmp_path / "tuned.infc")) != chosen(made.programs())


@pytest.mark.slow
def test_a_candidate_that_gives_wrong_answers_is_refused(made: Made, tmp_path: Path) -> None:
    """The fastest of one call breaks what it writes: that choice is taken back, by name, and the others stay."""
    default = {step.kernel for program in made.programs() for step in program.steps}
    decode = made.programs()[0]                                            # the fewest programs to interpret
    others = dict.fromkeys(step.kernel for choice in decode.choices for c in choice.candidates[1:] for step in c.steps
                           if step.kernel not in default)
    wrong, *_, right = others

    def clock(work: Sequence[Launch]) -> float:
        hashes = {one.kernel.hash for one in work}
        return 1.0 if wrong in hashes else 5.0 if right in hashes else 10.0

    found = tune(made.path, tmp_path / "tuned.infc", device=Interpreted(made, clock, frozenset({wrong})), brief=True)
    assert found.written and found.golden.passed and "its answers are wrong" in {one.why_not for one in found.calls}
    assert wrong not in {step.kernel for program in programs(tmp_path / "tuned.infc") for step in program.steps}
    assert 0 < found.info.changed < found.info.choices


def quick(made: Made, output: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, golden: GoldenReport = PASSED, **more: Any) -> Tuned:
    """Tune without running a kernel; golden prompts are answered as told."""
    monkeypatch.setattr(tuning, "replay", lambda model, buckets=(), brief=False: golden)
    return tune(made.path, output, device=Idle(clock), **more)


def test_a_tie_keeps_the_default(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = quick(made, tmp_path / "tuned.infc", lambda work: 8.0, monkeypatch)
    assert found.info.changed == 0 and all(one.before == one.after for one in found.calls)
    for old, new in zip(made.programs(), programs(tmp_path / "tuned.infc"), strict=True):
        assert old.steps == new.steps
        assert {c.measured_us for choice in new.choices if len(choice.candidates) > 1 for c in choice.candidates} <= {
            round(8.0 / len(choice.calls), 4) for choice in new.choices}


def test_a_hair_faster_is_no_reason(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = {tuple(step.kernel for step in steps_of(choice.candidates[0], choice.calls[0], program.steps[0]))
              for program in made.programs() for choice in program.choices}

    def clock(work: Sequence[Launch]) -> float:
        hashes = [one.kernel.hash for one in work]
        return 10.0 if any(tuple(hashes[:len(first)]) == first for first in firsts) else 9.9

    found = quick(made, tmp_path / "tuned.infc", clock, monkeypatch)
    assert found.info.changed == 0 and f"not faster by {tuning.MARGIN:.0%}" in {one.why_not for one in found.calls}


def test_rounds_take_turns(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that falls all the time favours nobody: medians of interleaved rounds."""
    ticks = iter(range(10**6))
    found = quick(made, tmp_path / "tuned.infc", lambda work: 1e6 - next(ticks), monkeypatch, rounds=9)
    assert found.info.changed == 0 and found.info.rounds == 9


class Full(Idle):
    """It has room for the weights, the arena and three blocks of keys and values."""

    def free_memory(self) -> int:
        with read(self.path) as artifact: manifest = artifact.manifest
        assert manifest.weights
        taken = manifest.weights.data_bytes + max(bucket.arena_bytes for bucket in manifest.buckets)
        return taken + -(-3 * sum(kv.block_bytes for kv in manifest.kv) * 10 // 9)

    path: Path


def test_attention_is_timed_at_full_length_or_at_what_the_card_holds(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 positions, less the one token of the smallest step; three blocks of 32 tokens, less one."""
    notes = list[str]()
    assert quick(made, tmp_path / "long.infc", lambda work: 8.0, monkeypatch, note=notes.append).info.context == 255
    assert any("step_T1:" in note and "sequences of 256 tokens" in note for note in notes)
    monkeypatch.setattr(tuning, "replay", lambda model, buckets=(), brief=False: PASSED)
    small = Full(lambda work: 8.0)
    small.path = made.path
    assert tune(made.path, tmp_path / "short.infc", device=small).info.context == 95


@pytest.mark.parametrize(("tokens", "sequences", "blocks", "lengths"), [
    (1, 1, 10**6, [(131_071, 1)]), (8, 8, 10**6, [(131_071, 1)] * 8), (8, 8, 80, [(319, 1)] * 8), (2048, 64, 10**6, [(129_024, 2048)]),
    (2048, 64, 100, [(1152, 2048)]), (200_000, 64, 10**6, [(31_072, 100_000)] * 2),
])
def test_a_step_is_timed_behind_what_the_compiler_ranks(tokens: int, sequences: int, blocks: int, lengths: list[tuple[int, int]]) -> None:
    model = SimpleNamespace(limits=SimpleNamespace(positions=131_072), pool=SimpleNamespace(count=blocks))
    bucket = SimpleNamespace(bucket={"T": tokens, "N": sequences})
    assert tuning._lengths(model, bucket) == lengths                       # type: ignore[arg-type]


def test_answers_that_differ_write_nothing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = quick(made, tmp_path / "tuned.infc", programs_run, monkeypatch, msgspec.structs.replace(PASSED, passed=False))
    assert not found.written and not list(tmp_path.iterdir())


def test_ctrl_c_and_a_full_disk_leave_nothing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(work: Sequence[Launch]) -> float: raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt): quick(made, tmp_path / "tuned.infc", interrupted, monkeypatch)
    assert not list(tmp_path.iterdir())
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("infc.runtime.writer._sync_folder", lambda folder: (_ for _ in ()).throw(full))
    with pytest.raises(RuntimeFault, match="no space left"): quick(made, tmp_path / "tuned.infc", programs_run, monkeypatch)
    assert not list(tmp_path.iterdir())


def test_in_its_own_place(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    own = replace(made, path=tmp_path / "own.infc")
    shutil.copytree(made.path, own.path)
    with pytest.raises(RuntimeFault, match="exists already; add --force"): quick(own, own.path, programs_run, monkeypatch)
    assert quick(own, own.path, programs_run, monkeypatch, force=True).info.changed and verify_files(own.path).manifest.tuned
    again = quick(own, own.path, programs_run, monkeypatch, force=True)
    assert again.info.changed == 0 and [path.name for path in tmp_path.iterdir()] == ["own.infc"]


def test_the_command(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.setattr("infc.runtime.cuda.CudaDevice", lambda: Idle(programs_run))
    monkeypatch.setattr(tuning, "replay", lambda model, buckets=(), brief=False: PASSED)
    done = infc("tune", made.path, "-o", tmp_path / "tuned", "--rounds", 5, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and not done.stderr and told["written"] and told["info"]["rounds"] == 5
    shown = json.loads(infc("inspect", tmp_path / "tuned.infc", "--json").stdout)
    assert shown["manifest"]["tuned"]["gpu"] == "NVIDIA H200" and {*shown["choices"]} == {"step_T1", "step_T8"}
    text = infc("inspect", tmp_path / "tuned.infc").stdout
    assert "on NVIDIA H200, driver 13.1" in text and "predicted us" in text and "* " in text
    shown = infc("tune", made.path, "-o", tmp_path / "other").stdout
    assert "choices changed, where a candidate is faster by more than 2 %" in shown
    monkeypatch.setattr(tuning, "replay", lambda model, buckets=(), brief=False: msgspec.structs.replace(PASSED, passed=False))
    done = infc("tune", made.path, "-o", tmp_path / "wrong")
    assert done.returncode == 1 and "nothing was written" in done.stderr and done.stderr.strip().splitlines()[-1].startswith("infc: ")
    assert not (tmp_path / "wrong.infc").exists()


def test_what_cannot_be_tuned_says_why(made: Made, tmp_path: Path) -> None:
    import torch

    for arguments, says in (((tiny(), "-o", tmp_path / "x"), "is for a CPU, whose kernels have no candidates"),
                            ((tiny(),), "is for a CPU, whose kernels have no candidates"),     # and that it exists is no matter
                            ((made.path,), "exists already; add --force"), ((made.path, "-o", tmp_path / "x", "--rounds", 3), "rounds")):
        done = infc("tune", *arguments)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
    if not torch.cuda.is_available():
        done = infc("tune", made.path, "-o", tmp_path / "x")
        assert done.returncode == 2 and "NVIDIA driver" in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_weights_of_an_artifact_that_was_not_tuned_fit(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quick(made, tmp_path / "tuned.infc", programs_run, monkeypatch).info.changed
    assert [program.untuned() for program in programs(tmp_path / "tuned.infc")] == made.programs()
    monkeypatch.setattr("infc.runtime.golden.replay", lambda model, buckets=(), brief=False: PASSED)
    with load(tmp_path / "tuned.infc", device=Idle(programs_run)) as model: assert model.swap_weights(made.path).passed


def test_any_candidate_fits_where_another_lies(made: Made) -> None:
    """Scratch is planned at the largest candidate's size; what a candidate names is the call's own, in the order its launches say."""
    sizes: dict[tuple[str, int], set[int]] = {}
    for program in made.programs():
        bound = made.bounds[program.name]
        firsts = [at for at, step in enumerate(program.steps) if not step.part]
        calls = {call.step: (choice, call) for choice in program.choices for call in choice.calls}
        for unit, first in zip(bound.units, firsts, strict=True):
            if first not in calls: continue
            (choice, call), known = calls[first], candidates_of(unit, bound.context)
            for one in choice.candidates:
                for step, launched in zip(one.steps, known[one.name], strict=True):
                    for at, arg in zip(step.args, launched.args, strict=True):
                        buffer = program.buffers[call.buffers[at]]
                        if not isinstance(arg, Scratch): continue
                        assert buffer.kind == "arena" and arg.bytes <= buffer.bytes
                        sizes.setdefault((program.name, call.buffers[at]), set()).add(arg.bytes)
    assert any(len(found) > 1 for found in sizes.values())                 # candidates that want more, in the same place
