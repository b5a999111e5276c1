"""Model.swap_weights: another artifact's weights in the memory of this one's, verified, or nothing changed."""
from pathlib import Path

import numpy as np
import pytest
import torch
from decoders import llama
from infc.backends.host_device import HostDevice
from infc.compiler.driver import Options, compile
from infc.runtime.errors import RuntimeFault
from infc.runtime.session import Model, load


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twice the same model, once with other weights, and once of another size."""
    folder = tmp_path_factory.mktemp("swap")
    tuned = llama(head_dim=16)
    with torch.no_grad():
        for weight in tuned.parameters(): weight.copy_(weight.flip(0))
    models = {"first": llama(head_dim=16), "tuned": tuned, "wider": llama(head_dim=16, intermediate_size=64)}
    return {name: compile(model, folder / name, options=Options(buckets=(1, 16))).artifact for name, model in models.items()}


def logits(model: Model) -> np.ndarray:
    """After a prompt, of its last token."""
    with model.sequence() as sequence: return model.step([sequence], [[3, 1, 4, 1, 5]]).logits[0]


def test_answers_are_those_of_the_other_weights_in_the_same_places(artifacts: dict[str, Path]) -> None:
    with load(artifacts["tuned"]) as other: wanted = logits(other)
    with load(artifacts["first"]) as model:
        before, places = logits(model), model.executor.places
        assert model.swap_weights(artifacts["tuned"]).passed
        assert np.array_equal(logits(model), wanted) and not np.allclose(wanted, before, atol=1e-2)
        assert model.executor.places == places
        model.swap_weights(artifacts["first"])
        assert np.array_equal(logits(model), before)


def test_another_model_is_refused(artifacts: dict[str, Path]) -> None:
    with load(artifacts["first"]) as model, pytest.raises(RuntimeFault, match="kernels are others"):
        model.swap_weights(artifacts["wider"])


def test_an_open_sequence_is_refused(artifacts: dict[str, Path]) -> None:
    with load(artifacts["first"]) as model, model.sequence() as sequence:
        model.step([sequence], [[1]])
        with pytest.raises(RuntimeFault, match="a sequence is open"): model.swap_weights(artifacts["tuned"])
        assert len(model.step([sequence], [[2]]).logits) == 1


def test_the_old_weights_are_back_where_the_new_ones_are_damaged(artifacts: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(artifacts["tuned"], tmp_path / "bad.infc")
    file = tmp_path / "bad.infc" / "weights.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-40] ^= 1
    file.write_bytes(raw)
    with load(artifacts["first"]) as model:
        before = logits(model)
        with pytest.raises(RuntimeFault, match="altered"): model.swap_weights(tmp_path / "bad.infc")
        assert np.array_equal(logits(model), before)


def test_a_device_for_a_cpu_artifact_is_refused(artifacts: dict[str, Path]) -> None:
    with pytest.raises(RuntimeFault, match="is for a CPU, and a device is given"): load(artifacts["first"], device=HostDevice("sm_90a"))
