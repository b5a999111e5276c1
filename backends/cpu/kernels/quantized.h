// Rows rounded to codes times weights held as codes: integers inside a block of 32 k, fp32 from block to block.
//
// A panel of w (32 columns) is one stream: per group of k the f16 scales of its columns (and offsets), then the codes of its
// blocks (codes.h). x becomes codes while it is packed, [block][row]: a row's codes of a block, their scale, and their sum.
// Codes of weights are unsigned, their middle is taken off by where the integer sum starts: -middle * (sum of x's codes).
#pragma once
#include "codes.h"
#include "linear.h"

namespace infc {

// How w lies: BITS a code, GROUP k to a scale (0: all), OFFSET: one beside each scale.
template <int BITS, int GROUP, bool OFFSET> struct Packed {
    static constexpr int WIDTH = BITS, MIDDLE = 1 << (BITS - 1);
    static constexpr bool OFFSETS = OFFSET;
    static constexpr int64_t HEAD = COLS * 2 * (OFFSET ? 2 : 1), CODES = COLS * BLOCK_K * BITS / 8;      // bytes: a group's, a block's
    static constexpr int64_t IN_GROUP = GROUP ? GROUP / BLOCK_K : INT64_MAX;                             // blocks
    static int64_t blocks(int64_t k) { return (k + BLOCK_K - 1) / BLOCK_K; }
    static int64_t panel_bytes(int64_t k) { return (GROUP ? (k + GROUP - 1) / GROUP : 1) * HEAD + blocks(k) * CODES; }
    // scales of 16 columns, and offsets of codes whose middle was taken off
    static INFC_INLINE f32x16 scale(const char* head, int v) { return load16(reinterpret_cast<const f16*>(head) + v * 16); }
    static INFC_INLINE f32x16 offset(const char* head, int v, f32x16 scale) {
        return fma(scale, splat(MIDDLE), load16(reinterpret_cast<const f16*>(head) + COLS + v * 16));
    }
};

// A format: how w lies, and x of type XT rounded to ACT_BITS, ACT_GROUP k (32; 0: all) to a scale.
template <class XT, int BITS, int GROUP, bool OFFSET, int ACT_BITS, int ACT_GROUP> struct Coded : Packed<BITS, GROUP, OFFSET>, InRegisters {
    using W = Packed<BITS, GROUP, OFFSET>;
    using X = XT;
    using Dots = Step<ACT_BITS>;
    struct Row {                                         // one row's block
        char codes[Dots::BYTES];
        float scale, sum;                                // sum: of the group's values so far, without the scale if the row has one
        int32_t start, unused;
    };
#if defined(__AVX512F__)
    static constexpr int64_t ROWS = Dots::SUMS == 1 ? 6 : 4, VECS = 2;                 // 24 sums + 4 of weights + a mask + a broadcast
#elif defined(__AVX2__)
    static constexpr int64_t ROWS = 3, VECS = 1;
#else
    static constexpr int64_t ROWS = 2, VECS = 1;
#endif
    static int64_t row_bytes(int64_t k) { return W::blocks(k) * int64_t(sizeof(Row)); }
    static int64_t tile_bytes(int64_t k) { return W::panel_bytes(k); }
    template <class F> using Source = Stored<F>;
    static bool in_place(int64_t, int64_t) { return false; }
    static void pack(void* to, const X* x, int64_t height, int64_t k);
    template <int R, class Beside>
    static __attribute__((noinline)) void panel(const void* x, const char* w, int64_t k, Ahead ahead, const End& end, Beside&, float* out);
};

// ---- x to codes: as compiler/ops/codes.row_codes, bit for bit -----------------------------------------------------------
// Largest values to scales and their inverses. `largest` are bits of |x|, compared as integers: there NaN is above all.
template <int BITS> INFC_INLINE void scales(i32x16 largest, float* scale, float* inverse) {
    const f32x16 limit = splat(BITS == 8 ? 127 : 127 * 256), most = cast<f32x16>(largest);
    store16(scale, most / limit);
    store16(inverse, select(most > splat(1e-30f), splat(1.0f) / most * limit, splat(0.0f)));
}

template <class X> INFC_INLINE i32x16 magnitudes(const X* x, int64_t n) {
    return cast<i32x16>(cast<u32x16>(load_some(x, n)) & splat_u32(0x7fffffffu));
}

template <class X, int B, int G, bool O, int AB, int AG>
void Coded<X, B, G, O, AB, AG>::pack(void* to, const X* x, int64_t height, int64_t k) {
    constexpr int64_t MANY = 16;                         // blocks whose scales are made at once
    float scale[MANY], inverse[MANY];
    for (int64_t r = 0; r < height; r++, x += k) {
        auto* row = static_cast<Row*>(to) + r;
        if (AG == 0) {
            i32x16 largest = splat_i32(0);
            for (int64_t c = 0; c < k; c += 16) largest = larger(largest, magnitudes(x + c, k - c));
            scales<AB>(splat_i32(reduce_larger(largest)), scale, inverse);
        }
        float sum = 0;
        for (int64_t b = 0; b < W::blocks(k); b++, row += height) {
            if (AG != 0 && b % MANY == 0) {
                int32_t largest[MANY] = {};
                for (int64_t i = 0; i < MANY && b + i < W::blocks(k); i++) {
                    const int64_t c = (b + i) * BLOCK_K;
                    largest[i] = reduce_larger(larger(magnitudes(x + c, k - c), magnitudes(x + c + 16, k - c - 16)));
                }
                scales<AB>(load<i32x16>(largest), scale, inverse);
            }
            const X* at = x + b * BLOCK_K;
            const int64_t n = k - b * BLOCK_K;
            const f32x16 by = splat(inverse[b % MANY]);
            const i32x16 first = nearest(load_some(at, n) * by), second = nearest(load_some(at + 16, n - 16) * by);
            const int32_t codes = reduce_add(first + second);
            Dots::pack(row->codes, first, second);
            row->scale = scale[b % MANY], row->start = -W::MIDDLE * codes;
            if (O) row->sum = sum = (b % W::IN_GROUP ? sum : 0) + (AG == 0 ? 1 : row->scale) * float(codes);
        }
    }
}

// ---- R rows x one panel -> out[R][32] ------------------------------------------------------------------------------------
// Sums of a block's integers, R rows x V vectors of columns, from the rows' starts. A line is fetched at `next` for each that is read.
// Few rows leave too few sums to hide the latency of the products (4 cycles on Zen 4), so they take U chains each.
template <class F, int R, int V>
INFC_INLINE void block_sums(const typename F::Row* row, const char* w, const char* next, int64_t stride, i32x16 (&total)[R][V]) {
    using Dots = typename F::Dots;
    constexpr int BITS = F::W::WIDTH, PARTS = 8 / BITS, SUMS = Dots::SUMS, U = NATIVE == 16 && R * SUMS <= 2 ? 2 : 1;
    i32x16 sum[U][R][V][SUMS];
#pragma GCC unroll 2
    for (int u = 0; u < U; u++)
#pragma GCC unroll 16
        for (int i = 0; i < R * V; i++)
#pragma GCC unroll 2
            for (int d = 0; d < SUMS; d++) sum[u][i / V][i % V][d] = splat_i32(u == 0 && d + 1 == SUMS ? row[i / V].start : 0);
#pragma GCC unroll 8
    for (int line = 0; line < STEPS / PARTS; line++) {
        u32x16 bytes[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
            bytes[v] = load<u32x16>(w + line * 128 + v * 64);
            __builtin_prefetch(next + line * stride + v * 64, 0, 2);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            Dots step[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++)
                step[v] = Dots::of(BITS == 8 ? bytes[v] : (part ? bytes[v] >> 4 : bytes[v]) & splat_u32(0x0f0f0f0fu));
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int v = 0; v < V; v++) step[v].add(sum[line % U][r][v], row[r].codes, line + part * STEPS / 2);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * V; i++) {
        i32x16& to = total[i / V][i % V];
        to = Dots::total(sum[0][i / V][i % V]);
        if (U == 2) to = to + Dots::total(sum[U - 1][i / V][i % V]);
    }
}

template <class X, int B, int G, bool O, int AB, int AG> template <int R, class Beside>
void Coded<X, B, G, O, AB, AG>::panel(const void* x, const char* weights, int64_t k, Ahead ahead, const End& end, Beside&, float* out) {
    constexpr int V = VECS;
    for (int half = 0; half < 2; half += V) {
        const auto* row = static_cast<const Row*>(x);                  // a row's scale for all k is taken in at the end
        const char *w = weights, *next = ahead.at;
        f32x16 total[R][V], scale[V], offset[V];
#pragma GCC unroll 16
        for (int i = 0; i < R * V; i++) total[i / V][i % V] = splat(0.0f);
        for (int64_t left = W::blocks(k), in_group = 0; left > 0; left--, in_group--) {
            if (in_group == 0) {
                in_group = W::IN_GROUP;
#pragma GCC unroll 2
                for (int v = 0; v < V; v++) {
                    scale[v] = W::scale(w, half + v);
                    if (O) offset[v] = W::offset(w, half + v, scale[v]);
                }
                fetch<2>(next, W::HEAD);
                w += W::HEAD, next += ahead.share(W::HEAD);
            }
            if (left == 4) end.fetch_rows(R);
            i32x16 sum[R][V];
            block_sums<Coded, R, V>(row, w + half * 64, next + half * 64, ahead.line, sum);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int v = 0; v < V; v++) {
                    total[r][v] = AG == 0 ? fma(floats(sum[r][v]), scale[v], total[r][v])
                                          : fma(floats(sum[r][v]) * scale[v], splat(row[r].scale), total[r][v]);
                    if (O && (in_group == 1 || left == 1)) total[r][v] = fma(offset[v], splat(row[r].sum), total[r][v]);
                }
            row += R, w += W::CODES, next += W::CODES / 128 * ahead.line;
        }
#pragma GCC unroll 16
        for (int i = 0; i < R * V; i++) {
            const f32x16 sum = total[i / V][i % V];
            store16(out + i / V * COLS + (half + i % V) * 16, AG == 0 ? sum * splat(row[i / V - R].scale) : sum);
        }
    }
}

// ---- rows picked by index --------------------------------------------------------------------------------------------------
// Row v of w [vocab, k], scale * code + offset. An index outside 0..vocab-1 gives a row of zeros.
template <class W, class I, class Y>
void embedding_coded(const infc_run* r, int64_t rows, int64_t vocab, int64_t k, const void* w, const void* ids, void* y) {
    const int64_t blocks = W::blocks(k), panel_bytes = W::panel_bytes(k);
    Span mine = share(rows * blocks, r->thread, r->threads);           // even one row is shared: its reads miss the cache
    for (int64_t u = mine.begin; u < mine.end; u++) {
        const int64_t row = u / blocks, b = u % blocks, id = int64_t(static_cast<const I*>(ids)[row]);
        Y* out = static_cast<Y*>(y) + row * k + b * BLOCK_K;
        const int64_t n = k - b * BLOCK_K < BLOCK_K ? k - b * BLOCK_K : BLOCK_K;
        const bool known = id >= 0 && id < vocab;
        const int64_t column = known ? id % COLS : 0, group = b / W::IN_GROUP, first = group * W::IN_GROUP;      // of the group
        const char* head = static_cast<const char*>(w) + (known ? id / COLS : 0) * panel_bytes + group * W::HEAD + first * W::CODES;
        const auto* scales = reinterpret_cast<const f16*>(head) + column;
        const float scale = known ? to_f32(scales[0]) : 0, offset = !known ? 0 : W::OFFSETS ? to_f32(scales[COLS]) : -W::MIDDLE * scale;
        const auto* codes = reinterpret_cast<const uint8_t*>(head) + W::HEAD + (b - first) * W::CODES + column * 4;
        for (int64_t i = 0; i < n; i++) {
            const int64_t step = i / 4;
            const int code = W::WIDTH == 8 ? codes[step * 128 + i % 4] : codes[step % 4 * 128 + i % 4] >> (step / 4 * 4) & 15;
            out[i] = from_f32<Y>(float(code) * scale + offset);        // exact up to the sum: 8 bits times 11
        }
    }
}

}  // namespace infc
