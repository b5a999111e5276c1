"""An operator that no kernel and no loop takes, in a GPU's program: a counted step that calls torch between two recordings."""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton_env import run  # first: kernels of this process are interpreted

from decoders import config  # isort: skip
from infc.backends import reference
from infc.backends.host_device import HostDevice
from infc.backends.triton.device import interpreter
from infc.compiler import driver
from infc.compiler.driver import Hooks, Options
from infc.compiler.errors import CheckFailed
from infc.models.llama import Llama
from infc.runtime import aten_step, golden
from infc.runtime.artifact import read
from infc.runtime.device import Recorded
from infc.runtime.errors import RuntimeFault
from infc.runtime.session import load

OPTIONS = Options(target="h100", dtype="fp32", buckets=(16,), max_sequences=2)
assert run                                                   # imported for what its module does


class Odd(Llama):
    """Its logits go through an operator that nobody has a kernel for."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        return torch.erfinv(super().forward(input_ids, position_ids).tanh() * 0.9)


def compiled(folder: Path, bounds: driver.Bounds, options: Options = OPTIONS) -> Path:
    """Nothing of it has run yet."""
    def keep(_: Path, found: driver.Bounds) -> dict[str, object]:
        bounds.update(found)
        return {"replayed": False}

    torch.manual_seed(0)
    hooks = Hooks(lambda graph: driver._run_passes(graph, options, lambda event: None), keep)
    return driver.compile(Odd(config(layers=1, max_positions=32)).eval(), folder / "odd.infc", options=options, hooks=hooks).artifact


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, driver.Bounds]:
    bounds = driver.Bounds()
    return compiled(tmp_path_factory.mktemp("odd"), bounds), bounds


class Counting(HostDevice):
    """Keeps what was recorded."""

    def __init__(self, arch: str) -> None:
        super().__init__(arch)
        self.lists: list[int] = []

    def record(self, work: Any) -> Recorded:
        self.lists.append(len(work))
        return super().record(work)


def test_the_whole_program_is_right_with_its_aten_step(made: tuple[Path, driver.Bounds]) -> None:
    """Kernels interpreted on either side of it, a prompt in chunks, padding: within the golden bound of fp64."""
    path, bounds = made
    with read(path) as artifact:
        assert [b.aten_steps for b in artifact.manifest.buckets] == [1]
        device = interpreter("sm_90a", [artifact.program(name) for name in bounds], bounds)
    with load(path, device=device, kv_tokens=512) as model:
        case = next(c for c in golden._cases(model) if len(c.tokens) == 9)
        found, wrong = golden._run(model, case, model.manifest.buckets[0])
        assert golden._error("max_abs", case.logits, found) <= model.manifest.golden.bound and not wrong
        with model.sequence() as sequence:
            times = dict(model.profile(sequence, [1]))
        assert times["aten.erfinv.default"] > 0 and len(times) > 5


def test_reference_operators_leave_it_as_it_is(made: tuple[Path, driver.Bounds], monkeypatch: pytest.MonkeyPatch) -> None:
    path, bounds = made
    called: list[str] = []
    real = aten_step.call
    monkeypatch.setattr(aten_step, "call", lambda symbol, *rest: (called.append(symbol), real(symbol, *rest)))
    with load(path, device=HostDevice("sm_90a"), kv_tokens=512) as model:
        model.cache.clear()
        reference.install(model.executor, bounds, lambda step: False)
        assert golden.replay(model, brief=True).passed
    assert set(called) == {'aten::erfinv.default [{"in":0}]'}


def test_it_stands_between_two_recordings(made: tuple[Path, driver.Bounds]) -> None:
    device = Counting("sm_90a")
    with load(made[0], device=device, kv_tokens=64) as model:
        steps = len(model.artifact.program("step_T16").steps)
    assert len(device.lists) == 2 and sum(device.lists) == steps - 1 + 2             # a copy in, a copy out


def test_strict_names_operator_and_source_line_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"1 x aten\.erfinv\.default \(%\w+ .*test_gpu_aten\.py:\d+ .*triton: .*loops: ") as failed:
        compiled(tmp_path, driver.Bounds(), replace(OPTIONS, strict=True))
    assert failed.value.exit_code == 1 and "\n" not in failed.value.message and not list(tmp_path.iterdir())


class Elsewhere(HostDevice):
    """A GPU, as far as torch is told."""

    torch_device, torch_stream = "cuda:0", 77


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_torch_that_sees_no_gpu_is_refused_as_the_model_is_loaded(made: tuple[Path, driver.Bounds]) -> None:
    with pytest.raises(RuntimeFault, match=r"calls aten::erfinv\.default on cuda:0, and torch .* sees no GPU"):
        load(made[0], device=Elsewhere("sm_90a"), kv_tokens=64)


def test_torch_sends_it_to_the_stream_of_the_recordings() -> None:
    """The names are torch's own; what goes by the stream is what is called inside."""
    sent: list[Any] = []
    fake = SimpleNamespace(cuda=SimpleNamespace(ExternalStream=lambda stream, device: (stream, device), stream=sent.append))
    aten_step._sent_to(fake, "cuda:0", 77)
    assert sent == [(77, "cuda:0")] and callable(torch.cuda.stream) and callable(torch.cuda.ExternalStream)
    aten_step._sent_to(fake, "cpu", 0)
    assert len(sent) == 1


def test_what_torch_cannot_do_is_one_line() -> None:
    view = aten_step.View(torch.zeros(4).data_ptr(), "f32", (4,))
    with pytest.raises(RuntimeFault, match=r"^aten::view\.default fails in torch [^\n]*$"):
        aten_step.run('aten::view.default [{"in":0},[3]]', [view], [view], {})
    with pytest.raises(RuntimeFault, match=r"aten::frobnicate\.default fails in torch"):
        aten_step.run('aten::frobnicate.default [{"in":0}]', [view], [view], {})
