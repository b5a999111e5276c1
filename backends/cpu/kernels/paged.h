// The KV cache: blocks of 32 tokens, K and V each laid out as the right-hand side of the product that reads it.
//
// Per block and kv head, bf16: K as [D/2][32][2] (for q @ K.T), V as [16][D][2] (for p @ V); fp32: K as [D][32], V as [32][D].
// The same number of bytes as the logical cache [P, Hkv, 32, D]. Codes of 8 bits (kv_codes.h): K as [D/4][32][4] of code + 128, V as
// [8][D][4], and a cache of scales [P, Hkv, 32] in fp32 beside each.
#pragma once
#include "kv_codes.h"

namespace infc {

constexpr int64_t PAGE = 32;

// One token's K or V of one head, already in the cache's type, into its slot; slot -1 is padding and goes nowhere. Two
// threads may hold the two tokens of one V pair, so a pair is never read and written back.
template <class C> INFC_INLINE void write_k(C* cache, int64_t slot, int64_t head, int64_t heads, int64_t dims, const C* x) {
    if (slot < 0) return;
    struct Step { C of[Dot<C>::K]; };                                  // what lies together: one fp32, two bf16
    Step step, *at = reinterpret_cast<Step*>(cache + (slot / PAGE * heads + head) * PAGE * dims) + slot % PAGE;
    for (int64_t d = 0; d < dims; d += Dot<C>::K, at += PAGE) memcpy(&step, x + d, sizeof step), memcpy(at, &step, sizeof step);
}
template <class C> INFC_INLINE void write_v(C* cache, int64_t slot, int64_t head, int64_t heads, int64_t dims, const C* x) {
    if (slot < 0) return;
    constexpr int64_t K = Dot<C>::K;
    C* at = cache + (slot / PAGE * heads + head) * PAGE * dims + slot % PAGE / K * dims * K + slot % K;
    for (int64_t d = 0; d < dims; d++) at[d * K] = x[d];
}

// The same of codes, with their scale. Threads that hold tokens of one group of four write different bytes.
INFC_INLINE void write_k_codes(void* cache, void* scales, int64_t slot, int64_t head, int64_t heads, int64_t dims, const int8_t* x, float scale) {
    if (slot < 0) return;
    const int64_t page = slot / PAGE * heads + head;
    auto* at = static_cast<uint8_t*>(cache) + page * PAGE * dims + slot % PAGE * 4;
    for (int64_t d = 0; d < dims; d++) at[d / 4 * PAGE * 4 + d % 4] = uint8_t(x[d] + K_BIAS);
    static_cast<float*>(scales)[page * PAGE + slot % PAGE] = scale;
}
INFC_INLINE void write_v_codes(void* cache, void* scales, int64_t slot, int64_t head, int64_t heads, int64_t dims, const int8_t* x, float scale) {
    if (slot < 0) return;
    const int64_t page = slot / PAGE * heads + head;
    auto* at = static_cast<int8_t*>(cache) + page * PAGE * dims + slot % PAGE / 4 * dims * 4 + slot % 4;
    for (int64_t d = 0; d < dims; d++) at[d * 4] = x[d];
    static_cast<float*>(scales)[page * PAGE + slot % PAGE] = scale;
}

}  // namespace infc
