"""step(): your own loop. Logits are copies; any split into chunks and any mix of sequences gives the same; errors change nothing."""
from threading import Thread

import numpy as np
import pytest
from infc.runtime.errors import RuntimeFault
from infc.runtime.session import load


@pytest.fixture
def model(fake):
    with load(fake.write(), kv_tokens=512) as loaded:
        yield loaded


def test_last_row(fake, model):
    with model.sequence() as a, model.sequence() as b:
        result = model.step([a, b], [[1, 2, 3], [4]])
        assert np.array_equal(result.logits[0], [fake.logits([1, 2, 3])])
        assert np.array_equal(result.logits[1], [fake.logits([4])])
        assert result.tokens == [fake.answer([1, 2, 3], 1)[0], fake.answer([4], 1)[0]]
        assert (a.length, b.length) == (3, 1)


def test_all_rows_over_chunks(fake, model):
    tokens = list(range(100)) + list(range(50))
    with model.sequence() as a, model.sequence() as b:
        result = model.step([a, b], [tokens, [7, 8]], logits="all")
        assert np.array_equal(result.logits[0], [fake.logits(tokens[:i + 1]) for i in range(150)])
        assert np.array_equal(result.logits[1], [fake.logits([7]), fake.logits([7, 8])])


def test_outputs_stay_what_they_are(fake, model):
    with model.sequence() as s:
        kept = [model.step([s], [[t]]).logits[0] for t in range(10)]
        for i, values in enumerate(kept):
            assert np.array_equal(values, [fake.logits(list(range(i + 1)))])


def test_sizes_are_served_by_the_buckets_recordings_alone(fake, model):
    """FIELD R36: lengths 1..199 of one and two sequences, twice over; the second sweep finds all it needs and keeps nothing more."""
    def sweep() -> dict[str, int]:
        for n in range(1, 200, 3):
            with model.sequence() as a, model.sequence() as b:
                found = model.step([a] if n % 2 else [a, b], [[1] * n] if n % 2 else [[1] * n, [2]]).logits[0]
                assert np.array_equal(found, [fake.logits([1] * n)])
        return dict(model.counters)

    first, second = sweep(), sweep()
    assert first["entries"] == first["misses"] == 3 and second["hits"] > first["hits"] > 0
    assert all(second[name] == first[name] for name in ("entries", "misses", "bytes", "evictions", "stale", "kv_blocks_peak"))


def test_the_static_buffer_is_handed_out_on_request(fake, model):
    """The same memory at every step: what was there is overwritten, and nobody can write to it."""
    with model.sequence() as a, model.sequence() as b:
        first = model.step([a, b], [[1, 2, 3], [4]], copy=False)
        assert np.array_equal(first.logits[0], [fake.logits([1, 2, 3])]) and np.array_equal(first.logits[1], [fake.logits([4])])
        with pytest.raises(ValueError, match="read-only"): first.logits[0][0, 0] = 1
        second = model.step([a], [[5]], copy=False)
        assert first.logits[0].ctypes.data == second.logits[0].ctypes.data
        assert np.array_equal(first.logits[0], [fake.logits([1, 2, 3, 5])])
        kept = model.step([a], [[6]]).logits[0]
        assert kept.ctypes.data != second.logits[0].ctypes.data and kept.flags.owndata


def test_the_static_buffer_holds_one_step(fake, model):
    with model.sequence() as a, model.sequence() as b:
        with pytest.raises(RuntimeFault, match=r"run in \d+ steps, each of which overwrites"):
            model.step([a, b], [[1] * 90, [2] * 90], logits="all", copy=False)
        assert (a.length, b.length) == (0, 0)
        long = model.step([a], [[1] * 200], copy=False)                 # chunks, of which the last alone has logits
        assert np.array_equal(long.logits[0], [fake.logits([1] * 200)])
        assert model.step([a], [[2] * 20], logits="none", copy=False).logits == []


def test_no_logits(fake, model):
    with model.sequence() as s:
        result = model.step([s], [[5, 6]], logits="none")
        assert result.logits == [] and result.tokens == fake.answer([5, 6], 1)


def test_truncate_takes_tokens_back(fake, model):
    with model.sequence() as s:
        model.step([s], [list(range(70))])
        s.truncate(33)
        result = model.step([s], [[200] * 31])                      # to the block's end: what was cut off lies behind it till then
        assert np.array_equal(result.logits[0], [fake.logits([*range(33), *[200] * 31])])
        assert len(s.blocks) == 2
        with pytest.raises(RuntimeFault, match="cannot truncate a sequence of 64 tokens to 65"):
            s.truncate(65)


def test_a_full_pool_changes_nothing(fake, model):
    with model.sequence() as a, model.sequence() as b, model.sequence() as c:
        model.step([a, b], [[1] * 250, [2] * 240])
        with pytest.raises(RuntimeFault, match=r"the KV pool is full.*kv_tokens="):
            model.step([c, a], [[3] * 33, [5]])
        assert (a.length, c.length) == (250, 0)
        assert np.array_equal(model.step([a], [[5]]).logits[0], [fake.logits([1] * 250 + [5])])
        with pytest.raises(RuntimeFault, match="the KV pool is full"):
            model.generate([9] * 40, max_tokens=1)
    assert model.pool.free == model.pool.count


def test_a_dropped_sequence_is_found_again(fake, model):
    s = model.sequence()
    model.step([s], [[1] * 250])
    del s
    for _ in range(3):
        assert model.generate([9] * 200, max_tokens=40, ignore_eos=True)[0].token_ids == fake.answer([9] * 200, 40)
    with model.sequence() as a, model.sequence() as b:
        model.step([a, b], [[1] * 250, [2] * 250])


def test_profile_names_every_step(model):
    with model.sequence() as s:
        times = model.profile(s, [1, 2, 3])
    assert [op for op, _ in times] == ["infc.write.default", "infc.hash.default", "infc.sample.default"]
    assert all(ns >= 0 for _, ns in times)


def test_a_sequence_of_another_model_is_refused(fake, model):
    with load(fake.write("other.infc"), kv_tokens=512) as other:
        theirs, mine = other.sequence(), model.sequence()
        other.step([theirs], [[1] * 200])
        for call in (lambda: model.step([mine, theirs], [[1], [2]]), lambda: model.profile(theirs, [2])):
            with pytest.raises(RuntimeFault, match=r"sequence [01] belongs to another model"): call()
        assert (mine.length, theirs.length, model.pool.free) == (0, 200, model.pool.count)
        assert np.array_equal(other.step([theirs], [[2]]).logits[0], [fake.logits([1] * 200 + [2])])
    with pytest.raises(RuntimeFault, match="sequence 0 belongs to another model"):
        model.step([theirs], [[2]])                                 # of a model that is closed by now
    with pytest.raises(RuntimeFault, match="the model is closed"):
        other.step([theirs], [[2]])


@pytest.mark.parametrize(("sequences", "tokens", "message"), [
    ([5], [[1]], r"sequence 0 is an int; make one with sequence\(\)"),
    ([None], [[1]], "sequence 0 is a NoneType"),
    (None, [[1]], "sequences is a NoneType"),
])
def test_what_is_no_sequence(model, sequences, tokens, message):
    with pytest.raises(RuntimeFault, match=message):
        model.step(sequences, tokens)


@pytest.mark.parametrize(("tokens", "message"), [
    ([5], "sequence 0 is an int; give a list of token ids"),
    ([b"ab"], "sequence 0 is a bytes"),
    (["ab"], "sequence 0 is a str"),
    (None, "tokens is a NoneType; give a list"),
    (5, "tokens is an int"),
])
def test_what_is_no_token_list(model, tokens, message):
    with pytest.raises(RuntimeFault, match=message):
        model.step([model.sequence()], tokens)


def test_two_threads_on_one_sequence_are_told_the_limit(fake, model):
    outcomes: list[str] = []
    with model.sequence() as s:
        model.step([s], [[1] * 200])

        def more() -> None:
            try:
                model.step([s], [[2] * 40])
                outcomes.append("done")
            except RuntimeFault as fault:
                outcomes.append(str(fault))

        callers = [Thread(target=more) for _ in range(2)]
        with model.lock:                                            # both wait for their turn
            for caller in callers: caller.start()
            for caller in callers: caller.join(0.05)
        for caller in callers: caller.join()
        assert sorted(outcomes) == ["done", "sequence 0 has 280 tokens; the model's limit is 256"]
        assert np.array_equal(model.step([s], [[3]]).logits[0], [fake.logits([1] * 200 + [2] * 40 + [3])])


@pytest.mark.parametrize(("sequences", "tokens", "message"), [
    (1, [[]], "sequence 0 is empty"),
    (1, [[1], [2]], "1 sequences and 2 token lists"),
    (0, [], "0 sequences"),
    (5, [[1]] * 5, "the limit is 4"),
    (1, [[512]], r"token 0 is 512; the vocabulary has ids 0\.\.511"),
    (1, [[0] * 257], "257 tokens; the model's limit is 256"),
])
def test_bad_calls(model, sequences, tokens, message):
    with pytest.raises(RuntimeFault, match=message):
        model.step([model.sequence() for _ in range(sequences)], tokens)


def test_a_closed_sequence_is_told(fake, model):
    sequence = model.sequence()
    model.step([sequence], [[1, 2]])
    sequence.close()
    sequence.close()                                         # twice is once
    with pytest.raises(RuntimeFault, match=r"sequence 0 is closed, and what it held is gone"): model.step([sequence], [[3]])
    with pytest.raises(RuntimeFault, match="the sequence is closed"), sequence: pass
    assert model.counters["kv_blocks_free"] == model.counters["kv_blocks"]


@pytest.mark.parametrize("length", ["1", 1.5, None, True])
def test_a_length_that_is_no_number(model, length):
    with model.sequence() as sequence, pytest.raises(RuntimeFault, match="give a whole number of tokens"): sequence.truncate(length)


@pytest.mark.parametrize("given", [{"kv_tokens": "64"}, {"kv_tokens": 64.5}, {"kv_tokens": True}, {"threads": "2"}, {"max_sequences": "x"}])
def test_a_load_with_what_is_no_number(fake, given):
    with pytest.raises(RuntimeFault, match=rf"^{next(iter(given))} is .*; it must be a whole number$"): load(fake.write(), **given)


def test_a_load_of_what_is_no_path():
    with pytest.raises(RuntimeFault, match=r"^the artifact's path is None; give a string or a path$"): load(None)
