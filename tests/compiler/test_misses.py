"""Why a pass did not fire is said, for each that nearly did; pinned counts fail where a pattern stops matching."""
import json

import pytest
import torch
from decoders import OneLayer, before, captured
from golden import trace
from infc import models, passes
from infc.compiler import driver, misses
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.rewrite import Report
from infc.passes import fuse_rms_norm, fuse_rope, fuse_swiglu, merge_projections, page_kv_cache, rewrite_attention, sample_tokens
from tiny_artifact import infc, tiny
from torch import Tensor, nn


def run(module, graph) -> Report:
    report = Report(module.PASS.name)
    module.PASS.apply(graph, report)
    return report


def norm(x, w):
    return w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))


def other_norm(x, w):
    return w * (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6))


X, W = torch.randn(4, 8), torch.randn(8)


def test_a_near_miss_names_what_was_expected_and_what_was_found():
    (miss,) = run(fuse_rms_norm, trace(other_norm, X, W)).misses
    assert (miss.expected, miss.matched) == ("aten.mean.dim", 4) and "aten.sum.dim_IntList" in miss.found


def test_a_site_that_another_rule_took_is_no_miss():
    report = run(fuse_rms_norm, trace(norm, X, W))
    assert (report.fired, report.misses, report.refused) == (1, [], {})


# ------------------------------------------------------------------------------------------- passes that are plain functions

class MinusSine(OneLayer):
    """Turned the other way in another spelling: no rotation that fuse_rope knows."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None, :, None].float() * self.inv_freq
        angle = torch.cat((angle, angle), -1)
        a, b = x.chunk(2, -1)
        return x * angle.cos() - torch.cat((b, a), -1) * angle.sin()


def test_an_unknown_rotation_is_reported():
    graph = before(captured(MinusSine()), "fuse_rope")
    (reason,) = run(fuse_rope, graph).refused.values()
    assert "multiplied by cos or sin" in reason and "no rotation that is known" in reason
    assert not run(fuse_rope, before(captured(OneLayer()), "fuse_rope")).refused


class Gated(nn.Module):
    """relu(gate) * up; and q, k, v of two values."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.gate(x)) * self.up(x)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (self.q(h), self.k(y), self.v(x)))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_gates_and_projections_that_stay_apart_are_reported():
    graph = trace(Gated().eval(), torch.randn(2, 5, 16), torch.randn(2, 5, 16))
    assert "relu: infc::swiglu has silu and gelu" in " ".join(run(fuse_swiglu, graph).refused.values())
    assert "read different values" in " ".join(run(merge_projections, graph).refused.values())


def test_an_unknown_attention_is_reported():
    def odd(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2), -2) @ v           # over the queries

    graph = trace(odd, *(torch.randn(1, 2, 5, 8) for _ in range(3)))
    report = run(rewrite_attention, graph)
    assert (report.fired, list(report.refused.values())) == (0, [rewrite_attention.NOT_KNOWN])


def test_what_is_no_decoder_says_so():
    graph = trace(norm, X, W)
    assert "a decoder takes input_ids, position_ids" in " ".join(run(page_kv_cache, graph).refused.values())
    assert "only a step graph" in " ".join(run(sample_tokens, graph).refused.values())


# ------------------------------------------------------------------------------------------------------------ pinned counts

LISTED = [{"name": "merge_common", "fired": 2, "refused": [], "misses": []},
          {"name": "fuse_rope", "fired": 1, "refused": [{"site": "%a in layers.1", "reason": "other angles"}], "misses": []},
          {"name": "fuse_rms_norm", "fired": 60, "refused": [],
           "misses": [{"site": "%b in layers.7", "matched": 5, "of": 6, "reason": "found %c: expected aten.mean.dim"}]},
          {"name": "merge_common", "fired": 3, "refused": [], "misses": []}]


def test_expected_counts():
    misses.check_expected(LISTED, [("merge_common", 5), ("fuse_rope", 1)])
    with pytest.raises(CheckFailed, match=r"fuse_rms_norm was expected to fire 61 times and fired 60 times; .*layers.7, 5 of 6"):
        misses.check_expected(LISTED, [("fuse_rms_norm", 61)])
    with pytest.raises(CheckFailed, match=r"it refused %a in layers\.1: other angles"):
        misses.check_expected(LISTED, [("fuse_rope", 2)])


@pytest.mark.parametrize(("text", "message"), [
    ("fuse_rms_norm", "like fuse_rms_norm=61"), ("fuse_rope=two", "like fuse_rms_norm=61"), ("fuse_rms=3", "did you mean 'fuse_rms_norm'"),
])
def test_a_wrong_expectation(text, message):
    with pytest.raises(UserError, match=message):
        misses.counts([text], passes.PIPELINE)


def counted(name: str) -> dict[str, int]:
    listed = driver.passes_of(name, driver.Options(check="off"), lambda event: None)[0].json()
    assert not [miss for one in listed for miss in one["misses"] + one["refused"]], "every miss is explained by a fix, or is none"
    return {one: misses.total(listed, one)["fired"] for one in models.table()[name].expect}


def test_the_pinned_counts_of_tiny():
    assert counted("tiny") == models.table()["tiny"].expect


@pytest.mark.slow
def test_the_pinned_counts_of_smollm2():
    assert counted("smollm2") == models.table()["smollm2"].expect


# --------------------------------------------------------------------------------------------------------------- command line

def test_expect_fails_a_compile(tmp_path):
    done = infc("compile", "random:tiny?layers=1", "-o", tmp_path / "a.infc", "--check", "off", "--quiet", "--expect", "fuse_rope=2")
    assert done.returncode == 1 and "fuse_rope was expected to fire 2 times and fired 1 times" in done.stderr
    assert not (tmp_path / "a.infc").exists()


def test_explain_a_pass_of_an_artifact():
    found = json.loads(infc("explain", tiny(), "--pass", "fuse_rope", "--json").stdout)
    assert found == {"name": "fuse_rope", "fired": 2, "refused": [], "misses": [],
                     "places": [{"where": "model.rotary", "nodes": 2}]}
    assert "fuse_rope: fired 2, refused 0, nearly matched 0" in infc("explain", tiny(), "--pass", "fuse_rope").stdout


def test_explain_an_unknown_pass():
    done = infc("explain", tiny(), "--pass", "fuse_ropes")
    assert done.returncode == 2 and "did you mean 'fuse_rope'?" in done.stderr
