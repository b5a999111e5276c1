// y = x @ w.T (+ bias) (+ residual), or act(gate) * up: weights stream once, in order, whatever the number of rows.
//
// w is packed in panels of 32 columns ([N/32][K or K/2][2 vectors of 64 bytes]); each thread owns a contiguous range of
// panels and reads it from front to back. All rows of x (up to 14 in registers at once) meet a panel while it passes; with
// more rows the panel is met again from L2. Many rows are divided among the threads instead of the columns.
#pragma once
#include <utility>
#include "pool.h"
#include "tile.h"

namespace infc {

constexpr int COLS = 32;
constexpr int64_t LHS_BYTES = 512 << 10;                 // x rows held at once: half of a 1 MiB L2

// x in panels, [chunk of k][row][LDA]. The sums of a chunk are closed and added up: short rounding chains. With chunks of 64
// (fp32) and 128 (bf16) the error is 0.6x and 0.9x that of torch's own product (K = 576 and 1536, 1 to 513 rows).
template <class T> struct Lhs {
#if INFC_FMA
    static constexpr int64_t CHUNK_K = sizeof(T) == 4 ? 64 : 128;
#else
    static constexpr int64_t CHUNK_K = sizeof(T) == 4 ? 16 : 128;      // a product of two fp32 is rounded too
#endif
    static constexpr int LDA = int(CHUNK_K) / Dot<T>::K * Dot<T>::A;
    static int64_t steps(int64_t k) { return (k + Dot<T>::K - 1) / Dot<T>::K; }
    static int64_t row_elements(int64_t k) { return (k + CHUNK_K - 1) / CHUNK_K * LDA; }
};

// R rows x one panel -> out[R][32]
template <class T, int R>
__attribute__((noinline)) void panel_product(const typename Dot<T>::Lhs* x, const char* w, int64_t k, int64_t ahead, float* out) {
    constexpr int V = Shape<T>::VECS, STEPS = int(Lhs<T>::CHUNK_K) / Dot<T>::K;
    for (int half = 0; half < 2 / V; half++) {
        const char* at = w + half * 64;
        const auto* a = x;
        for (int64_t left = Lhs<T>::steps(k), first = 1; left > 0; first = 0) {
            int64_t steps = left < STEPS ? left : STEPS;
            Tile<T, R, V, Lhs<T>::LDA> tile;
            tile.zero();
            tile.steps(a, at, 128, steps, at + ahead);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) {
                    float* sum = out + r * COLS + (half + v) * 16;
                    store16(sum, first ? tile.total(r, v) : load16(sum) + tile.total(r, v));
                }
            at += steps * 128, a += R * Lhs<T>::LDA, left -= steps;
        }
    }
}

template <class T> using PanelProduct = void (*)(const typename Dot<T>::Lhs*, const char*, int64_t, int64_t, float*);
template <class T, size_t... R> inline PanelProduct<T> pick(int64_t rows, std::index_sequence<R...>) {
    static constexpr PanelProduct<T> table[] = {panel_product<T, int(R) + 1>...};
    return table[rows - 1];
}

// rows of x in panels of `height` rows each, [tile][chunk][height][LDA]
template <class T> void pack_rows(typename Dot<T>::Lhs* to, const T* x, int64_t height, int64_t k) {
    constexpr int64_t CHUNK = Lhs<T>::CHUNK_K;
    for (int64_t at = 0; at < k; at += CHUNK)
        for (int64_t r = 0; r < height; r++, to += Lhs<T>::LDA) {
            int64_t n = k - at < CHUNK ? k - at : CHUNK;
            pack_row<T>(to, x + r * k + at, n, (n + Dot<T>::K - 1) / Dot<T>::K * Dot<T>::K);
        }
}

// Calls emit(first row, rows, panel, float[rows][32]) for each finished tile of x [rows, k] @ w [panels * 32, k].T
template <class T, class Emit>
INFC_INLINE void product(const infc_run* r, int64_t rows, const T* x, const void* weights, int64_t k, int64_t panels, Emit emit) {
    constexpr int64_t MAX = Shape<T>::ROWS;
    using L = typename Dot<T>::Lhs;
    const bool by_rows = rows >= 32 * r->threads;
    Span mine_rows = by_rows ? share(rows, r->thread, r->threads) : Span{0, rows};
    Span mine = by_rows ? Span{0, panels} : share(panels, r->thread, r->threads);
    if (mine.begin == mine.end) return;
    const int64_t row_elements = Lhs<T>::row_elements(k), panel_bytes = Lhs<T>::steps(k) * 128;
    const int64_t fit = LHS_BYTES / int64_t(sizeof(L)) / row_elements, at_once = fit < MAX ? MAX : fit;
    const char* w = static_cast<const char*>(weights);
    auto* packed = static_cast<L*>(r->scratch);
    alignas(64) float out[MAX * COLS];
    for (int64_t begin = mine_rows.begin; begin < mine_rows.end;) {
        int64_t chunks = (mine_rows.end - begin + at_once - 1) / at_once;              // equal chunks, then equal tiles
        int64_t n = (mine_rows.end - begin + chunks - 1) / chunks, tiles = (n + MAX - 1) / MAX;
        auto height = [&](int64_t t) { Span s = share(n, t, tiles); return s.end - s.begin; };
        // one row that already lies as a panel would is read where it is
        const bool in_place = n == 1 && sizeof(typename Panel<T>::type) == sizeof(T) && k % Dot<T>::K == 0;
        const L* lhs = in_place ? reinterpret_cast<const L*>(x + begin * k) : packed;
        if (!in_place)
            for (int64_t t = 0; t < tiles; t++) {
                Span s = share(n, t, tiles);
                pack_rows<T>(packed + s.begin * row_elements, x + (begin + s.begin) * k, s.end - s.begin, k);
            }
        const int64_t ahead = tiles == 1 ? AHEAD : panel_bytes;
        for (int64_t p = mine.begin; p < mine.end; p++)
            for (int64_t t = 0; t < tiles; t++) {
                Span s = share(n, t, tiles);
                pick<T>(height(t), std::make_index_sequence<MAX>())(lhs + s.begin * row_elements, w + p * panel_bytes, k, ahead, out);
                emit(begin + s.begin, s.end - s.begin, p, out);
            }
        begin += n;
    }
}

template <class T, class Y, class B = float, class E = float>
void linear(const infc_run* r, int64_t rows, int64_t k, int64_t n, const void* x, const void* w, const void* bias,
            const void* residual, void* y) {
    product<T>(r, rows, static_cast<const T*>(x), w, k, (n + COLS - 1) / COLS,
               [&](int64_t row, int64_t count, int64_t panel, const float* out) {
        for (int64_t i = 0; i < count; i++)
            for (int64_t c = panel * COLS, v = 0; v < 2 && c < n; v++, c += 16) {
                f32x16 sum = load16(out + i * COLS + v * 16);
                if (bias) sum = sum + load_some(static_cast<const B*>(bias) + c, n - c);
                if (residual) sum = sum + load_some(static_cast<const E*>(residual) + (row + i) * n + c, n - c);
                store_some(static_cast<Y*>(y) + (row + i) * n + c, sum, n - c);
            }
    });
}

}  // namespace infc
