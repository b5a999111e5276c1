// The next token of each row: argmax by all threads together; temperature, top-k and top-p by one thread per row.
//
// A draw needs the largest logits in descending order, but rarely many of them: ids are spread by value into buckets (two
// passes), and only the buckets that are reached get sorted.
#pragma once
#include <algorithm>
#include <cmath>
#include "pool.h"
#include "common.h"

namespace infc {

struct Best { float value; int32_t index; };

constexpr Best NONE{-__builtin_inff(), 0x7fffffff};

INFC_INLINE bool better(float value, int32_t index, Best than) {
    return value > than.value || (value == than.value && index < than.index);
}

// the largest of x[begin, end), the lowest index of it
INFC_INLINE Best argmax(const float* x, int64_t begin, int64_t end) {
    Best best = NONE;                                    // what is never greater (NaN) never wins
    f32x16 top = splat(-__builtin_inff());
    i32x16 where = splat_i32(int32_t(begin));
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
        f32x16 v = load16(x + i);
        auto more = v > top;
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
        if (better(x[i], int32_t(i), best)) best = {x[i], int32_t(i)};
    return best;
}

constexpr int BUCKETS = 4096;                            // sign, exponent and 3 bits of the fraction, descending

// order-preserving: a larger float has a smaller key
INFC_INLINE uint32_t descending(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if (x == 0) u = 0;                                   // -0 ties with 0
    return u >> 31 ? u : ~(u | 0x80000000u);
}

// ids of a row in descending order of value (ties by index), sorted as far as they are asked for
struct Descending {
    const float* x;
    int32_t* ids;                                        // [n], grouped by bucket
    int32_t end[BUCKETS];
    int64_t sorted, bucket;

    void build(const float* values, int64_t n, int32_t* room) {
        x = values, ids = room, sorted = 0, bucket = 0;
        memset(end, 0, sizeof end);
        for (int64_t i = 0; i < n; i++) end[descending(x[i]) >> 20]++;
        int32_t total = 0;
        for (int32_t& e : end) { int32_t count = e; e = total; total += count; }
        for (int64_t i = 0; i < n; i++) ids[end[descending(x[i]) >> 20]++] = int32_t(i);
    }
    int32_t at(int64_t i) {
        for (; i >= sorted; bucket++) {
            std::sort(ids + sorted, ids + end[bucket], [this](int32_t a, int32_t b) {
                return x[a] != x[b] ? x[a] > x[b] : a < b;
            });
            sorted = end[bucket];
        }
        return ids[i];
    }
};

// see the operator: softmax(x / temperature), cut to top_k, then to the smallest prefix of mass >= top_p, drawn at `uniform`
INFC_INLINE int32_t draw(const float* x, int64_t n, float temperature, int32_t top_k, float top_p, float uniform, Descending& order,
                         int32_t* room) {
    order.build(x, n, room);
    const float top = x[order.at(0)];
    auto weight = [&](float v) { return std::exp(double(v - top) / double(temperature)); };
    auto all = [&]() {                                   // of every token: fp32 terms, summed in fp64 every 1024
        double sum = 0;
        const f32x16 by = splat(1.0f / temperature), zero = splat(top);
        int64_t i = 0;
        while (i + 16 <= n) {
            f32x16 s = splat(0.0f);
            for (int64_t stop = i + 1024 < n ? i + 1024 : n; i + 16 <= stop; i += 16) s = s + exp((load16(x + i) - zero) * by);
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
    static_assert(AT_ONCE * sizeof(Best) + sizeof(Descending) < SCRATCH_BYTES / 4, "leave room for the ids");
    auto* part = static_cast<Best*>(r->scratch);
    auto* order = reinterpret_cast<Descending*>(part + AT_ONCE);
    auto* ids = reinterpret_cast<int32_t*>(order + 1);
    for (int64_t begin = 0; begin < rows; begin += AT_ONCE) {
        int64_t end = begin + AT_ONCE < rows ? begin + AT_ONCE : rows;
        Span mine = share(vocab, r->thread, r->threads);
        for (int64_t i = begin; i < end; i++) {
            if (!(heat[i] > 0) && mine.begin < mine.end) part[i - begin] = argmax(x + i * vocab, mine.begin, mine.end);
            if (heat[i] > 0 && i % r->threads == r->thread)
                out[i] = draw(x + i * vocab, vocab, heat[i], static_cast<const int32_t*>(top_k)[i],
                              static_cast<const float*>(top_p)[i], static_cast<const float*>(uniform)[i], *order, ids);
        }
        sync(r);
        for (int64_t i = begin + r->thread; i < end; i += r->threads) {
            if (heat[i] > 0) continue;
            Best best = NONE;
            for (int64_t t = 0; t < r->threads; t++) {
                Span s = share(vocab, t, r->threads);
                const Best& b = reinterpret_cast<const Best*>(scratch_of(r, t))[i - begin];
                if (s.begin < s.end && better(b.value, b.index, best)) best = b;
            }
            out[i] = best.index < vocab ? best.index : 0;            // nothing but NaN: token 0
        }
        sync(r);
    }
}

}  // namespace infc
