"""fuse_rope: every spelling of a rotation, angles at half width, and what it leaves alone."""
import pytest
import torch
import torch.nn.functional as F
from golden import assert_contract, filecheck, trace
from infc.compiler.ir import text
from infc.compiler.rewrite import Report
from infc.passes import fuse_rope, merge_common
from torch import Tensor

PASS = fuse_rope.PASS
HEAD = 8
Q, K, V = torch.randn(2, 4, 5, HEAD), torch.randn(2, 2, 5, HEAD), torch.randn(2, 2, 5, HEAD)
POSITIONS = torch.arange(5).repeat(2, 1)
SIZES = ({0: "B", 2: "S"}, {0: "B", 2: "S"}, {0: "B", 2: "S"}, {0: "B", 1: "S"})
INV_FREQ = torch.tensor([1.0, 0.3, 0.1, 0.03])


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def angles(positions: Tensor, width: int, double, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, S, width]."""
    angle = double(positions[..., None].float() * INV_FREQ[: width // 2])
    return (angle.cos() * scale).unsqueeze(1), (angle.sin() * scale).unsqueeze(1)


def twice(x: Tensor) -> Tensor:
    return torch.cat((x, x), -1)


def each_twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def half_split(q, k, v, positions):
    cos, sin = angles(positions, HEAD, twice)
    return attend(q * cos + halves(q) * sin, sin * halves(k) + cos * k, v)         # commuted on purpose


def scaled(q, k, v, positions):                                                   # yarn: cos and sin times a constant
    cos, sin = angles(positions, HEAD, twice, scale=1.2)
    return attend(q * cos + halves(q) * sin, k * cos + halves(k) * sin, v)


def interleaved(q, k, v, positions):                                              # Cohere
    cos, sin = angles(positions, HEAD, each_twice)
    return attend(q * cos + pairs(q) * sin, k * cos + pairs(k) * sin, v)


def interleaved_from_halves(q, k, v, positions):                                  # GLM, Ernie: doubled one way, used the other
    cos, sin = (t[..., : HEAD // 2].repeat_interleave(2, -1) for t in angles(positions, HEAD, twice))
    return attend(q * cos + pairs(q) * sin, k * cos + pairs(k) * sin, v)


def partial(q, k, v, positions):                                                  # Phi
    cos, sin = angles(positions, HEAD // 2, twice)
    q, q_rest = q[..., : HEAD // 2], q[..., HEAD // 2 :]
    k, k_rest = k[..., : HEAD // 2], k[..., HEAD // 2 :]
    q, k = q * cos + halves(q) * sin, k * cos + halves(k) * sin
    return attend(torch.cat((q, q_rest), -1), torch.cat((k, k_rest), -1), v)


def written_out(q, k, v, positions):                                              # two products per half, no rotate_half
    cos, sin = angles(positions, HEAD, lambda x: x)

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return attend(rotate(q), rotate(k), v)


def written_out_interleaved(q, k, v, positions):                                  # gpt-fast
    cos, sin = angles(positions, HEAD, lambda x: x)

    def rotate(x):
        x = x.unflatten(-1, (-1, 2))
        a, b = x[..., 0], x[..., 1]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    return attend(rotate(q), rotate(k), v)


def table(q, k, v, positions):                                                    # GPT-J: a table of sin and cos, looked up
    every = torch.arange(16.0)[:, None] * INV_FREQ
    sin, cos = torch.cat((every.sin(), every.cos()), -1)[positions].chunk(2, -1)
    cos, sin = (t[:, None].repeat_interleave(2, -1) for t in (cos, sin))
    return attend(q * cos + pairs(q) * sin, k * cos + pairs(k) * sin, v)


def rotated_early(q, k, v, positions):                                            # q' is used before k exists
    cos, sin = angles(positions, HEAD, twice)
    q = (q * cos + halves(q) * sin) * 0.5
    k = k + 1
    return attend(q, k * cos + halves(k) * sin, v)


STYLES = {
    half_split: (4, False), scaled: (4, False), interleaved: (4, True), interleaved_from_halves: (4, True), partial: (2, False),
    written_out: (4, False), written_out_interleaved: (4, True), table: (4, True), rotated_early: (4, False),
}  # fmt: skip


@pytest.mark.parametrize("spelling", STYLES, ids=lambda f: f.__name__)
def test_fuses_and_keeps_its_contract(spelling):
    width, style = STYLES[spelling]
    graph = assert_contract(PASS, spelling, Q, K, V, POSITIONS, dynamic=SIZES, fires=1)
    filecheck(graph, rf"""
    CHECK-NOT: aten.neg
    CHECK:     [[R:%\w+]]: (f32[B,4,S,8], f32[B,2,S,8]) = infc.rope(%{{{{\w+}}}}, %{{{{\w+}}}}, [[C:%\w+]], [[S:%\w+]], {style})
    CHECK-NOT: aten.neg
    """)
    rope = next(n for n in graph.nodes if "rope" in str(n.target))
    assert all(angle.meta["val"].shape[-1] == width for angle in rope.args[2:4])
    waves = [n for n in graph.nodes if n.target in (torch.ops.aten.cos.default, torch.ops.aten.sin.default)]
    wide = [n.name for n in waves if n.meta["val"].shape[-1] > width]
    assert not wide, f"{wide} are still computed at full width"


def layers(count):
    def model(q, k, v, positions):
        cos, sin = angles(positions, HEAD, twice)
        for _ in range(count):
            q = attend(q * cos + halves(q) * sin, k * cos + halves(k) * sin, v)
        return q

    return model


def test_angles_are_computed_once_for_all_layers():
    graph = trace(layers(4), Q, K, V, POSITIONS, dynamic=SIZES)
    assert PASS.apply(graph) == 4
    filecheck(graph, r"""
    CHECK:         f32[B,S,4] = aten.cos(
    CHECK:         [[CU:%\w+]]: f32[B,1,S,4] = aten.unsqueeze(
    CHECK:         f32[B,S,4] = aten.sin(
    CHECK:         [[SU:%\w+]]: f32[B,1,S,4] = aten.unsqueeze(
    CHECK-COUNT-4: infc.rope({{.*}}, [[CU]], [[SU]], False)
    CHECK-NOT:     aten.cos
    """)
    assert PASS.apply(graph) == 0


def refuses(fn, *inputs, reason: str, dynamic=SIZES):
    graph = trace(fn, *inputs, dynamic=dynamic)
    merge_common.PASS.apply(graph)
    before, report = text(graph), Report("fuse_rope")
    assert PASS.apply(graph, report) == 0 and text(graph) == before
    assert any(reason in r for r in report.refused.values()), report.refused


def test_refuses_angles_that_are_given_from_outside():
    def given(q, k, v, cos, sin):
        return attend(q * cos + halves(q) * sin, k * cos + halves(k) * sin, v)

    refuses(given, Q, K, V, torch.randn(2, 1, 5, HEAD), torch.randn(2, 1, 5, HEAD), dynamic=SIZES[:3] + ({0: "B", 2: "S"},) * 2,
            reason="not proved equal")


def test_refuses_halves_that_differ():
    def uneven(q, k, v, positions):
        angle = positions[..., None].float() * INV_FREQ
        angle = torch.cat((angle, angle * 1.001), -1)[:, None]
        return attend(q * angle.cos() + halves(q) * angle.sin(), k * angle.cos() + halves(k) * angle.sin(), v)

    refuses(uneven, Q, K, V, POSITIONS, reason="not proved equal")


def test_refuses_half_split_rotation_by_interleaved_angles():
    def mixed(q, k, v, positions):
        cos, sin = angles(positions, HEAD, each_twice)
        return attend(q * cos + halves(q) * sin, k * cos + halves(k) * sin, v)

    refuses(mixed, Q, K, V, POSITIONS, reason="not proved equal")


def test_refuses_q_and_k_at_different_positions():
    def shifted(q, k, v, positions):
        (qc, qs), (kc, ks) = angles(positions, HEAD, twice), angles(positions + 1, HEAD, twice)
        return attend(q * qc + halves(q) * qs, k * kc + halves(k) * ks, v)

    refuses(shifted, Q, K, V, POSITIONS, reason="different angles")


def test_refuses_different_styles():
    def styles(q, k, v, positions):
        cos, sin = angles(positions, HEAD, twice)
        return attend(q * cos + halves(q) * sin, k * cos + pairs(k) * sin, v)

    refuses(styles, Q, K, V, POSITIONS, reason="half-split over 8 and interleaved over 8")


def test_refuses_a_lone_q():
    def lone(q, k, v, positions):
        cos, sin = angles(positions, HEAD, twice)
        return attend(q * cos + halves(q) * sin, k, v)

    refuses(lone, Q, K, V, POSITIONS, reason="only q of")


def test_refuses_fp64_angles():
    def wide(q, k, v, positions):
        cos, sin = (t.double() for t in angles(positions, HEAD, twice))
        return attend(q * cos + halves(q) * sin, k * cos + halves(k) * sin, v.double())

    refuses(wide, Q, K, V, POSITIONS, reason="different dtypes")


def test_leaves_another_rotation_alone():
    def backwards(q, k, v, positions):                                            # (b, -a): the other way round
        cos, sin = angles(positions, HEAD, twice)
        return attend(q * cos - halves(q) * sin, k * cos - halves(k) * sin, v)

    graph = trace(backwards, Q, K, V, POSITIONS, dynamic=SIZES)
    assert PASS.apply(graph) == 0


def test_keeps_a_rotated_value_that_is_returned():
    def returned(q, k, v, positions):
        cos, sin = angles(positions, HEAD, twice)
        q, k = q * cos + halves(q) * sin, k * cos + halves(k) * sin
        return attend(q, k, v), k, halves(q)

    assert_contract(PASS, returned, Q, K, V, POSITIONS, dynamic=SIZES, fires=1)
