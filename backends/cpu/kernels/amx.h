// Products of many rows by AMX: the matrix registers ("tiles") of 16 rows x 64 bytes that Sapphire Rapids and later have.
//
// A step is 32 k: two tiles of x and two of w make four of sums, so each value that is loaded is used twice. A panel's step of
// w lies as AMX wants it, 16 rows of two k x 16 columns, 128 bytes apart. x is read as it lies, or
// packed: with rounding, where K is no multiple of 32, and for the last rows, with rows of zeros behind them.
// Inputs and sums below 2**-126 are taken as 0 (Intel SDM, TDPBF16PS).
//
// SmolLM2 in bf16 on two virtual CPUs of Emerald Rapids, prompts beside products in registers (AVX512_BF16): 8 tokens 1.2x, 16 2.1x,
// 32 3.7x, 48 3.9x, 128 5.9x, 256 6.6x, 512 6.7x. Weights held as codes, made bf16 for it, beside products of integers: w8 1.0x
// (32 tokens), 1.37x (48 and 64), 1.5x (128); w4a8 0.9x (32), 1.08x (48), 1.2x (128), 1.4x (256), 1.6x (512). Later, interleaved, w8 and
// w4: 0.93 and 1.17x (32 tokens), 1.08 and 1.17x (36), 1.2 and 1.36x (40), 1.3 and 1.7x (47): with a16 they begin at 32, with a8 at 48.
// Of such a product of 256 rows of codes, a quarter is making the panels; where x is fp32, rounding it is most of what else bf16
// weights save.
// Not kept: products of integers in tiles (TDPBSUD, a block of 32 k a step). Their sums go through memory to meet the scales, 16 cycles for
// each tile that is stored: w8a8 31 ns a block of 32 columns x 8 rows (40 in registers), w4a8 39 (44), and twice that where another thread
// works on the core. Nor steps of a panel in turn, so that it stays in L1: sums then go through memory more often.
#pragma once
#include <type_traits>
#include "product.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define INFC_AMX 1
#else
#define INFC_AMX 0
#endif

namespace infc {

#if INFC_AMX
constexpr int64_t TILE_ROWS = 16;

// All eight tiles of this thread, whole, while it lives. The kernel saves no tiles of a thread that has released them.
struct Tiles {
    Tiles() {
        struct alignas(64) { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {1, 0, {}, {}, {}};
        for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
};

// Before tiles read what was written, and after they have written: GCC's intrinsics are statements that do not say which memory they touch.
INFC_INLINE void tiles_meet_memory() { asm volatile("" ::: "memory"); }

// Of a format F whose panels are bf16 as Wide<bf16> has them.
template <class F> struct InTiles : F {
    using X = typename F::X;
    static constexpr int64_t STEP_K = 32, TILE_BYTES = 1024, ROWS = 2 * TILE_ROWS, HELD = 1 << 20;       // HELD: half of a 2 MiB L2
    static constexpr int64_t FROM_ROWS = 8;              // a step of 8 is 1.2x as fast

    static int64_t steps(int64_t k) { return (k + STEP_K - 1) / STEP_K; }
    static int64_t row_bytes(int64_t k) { return steps(k) * 64; }
    // whole tiles of rows that need no rounding are read where they are: packing all of x took a fifth of a product's time
    static bool in_place(int64_t height, int64_t k) { return sizeof(X) == sizeof(bf16) && k % STEP_K == 0 && height % TILE_ROWS == 0; }
    static Span tile(int64_t rows, int64_t t, int64_t) { return {t * ROWS, rows < (t + 1) * ROWS ? rows : (t + 1) * ROWS}; }

    // Columns are divided: each panel is then read, or made, once. Rows too where threads' shares become more equal.
    static Part part(const infc_run* r, int64_t rows, int64_t panels) {
        auto up = [](int64_t n, int64_t by) { return (n + by - 1) / by; };
        int64_t parts = 1, least = INT64_MAX;
        for (int64_t by = 1; by <= r->threads; by++) {
            if (r->threads % by) continue;
            const int64_t cost = up(panels, r->threads / by) * (up(up(rows, by), TILE_ROWS) + 1);      // 1: to read or make a panel
            if (cost < least) parts = by, least = cost;
        }
        return {share(rows, r->thread % parts, parts), share(panels, r->thread / parts, r->threads / parts)};
    }

    // [step][16 or 32 rows][32 k]
    static void pack(void* to, const X* x, int64_t height, int64_t k) {
        const int64_t padded = height > TILE_ROWS ? ROWS : TILE_ROWS, step = padded * STEP_K;
        for (int64_t r = 0; r < padded; r++) {
            bf16* row = static_cast<bf16*>(to) + r * STEP_K;
            int64_t c = 0, n = r < height ? k : 0;
            for (; c + STEP_K <= n; c += STEP_K, row += step) {
                const X* from = x + r * k + c;
                if constexpr (sizeof(X) == sizeof(bf16)) store(row, load<u32x16>(from));
                else store16(row, load16(from)), store16(row + 16, load16(from + 16));
            }
            for (; c < k; c += STEP_K, row += step)
                for (int64_t i = 0; i < STEP_K; i++) row[i] = from_f32<bf16>(c + i < n ? to_f32(x[r * k + c + i]) : 0.0f);
        }
    }

    // One or two tiles of rows (DOWN) x one panel -> out. row, next: bytes of x from a row, a step, to the next. Sums are closed after
    // CHAIN steps at most and added up: with 20 the error is 0.7x that of torch's product of the same numbers in fp32 (K = 576 and 1536),
    // with 48 it is 0.95x.
    static constexpr int64_t CHAIN = 20;
    template <int DOWN, class Beside>
    static INFC_INLINE void sums(const char* x, int64_t row, int64_t next, const char* w, int64_t k, Ahead ahead, const End& end,
                                 int64_t height, Beside& beside, float* out) {
        alignas(64) char last[2 * TILE_BYTES];           // the last step where w ends before it
        alignas(64) float more[DOWN * TILE_ROWS * COLS];
        const int64_t all = steps(k), chains = (all + CHAIN - 1) / CHAIN;
        for (int64_t chain = 0; chain < chains; chain++) {
            const Span s = share(all, chain, chains);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t step = s.begin; step < s.end; step++, x += next, w += 2 * TILE_BYTES) {
                if ((step + 1) * STEP_K > k) {
                    const int64_t bytes = (k - step * STEP_K + 1) / 2 * 128;
                    memcpy(last, w, size_t(bytes));
                    memset(last + bytes, 0, sizeof last - size_t(bytes));
                    w = last;
                }
                tiles_meet_memory();
                _tile_loadd(6, w, 128);
                _tile_loadd(4, x, row);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, w + 64, 128);
                _tile_dpbf16ps(1, 4, 7);
                if (DOWN == 2) {
                    _tile_loadd(5, x + TILE_ROWS * row, row);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                const int64_t line = ahead.share(2 * TILE_BYTES);
                fetch<2>(ahead.at, line);
                ahead.at += line;
                if (step + 2 == all) end.fetch_rows(height);
                beside.piece();
            }
            float* to = chain ? more : out;
            _tile_stored(0, to, 128);
            _tile_stored(1, to + 16, 128);
            if (DOWN == 2) {
                _tile_stored(2, to + TILE_ROWS * COLS, 128);
                _tile_stored(3, to + TILE_ROWS * COLS + 16, 128);
            }
            tiles_meet_memory();
            for (int64_t i = 0; chain && i < DOWN * TILE_ROWS * COLS; i += 16) store16(out + i, load16(out + i) + load16(more + i));
        }
    }
    template <class G, class Beside>
    static __attribute__((noinline)) void multiply(int64_t height, const void* x, const char* w, int64_t k, Ahead ahead, const End& end,
                                                   Beside& beside, float* out) {
        const bool here = in_place(height, k), two = height > TILE_ROWS;
        const int64_t row = here ? k * int64_t(sizeof(bf16)) : 64, next = here ? 64 : two ? 2 * TILE_BYTES : TILE_BYTES;
        if (two) sums<2>(static_cast<const char*>(x), row, next, w, k, ahead, end, height, beside, out);
        else sums<1>(static_cast<const char*>(x), row, next, w, k, ahead, end, height, beside, out);
    }
};
#endif

// Calls emit(first row, rows, panel, float[rows][32]) for each finished tile: see tiles_of.
template <class F, class Touches, class Emit>
INFC_INLINE void product(const infc_run* r, int64_t rows, const typename F::X* x, const void* weights, int64_t k, int64_t panels,
                         Touches touches, Emit emit) {
#if INFC_AMX
    if constexpr (std::is_base_of<Wide<bf16>, F>::value)
        if (rows >= InTiles<F>::FROM_ROWS) {
            const Tiles tiles;
            return tiles_of<InTiles<F>>(r, rows, x, weights, k, panels, touches, emit);
        }
#endif
    tiles_of<F>(r, rows, x, weights, k, panels, touches, emit);
}

}  // namespace infc
