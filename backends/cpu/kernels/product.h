// x @ w.T, tile by tile: weights stream once, in order, whatever the number of rows.
//
// w is packed in panels of 32 columns ([N/32][K or K/2][2 vectors of 64 bytes]); each thread owns a contiguous range of
// panels and reads it from front to back. All rows of x (a tile at once) meet a panel while it passes; with more rows the
// panel is met again from L2.
#pragma once
#include <utility>
#include "pool.h"
#include "tile.h"

namespace infc {

constexpr int COLS = 32;

// x in panels, [chunk of k][row][LDA]. The sums of a chunk are closed and added up: short rounding chains. With chunks of 64
// (fp32) and 144 (bf16) the error is 0.6x and 0.9x that of torch's own product (K = 576 and 1536, 1 to 513 rows); with 192
// it would be 1.0x, and about 1 % faster.
template <class T> struct Lhs {
#if INFC_FMA
    static constexpr int64_t CHUNK_K = sizeof(T) == 4 ? 64 : 144;
#else
    static constexpr int64_t CHUNK_K = sizeof(T) == 4 ? 16 : 128;      // a product of two fp32 is rounded too
#endif
    static constexpr int LDA = int(CHUNK_K) / Dot<T>::K * Dot<T>::A;
    static int64_t steps(int64_t k) { return (k + Dot<T>::K - 1) / Dot<T>::K; }
    static int64_t row_elements(int64_t k) { return (k + CHUNK_K - 1) / CHUNK_K * LDA; }
};

template <int LEVEL, class T> INFC_INLINE void fetch(const T* from, int64_t n) {        // 3: into L1, 2: into L2
    for (int64_t at = 0; at < n * int64_t(sizeof(T)); at += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + at, 0, LEVEL);
}

// What the end of a tile reads and writes (null: nothing): its first row, and the bytes between rows. It is fetched into L1
// two chunks before the end. A store that waits for its line holds back loads with the same low twelve address bits: SmolLM2's
// QKV product with 512 rows gains 5 % of it on Zen 4 (417 to 441 GFLOP/s with chunks of 288); nothing when the lines are fetched
// before the first chunk.
struct End {
    const char *read = nullptr, *written = nullptr;
    int64_t stride = 0, bytes = 0;

    INFC_INLINE void fetch_rows(int64_t rows) const {
        if (!written) return;
        for (int64_t at = 0; at < rows * stride; at += stride) {
            fetch<3>(written + at, bytes);
            if (read) fetch<3>(read + at, bytes);
        }
    }
};

// What a tile fetches into L2 while it works: `line` bytes from `at` on for each 128 bytes of weights that it reads.
struct Ahead {
    const char* at;
    int64_t line;
    INFC_INLINE int64_t share(int64_t n) const { return (n * line + 127) / 128; }
};

// What else a tile does, a piece after every `steps` steps: here nothing.
struct Nothing {
    static constexpr int64_t steps = INT64_MAX;
    INFC_INLINE void piece() {}
};

// R rows x one panel -> out[R][32]
template <class T, int R, class Beside>
__attribute__((noinline)) void panel_product(const typename Dot<T>::Lhs* x, const char* w, int64_t k, Ahead ahead, const End& end,
                                             Beside& beside, float* out) {
    constexpr int V = Shape<T>::VECS, STEPS = int(Lhs<T>::CHUNK_K) / Dot<T>::K;
    for (int half = 0; half < 2 / V; half++) {
        const char *at = w + half * 64, *next = ahead.at + half * 64;
        const auto* a = x;
        for (int64_t left = Lhs<T>::steps(k), first = 1; left > 0; first = 0) {
            const int64_t steps = left < STEPS ? left : STEPS;
            Tile<T, R, V, Lhs<T>::LDA> tile;
            tile.zero();
            if (left <= 2 * STEPS && (first || left > STEPS)) end.fetch_rows(R);
            for (int64_t s = 0, n; s < steps; s += n) {
                n = steps - s < beside.steps ? steps - s : beside.steps;
                tile.steps(a + s * Dot<T>::A, at + s * 128, 128, n, next + s * ahead.line, ahead.line);
                beside.piece();
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) {
                    float* sum = out + r * COLS + (half + v) * 16;
                    store16(sum, first ? tile.total(r, v) : load16(sum) + tile.total(r, v));
                }
            at += steps * 128, next += steps * ahead.line, a += R * Lhs<T>::LDA, left -= steps;
        }
    }
}

// rows of x in panels of `height` rows each, [tile][chunk][height][LDA]
template <class T, class X> void pack_rows(typename Dot<T>::Lhs* to, const X* x, int64_t height, int64_t k) {
    constexpr int64_t CHUNK = Lhs<T>::CHUNK_K;
    for (int64_t at = 0; at < k; at += CHUNK)
        for (int64_t r = 0; r < height; r++, to += Lhs<T>::LDA) {
            int64_t n = k - at < CHUNK ? k - at : CHUNK;
            pack_row<T>(to, x + r * k + at, n, (n + Dot<T>::K - 1) / Dot<T>::K * Dot<T>::K);
        }
}

// The panels that tiles of a format F read: here as they are stored.
template <class F> struct Stored {
    const char* w;
    int64_t bytes;
    Nothing beside;
    Stored(const infc_run*, const void* weights, int64_t k, Span) : w(static_cast<const char*>(weights)), bytes(F::panel_bytes(k)) {}
    const char* at(int64_t p, int64_t) { return w + p * bytes; }
    const char* next(int64_t p) const { return w + (p + 1) * bytes; }      // what tiles fetch while they meet panel p
};

// What one thread does of a product.
struct Part { Span rows, panels; };

template <class Beside> using PanelProduct = void (*)(const void*, const char*, int64_t, Ahead, const End&, Beside&, float*);
template <class F, class Beside, size_t... R> inline PanelProduct<Beside> pick(int64_t rows, Beside&, std::index_sequence<R...>) {
    static constexpr PanelProduct<Beside> table[] = {&F::template panel<int(R) + 1, Beside>...};
    return table[rows - 1];
}

// How a format is met where the sums of a tile are registers: rows are divided among threads from 32 a thread on, else columns.
struct InRegisters {
    static constexpr int64_t HELD = 512 << 10;           // bytes of x that meet a panel in turn: half of a 1 MiB L2
    static Part part(const infc_run* r, int64_t rows, int64_t panels) {
        if (rows >= 32 * r->threads) return {share(rows, r->thread, r->threads), {0, panels}};
        return {{0, rows}, share(panels, r->thread, r->threads)};
    }
    static Span tile(int64_t rows, int64_t t, int64_t tiles) { return share(rows, t, tiles); }     // equal ones
    template <class F, class Beside>
    static void multiply(int64_t height, const void* x, const char* w, int64_t k, Ahead ahead, const End& end, Beside& beside, float* out) {
        pick<F>(height, beside, std::make_index_sequence<F::ROWS>())(x, w, k, ahead, end, beside, out);
    }
};

// What `tiles_of` needs to know of a format of weights: here the weights themselves, of type T.
template <class T> struct Wide : InRegisters {
    using X = T;
    using L = typename Dot<T>::Lhs;
    static constexpr int64_t ROWS = Shape<T>::ROWS;                    // of a tile
    static int64_t row_bytes(int64_t k) { return Lhs<T>::row_elements(k) * int64_t(sizeof(L)); }
    static int64_t panel_bytes(int64_t k) { return Lhs<T>::steps(k) * 128; }
    static int64_t tile_bytes(int64_t k) { return panel_bytes(k); }
    template <class F> using Source = Stored<F>;
    // one row that already lies as a panel would is read where it is
    static bool in_place(int64_t rows, int64_t k) {
        return rows == 1 && sizeof(typename Panel<T>::type) == sizeof(T) && k % Dot<T>::K == 0;
    }
    static void pack(void* to, const T* x, int64_t height, int64_t k) { pack_rows<T>(static_cast<L*>(to), x, height, k); }
    template <int R, class Beside>
    static void panel(const void* x, const char* w, int64_t k, Ahead ahead, const End& end, Beside& beside, float* out) {
        panel_product<T, R>(static_cast<const L*>(x), w, k, ahead, end, beside, out);
    }
};

// Calls emit(first row, rows, panel, float[rows][32]) for each finished tile of x [rows, k] @ w [panels * 32, k].T, w in the
// format F; touches(row, panel) says what of that row it will read and write.
template <class F, class Touches, class Emit>
INFC_INLINE void tiles_of(const infc_run* r, int64_t rows, const typename F::X* x, const void* weights, int64_t k, int64_t panels,
                          Touches touches, Emit emit) {
    constexpr int64_t MAX = F::ROWS;
    const Part part = F::part(r, rows, panels);
    const Span mine = part.panels;
    if (mine.begin == mine.end) return;
    const int64_t row_bytes = F::row_bytes(k), panel_bytes = F::panel_bytes(k), line = 128 * panel_bytes / F::tile_bytes(k);
    const int64_t fit = F::HELD / row_bytes, at_once = fit < MAX ? MAX : fit;
    typename F::template Source<F> source(r, weights, k, mine);
    auto* packed = static_cast<char*>(r->scratch);
    alignas(64) float out[MAX * COLS];
    for (int64_t begin = part.rows.begin; begin < part.rows.end;) {
        int64_t chunks = (part.rows.end - begin + at_once - 1) / at_once;              // equal chunks, then equal tiles
        int64_t n = (part.rows.end - begin + chunks - 1) / chunks, tiles = (n + MAX - 1) / MAX;
        for (int64_t p = mine.begin; p < mine.end; p++) {
            const char* panel = source.at(p, tiles);
            for (int64_t t = 0; t < tiles; t++) {
                const Span s = F::tile(n, t, tiles);
                const int64_t height = s.end - s.begin;
                const auto* from = x + (begin + s.begin) * k;
                const bool in_place = F::in_place(height, k);
                const void* lhs = in_place ? static_cast<const void*>(from) : packed + s.begin * row_bytes;
                if (p == mine.begin) {
                    if (!in_place) F::pack(packed + s.begin * row_bytes, from, height, k);
                    if (t + 1 < tiles)                   // the next rows come while this tile is worked on
                        fetch<2>(from + height * k, (F::tile(n, t + 1, tiles).end - s.end) * k);
                }
                const End end = tiles == 1 ? End{} : touches(begin + s.begin, p);
                // several tiles meet a panel: each fetches its part of what comes next
                const Ahead ahead = tiles == 1 ? Ahead{panel + r->ahead, 128}
                                               : Ahead{source.next(p) + t * panel_bytes / tiles, line / tiles + 1};
                F::template multiply<F>(height, lhs, panel, k, ahead, end, source.beside, out);
                emit(begin + s.begin, height, p, out);
            }
        }
        begin += n;
    }
}

}  // namespace infc
