"""A recipe names weights by module paths; later lines win, what names nothing is an error, and a compile's own recipe reads back."""
from dataclasses import replace
from pathlib import Path

import pytest
from decoders import before, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from infc import passes
from infc.compiler.errors import UserError
from infc.compiler.files import write_whole
from infc.compiler.frontends import capture
from infc.compiler.ir import Graph
from infc.compiler.ops import aten, infc
from infc.compiler.quant import recipe
from infc.compiler.quant.matrices import matrices
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.recipe import Keep, Line, Recipe, from_text, paths, read, widest, written
from infc.compiler.quant.scheme import Scheme, e4m3, parse
from infc.compiler.rewrite import Report
from torch import fx

HEAD = "format: 1\nlayers:\n"


@pytest.fixture(scope="module")
def wide() -> Graph:
    """A tied Llama of two layers before quantize_weights. Read only: copy it."""
    return before(capture(llama(tied=True)), "quantize_weights")


@pytest.fixture(scope="module")
def untied() -> Graph:
    return before(capture(llama(tied=False)), "quantize_weights")


def chosen(graph: Graph, text: str) -> tuple[dict[str, Scheme], list[str]]:
    """(weight name -> scheme, notes)."""
    graph = graph.copy()
    weights = [w for w, reason in matrices(graph).items() if not reason]
    found = from_text(text, "r.yaml").schemes(graph, weights)
    return {str(w.target): scheme for w, scheme in found.items()}, graph.meta.get("notes", [])


def quantized(graph: Graph, text: str) -> Graph:
    """The graph after the quantization passes with a recipe."""
    graph = graph.copy()
    for name in passes.QUANTIZATION:
        one = passes.load(name)
        one.apply(graph, Report(name, options={"quantization": Plan(from_text(text, "r.yaml"))}))
    return graph


# --------------------------------------------------------------------------------------------------------------------- lines

def test_later_lines_win_and_what_no_line_names_stays_wide(wide: Graph) -> None:
    text = HEAD + '  - "model.layers.*": w8\n  - "model.layers.*.mlp.*": w4:g64\n  - "model.layers.0.*": none\n'
    schemes, notes = chosen(wide, text)
    assert schemes == {
        "model_layers_1_self_attn_qkv_proj_weight": Scheme(8), "model_layers_1_self_attn_o_proj_weight": Scheme(8),
        "model_layers_1_mlp_gate_up_proj_weight": Scheme(4, 64), "model_layers_1_mlp_down_proj_weight": Scheme(4, 64)}
    assert notes == []


def test_a_merged_weight_gets_the_widest_of_what_its_parts_ask_for(wide: Graph) -> None:
    text = HEAD + ('  - "*.layers.*": w4a8\n  - "*.0.self_attn.v_proj": w8\n  - "*.1.mlp.up_proj": none\n'
                   '  - "*.1.self_attn.q_proj": w4:g128\n')
    schemes, notes = chosen(wide, text)
    assert schemes["model_layers_0_self_attn_qkv_proj_weight"] == Scheme(8)         # 8 bits of v's, 16-bit activations of v's
    assert schemes["model_layers_1_self_attn_qkv_proj_weight"] == Scheme(4)         # more scales than q's, finer activations than k's
    assert "model_layers_1_mlp_gate_up_proj_weight" not in schemes                  # none is the widest
    assert len(notes) == 1 and notes[0].startswith("3 stored weights have parts or names that ask for different schemes: the widest counts")
    assert "model.layers.0.self_attn.v_proj w8 -> w8" in notes[0]


def test_either_name_of_a_tied_weight_works_and_two_that_differ_are_said(wide: Graph) -> None:
    name = "model_embed_tokens_weight"
    assert chosen(wide, HEAD + "  - lm_head: w8a8\n  - model.embed_tokens: w8a8\n") == ({name: Scheme(8, act_bits=8)}, [])
    schemes, notes = chosen(wide, HEAD + "  - lm_head: w8\n  - model.embed_tokens: w4\n")
    assert schemes == {name: Scheme(8)} and "model.embed_tokens w4, lm_head w8 -> w8" in notes[0]
    schemes, notes = chosen(wide, HEAD + "  - lm_head: w8\n")                       # the other name asks for nothing: wide is the widest
    assert schemes == {} and "lm_head w8 -> none" in notes[0]


@pytest.mark.parametrize("line", [
    "model.embed_tokens: none", "lm_head: none", '"*": none\n  - lm_head: w8', '"*": none\n  - model.embed_tokens: w8',
    '"model.layers.*": w8\n  - lm_head: w4', '"model.layers.*": w8\n  - model.embed_tokens: w4'])
def test_a_tied_weight_that_one_name_leaves_wide_stays_one_and_wide(wide: Graph, line: str) -> None:
    """FIELD R22: quantizing the table must not change the head, nor the head the table, and nothing may be stored twice."""
    text = HEAD + f'  - "*": w8\n  - {line}\n' if line.endswith("none") else HEAD + f"  - {line}\n"
    graph = quantized(wide, text)
    table = [name for name in graph.weights if "embed" in name or "lm_head" in name]
    assert table == ["model_embed_tokens_weight"] and graph.weights[table[0]] is wide.weights[table[0]]
    readers = {node.target for node in graph.placeholders[table[0]].users}
    assert readers == {aten.embedding.default, infc.linear.default}
    assert sum(w.nbytes for w in graph.weights.values()) <= sum(w.nbytes for w in wide.weights.values())


def test_untied_head_and_table_are_two_weights(untied: Graph) -> None:
    schemes, notes = chosen(untied, HEAD + "  - lm_head: w8\n  - model.embed_tokens: w4\n")
    assert schemes == {"lm_head_weight": Scheme(8), "model_embed_tokens_weight": Scheme(4)} and notes == []


@pytest.mark.parametrize(("line", "said"), [
    ("model.layers.7.*: w8", "r.yaml line 3: 'model.layers.7.*' names no module of the model; the nearest is 'model.layers."),
    ("lm_heat: w8", "r.yaml line 3: 'lm_heat' names no module of the model; the nearest is 'lm_head'"),
    ("Model.*: w8", "names no module of the model"),                                # case counts
    ("model.norm: w8", "r.yaml line 3: 'model.norm' names only modules without a matrix that can be quantized; leave the line out"),
])
def test_a_line_that_names_nothing_is_an_error(wide: Graph, line: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        chosen(wide, HEAD + f"  - {line}\n")
    assert said in error.value.message and "\n" not in error.value.message


def test_a_norm_may_be_left_wide(wide: Graph) -> None:
    assert chosen(wide, HEAD + '  - "*": w8\n  - model.norm: none\n')[0] == chosen(wide, HEAD + '  - "*": w8\n')[0]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(("bad", "said"), [(float("nan"), r"1 value is not finite, the first at \[3, 5\]: nan"),
                                           (1e9, "a scale of .* is beyond f16")])
@pytest.mark.parametrize(("part", "modules"), [("1_mlp_down", "1.mlp.down_proj"),
                                               ("0_self_attn_qkv", "0.self_attn.q_proj, .*k_proj, .*v_proj")])
def test_what_cannot_be_quantized_is_refused_by_the_names_a_recipe_takes(wide: Graph, part: str, modules: str, bad: float, said: str,
                                                                        method: str) -> None:
    graph, name = wide.copy(), f"model_layers_{part}_proj_weight"
    graph.weights[name] = graph.weights[name].clone()
    graph.weights[name][3, 5] = bad
    report = Report("quantize_weights", options={"quantization": Plan(Scheme(4), method, [[*range(40)]] * 2)})
    with pytest.raises(UserError, match=rf"^{name} \(model.layers.{modules}\): {said}.* wide with a recipe"):
        passes.load("quantize_weights").apply(graph, report)


def test_keep_without_a_gguf_says_why(wide: Graph) -> None:
    with pytest.raises(UserError, match=r"^no weight's blocks can be kept: the model was not read from a GGUF file$"):
        chosen(wide, HEAD + '  - "*": keep\n')


def test_every_weight_of_the_step_graph_has_its_modules_names(wide: Graph) -> None:
    named = [path for weight in matrices(wide) for path in paths(weight)]
    layer = [*(f"self_attn.{part}_proj" for part in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
    assert sorted(named) == sorted(["model.embed_tokens", "lm_head", *(f"model.layers.{i}.{part}" for i in (0, 1) for part in layer)])


SCHEMES = st.builds(Scheme, st.sampled_from((4, 8)), st.sampled_from((0, 32, 64, 128)), st.booleans(), st.sampled_from((0, 8, 16)),
                    st.sampled_from((0, 32)))
FLOATS = st.builds(e4m3, st.sampled_from((0, 32, 64, 128)), st.sampled_from((0, 8))) | st.builds(
    e4m3, act_bits=st.sampled_from((0, 8)), tensor=st.just(True))


@given(st.lists(SCHEMES | FLOATS, min_size=1, max_size=4), st.sampled_from((32, 48, 576)))
def test_nothing_gets_fewer_bits_than_it_asked_for(schemes: list[Scheme], k: int) -> None:
    found = widest(schemes, k)
    assert found is not None and widest(schemes[::-1], k) == found                   # whatever the order
    for scheme in schemes:
        assert found.bits >= scheme.bits and (found.act_bits or 32) >= (scheme.act_bits or 32)
        assert found.bits > scheme.bits or (scheme.e4m3 and not found.e4m3) or found.stored_bits(k) >= scheme.stored_bits(k)
        assert scheme.e4m3 or not found.e4m3 or found.bits > scheme.bits            # of eight bits integers are the finer
    assert parse(str(found)) == found
    assert widest([*schemes, None], k) is None


# ----------------------------------------------------------------------------------------------------------------------- text

BAD = {
    "": "r.yaml: is empty; a recipe begins with format: 1, then layers:",
    "# nothing\n": "r.yaml: is empty",
    "- a\n- b\n": "r.yaml line 1: a recipe is KEY: VALUE, found a list",
    "format: 1\n": "r.yaml: has no layers:",
    "layers:\n  - a: w8\n": "r.yaml: has no format:",
    "format: 2\nlayers:\n  - a: w8\n": "r.yaml line 1: format '2'; this infc reads format 1",
    "format: 1\nlayer:\n  - a: w8\n": "r.yaml line 3: unknown key 'layer'; did you mean 'layers'?",
    "format: 1\nformat: 1\nlayers:\n  - a: w8\n": "'format' stands there twice",
    "format: 1\nlayers:\n  a: w8\n": "r.yaml line 3: layers is a list",
    "format: 1\nlayers: []\n": "r.yaml line 2: layers is empty",
    HEAD + "  - a: w8\n    b: w4\n": "r.yaml line 3: a line of layers has one pattern, not 2",
    HEAD + "  - a\n": "r.yaml line 3: a line of layers is KEY: VALUE, found 'a'",
    HEAD + "  - a: [w8]\n": "r.yaml line 3: the scheme of 'a' is one word, found a list",
    HEAD + "  - a: w8\n  - a: w5\n": "r.yaml line 4: unknown quantization 'w5'",
    HEAD + "  - a: w8:g33\n": "r.yaml line 3: unknown quantization 'w8:g33' at 'g33'",
    HEAD + "  - a: keepa4\n": "r.yaml line 3: unknown quantization 'keepa4'",
    HEAD + "  - a:\n": "r.yaml line 3: unknown quantization ''",
    HEAD + "  - *: w8\n": "r.yaml line 3: is no YAML",
    HEAD + "  - {a: w8, a: w4}\n": "r.yaml line 3: 'a' stands there twice",
    HEAD + "\t- a: w8\n": "r.yaml line 3: is no YAML",
    HEAD + "  - ? [a]\n    : w8\n": "r.yaml line 3: a key is one word, found a list",
    "format: 1\nlayers: &x [*x]\n": "r.yaml line 2: a line of layers is KEY: VALUE, found a list",
    "--- 1\n--- 2\n": "r.yaml line 2: is no YAML",
}


@pytest.mark.parametrize(("text", "said"), BAD.items())
def test_a_wrong_recipe_is_one_line_that_names_its_place(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        from_text(text, "r.yaml")
    assert said in error.value.message and "\n" not in error.value.message and error.value.exit_code == 2


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_any_text_is_a_recipe_or_one_line(text: str) -> None:
    try:
        found = from_text(text, "r.yaml")
    except UserError as error:
        assert "\n" not in error.message
    else:
        assert isinstance(found, Recipe)


PATHS = st.text(st.sampled_from('abz09._-*?["\\ é:#'), min_size=1, max_size=12)


@given(st.lists(st.tuples(PATHS, SCHEMES | FLOATS | st.none() | st.builds(Keep, st.sampled_from((0, 8, 16)))), min_size=1, max_size=5))
def test_a_recipe_reads_back_from_its_own_text(lines: list[tuple]) -> None:
    made = Recipe(tuple(Line(pattern, one) for pattern, one in lines))
    assert from_text(str(made), "r.yaml") == made


def test_what_quant_may_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# mine\n" + HEAD + "  - '*': w8   # all\n")
    assert read(str(file)) == Recipe((Line("*", Scheme(8)),)) == read(recipe.text_of(str(file)))
    assert read("fp8a8:g64") == e4m3(64, 8) == read("fp8a8:g64:token") and read("fp8:channel") == e4m3()
    assert read("none") is None and read("w4a8:g64") == Scheme(4, 64, act_bits=8)
    assert read("keep") == Recipe((Line("*", Keep()),)) and read("keepa8") == Recipe((Line("*", Keep(8)),))
    assert recipe.text_of("w8") == "w8"
    (tmp_path / "bytes.yml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "recipe").write_text(HEAD)
    monkeypatch.chdir(tmp_path)
    for quant, said in {"gone.yaml": "gone.yaml: cannot be read (no such file or directory)", "bytes.yml": "byte 0 is no UTF-8",
                        "folder.yaml": "is a directory", "recipe": "is a file without .yaml or .yml at its end",
                        "w9": "unknown quantization 'w9': write w8 or w4", "fp8:asym": "no offset: leave :asym out",
                        "fp8a16": "unknown quantization 'fp8a16'", "w8:tensor": "unknown quantization 'w8:tensor' at 'tensor'",
                        "fp8:g32:tensor": "says which group twice"}.items():
        with pytest.raises(UserError) as error:
            read(quant)
        assert said in error.value.message and "\n" not in error.value.message


# ------------------------------------------------------------------------------------------------------- of a finished compile

@pytest.mark.parametrize("text", [
    HEAD + '  - "*": w8\n', HEAD + '  - "*": w4:g64:asym\n  - "model.layers.1.*": none\n  - lm_head: w8a8\n  - model.embed_tokens: w8a8\n',
    HEAD + '  - "model.layers.*.mlp.*": w4a32:channel\n  - "model.layers.0.self_attn.*_proj": w8a8:token\n',
    HEAD + '  - "*": fp8\n  - "model.layers.*.mlp.*": fp8a8:tensor\n  - "model.layers.1.self_attn.o_proj": fp8:g32\n',
])
@pytest.mark.parametrize("model", ["wide", "untied"])
def test_a_compiles_recipe_gives_the_same_graph_again(text: str, model: str, request: pytest.FixtureRequest) -> None:
    graph: Graph = request.getfixturevalue(model)
    if model == "untied": text = text.replace("  - model.embed_tokens: w8a8\n", "  - model.embed_tokens: w8\n")
    once = quantized(graph, text)
    found = recipe.of(once)
    assert found is not None
    again = quantized(graph, str(found))
    assert formats(again) == formats(once) and recipe.of(again) == found


def formats(graph: Graph) -> list[tuple]:
    """Every reader of a matrix, with all its settings."""
    readers = {infc.linear_quantized.default, infc.linear_swiglu_quantized.default, infc.embedding_quantized.default, infc.linear.default,
               infc.linear_swiglu.default}
    return [(node.target, [None if isinstance(a, fx.Node) else a for a in node.args]) for node in graph.nodes if node.target in readers]


def test_a_wide_graph_has_no_recipe(wide: Graph) -> None:
    assert recipe.of(wide) is None


def test_the_commonest_scheme_is_said_once() -> None:
    assert str(written({"a": Scheme(8), "b": None, "c": Scheme(8)})) == HEAD + '  - "*": w8\n  - "b": none\n'


def test_a_searched_recipe_lies_beside_its_artifact_and_reads_back(tmp_path: Path) -> None:
    artifact = tmp_path / "m.infc"
    made = written({"a": Scheme(8), "b": None})
    file = recipe.beside(artifact, force=False)
    write_whole(file, f"# found by infc for --quality kl<=0.02: 12 bytes of matrices\n{made}")
    assert file.name == "m.recipe.yaml" and read(str(file)) == made and [f.name for f in tmp_path.iterdir()] == ["m.recipe.yaml"]
    with pytest.raises(UserError, match=r"m\.recipe\.yaml: exists already; add --force to replace it"):
        recipe.beside(artifact, force=False)
    assert recipe.beside(artifact, force=True) == file
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="it is no recipe: remove it yourself"):
        recipe.beside(artifact, force=True)


@pytest.mark.parametrize(("rows_wide", "rows_narrow"), [
    ("w4:asym", "w4a8:asym"), ("w8a32", "w8a8"), ("fp8:tensor", "fp8a8:tensor"), ("fp8", "fp8a8"),
])
def test_rows_of_eight_bits_are_grouped_as_the_format_has_them(rows_wide: str, rows_narrow: str):
    """Whatever the rows were before: integers in groups of 32, e4m3 with a scale each; wider ones have one scale."""
    was, made = parse(rows_wide), parse(rows_narrow)
    assert was and made and replace(was, act_bits=8) == made and was.row_group == 0
    assert made.row_group == (0 if made.e4m3 else 32) and str(replace(made, act_bits=was.act_bits)) == rows_wide
