// Paged attention, prefill and decode in one: blocks of query rows against pages of 32 tokens, online softmax in fp32.
//
// A row is one query token of one query head; all rows of a kv head's group and of a stretch of tokens share each page they
// read. The work (pages x tiles of rows) is one line, cut evenly among the threads: a cut may fall inside an item, whose
// parts are then combined, in order, by the thread that began it. So one long decode, many short ones and a prefill are all
// balanced, without a lock.
#pragma once
#include <type_traits>
#include "paged.h"
#include "pool.h"

namespace infc {

constexpr int64_t BLOCK_ROWS = 48, CHUNK = 4;            // rows of an item; pages between two looks at the row maxima
constexpr float LOG2E = 1.44269504088896341f;

template <int D> struct Softmax {                        // of BLOCK_ROWS rows; m in the units of the scores
    alignas(64) float m[BLOCK_ROWS];
    f32x16 l[BLOCK_ROWS];                                // sixteen partial sums
    alignas(64) float o[BLOCK_ROWS][D];
};

struct Item { int64_t token, head, row, rows, first_pos, page, pages, sequence; };     // rows of the group order (token, head)

template <class C, int D> struct Attention {
    using L = typename Dot<C>::Lhs;
    static constexpr int K = Dot<C>::K, A = Dot<C>::A;
    static constexpr int Q_LDA = D / K * A, P_LDA = int(CHUNK * PAGE) / K * A, VECS = Shape<C>::VECS;
    static constexpr int ROWS = Shape<C>::ROWS > 12 ? 12 : Shape<C>::ROWS;
    static constexpr Precision EXP = sizeof(C) == 2 ? COARSE : FINE;
    static constexpr int64_t PAGE_BYTES = PAGE * D * sizeof(C);

    // one call: the pages of a chunk, and how many of their tokens any row of the block may see
    struct Chunk { const char* k[CHUNK]; const char* v[CHUNK]; const char* next[CHUNK]; int64_t pages, tokens, first_token; };
    struct Mask { int64_t first_row, group, first_pos, window; };      // row -> the span of positions it sees
    struct Scale {
        float scale, cap;                                // cap 0: none

        // exp(scale * (x - m)). The fine form rounds where the reference does (x - m is often exact, a scale of 1/8 always
        // is); the coarse form folds log2(e) into one multiply-add: p is rounded to bf16 anyway.
        INFC_INLINE f32x16 term(f32x16 x, float m) const {
            const float by = cap != 0 ? 1.0f : scale;
            if (EXP == FINE) return exp((x - splat(m)) * splat(by));
            return exp2<COARSE>(fma(x, splat(by * LOG2E), splat(-m * (by * LOG2E))));
        }
    };
    static INFC_INLINE float finite(float m) { return m == -__builtin_inff() ? 0.0f : m; }     // nothing seen yet: terms are 0

    template <int R, int V> static INFC_INLINE void scores(const L* q, const Chunk& c, int v0, float (*s)[CHUNK * PAGE]) {
        for (int64_t j = 0; j < c.pages; j++) {
            Tile<C, R, V, Q_LDA> tile;
            tile.zero();
            tile.steps(q, c.k[j] + v0 * 64, 128, D / K, c.v[j] + v0 * 64);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) store16(&s[r][j * PAGE + (v0 + v) * 16], tile.total(r, v));
        }
    }

    template <int R, int V> static INFC_INLINE void values(const L* p, const Chunk& c, int v0, const float* alpha, float (*o)[D]) {
        Tile<C, R, V, P_LDA> tile;
        tile.zero();
        for (int64_t j = 0; j < c.pages; j++) {
            int64_t n = c.tokens - j * PAGE < PAGE ? c.tokens - j * PAGE : PAGE;
            const L* a = p + j * PAGE / K * A;
            tile.steps(a, c.v[j] + v0 * 64, D * K * int64_t(sizeof(C)), n / K, c.next[j] + v0 * 64);
            if (n % K) {                                 // the token beside the last one is not ours: it may hold a NaN
                alignas(64) char last[64 * V];
                for (int v = 0; v < V; v++) {
                    const char* at = c.v[j] + n / K * D * K * int64_t(sizeof(C)) + (v0 + v) * 64;
                    store(last + v * 64, load<u32x16>(at) & splat_u32(0xffff));
                }
                tile.step(0, a + n / K * A, last, last);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                float* at = o[r] + (v0 + v) * 16;
                store16(at, fma(load16(at), splat(alpha[r]), tile.total(r, v)));
            }
    }

    // a row's scores -> probabilities (in the panel p), its maximum and sum brought up to date; returns what o shrinks by
    static INFC_INLINE float soften(float* s, L* p, const Chunk& c, const Scale& scale, bool masked, int64_t lo, int64_t hi,
                                    float& m, f32x16& l) {
        const int64_t n = c.pages * PAGE;
        const f32x16 low = splat(-__builtin_inff());
        f32x16 top = low;
        for (int64_t i = 0; i < n; i += 16) {
            f32x16 x = load16(s + i);
            if (scale.cap != 0) x = splat(scale.cap) * tanh(x * splat(scale.scale) / splat(scale.cap));
            if (masked) {
                i32x16 at = iota() + splat_i32(int32_t(c.first_token + i));
                x = select((at < splat_i32(int32_t(hi))) & (at >= splat_i32(int32_t(lo))), x, low);
            }
            if (masked || scale.cap != 0) store16(s + i, x);
            top = maximum(x, top);
        }
        float peak = reduce_max(top), now = m > peak ? m : peak, base = finite(now);
        float alpha[16];
        store16(alpha, scale.term(splat(m), base));
        f32x16 sum = l * splat(alpha[0]);
        auto* out = reinterpret_cast<typename Panel<C>::type*>(p);
        for (int64_t i = 0; i < n; i += 16) {
            f32x16 e = scale.term(load16(s + i), base);
            sum = sum + e;
            store16(out + i, e);
        }
        m = now, l = sum;
        return alpha[0];
    }

    template <int R>
    static __attribute__((noinline)) void tile_chunk(const L* q, const Chunk& c, const Scale& scale, const Mask& mask,
                                                     int64_t row, int64_t live, float* m, f32x16* l, float (*o)[D]) {
        alignas(64) float s[R][CHUNK * PAGE];
        alignas(64) L p[R * P_LDA];
        float alpha[R];
        for (int v0 = 0; v0 < 2; v0 += VECS) scores<R, VECS>(q, c, v0, s);
        for (int i = 0; i < R; i++) {
            int64_t at = i < live ? i : live - 1;                      // rows past the last repeat it
            int64_t pos = mask.first_pos + (mask.first_row + row + at) / mask.group;
            int64_t lo = mask.window > 0 && pos - mask.window + 1 > 0 ? pos - mask.window + 1 : 0;
            bool masked = pos + 1 < c.first_token + c.pages * PAGE || lo > c.first_token;
            alpha[i] = soften(s[i], p + i * P_LDA, c, scale, masked, lo, pos + 1, m[i], l[i]);
        }
        constexpr int VECTORS = D / 16;
        for (int v0 = 0; v0 + VECS <= VECTORS; v0 += VECS) values<R, VECS>(p, c, v0, alpha, o);
        if constexpr (VECTORS % VECS != 0) values<R, 1>(p, c, VECTORS - 1, alpha, o);
    }

    using TileChunk = void (*)(const L*, const Chunk&, const Scale&, const Mask&, int64_t, int64_t, float*, f32x16*, float (*)[D]);
    static INFC_INLINE TileChunk pick(int64_t rows, int& height) {     // few heights: each is code to compile
        auto at = [&](auto h) -> TileChunk { height = h.value; return &tile_chunk<h.value>; };
        if (rows == 1) return at(std::integral_constant<int, 1>());
        if constexpr (ROWS >= 2) { if (rows == 2 || ROWS == 2) return at(std::integral_constant<int, 2>()); }
        if constexpr (ROWS >= 3) { if (rows == 3) return at(std::integral_constant<int, 3>()); }
        if constexpr (ROWS >= 4) { if (rows == 4) return at(std::integral_constant<int, 4>()); }
        if constexpr (ROWS > 6) { if (rows <= 6) return at(std::integral_constant<int, 6>()); }
        if constexpr (ROWS > 8) { if (rows <= 8) return at(std::integral_constant<int, 8>()); }
        return at(std::integral_constant<int, ROWS>());
    }

    // pages [from, to) of the item into st; panel holds its query rows
    static void run(const Item& item, int64_t from, int64_t to, const L* panel, const int32_t* table, const char* k_cache,
                    const char* v_cache, int64_t kv_heads, int64_t group, int64_t window, const Scale& scale, Softmax<D>& st) {
        for (int64_t i = 0; i < BLOCK_ROWS; i++) {
            st.m[i] = -__builtin_inff(), st.l[i] = splat(0.0f);
            for (int64_t d = 0; d < D; d += 16) store16(&st.o[i][d], splat(0.0f));
            if (i + 1 == item.rows + ROWS) break;        // rows that only fill a tile are also kept finite
        }
        auto page_at = [&](const char* cache, int64_t p) {
            return cache + (int64_t(table[item.page + p]) * kv_heads + item.head) * PAGE_BYTES;
        };
        const int64_t last_pos = item.first_pos + (item.row + item.rows - 1) / group;
        for (int64_t p = from; p < to; p += CHUNK) {
            Chunk c;
            c.pages = to - p < CHUNK ? to - p : CHUNK;
            c.first_token = (item.page + p) * PAGE;
            c.tokens = last_pos + 1 - c.first_token < c.pages * PAGE ? last_pos + 1 - c.first_token : c.pages * PAGE;
            for (int64_t j = 0; j < c.pages; j++) {
                c.k[j] = page_at(k_cache, p + j), c.v[j] = page_at(v_cache, p + j);
                c.next[j] = page_at(k_cache, p + CHUNK + j < to ? p + CHUNK + j : p + j);
            }
            Mask mask{item.row, group, item.first_pos, window};
            for (int64_t row = 0; row < item.rows;) {
                int height;
                TileChunk f = pick(item.rows - row, height);
                int64_t live = item.rows - row < height ? item.rows - row : height;
                f(panel + row * Q_LDA, c, scale, mask, row, live, st.m + row, st.l + row, st.o + row);
                row += live;
            }
        }
    }
};

// Items in order: sequence, kv head, block of rows. f(item, cost); cost 0 means that its rows see nothing.
template <class F>
INFC_INLINE void each_item(int64_t sequences, int64_t kv_heads, int64_t group, int64_t window, int64_t height, const int32_t* query_start,
                           const int32_t* context_len, F f) {
    for (int64_t n = 0; n < sequences; n++) {
        int64_t tokens = query_start[n + 1] - query_start[n], first_pos = context_len[n] - tokens;
        for (int64_t head = 0; head < kv_heads; head++)
            for (int64_t row = 0; row < tokens * group; row += BLOCK_ROWS) {
                int64_t rows = tokens * group - row < BLOCK_ROWS ? tokens * group - row : BLOCK_ROWS;
                int64_t last = first_pos + (row + rows - 1) / group, first = first_pos + row / group;
                int64_t lo = window > 0 && first - window + 1 > 0 ? (first - window + 1) / PAGE : 0;
                int64_t pages = last < 0 ? 0 : last / PAGE + 1 - lo;
                f(Item{query_start[n], head, row, rows, first_pos, lo, pages, n}, pages * ((rows + height - 1) / height));
            }
    }
}

// q [tokens, kv_heads * group, D] -> y [tokens, kv_heads * group * D]; see the operator for the meaning of the rest
template <class Q, class C, class Y, int D>
void paged_attention(const infc_run* r, int64_t tokens, int64_t sequences, int64_t table_width, int64_t kv_heads, int64_t group,
                     float scale, int64_t window, float softcap, const void* q, const void* k_cache, const void* v_cache,
                     const void* query_start, const void* context_len, const void* block_table, void* y) {
    using At = Attention<C, D>;
    static_assert(D % 16 == 0, "a head is whole vectors");
    static_assert(3 * sizeof(Softmax<D>) + (BLOCK_ROWS + At::ROWS) * At::Q_LDA * sizeof(typename At::L) <= SCRATCH_BYTES, "too wide");
    const auto* starts = static_cast<const int32_t*>(query_start);
    const auto* lens = static_cast<const int32_t*>(context_len);
    const typename At::Scale factors{scale, softcap};
    const int64_t q_heads = kv_heads * group;
    // this thread's scratch: the part of an item begun before it, the part it leaves unfinished, an item all its own
    auto* mine = static_cast<Softmax<D>*>(r->scratch);
    auto* panel = reinterpret_cast<typename At::L*>(mine + 3);
    auto place = [&](const Item& it, int64_t i) {        // of row i: element offset in q and y
        int64_t row = it.row + i;
        return ((it.token + row / group) * q_heads + it.head * group + row % group) * D;
    };
    auto finish = [&](const Item& it, const Softmax<D>& st) {
        for (int64_t i = 0; i < it.rows; i++) {
            float sum = reduce_add(st.l[i]);
            f32x16 by = splat(sum == 0 ? 1.0f : sum);    // a row that sees nothing stays 0
            for (int64_t d = 0; d < D; d += 16) store16(static_cast<Y*>(y) + place(it, i) + d, load16(&st.o[i][d]) / by);
        }
    };
    auto clear = [&](int64_t from, int64_t to) {
        for (int64_t i = from * q_heads * D; i < to * q_heads * D; i += 16) store16(static_cast<Y*>(y) + i, splat(0.0f));
    };
    int64_t total = 0;
    each_item(sequences, kv_heads, group, window, At::ROWS, starts, lens, [&](const Item&, int64_t cost) { total += cost; });
    if (r->thread == 0) {                                // rows of no sequence
        int64_t owned = sequences ? starts[sequences] : 0;
        clear(0, sequences && starts[0] < tokens ? starts[0] : 0);
        if (owned < tokens) clear(owned, tokens);
    }
    Item open{};                                         // begun here, finished by others
    int64_t open_at = 0, open_cost = 0, at = 0;
    auto cut = [&](int64_t thread, const Item& it, int64_t start, int64_t cost) {      // pages of it before thread's share
        int64_t bound = total * thread / r->threads - start;
        return bound <= 0 ? 0 : bound >= cost ? it.pages : bound / (cost / it.pages);
    };
    each_item(sequences, kv_heads, group, window, At::ROWS, starts, lens, [&](const Item& it, int64_t cost) {
        int64_t start = at;
        at += cost;
        if (cost == 0) {
            if (r->thread == 0)
                for (int64_t i = 0; i < it.rows; i++)
                    for (int64_t d = 0; d < D; d += 16) store16(static_cast<Y*>(y) + place(it, i) + d, splat(0.0f));
            return;
        }
        int64_t from = cut(r->thread, it, start, cost), to = cut(r->thread + 1, it, start, cost);
        if (from >= to) return;
        Softmax<D>& st = mine[from > 0 ? 0 : to < it.pages ? 1 : 2];
        for (int64_t i = 0; i < it.rows; i++)
            pack_row<C>(panel + i * At::Q_LDA, static_cast<const Q*>(q) + place(it, i), D, D);
        for (int64_t i = it.rows; i % At::ROWS && i < BLOCK_ROWS + At::ROWS; i++)
            pack_row<C>(panel + i * At::Q_LDA, static_cast<const Q*>(q) + place(it, it.rows - 1), D, D);
        At::run(it, from, to, panel, static_cast<const int32_t*>(block_table) + it.sequence * table_width,
                static_cast<const char*>(k_cache), static_cast<const char*>(v_cache), kv_heads, group, window, factors, st);
        if (from == 0 && to == it.pages) finish(it, st);
        else if (from == 0) open = it, open_at = start, open_cost = cost;
    });
    if (r->threads == 1) return;
    sync(r);
    if (!open_cost) return;
    Softmax<D>& st = mine[1];
    for (int64_t t = r->thread + 1; t < r->threads; t++) {
        int64_t from = cut(t, open, open_at, open_cost), to = cut(t + 1, open, open_at, open_cost);
        if (from >= to) continue;
        const auto& part = *reinterpret_cast<const Softmax<D>*>(scratch_of(r, t));
        for (int64_t i = 0; i < open.rows; i++) {
            float now = st.m[i] > part.m[i] ? st.m[i] : part.m[i], base = At::finite(now);
            f32x16 a = factors.term(splat(st.m[i]), base), b = factors.term(splat(part.m[i]), base);
            st.m[i] = now, st.l[i] = st.l[i] * a + part.l[i] * b;
            for (int64_t d = 0; d < D; d += 16) store16(&st.o[i][d], load16(&st.o[i][d]) * a + load16(&part.o[i][d]) * b);
        }
    }
    finish(open, st);
}

}  // namespace infc
