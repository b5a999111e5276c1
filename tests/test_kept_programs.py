"""The verdict on a GPU's programs, kept: taken for the same files, graph and sources, and never for others; draws of four sequences."""
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton", reason="needs the extra `gpu`")

from infc.backends import reference
from infc.backends.host_device import HostDevice
from infc.backends.triton import device
from infc.compiler import driver, kept, replays
from infc.compiler.driver import Options
from infc.compiler.errors import CheckFailed
from infc.runtime import golden
from infc.runtime.artifact import read
from infc.runtime.session import Model, load

MODEL = "random:tiny?layers=1"
OPTIONS = Options(target="h100", buckets=(1, 8), reuse=False)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, driver.Result, driver.Bounds]]:
    """A compile that finds everything out, in a cache of its own, on reference operators; and what lies behind its programs."""
    bounds, real = driver.Bounds(), driver.replay_on_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "interprets", lambda: False)
        patch.setattr(driver, "replay_on_host", lambda *given: bounds.update(given[2]) or real(*given))
        folder = tmp_path_factory.mktemp("kept")
        kernels = kept.cache_folder() / "triton"
        patch.setenv("XDG_CACHE_HOME", str(folder))
        kept.cache_folder().mkdir()
        (kept.cache_folder() / "triton").symlink_to(kernels, target_is_directory=True)
        made = driver.compile(MODEL, folder / "a.infc", options=OPTIONS)
        patch.setattr(driver, "replay_on_host", real)
        yield folder, made, bounds


def compiled(folder: Path, **changes: Any) -> driver.Result:
    return driver.compile(MODEL, folder / "b.infc", options=replace(OPTIONS, force=True, **changes))


def test_the_same_programs_are_verified_once(first: tuple[Path, driver.Result, driver.Bounds], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, made, _ = first
    assert made.verify["kept_from"] == made.verify["golden_kept_from"] == "" and made.verify["passed"]
    monkeypatch.setattr(replays, "replay", lambda *_, **__: pytest.fail("replayed again"))
    again = compiled(folder)
    assert again.verify["kept_from"] and again.verify["golden_kept_from"] and again.version == made.version
    assert {k: v for k, v in again.verify.items() if "kept_from" not in k} == {k: v for k, v in made.verify.items() if "kept_from" not in k}
    with read(again.artifact) as artifact:
        assert artifact.report()["verify"] == {k: v for k, v in again.verify.items() if k not in ("graph_error", "golden_kept_from")}
    for options in ({"cache": False}, {"buckets": (1, 16)}, {"dtype": "fp32"}, {"max_sequences": 2}):
        with pytest.raises(pytest.fail.Exception, match="replayed again"): compiled(folder, **options)


def test_a_plan_that_lets_values_overlap_is_caught_behind_a_warm_cache(
    first: tuple[Path, driver.Result, driver.Bounds], monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = driver.build_programs

    def overlapping(*given: Any) -> Any:
        programs, *rest = real(*given)
        spoiled = [msgspec.structs.replace(p, buffers=[
            msgspec.structs.replace(b, offset=0) if b.kind == "arena" else b for b in p.buffers]) for p in programs]
        return spoiled, *rest

    monkeypatch.setattr(driver, "build_programs", overlapping)
    with pytest.raises(CheckFailed, match="the program is not the graph"): compiled(first[0])


def test_a_key_holds_every_file_and_the_graph(first: tuple[Path, driver.Result, driver.Bounds]) -> None:
    _, made, bounds = first
    with read(made.artifact) as artifact: manifest = artifact.manifest
    keys = [replays.replay_key(manifest, bounds)]
    for name, info in manifest.files.items():
        files = {**manifest.files, name: msgspec.structs.replace(info, sha256="0" * 64)}
        found = replays.replay_key(msgspec.structs.replace(manifest, files=files), bounds)
        if name == "report.json": assert found == keys[0]              # it holds times, and no step reads it
        else: keys.append(found)
    assert manifest.golden
    keys.append(replays.replay_key(msgspec.structs.replace(manifest, golden=msgspec.structs.replace(manifest.golden, bound=9.0)), bounds))
    graph = next(iter(bounds.values())).graph
    name = next(iter(graph.weights))
    kept_weight = graph.weights[name]
    graph.weights[name] = kept_weight * 2
    keys.append(replays.replay_key(manifest, bounds))
    graph.weights[name] = kept_weight
    assert len(set(keys)) == len(keys) >= 8 and replays.replay_key(manifest, bounds) == keys[0]


@pytest.fixture
def model(first: tuple[Path, driver.Result, driver.Bounds]) -> Iterator[Model]:
    """The artifact on reference operators."""
    with load(first[1].artifact, device=HostDevice("sm_90a"), kv_tokens=512) as loaded:
        loaded.cache.clear()
        reference.install(loaded.executor, first[2], lambda step: False)
        yield loaded


def test_a_brief_replay_draws_in_one_step_where_there_is_room(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, real = list[int](), golden._draw

    def draw(*given: Any) -> int:
        drawn.append(len(given[1]))
        return real(*given)

    monkeypatch.setattr(golden, "_draw", draw)
    assert golden.replay(model, brief=True).passed and drawn == [1, 4]
    drawn.clear()
    assert golden.replay(model).passed and set(drawn) == {1}


@pytest.mark.parametrize("column", ["temperature", "top_k", "top_p", "uniform"])
def test_draws_with_another_rows_settings_are_seen(model: Model, monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    real = model.executor.fill

    def fill(works: Any, live: Any, bucket: Any) -> None:
        real(works, live, bucket)
        column_view = model.executor.views[column]
        for row in range(1, live["R"]): column_view[row] = column_view[0]

    monkeypatch.setattr(model.executor, "fill", fill)
    assert golden.replay(model, ["step_T8"], brief=True).wrong_tokens > 0
