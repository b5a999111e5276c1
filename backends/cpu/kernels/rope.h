// Rotary positions, with the write of k and v into the paged cache as its end.
#pragma once
#include "paged.h"
#include "pool.h"

namespace infc {

constexpr int64_t MAX_HEAD = 1024;                       // one head's row is turned on the stack

template <class X> INFC_INLINE void load_row(float* to, const X* x, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) store_some(to + i, load_some(x + i, n - i), n - i);
}
template <class Y> INFC_INLINE void store_row(Y* y, const float* from, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) store_some(y + i, load_some(from + i, n - i), n - i);
}

// turns x[0 .. 2*half) in place: pairs (i, i + half), or (2i, 2i + 1) if interleaved; the rest passes through
template <bool INTERLEAVED> INFC_INLINE void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    if (INTERLEAVED) {
        for (int64_t i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (int64_t i = 0; i < half; i += 16) {
        int64_t n = half - i;
        f32x16 a = load_some(x + i, n), b = load_some(x + half + i, n), c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(x + i, a * c - b * s, n);
        store_some(x + half + i, b * c + a * s, n);
    }
}

constexpr int64_t FEW_TOKENS = 32;                       // more write the same lines again and again

// what `mine` of tokens x (q, k and v heads) will write of the caches
INFC_INLINE void fetch_slots(Span mine, int64_t tokens, int64_t q_heads, const Blocks& blocks, const void* k_cache, const void* v_cache,
                             const void* slots, int64_t bytes, int64_t dims) {
    const int64_t heads = q_heads + 2 * blocks.heads;
    for (int64_t u = tokens <= FEW_TOKENS ? mine.begin : mine.end; u < mine.end; u++) {
        const int64_t slot = static_cast<const int32_t*>(slots)[u / heads], h = u % heads - q_heads;
        if (h >= blocks.heads) fetch_v(v_cache, blocks, slot, h - blocks.heads, bytes, dims);
        else if (h >= 0) fetch_k(k_cache, blocks, slot, h, bytes);
    }
}

// qkv [tokens, (q_heads + 2 kv_heads) * dims] -> q [tokens, q_heads, dims], k and v into the cache
template <class X, class Y, class C, bool INTERLEAVED>
void rope_kv_write(const infc_run* r, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dims, int64_t half, const void* qkv,
                   const void* cos, const void* sin, void* k_cache, void* v_cache, const void* slots, void* q) {
    const int64_t heads = q_heads + 2 * kv_heads;
    Span mine = share(tokens * heads, r->thread, r->threads);
    alignas(64) float row[MAX_HEAD];
    alignas(64) C cached[MAX_HEAD];
    const Blocks blocks{kv_heads, r->kv_run};
    fetch_slots(mine, tokens, q_heads, blocks, k_cache, v_cache, slots, dims * int64_t(sizeof(C)), dims);
    for (int64_t u = mine.begin; u < mine.end; u++) {
        int64_t t = u / heads, h = u % heads, slot = static_cast<const int32_t*>(slots)[t];
        load_row(row, static_cast<const X*>(qkv) + u * dims, dims);
        if (h < q_heads + kv_heads)
            rotate<INTERLEAVED>(row, static_cast<const float*>(cos) + t * half, static_cast<const float*>(sin) + t * half, half);
        if (h < q_heads) {
            store_row(static_cast<Y*>(q) + (t * q_heads + h) * dims, row, dims);
            continue;
        }
        store_row(cached, row, dims);
        if (h < q_heads + kv_heads) write_k(static_cast<C*>(k_cache), blocks, slot, h - q_heads, dims, cached);
        else write_v(static_cast<C*>(v_cache), blocks, slot, h - q_heads - kv_heads, dims, cached);
    }
}

// k, v [tokens, heads, dims] into the cache
template <class X, class C>
void kv_write(const infc_run* r, int64_t tokens, int64_t heads, int64_t dims, const void* k, const void* v, void* k_cache,
              void* v_cache, const void* slots) {
    Span mine = share(tokens * heads, r->thread, r->threads);
    alignas(64) C cached[MAX_HEAD];
    const Blocks blocks{heads, r->kv_run};
    auto row = [&](const void* x, int64_t u) {
        for (int64_t d = 0; d < dims; d += 16) store16(cached + d, load16(static_cast<const X*>(x) + u * dims + d));
    };
    for (int64_t u = mine.begin; u < mine.end; u++) {
        int64_t slot = static_cast<const int32_t*>(slots)[u / heads], h = u % heads;
        row(k, u);
        write_k(static_cast<C*>(k_cache), blocks, slot, h, dims, cached);
        row(v, u);
        write_v(static_cast<C*>(v_cache), blocks, slot, h, dims, cached);
    }
}

// the same two, k and v rounded to codes and scales
template <class X, class Y, bool INTERLEAVED>
void rope_kv_write_codes(const infc_run* r, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dims, int64_t half, const void* qkv,
                         const void* cos, const void* sin, void* k_cache, void* k_scale, void* v_cache, void* v_scale, const void* slots,
                         void* q) {
    const int64_t heads = q_heads + 2 * kv_heads;
    Span mine = share(tokens * heads, r->thread, r->threads);
    alignas(64) float row[MAX_HEAD];
    alignas(64) int8_t codes[MAX_HEAD];
    const Blocks blocks{kv_heads, r->kv_run};
    fetch_slots(mine, tokens, q_heads, blocks, k_cache, v_cache, slots, dims, dims);
    for (int64_t u = mine.begin; u < mine.end; u++) {
        int64_t t = u / heads, h = u % heads, slot = static_cast<const int32_t*>(slots)[t];
        load_row(row, static_cast<const X*>(qkv) + u * dims, dims);
        if (h < q_heads + kv_heads)
            rotate<INTERLEAVED>(row, static_cast<const float*>(cos) + t * half, static_cast<const float*>(sin) + t * half, half);
        if (h < q_heads) {
            store_row(static_cast<Y*>(q) + (t * q_heads + h) * dims, row, dims);
            continue;
        }
        const float scale = round_row(row, dims, codes);
        if (h < q_heads + kv_heads) write_k_codes(k_cache, k_scale, blocks, slot, h - q_heads, dims, codes, scale);
        else write_v_codes(v_cache, v_scale, blocks, slot, h - q_heads - kv_heads, dims, codes, scale);
    }
}
template <class X>
void kv_write_codes(const infc_run* r, int64_t tokens, int64_t heads, int64_t dims, const void* k, const void* v, void* k_cache,
                    void* k_scale, void* v_cache, void* v_scale, const void* slots) {
    Span mine = share(tokens * heads, r->thread, r->threads);
    alignas(64) float row[MAX_HEAD];
    alignas(64) int8_t codes[MAX_HEAD];
    const Blocks blocks{heads, r->kv_run};
    for (int64_t u = mine.begin; u < mine.end; u++) {
        int64_t slot = static_cast<const int32_t*>(slots)[u / heads], h = u % heads;
        load_row(row, static_cast<const X*>(k) + u * dims, dims);
        float scale = round_row(row, dims, codes);
        write_k_codes(k_cache, k_scale, blocks, slot, h, dims, codes, scale);
        load_row(row, static_cast<const X*>(v) + u * dims, dims);
        scale = round_row(row, dims, codes);
        write_v_codes(v_cache, v_scale, blocks, slot, h, dims, codes, scale);
    }
}

// x [batch, heads, length, dims], cos and sin [batch or 1, 1, length, half]; called once for q and once for k
template <class X, bool INTERLEAVED>
void rope_rows(const infc_run* r, int64_t batch, int64_t heads, int64_t length, int64_t dims, int64_t half, bool one_cos,
               const void* x, const void* cos, const void* sin, void* y) {
    Span mine = share(batch * heads * length, r->thread, r->threads);
    alignas(64) float row[MAX_HEAD];
    for (int64_t u = mine.begin; u < mine.end; u++) {
        int64_t at = ((one_cos ? 0 : u / (heads * length)) * length + u % length) * half;
        load_row(row, static_cast<const X*>(x) + u * dims, dims);
        rotate<INTERLEAVED>(row, static_cast<const float*>(cos) + at, static_cast<const float*>(sin) + at, half);
        store_row(static_cast<X*>(y) + u * dims, row, dims);
    }
}

}  // namespace infc
