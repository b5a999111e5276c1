// Paged attention, prefill and decode in one: blocks of query rows against pages of 32 tokens, online softmax in fp32.
//
// A row is one query token of one query head; all rows of a kv head's group and of a stretch of tokens share each page they
// read. The work (pages x tiles of rows) is one line, cut evenly among the threads: a cut may fall inside an item, whose
// parts are then combined, in order, by the thread that began it. So one long decode, many short ones and a prefill are all
// balanced, without a lock.
//
// A cache of codes has a scale a token: K's meets the scores, V's the probabilities, so the products are of codes alone.
// A sink is a score without a key: the sum of a row begins with it, in the part of the item that holds its first page.
#pragma once
#include <type_traits>
#include "attention_amx.h"
#include "kv_wide.h"
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

// How K lies, where it is not as V; and as what many rows read the cache.
template <class C> struct Sides { using KeyCodes = C; using Many = C; };
template <> struct Sides<code8> { using KeyCodes = biased8; using Many = code8; };
#if INFC_WIDEN
template <> struct Sides<digits8> { using KeyCodes = biased8; using Many = wide8; };
#else
template <> struct Sides<digits8> { using KeyCodes = biased8; using Many = digits8; };
#endif
constexpr int64_t MANY_ROWS = 24;                        // no gain yet with 18 rows (D = 64, 30 to 2,000 tokens)

// C: the type of the cache. IN_TILES: products by AMX, sixteen rows at a time.
template <class C, int D, bool IN_TILES = false> struct Attention {
    static constexpr int DIM = D;
    static constexpr bool TILES = IN_TILES;
    using L = typename Dot<C>::Lhs;
    static constexpr int K = Dot<C>::K, A = Dot<C>::A;
    static constexpr bool WIDE = INFC_WIDEN && std::is_same<C, wide8>::value;
    static constexpr bool CODED = std::is_same<C, code8>::value || std::is_same<C, digits8>::value || WIDE;
    static constexpr bool DIGITS = INFC_DIGITS && std::is_same<C, digits8>::value;
    static constexpr int Q_LDA = D / K * A, P_LDA = int(CHUNK * PAGE) / K * A, VECS = Shape<C>::VECS;
    static constexpr int ROWS = IN_TILES ? 16 : Shape<C>::ROWS > 12 ? 12 : Shape<C>::ROWS;
    static constexpr bool FINE = sizeof(C) == 4 || std::is_same<C, code8>::value;      // else probabilities are rounded to bf16
    static constexpr int64_t PAGE_BYTES = PAGE * D * sizeof(C);
    using Pages = Widened<D, int(CHUNK)>;

    // one call: the pages of a chunk, and how many of their tokens any row of the block may see
    struct Chunk {
        const char *k[CHUNK], *v[CHUNK], *next[CHUNK];
        const float* k_scale[CHUNK];                     // of codes
        alignas(64) float v_scale[CHUNK * PAGE];         // 0 for the tokens behind the last: theirs may be NaN
        float odd;                                       // 0, or NaN where one of v_scale is not finite
        int64_t pages, tokens, first_token;
    };
    struct Mask { int64_t first_row, group, first_pos, window; };      // row -> the span of positions it sees
    struct Scale {
        float scale, cap;                                // cap 0: none

        // exp(scale * (x - m)): exactly 1 where x is the maximum
        INFC_INLINE f32x16 term(f32x16 x, f32x16 m) const {
            const float by = cap != 0 ? 1.0f : scale;
            if (FINE) return exp((x - m) * splat(by));
            const f32x16 power = splat(by * LOG2E);
            return exp2_coarse(fma(x, power, -m * power));
        }
        INFC_INLINE f32x16 capped(f32x16 x) const { return cap == 0 ? x : splat(cap) * tanh(x * splat(scale) / splat(cap)); }
    };
    static INFC_INLINE f32x16 scaled(f32x16 x) {
#if INFC_WIDEN
        if (WIDE) return x * splat(WIDENED);
#endif
        return x;
    }
    static INFC_INLINE f32x16 finite(f32x16 m) {                       // of a row that has seen nothing: its terms are 0
        return select(m == splat(-__builtin_inff()), splat(0.0f), m);
    }

    // In fp32 a score is the sum of short chains: its error is that of an exponential.
    static constexpr int FIRST = FINE && !DIGITS && D > 16 ? 16 : D;
    template <int R, int V> static INFC_INLINE void chains(const L* q, const char* k, f32x16 (*sum)[V]) {
        for (int d = FIRST; d < D; d += FIRST) {
            Tile<typename Sides<C>::KeyCodes, R, V, Q_LDA> tile;
            tile.zero();
            tile.steps(q + d / K * A, k + d / K * 128, 128, (D - d < FIRST ? D - d : FIRST) / K, k);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) sum[r][v] = d > FIRST ? sum[r][v] + tile.total(r, v) : tile.total(r, v);
        }
    }

    // q @ K.T of a chunk, and each row's largest scores
    template <int R, int V>
    static INFC_INLINE void scores(const L* q, const QueryRow* rows, const Chunk& c, int v0, float (*s)[CHUNK * PAGE], f32x16* top) {
        for (int64_t j = 0; j < c.pages; j++) {
#if INFC_DIGITS
            typename std::conditional<DIGITS, DigitTile<true, R, V, Q_LDA>, Tile<typename Sides<C>::KeyCodes, R, V, Q_LDA>>::type tile;
#else
            Tile<typename Sides<C>::KeyCodes, R, V, Q_LDA> tile;
#endif
            tile.zero();
            tile.steps(q, c.k[j] + v0 * 64, 128, FIRST / K, c.v[j] + v0 * 64);
            f32x16 rest[R][V];
            if constexpr (FIRST < D) chains<R, V>(q, c.k[j] + v0 * 64, rest);
            f32x16 by[V];                                // read once: stores of scores might change it, for all the compiler knows
            for (int v = 0; v < V; v++) by[v] = CODED ? scaled(load16(c.k_scale[j] + (v0 + v) * 16)) : splat(1.0f);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) {
                    f32x16 x;
                    if constexpr (DIGITS) x = tile.total(r, v, rows[r].unbias) * splat(rows[r].scale);
                    else x = tile.total(r, v);
                    if constexpr (FIRST < D) x = x + rest[r][v];
                    if (CODED) x = x * by[v];
                    store16(&s[r][j * PAGE + (v0 + v) * 16], x);
                    top[r] = maximum(x, top[r]);
                }
        }
    }

    // soft-cap, then what the row may not see becomes -inf; its largest score anew
    static INFC_INLINE void limit(float* s, const Chunk& c, const Scale& scale, int64_t lo, int64_t hi, f32x16& top) {
        top = splat(-__builtin_inff());
        for (int64_t i = 0; i < c.pages * PAGE; i += 16) {
            i32x16 at = iota() + splat_i32(int32_t(c.first_token + i));
            auto seen = (at < splat_i32(int32_t(hi))) & (at >= splat_i32(int32_t(lo)));
            f32x16 x = select(seen, scale.capped(load16(s + i)), splat(-__builtin_inff()));
            store16(s + i, x);
            top = maximum(x, top);
        }
    }

    // In fp32 sixteen tokens are a chain of their own, as scores are of sixteen products.
    template <int R, int V> static INFC_INLINE void values(const L* p, const Chunk& c, int v0, const float* alpha, float (*o)[D]) {
        constexpr int64_t CHAIN = FINE ? 16 : CHUNK * PAGE;
        Tile<C, R, V, P_LDA> tile;
        for (int64_t j = 0, done = 0; j < c.pages; j++) {
            const int64_t tokens = c.tokens - j * PAGE < PAGE ? c.tokens - j * PAGE : PAGE;
            for (int64_t t = 0; t < tokens; t += CHAIN, done++) {
                const int64_t n = tokens - t < CHAIN ? tokens - t : CHAIN;
                if (FINE || j == 0) tile.zero();
                const L* a = p + (j * PAGE + t) / K * A;
                const char* v = c.v[j] + v0 * 64 + t / K * D * 4;
                tile.steps(a, v, D * 4, CODED ? (n + K - 1) / K : n / K, c.next[j] + v0 * 64 + t / K * D * 4);
                if (!CODED && n % K) {                   // the token beside the last one is not ours: it may hold a NaN
                    alignas(64) char last[64 * V];
                    for (int i = 0; i < V; i++) store(last + i * 64, load<u32x16>(v + n / K * D * 4 + i * 64) & splat_u32(0xffff));
                    tile.step(0, a + n / K * A, last, last);
                }
                if (!FINE && j + 1 < c.pages) continue;
#pragma GCC unroll 16
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int i = 0; i < V; i++) {
                        float* at = o[r] + (v0 + i) * 16;
                        store16(at, fma(load16(at), splat(FINE && done ? 1.0f : alpha[r]), scaled(tile.total(r, i))));
                    }
            }
        }
    }

#if INFC_DIGITS
    template <int R, int V>
    static INFC_INLINE void digit_values(const L* p, const float* unit, const Chunk& c, int v0, const float* alpha, float (*o)[D]) {
        DigitTile<false, R, V, P_LDA> tile;
        tile.zero();
        for (int64_t j = 0; j < c.pages; j++) {
            int64_t n = c.tokens - j * PAGE < PAGE ? c.tokens - j * PAGE : PAGE;
            tile.steps(p + j * PAGE / K, c.v[j] + v0 * 64, D * K, (n + K - 1) / K, c.next[j] + v0 * 64);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                float* at = o[r] + (v0 + v) * 16;
                store16(at, fma(load16(at), splat(alpha[r]), tile.total(r, v) * splat(unit[r])));
            }
    }

#endif

    template <int R>
    static __attribute__((noinline)) void tile_chunk(const L* q, const QueryRow* rows, const Chunk& c, const Scale& scale, const Mask& mask,
                                                     int64_t row, int64_t live, float* m, f32x16* l, float (*o)[D]) {
        alignas(64) float s[R][CHUNK * PAGE];
        alignas(64) L p[R * P_LDA];
        alignas(64) float peak[16], base[16], alpha[16];               // of all rows at once
        f32x16 top[R];
        for (int i = 0; i < R; i++) top[i] = splat(-__builtin_inff());
        if constexpr (IN_TILES) TilesOf<Attention>::scores(q, c, s, top);
        else for (int v0 = 0; v0 < 2; v0 += VECS) scores<R, VECS>(q, rows, c, v0, s, top);
        for (int i = 0; i < R; i++) {
            int64_t at = i < live ? i : live - 1;                      // rows past the last repeat it
            int64_t pos = mask.first_pos + (mask.first_row + row + at) / mask.group;
            int64_t lo = mask.window > 0 && pos - mask.window + 1 > 0 ? pos - mask.window + 1 : 0;
            if (pos + 1 < c.first_token + c.pages * PAGE || lo > c.first_token || scale.cap != 0)
                limit(s[i], c, scale, lo, pos + 1, top[i]);
            peak[i] = reduce_max(top[i]);
        }
        for (int i = R; i < 16; i++) peak[i] = 0;
        f32x16 old = load_some(m, R), now = maximum(old, load16(peak)), from = finite(now);
        store_some(m, now, R);
        store16(base, from);
        store16(alpha, scale.term(old, from));
        float unit[R];                                   // of digits
        auto* out = reinterpret_cast<typename Panel<C>::type*>(p);
        for (int i = 0; i < R; i++) {
            f32x16 sum = l[i] * splat(alpha[i]), zero = splat(base[i]), largest = splat(0.0f);
#pragma GCC unroll 4
            for (int64_t k = 0; k < c.pages * PAGE; k += 16) {
                f32x16 e = scale.term(load16(s[i] + k), zero);
                sum = sum + e;
                if (CODED) e = e * load16(c.v_scale + k);
                if constexpr (DIGITS) store16(s[i] + k, e), largest = maximum(e, largest);
                else store16(out + i * CHUNK * PAGE + k, e);
            }
            l[i] = sum;
#if INFC_DIGITS
            if constexpr (DIGITS) {
                const float top = reduce_max(largest);
                for (int64_t k = c.pages * PAGE; k < CHUNK * PAGE; k += 16) store16(s[i] + k, splat(0.0f));
                pack_unsigned<int(CHUNK * PAGE)>(p + i * P_LDA, s[i], top);
                unit[i] = top * (1 / 65280.0f) + c.odd;
            }
#endif
        }
        if constexpr (IN_TILES) return TilesOf<Attention>::values(p, c, alpha, o);
        constexpr int VECTORS = D / 16;
#if INFC_DIGITS
        if constexpr (DIGITS) {
            for (int v0 = 0; v0 + VECS <= VECTORS; v0 += VECS) digit_values<R, VECS>(p, unit, c, v0, alpha, o);
            if constexpr (VECTORS % VECS != 0) digit_values<R, 1>(p, unit, c, VECTORS - 1, alpha, o);
            return;
        } else
#endif
        {
            for (int v0 = 0; v0 + VECS <= VECTORS; v0 += VECS) values<R, VECS>(p, c, v0, alpha, o);
            if constexpr (VECTORS % VECS != 0) values<R, 1>(p, c, VECTORS - 1, alpha, o);
        }
        (void)unit;
    }

    // n rows of queries as the products read them
    template <class Q> static INFC_INLINE void pack(L* to, QueryRow* row, const Q* from) {
#if INFC_DIGITS
        if constexpr (DIGITS) { *row = pack_signed<D>(to, from); return; } else
#endif
        { (void)row; pack_row<C>(to, from, D, D); }
    }

    using TileChunk = void (*)(const L*, const QueryRow*, const Chunk&, const Scale&, const Mask&, int64_t, int64_t, float*, f32x16*,
                               float (*)[D]);
    static INFC_INLINE TileChunk pick(int64_t rows, int& height) {     // few heights: each is code to compile
        auto at = [&](auto h) -> TileChunk { height = h.value; return &tile_chunk<h.value>; };
        if constexpr (IN_TILES) return at(std::integral_constant<int, ROWS>());
        if (rows == 1) return at(std::integral_constant<int, 1>());
        if constexpr (ROWS >= 2) { if (rows == 2 || ROWS == 2) return at(std::integral_constant<int, 2>()); }
        if constexpr (ROWS >= 3) { if (rows == 3) return at(std::integral_constant<int, 3>()); }
        if constexpr (ROWS >= 4) { if (rows == 4) return at(std::integral_constant<int, 4>()); }
        if constexpr (ROWS > 6) { if (rows <= 6) return at(std::integral_constant<int, 6>()); }
        if constexpr (ROWS > 8) { if (rows <= 8) return at(std::integral_constant<int, 8>()); }
        return at(std::integral_constant<int, ROWS>());
    }

    struct Cache {
        const char *k, *v;
        const float *k_scale, *v_scale;
        const int32_t* table;
        int64_t width;
        Blocks blocks;
        INFC_INLINE int64_t block(const Item& item, int64_t p) const { return table[item.sequence * width + item.page + p]; }
        INFC_INLINE int64_t number(const Item& item, int64_t p) const { return block(item, p) * blocks.heads + item.head; }
        INFC_INLINE const char* page(const char* cache, const Item& item, int64_t p) const {
            return blocks.at(cache, block(item, p), item.head, PAGE_BYTES);
        }
        INFC_INLINE const float* scales_of(const float* scales, const Item& item, int64_t p) const {
            return blocks.at(scales, block(item, p), item.head, PAGE * sizeof(float));
        }
        INFC_INLINE void scales(Chunk& c, const Item& item, int64_t p, int64_t to) const {      // of the chunk that begins at page p
            f32x16 odd = splat(0.0f);
            for (int64_t j = 0; j < c.pages; j++) {
                const float* of_v = scales_of(v_scale, item, p + j);
                c.k_scale[j] = scales_of(k_scale, item, p + j);
                for (int64_t i = 0; i < PAGE; i += 16) {
                    auto there = iota() + splat_i32(int32_t(j * PAGE + i)) < splat_i32(int32_t(c.tokens));
                    f32x16 x = select(there, load16(of_v + i), splat(0.0f));
                    store16(c.v_scale + j * PAGE + i, x);
                    odd = odd + (x - x);
                }
                if (p + CHUNK + j >= to) continue;
                const float *next_k = scales_of(k_scale, item, p + CHUNK + j), *next_v = scales_of(v_scale, item, p + CHUNK + j);
                for (int64_t i = 0; i < PAGE; i += 16) __builtin_prefetch(next_k + i, 0, 2), __builtin_prefetch(next_v + i, 0, 2);
            }
            c.odd = reduce_add(odd);
        }
    };

    // each row as it is once its sink is seen: the largest score, its term 1, and no value
    template <class S> static void sink(const Item& item, int64_t group, const Scale& scale, const S* sinks, Softmax<D>& st) {
        for (int64_t i = 0; i < item.rows; i++) {
            st.m[i] = to_f32(sinks[item.head * group + (item.row + i) % group]) / (scale.cap != 0 ? 1.0f : scale.scale);
            st.l[i] = select(iota() == splat_i32(0), splat(1.0f), splat(0.0f));
        }
    }

    // pages [from, to) of the item into st; panel holds its query rows. While the last chunk meets its values, the first
    // keys of `after` (the next item of this thread, from its page `after_from`) are fetched. S: of the sinks, void where there are none.
    template <class S>
    static void run(const Item& item, int64_t from, int64_t to, const Item& after, int64_t after_from, const L* panel, const QueryRow* rows,
                    const Cache& cache, int64_t group, int64_t window, const Scale& scale, const S* sinks, Pages& wide, Softmax<D>& st) {
        for (int64_t i = 0; i < BLOCK_ROWS; i++) {
            st.m[i] = -__builtin_inff(), st.l[i] = splat(0.0f);
            for (int64_t d = 0; d < D; d += 16) store16(&st.o[i][d], splat(0.0f));
            if (i + 1 == item.rows + ROWS) break;        // rows that only fill a tile are also kept finite
        }
        if constexpr (!std::is_void<S>::value) { if (from == 0) sink(item, group, scale, sinks, st); }
        const int64_t last_pos = item.first_pos + (item.row + item.rows - 1) / group;
        for (int64_t p = from; p < to; p += CHUNK) {
            Chunk c;
            c.pages = to - p < CHUNK ? to - p : CHUNK;
            c.first_token = (item.page + p) * PAGE;
            c.tokens = last_pos + 1 - c.first_token < c.pages * PAGE ? last_pos + 1 - c.first_token : c.pages * PAGE;
            for (int64_t j = 0; j < c.pages; j++) {
                c.k[j] = cache.page(cache.k, item, p + j), c.v[j] = cache.page(cache.v, item, p + j);
                c.next[j] = p + CHUNK + j < to ? cache.page(cache.k, item, p + CHUNK + j)
                            : p + CHUNK < to || after_from + j >= after.pages ? c.k[j] : cache.page(cache.k, after, after_from + j);
            }
            if constexpr (CODED) cache.scales(c, item, p, to);
#if INFC_WIDEN
            for (int64_t j = 0; WIDE && j < c.pages; j++) {
                const int64_t later = p + CHUNK + j < to ? p + CHUNK + j : p + j;
                const auto& page = wide.page(item.page + p + j, cache.number(item, p + j), c.k[j], c.v[j], cache.page(cache.k, item, later),
                                             cache.page(cache.v, item, later));
                c.k[j] = c.next[j] = page.k, c.v[j] = page.v;
            }
#endif
            Mask mask{item.row, group, item.first_pos, window};
            for (int64_t row = 0; row < item.rows;) {
                int height;
                TileChunk f = pick(item.rows - row, height);
                int64_t live = item.rows - row < height ? item.rows - row : height;
                f(panel + row * Q_LDA, rows + row, c, scale, mask, row, live, st.m + row, st.l + row, st.o + row);
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

// q [tokens, kv_heads * group, D] -> y [tokens, kv_heads * group * D]; see the operator for the meaning of the rest. Scales: of codes.
template <class Q, class C, class Y, int D, class S = void>
void paged_attention(const infc_run* r, int64_t tokens, int64_t sequences, int64_t table_width, int64_t kv_heads, int64_t group,
                     float scale, int64_t window, float softcap, const void* q, const void* k_cache, const void* v_cache,
                     const void* query_start, const void* context_len, const void* block_table, void* y,
                     const void* k_scale = nullptr, const void* v_scale = nullptr, const void* sinks = nullptr) {
    using At = Attention<C, D>;
    using ManyCodes = typename Sides<C>::Many;
    constexpr bool IN_TILES = HEAD_IN_TILES<D> && std::is_base_of<Dot<bf16>, Dot<ManyCodes>>::value;
    using Many = Attention<ManyCodes, D, IN_TILES>;
    constexpr int64_t PANEL_ROWS = BLOCK_ROWS + (At::ROWS > Many::ROWS ? At::ROWS : Many::ROWS);
    constexpr int64_t ROW = At::Q_LDA * sizeof(typename At::L) > Many::Q_LDA * sizeof(typename Many::L)
                                ? At::Q_LDA * sizeof(typename At::L) : Many::Q_LDA * sizeof(typename Many::L);
    static_assert(D % 16 == 0, "a head is whole vectors");
    static_assert(3 * sizeof(Softmax<D>) + PANEL_ROWS * (ROW + sizeof(QueryRow)) + 64 + sizeof(typename Many::Pages) <= SCRATCH_BYTES,
                  "too wide");
    const auto* starts = static_cast<const int32_t*>(query_start);
    const auto* lens = static_cast<const int32_t*>(context_len);
    const typename At::Scale factors{scale, softcap};
    const int64_t q_heads = kv_heads * group;
    // this thread's scratch: the part of an item begun before it, the part it leaves unfinished, an item all its own
    auto* mine = static_cast<Softmax<D>*>(r->scratch);
    auto* panel = reinterpret_cast<char*>(mine + 3);
    auto* rows = reinterpret_cast<QueryRow*>(panel + PANEL_ROWS * ROW);
    const auto behind = (reinterpret_cast<uintptr_t>(rows + PANEL_ROWS) + 63) & ~uintptr_t(63);
    auto& wide = *reinterpret_cast<typename Many::Pages*>(behind);
    bool fresh = true;                                   // nothing in it is of this call
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
    struct Part { Item item; int64_t from, to; } waiting{};            // one behind, so that what follows is known
    auto attend = [&](const Part& part, const Part& after) {
        const Item& it = part.item;
        if (part.from >= part.to) return;
        Softmax<D>& st = mine[part.from > 0 ? 0 : part.to < it.pages ? 1 : 2];
        auto run = [&](auto how) {
            using As = decltype(how);
            const typename TilesOf<As>::Held tiles;
            (void)tiles;
            auto* x = reinterpret_cast<typename As::L*>(panel);
            const auto* from = static_cast<const Q*>(q);
            for (int64_t i = 0; i < it.rows; i++) As::pack(x + i * As::Q_LDA, rows + i, from + place(it, i));
            for (int64_t i = it.rows; i % As::ROWS; i++) As::pack(x + i * As::Q_LDA, rows + i, from + place(it, it.rows - 1));
            const typename As::Cache cache{static_cast<const char*>(k_cache), static_cast<const char*>(v_cache),
                                           static_cast<const float*>(k_scale), static_cast<const float*>(v_scale),
                                           static_cast<const int32_t*>(block_table), table_width, {kv_heads, r->kv_run}};
            if (As::WIDE && fresh) wide.forget(), fresh = false;
            As::run(it, part.from, part.to, after.item, after.from, x, rows, cache, group, window, typename As::Scale{scale, softcap},
                    static_cast<const S*>(sinks), wide, st);
        };
        if (it.rows >= MANY_ROWS) run(Many());
        else run(At());
        if (part.from == 0 && part.to == it.pages) finish(it, st);
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
        Part part{it, cut(r->thread, it, start, cost), cut(r->thread + 1, it, start, cost)};
        if (part.from >= part.to) return;
        attend(waiting, part);
        waiting = part;
        if (part.from == 0 && part.to < it.pages) open = it, open_at = start, open_cost = cost;
    });
    attend(waiting, Part{});
    if (r->threads == 1) return;
    sync(r);
    if (!open_cost) return;
    Softmax<D>& st = mine[1];
    for (int64_t t = r->thread + 1; t < r->threads; t++) {
        int64_t from = cut(t, open, open_at, open_cost), to = cut(t + 1, open, open_at, open_cost);
        if (from >= to) continue;
        const auto& part = *reinterpret_cast<const Softmax<D>*>(scratch_of(r, t));
        for (int64_t i = 0; i < open.rows; i++) {
            float now = st.m[i] > part.m[i] ? st.m[i] : part.m[i];
            f32x16 base = At::finite(splat(now)), a = factors.term(splat(st.m[i]), base), b = factors.term(splat(part.m[i]), base);
            st.m[i] = now, st.l[i] = st.l[i] * a + part.l[i] * b;
            for (int64_t d = 0; d < D; d += 16) store16(&st.o[i][d], load16(&st.o[i][d]) * a + load16(&part.o[i][d]) * b);
        }
    }
    finish(open, st);
}

}  // namespace infc
