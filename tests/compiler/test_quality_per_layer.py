"""A layer's row says which kernel reads it, what it weighs, and what the race found of its shape."""
import pytest
from infc.compiler.quality.per_layer import with_kernels
from infc.compiler.quant.pays import Entry, Outcome
from infc.compiler.quant.scheme import Scheme
from infc.runtime.program import Buffer, Kernel, Program, Step

BUFFERS = (
    Buffer("table_codes", "weight", "u8", (48, 32), 48 * 34),
    Buffer("down_codes", "weight", "u8", (64, 16), 64 * 20),          # w4: K is 32
    Buffer("up", "weight", "bf16", (64, 32), 64 * 64),
    Buffer("x", "arena", "f32", ("T", 32), 128),
)
KERNELS = [Kernel(name, name, f"k_{name}", "", "x86-64-v4") for name in ("look_up", "head", "down", "up")]
STEPS = (Step("look_up", (0, 3), "infc.embedding_quantized"), Step("down", (3, 1, 3), "infc.linear_quantized"),
         Step("up", (3, 2, 3), "infc.linear"), Step("head", (3, 0, 3), "infc.linear_quantized"))
PROGRAM = Program("step_T1", {"T": 1}, ("T",), 128, BUFFERS, STEPS)
ROWS = [{"weight": "table", "scheme": "w8", "values": 48 * 32}, {"weight": "down", "scheme": "w4", "values": 64 * 32},
        {"weight": "up", "scheme": "bf16", "values": 64 * 32}, {"weight": "gone", "scheme": "bf16", "values": 8}]
RACED = [Outcome(Entry(64, 32, Scheme(4)), "down", (1e-6, 2e-6, 3e-6), (4e-6, 5e-6, 6e-6)),
         Outcome(Entry(32, 64, Scheme(4)), "other", (9e-6,) * 3, (9e-6,) * 3),
         Outcome(Entry(48, 32, Scheme(4)), "other", (9e-6,) * 3, (9e-6,) * 3)]


def test_each_weight_has_its_products_kernel_its_bytes_and_its_times():
    table, down, up, gone = with_kernels(ROWS, PROGRAM, KERNELS, RACED, wide_bytes=2, read_gb_s=2.0)
    assert [row["kernel"] for row in (table, down, up, gone)] == ["head", "down", "up", None]
    assert [row["bytes"] for row in (table, down, up, gone)] == [48 * 34, 64 * 20, 64 * 64, 0]
    assert (down["predicted_us"], down["wide_predicted_us"]) == (64 * 20 / 2000, 64 * 64 / 2000)
    assert down["measured"]["rows_1"] == {"us": pytest.approx(1), "wide_us": pytest.approx(4)} and [*down["measured"]] == [
        "rows_1", "rows_8", "rows_256"]
    assert table["measured"] is None and up["measured"] is None       # the race was of another format, and of none


def test_nothing_is_predicted_for_another_machine():
    for row in with_kernels(ROWS, PROGRAM, KERNELS, [], wide_bytes=2, read_gb_s=None):
        assert row["predicted_us"] is row["wide_predicted_us"] is row["measured"] is None
