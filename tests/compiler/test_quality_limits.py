"""Limits: what is written is what is held to; what is no limit is one line that shows the part."""
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infc.compiler.errors import UserError
from infc.compiler.quality.limits import DEFAULT, METRICS, Limit, broken, parse

FIGURES = {"ppl": 20.0, "kl": 0.01, "kl_p99": 0.2, "top1": 0.95, "retrieval": 1.0, "json": 1.0, "layer": 0.1}


def test_the_two_of_the_readme():
    assert parse("ppl<=+1%") == [Limit("ppl", 0.01, relative=True)] and parse("kl<=0.02") == [Limit("kl", 0.02)]
    assert parse(" ppl <= 25 , kl_p99<=1e-1,top1>=98%, json >= .5") == [
        Limit("ppl", 25.0), Limit("kl_p99", 0.1), Limit("top1", 0.98), Limit("json", 0.5)]


@given(st.sampled_from([*METRICS]), st.floats(1e-6, 1), st.booleans())
def test_a_limit_is_read_back_as_it_is_shown(metric: str, number: float, relative: bool):
    limit = Limit(metric, float(f"{number:.6g}"), relative and metric == "ppl")
    (again,) = parse(str(limit))
    assert again.metric == metric and again.relative == limit.relative and again.limit == pytest.approx(limit.limit, rel=1e-5)


def test_the_default_is_one():
    assert ",".join(map(str, parse(DEFAULT))) == DEFAULT


@pytest.mark.parametrize(("text", "words"), [
    ("", "'' is no limit"), ("ppl", "'ppl' is no limit"), ("ppl<=", "is no limit"), ("ppl<=x", "is no limit"),
    ("kl<=0.1,", "'' is no limit"),
    ("pple<=+1%", "unknown metric 'pple'; did you mean 'ppl'?"), ("kl>=0.1", "a limit of kl is written kl<=NUMBER"),
    ("top1<=0.9", "a limit of top1 is written top1>=NUMBER"), ("kl<0.1", "is written kl<=NUMBER"), ("kl<=1%", "is in nats, not in %"),
    ("ppl<=1%", "a perplexity is limited as ppl<=+1%"), ("ppl<=+1", "a perplexity is limited as ppl<=+1%"),
    ("ppl<=-1%", "a perplexity is limited as"), ("kl<=+0.1", "a limit of kl has no sign"), ("top1>=1.5", "top1 is a share"),
    ("top1>=150%", "top1 is a share"), ("kl<=0.1,kl<=0.2", "limits kl twice"), ("kl<=1e400", "a finite one"),
])
def test_what_is_no_limit_is_refused(text: str, words: str):
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        parse(text)
    assert repr(text) in refused.value.message and "\n" not in refused.value.message


@pytest.mark.parametrize(("text", "reference", "said"), [
    ("ppl<=+1%", 19.9, []), ("ppl<=+1%", 19.0, ["ppl 20 (+5.26%), ppl<=+1% allows 19.19"]), ("ppl<=20", 1.0, []),
    ("kl<=0.01,kl_p99<=0.1", 20.0, ["kl_p99 0.2, kl_p99<=0.1 allows 0.1"]), ("top1>=95%", 20.0, []),
    ("top1>=0.96,kl<=0.001", 20.0, ["top1 0.95, top1>=0.96 allows 0.96", "kl 0.01, kl<=0.001 allows 0.001"]),
])
def test_limits_that_do_not_hold_are_named(text: str, reference: float, said: list[str]):
    assert broken(parse(text), FIGURES, reference) == said


@pytest.mark.parametrize("text", ["ppl<=+1%", "kl<=1e9", "top1>=0"])
def test_nan_keeps_no_limit(text: str):
    assert len(broken(parse(text), dict.fromkeys(FIGURES, math.nan), 20.0)) == 1
