"""A format that makes a decode step slower is refused with its figures; one that costs only a prompt is used, and said."""
import importlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from infc.compiler import targets
from infc.compiler.quant.pays import ROWS, SMALLEST, Entry, Outcome, Pays
from infc.compiler.quant.scheme import Scheme, parse
from torch import fx

W8, W4 = (parse(text) for text in ("w8", "w4"))
BIG = (1024, SMALLEST // 2048)


def weights(*shapes: tuple[int, int]) -> list[fx.Node]:
    graph = fx.Graph()
    found = []
    for i, shape in enumerate(shapes):
        found.append(graph.placeholder(f"w{i}"))
        found[-1].meta["val"] = torch.empty(shape, device="meta")
    return found


class Timed:
    """A race whose times are made up: microseconds by scheme."""

    def __init__(self, times: dict[Scheme, tuple[float, float, float]]):
        self.times, self.asked = times, list[Entry]()

    def __call__(self, entries: list[Entry]) -> list[Outcome]:
        self.asked += entries
        return [Outcome(e, f"linear_{e.scheme}", self.times[e.scheme], (100.0, 200.0, 300.0)) for e in entries]


def test_a_slower_decode_step_is_refused_with_its_figures() -> None:
    a, b = weights(BIG, BIG)
    pays = Pays(Timed({W8: (120.0, 100.0, 100.0), W4: (50.0, 100.0, 100.0)}))
    found = pays.objections(None, {a: W8, b: W4})       # type: ignore[arg-type]
    assert [*found] == [a] and "120000000 us" in found[a] and "100000000 us" in found[a] and "--keep-slow" in found[a]
    assert pays.notes() == []                            # w8 is not used, w4 costs nothing
    kept = Pays(Timed({W8: (120.0, 100.0, 100.0)}), keep_slow=True)
    assert kept.objections(None, {a: W8}) == {} and "1 row at once: 1.20 times" in kept.notes()[0]     # type: ignore[arg-type]


def test_a_slower_prompt_is_used_and_said() -> None:
    (a,) = weights(BIG)
    pays = Pays(Timed({W8: (50.0, 200.0, 360.0)}))
    assert pays.objections(None, {a: W8}) == {}          # type: ignore[arg-type]
    assert pays.notes() == ["w8 is slower than what it replaces with 256 rows at once: 1.20 times the wide product's time on this machine"]
    assert pays.json()[0]["rows_256"] == {"us": 360e6, "wide_us": 300e6} and pays.json()[0]["kernel"] == "linear_w8"


def test_each_shape_is_timed_once_and_small_ones_never() -> None:
    a, b, small = weights(BIG, BIG, (8, 8))
    race = Timed({W8: (50.0, 100.0, 100.0)})
    pays = Pays(race)
    pays.objections(None, {a: W8, b: W8, small: W8})     # type: ignore[arg-type]
    pays.objections(None, {a: W8})                       # type: ignore[arg-type]
    assert race.asked == [Entry(*BIG, W8)]


def test_noise_is_no_reason() -> None:
    outcome = Outcome(Entry(*BIG, W8), "", (104.0, 200.0, 300.0), (100.0, 200.0, 300.0))
    assert outcome.slower == {} and set(ROWS) == {1, 8, 256}


@pytest.mark.parametrize("text", ["w8", pytest.param("w4:g128:asym", marks=pytest.mark.slow), "w8a32"])
def test_the_race_times_real_kernels(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    race = importlib.import_module("infc.backends.cpu.race")            # the package's name for it is the function's
    monkeypatch.setattr(race, "last_level_cache", lambda: 1 << 16)      # fewer copies of so small a weight
    isa = targets.find("cpu").isa
    scheme = parse(text)
    assert scheme is not None
    found = race.race([Entry(96, 64, scheme)], isa, 2, bf16_rows=targets.find(isa).bf16_rows)
    if text == "w8a32":
        assert found == []                               # nothing to time: no kernel takes it
    else:
        assert min(*found[0].quantized_s, *found[0].wide_s) > 0 and "64x96" in found[0].kernel


@pytest.mark.parametrize(("later", "slower"), [(0.5, False), (2.0, True)])
def test_what_would_be_refused_runs_many_rounds_more(monkeypatch: pytest.MonkeyPatch, later: float, slower: bool) -> None:
    """Seven rounds beside other work, in which codes were slow; then what is so."""
    race = importlib.import_module("infc.backends.cpu.race")

    class Pool:
        def __init__(self, *_: object) -> None: ...
        def close(self) -> None: ...
        def memory(self, size: int, dtype: type = np.uint16) -> np.ndarray: return np.zeros(size // np.dtype(dtype).itemsize, dtype)

        def steps(self, name: str, tables: object, live: object) -> Callable[[], float]:
            rounds = itertools.count()
            return lambda: 1.0 if name.startswith("w") else 3.0 if next(rounds) <= race.ROUNDS else later

    monkeypatch.setattr(race, "TimedPool", Pool)
    monkeypatch.setattr(race, "build", lambda *_: None)
    monkeypatch.setattr(race, "last_level_cache", lambda: 1 << 16)
    scheme = parse("w8")
    assert isinstance(scheme, Scheme)
    (outcome,) = race.race([Entry(64, 64, scheme)], "x86-64-v4-bf16", 1)
    assert (1 in outcome.slower) == slower and outcome.quantized_s[1:] == (3.0, 3.0)
