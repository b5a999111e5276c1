// The KV cache: blocks of 32 tokens, K and V each laid out as the right-hand side of the product that reads it.
//
// Per block and kv head, bf16: K as [D/2][32][2] (for q @ K.T), V as [16][D][2] (for p @ V); fp32: K as [D][32], V as [32][D].
// The same number of bytes as the logical cache [P, Hkv, 32, D].
#pragma once
#include "tile.h"

namespace infc {

constexpr int64_t PAGE = 32;

// element index within the block of one kv head: token `at` of the block, element d of D
template <class C> INFC_INLINE int64_t k_index(int64_t at, int64_t d) {
    constexpr int64_t K = Dot<C>::K;
    return d / K * PAGE * K + at * K + d % K;
}
template <class C> INFC_INLINE int64_t v_index(int64_t at, int64_t d, int64_t dims) {
    constexpr int64_t K = Dot<C>::K;
    return at / K * dims * K + d * K + at % K;
}

// one token's K or V of one head into its slot; slot -1 is padding and goes nowhere
template <class C> INFC_INLINE void write_k(C* cache, int64_t slot, int64_t head, int64_t heads, int64_t dims, const float* x) {
    if (slot < 0) return;
    C* block = cache + (slot / PAGE * heads + head) * PAGE * dims;
    for (int64_t d = 0; d < dims; d++) block[k_index<C>(slot % PAGE, d)] = from_f32<C>(x[d]);
}
template <class C> INFC_INLINE void write_v(C* cache, int64_t slot, int64_t head, int64_t heads, int64_t dims, const float* x) {
    if (slot < 0) return;
    C* block = cache + (slot / PAGE * heads + head) * PAGE * dims;
    for (int64_t d = 0; d < dims; d++) block[v_index<C>(slot % PAGE, d, dims)] = from_f32<C>(x[d]);
}

}  // namespace infc
