// The next token of each row: argmax by all threads together; temperature, top-k and top-p by one thread per row.
//
// A draw needs the largest logits in descending order, but rarely many of them: they are found and sorted step by step.
#pragma once
#include <algorithm>
#include <cmath>
#include "pool.h"
#include "common.h"

namespace infc {

struct Best { float value; int32_t index; };

constexpr Best NONE{-__builtin_inff(), 0x7fffffff};

// Below it a temperature is 0: its reciprocal must be finite in fp32. The same number as in compiler/ops/sample.py.
constexpr float GREEDY_BELOW = 1e-30f;

INFC_INLINE bool greedy(float temperature) { return !(temperature >= GREEDY_BELOW); }

INFC_INLINE float known(float x) { return x == x ? x : -__builtin_inff(); }          // NaN counts as -inf

INFC_INLINE bool better(float value, int32_t index, Best than) {
    return value > than.value || (value == than.value && index < than.index);
}

// the largest of x[begin, end), the lowest index of it; NaN is -inf
INFC_INLINE Best argmax(const float* x, int64_t begin, int64_t end) {
    Best best = NONE;
    f32x16 top = splat(-__builtin_inff());
    i32x16 where = splat_i32(int32_t(begin));
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
        f32x16 v = load16(x + i);
        auto more = v > top;                             // never of NaN
        top = select(more, v, top);
        where = select(more, splat_i32(int32_t(i)), where);            // the first block of this lane's largest
    }
    float values[16];
    int32_t blocks[16];
    store16(values, top);
    store(blocks, where);
    for (int lane = 0; lane < 16; lane++)
        if (i > begin && better(values[lane], blocks[lane] + lane, best)) best = {values[lane], blocks[lane] + lane};
    for (; i < end; i++)
        if (better(known(x[i]), int32_t(i), best)) best = {known(x[i]), int32_t(i)};
    return best;
}

// Ids of a row in descending order of value (ties by index), found as far as they are asked for: each look takes what lies
// within a wider distance of the largest, and sorts only what is new.
struct Descending {
    const float* x;
    int32_t* ids;                                        // [n]
    int64_t n, ready = 0;
    float below, reach;                                  // all values >= below are in; the next look goes down by reach
    bool first = true, done = false;

    Descending(const float* values, int64_t count, float top, float step, int32_t* room)
        : x(values), ids(room), n(count), below(top), reach(step) {}

    int32_t at(int64_t i) {
        while (i >= ready && !done) look();
        return i < ready ? ids[i] : ready ? ids[ready - 1] : 0;
    }
    void look() {
        const float above = below;
        done = !(reach < 1e30f);
        below = done ? -__builtin_inff() : below - reach;
        const int64_t from = ready;
        const f32x16 low = splat(below), floor = splat(-__builtin_inff());
        auto take = [&](int64_t k) {
            const float v = known(x[k]);
            if (v >= below && (first || v < above)) ids[ready++] = int32_t(k);
        };
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) {
            f32x16 v = load16(x + i);
            if (!done && reduce_max(select(v >= low, v, floor)) < below) continue;
            for (int64_t k = i; k < i + 16; k++) take(k);
        }
        for (; i < n; i++) take(i);
        std::sort(ids + from, ids + ready, [this](int32_t a, int32_t b) {
            const float p = known(x[a]), q = known(x[b]);
            return p != q ? p > q : a < b;
        });
        first = false, reach *= 4;
    }
};

// see the operator: softmax(x / temperature), cut to top_k, then to the smallest prefix of mass >= top_p, drawn at `uniform`
inline int32_t draw(const float* x, int64_t n, float temperature, int32_t top_k, float top_p, float uniform, int32_t* room) {
    const Best likeliest = argmax(x, 0, n);
    const float top = likeliest.value;
    if (!std::isfinite(top)) return likeliest.index;     // no mass to speak of
    Descending order(x, n, top, 2 * temperature, room);
    auto weight = [&](float v) { return std::exp(double(known(v) - top) / double(temperature)); };
    auto all = [&]() {                                   // of every token: fp32 terms, summed in fp64 every 1024
        double sum = 0;
        const f32x16 by = splat(1.0f / temperature), zero = splat(top), none = splat(-__builtin_inff());
        int64_t i = 0;
        while (i + 16 <= n) {
            f32x16 s = splat(0.0f);
            for (int64_t stop = i + 1024 < n ? i + 1024 : n; i + 16 <= stop; i += 16) {
                f32x16 v = load16(x + i);
                s = s + exp((select(v == v, v, none) - zero) * by);
            }
            sum += double(reduce_add(s));
        }
        for (; i < n; i++) sum += weight(x[i]);
        return sum;
    };
    int64_t kept = top_k > 0 && top_k < n ? top_k : n;
    double mass = 0;
    if (kept == n) mass = all();
    else
        for (int64_t i = 0; i < kept; i++) mass += weight(x[order.at(i)]);
    if (!(mass > 0 && std::isfinite(mass))) return likeliest.index;
    if (top_p < 1) {
        double prefix = 0, wanted = double(top_p) * mass;
        int64_t i = 0;
        do prefix += weight(x[order.at(i++)]); while (i < kept && prefix < wanted);
        kept = i, mass = prefix;
    }
    double seen = 0, wanted = double(uniform) * mass;
    for (int64_t i = 0; i + 1 < kept; i++) {
        seen += weight(x[order.at(i)]);
        if (seen > wanted) return order.at(i);
    }
    return order.at(kept - 1);
}

inline void sample(const infc_run* r, int64_t rows, int64_t vocab, const void* logits, const void* temperature, const void* top_k,
                   const void* top_p, const void* uniform, void* token) {
    const auto* x = static_cast<const float*>(logits);
    const auto* heat = static_cast<const float*>(temperature);
    auto* out = static_cast<int32_t*>(token);
    constexpr int64_t AT_ONCE = 1024;                    // rows whose parts are kept at a time
    static_assert(AT_ONCE * sizeof(Best) < SCRATCH_BYTES / 4, "leave room for the ids");
    auto* part = static_cast<Best*>(r->scratch);
    auto* ids = reinterpret_cast<int32_t*>(part + AT_ONCE);
    for (int64_t begin = 0; begin < rows; begin += AT_ONCE) {
        int64_t end = begin + AT_ONCE < rows ? begin + AT_ONCE : rows;
        Span mine = share(vocab, r->thread, r->threads);
        for (int64_t i = begin; i < end; i++) {
            if (greedy(heat[i]) && mine.begin < mine.end) part[i - begin] = argmax(x + i * vocab, mine.begin, mine.end);
            if (!greedy(heat[i]) && i % r->threads == r->thread)
                out[i] = draw(x + i * vocab, vocab, heat[i], static_cast<const int32_t*>(top_k)[i],
                              static_cast<const float*>(top_p)[i], static_cast<const float*>(uniform)[i], ids);
        }
        sync(r);
        for (int64_t i = begin + r->thread; i < end; i += r->threads) {
            if (!greedy(heat[i])) continue;
            Best best = NONE;
            for (int64_t t = 0; t < r->threads; t++) {
                Span s = share(vocab, t, r->threads);
                const Best& b = reinterpret_cast<const Best*>(scratch_of(r, t))[i - begin];
                if (s.begin < s.end && better(b.value, b.index, best)) best = b;
            }
            out[i] = best.index;
        }
        sync(r);
    }
}

}  // namespace infc
