"""The key of a compile: every option that reaches what is made changes it, no other does, in whatever order they are asked (FIELD R26)."""
from dataclasses import fields, replace
from pathlib import Path

import pytest
from infc.compiler import keys
from infc.compiler.driver import Options
from infc.compiler.frontends.identity import identity
from infc.compiler.quant import recipe
from infc.models.llama import Llama, LlamaConfig

OTHER = {
    "target": "h100", "dtype": "fp32", "allow": "exact", "check": "strict", "buckets": (1, 8), "max_sequences": 3, "strict": True,
    "dump": Path("d"), "dump_asm": True, "force": True, "reuse": False, "cache": False, "expect": (("fuse_rope", 2),), "keep_going": True,
    "quant": "w8", "quant_method": "mse", "calib": Path(__file__), "kv_quant": "int8", "data": Path(__file__), "quality": "kl<=1",
    "unverified": True, "keep_slow": True, "candidates": "w8", "search_for": "time",
}
"""Of every option a value that is not its default."""

MADE_OTHERWISE = {"cache", "dump", "dump_asm", "expect", "force", "reuse", "target"}
"""Options that say where things go and what is done with them. A target counts by its instruction set."""


def key(options: Options, model: str = "model", isa: str = "isa", toolchain: str = "toolchain") -> str:
    return keys.request(model, options, isa, toolchain)


def test_every_option_has_another_value_here() -> None:
    assert set(OTHER) == {field.name for field in fields(Options)}
    assert all(getattr(Options(), name) != value for name, value in OTHER.items())


@pytest.mark.parametrize("name", OTHER)
def test_an_option_counts_unless_it_changes_nothing(name: str) -> None:
    assert (key(replace(Options(), **{name: OTHER[name]})) == key(Options())) == (name in MADE_OTHERWISE)


def test_no_two_settings_share_a_key() -> None:
    every = [Options(), *(replace(Options(), **{name: value}) for name, value in OTHER.items() if name not in MADE_OTHERWISE)]
    every += [Options(quant=quant) for quant in ("w4", "w4:g64", "w4:g64:asym", "w4:channel", "w8a8", "w8a8:token")]
    every += [Options(kv_quant=kv) for kv in ("int8,none", "none,int8", "int8:keep=1", "fp8")]
    every += [Options(buckets=(1, 80)), Options(buckets=(18,)), Options(max_sequences=18)]
    assert len({key(options) for options in every}) == len(every)
    assert len({key(Options()), key(Options(), model="other"), key(Options(), isa="other"), key(Options(), toolchain="other")}) == 4


def test_a_file_counts_by_what_is_in_it(tmp_path: Path) -> None:
    text, recipes = "format: 1\nlayers:\n  - '*': w8\n", []
    for folder, content in (("a", text), ("b", f"# moved\n{text}"), ("c", text.replace("w8", "w4"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.yaml").write_text(content)
        recipes.append(recipe.text_of(str(tmp_path / folder / "r.yaml")))
    found = [key(Options(quant=quant)) for quant in recipes]
    assert found[0] == found[1] != found[2] and str(tmp_path) not in "".join(recipes)
    for name in ("calib", "data"):
        assert key(Options(**{name: tmp_path / "a" / "r.yaml"})) != key(Options(**{name: tmp_path / "c" / "r.yaml"}))
        (tmp_path / "again").write_text(text)
        assert key(Options(**{name: tmp_path / "a" / "r.yaml"})) == key(Options(**{name: tmp_path / "again"}))


def test_a_folder_counts_by_the_files_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "large.bin").write_bytes(b"x")
    assert identity(tmp_path) is None                            # no model: it is not hashed whole before that is said
    (tmp_path / "config.json").write_text("{}")
    found = identity(tmp_path)
    (tmp_path / "sub" / "large.bin").write_bytes(b"y")
    assert identity(tmp_path) == found is not None
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert identity(tmp_path) != found


def test_the_artifacts_key_counts_what_the_graph_is() -> None:
    from decoders import captured

    def made(change: str = "") -> str:
        import torch

        config = LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=48, layers=1, q_heads=4, kv_heads=2, head_dim=8,
                             max_positions=64)
        other = {"layers": 2, "q_heads": 2, "kv_heads": 1, "rms_eps": 2e-5, "rope_theta": 10_001.0}
        if change in other: config = replace(config, **{change: other[change]})
        torch.manual_seed(0)
        graph = captured(Llama(config))
        if change.startswith("a weight"):
            name = next(iter(graph.weights))
            bits = graph.weights[name].clone().view(torch.int32)
            bits.view(-1)[-1] ^= 1
            graph.weights[name] = bits.view(torch.float32)
        return keys.version(graph, [], Options(), "isa", "toolchain")

    found = [made(change) for change in ("", "layers", "q_heads", "kv_heads", "rms_eps", "rope_theta", "a weight's last bit")]
    assert made() == found[0] and len(set(found)) == len(found)
