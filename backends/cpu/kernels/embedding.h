// Rows picked by index: out of a packed weight (a tied embedding is stored once), out of plain rows; and plain casts.
#pragma once
#include "linear.h"

namespace infc {

// Row v of w [vocab, k] packed as linear reads it: one value (pair, for bf16) per 128 bytes. An index outside 0..vocab-1
// gives a row of zeros: the runtime refuses such tokens before they come here.
template <class T, class I, class Y>
void embedding_packed(const infc_run* r, int64_t rows, int64_t vocab, int64_t k, const void* w, const void* ids, void* y) {
    constexpr int PER = Dot<T>::K;                       // values of k that lie side by side
    const int64_t steps = Lhs<T>::steps(k);
    Span mine = share(rows * steps, r->thread, r->threads);            // even one row is shared: its reads miss the cache
    for (int64_t u = mine.begin; u < mine.end;) {
        int64_t row = u / steps, s = u % steps, end = (row + 1) * steps < mine.end ? steps : mine.end - row * steps;
        int64_t id = int64_t(static_cast<const I*>(ids)[row]);
        bool known = id >= 0 && id < vocab;
        const T* column = static_cast<const T*>(w) + (known ? id : 0) / COLS * steps * COLS * PER + (known ? id : 0) % COLS * PER;
        Y* out = static_cast<Y*>(y) + row * k;
        u += end - s;
        for (; s < end; s++)
            for (int i = 0; i < PER && s * PER + i < k; i++)
                out[s * PER + i] = from_f32<Y>(known ? to_f32(column[s * COLS * PER + i]) : 0.0f);
    }
}

// y[i] = x[ids[i]], rows of `bytes`; x has `count` rows, an index outside gives zeros (negative ones do not wrap)
template <class I>
void gather_rows(const infc_run* r, int64_t rows, int64_t count, int64_t bytes, const void* x, const void* ids, void* y) {
    Span mine = share(rows, r->thread, r->threads);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        int64_t id = int64_t(static_cast<const I*>(ids)[i]);
        char* to = static_cast<char*>(y) + i * bytes;
        if (id >= 0 && id < count) memcpy(to, static_cast<const char*>(x) + id * bytes, size_t(bytes));
        else memset(to, 0, size_t(bytes));
    }
}

template <class X, class Y> void convert(const infc_run* r, int64_t n, const void* x, void* y) {
    Span mine = share((n + 15) / 16, r->thread, r->threads);
    for (int64_t i = mine.begin * 16; i < mine.end * 16; i += 16)
        store_some(static_cast<Y*>(y) + i, load_some(static_cast<const X*>(x) + i, n - i), n - i);
}

}  // namespace infc
