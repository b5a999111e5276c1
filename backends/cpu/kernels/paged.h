// The KV cache: blocks of 32 tokens, K and V each laid out as the right-hand side of the product that reads it.
//
// Blocks lie in runs of sixteen, and within a run head by head: what attention reads of a head is one stream, which the CPU's own
// prefetchers follow. All caches of a model share runs (runtime/kv_runs.py, with what it is worth).
//
// Per block and kv head, bf16: K as [D/2][32][2] (for q @ K.T), V as [16][D][2] (for p @ V); fp32: K as [D][32], V as [32][D].
// The same number of bytes as the logical cache [P, Hkv, 32, D]. Codes of 8 bits (kv_codes.h): K as [D/4][32][4] of code + 128, V as
// [8][D][4], and a cache of scales [P, Hkv, 32] in fp32 beside each.
#pragma once
#include "kv_codes.h"

namespace infc {

constexpr int64_t PAGE = 32, RUN = 16;                   // tokens of a block; blocks of a run

// Where the blocks of each head lie. run_bytes: from a run to the next, of all caches in it; 0 where a cache is alone.
struct Blocks {
    int64_t heads, run_bytes;
    // bytes: of one block of one head
    template <class T> INFC_INLINE T* at(T* cache, int64_t block, int64_t head, int64_t bytes) const {
        const int64_t run = block / RUN, stride = run_bytes ? run_bytes : RUN * heads * bytes;
        using Byte = typename std::conditional<std::is_const<T>::value, const char, char>::type;
        return reinterpret_cast<T*>(reinterpret_cast<Byte*>(cache) + run * stride + (head * RUN + block % RUN) * bytes);
    }
};

// Lines that a token of one head will write, fetched to be written: K's words of four bytes lie 128 bytes apart, so that each store is
// a miss of its own, and stores wait for each other. SmolLM2 on Zen 4, 1 and 8 tokens, cold: 2.4 -> 1.6 and 7.3 -> 5.6 us a layer.
// bytes: of the token; dims: its values.
INFC_INLINE void fetch_to_write(const char* p) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" ::"m"(*p));              // without -mprfchw the builtin fetches to read
#else
    __builtin_prefetch(p, 1);
#endif
}
constexpr int64_t WORD = 4;                              // bytes that lie together in K: one fp32, two bf16, four codes
INFC_INLINE void fetch_k(const void* cache, const Blocks& blocks, int64_t slot, int64_t head, int64_t bytes) {
    if (slot < 0) return;
    const char* at = static_cast<const char*>(blocks.at(cache, slot / PAGE, head, PAGE * bytes)) + slot % PAGE * WORD;
    for (int64_t i = 0; i < bytes / WORD; i++) fetch_to_write(at + i * PAGE * WORD);
}
INFC_INLINE void fetch_v(const void* cache, const Blocks& blocks, int64_t slot, int64_t head, int64_t bytes, int64_t dims) {
    if (slot < 0) return;
    const int64_t together = WORD * dims / bytes;        // tokens
    const char* at = static_cast<const char*>(blocks.at(cache, slot / PAGE, head, PAGE * bytes)) + slot % PAGE / together * dims * WORD;
    for (int64_t i = 0; i < dims * WORD; i += 64) fetch_to_write(at + i);
}

// One token's K or V of one head, already in the cache's type, into its slot; slot -1 is padding and goes nowhere. Two
// threads may hold the two tokens of one V pair, so a pair is never read and written back.
template <class C> INFC_INLINE void write_k(C* cache, const Blocks& blocks, int64_t slot, int64_t head, int64_t dims, const C* x) {
    if (slot < 0) return;
    struct Step { C of[Dot<C>::K]; };                                  // what lies together: one fp32, two bf16
    Step step, *at = reinterpret_cast<Step*>(blocks.at(cache, slot / PAGE, head, PAGE * dims * sizeof(C))) + slot % PAGE;
    for (int64_t d = 0; d < dims; d += Dot<C>::K, at += PAGE) memcpy(&step, x + d, sizeof step), memcpy(at, &step, sizeof step);
}
template <class C> INFC_INLINE void write_v(C* cache, const Blocks& blocks, int64_t slot, int64_t head, int64_t dims, const C* x) {
    if (slot < 0) return;
    constexpr int64_t K = Dot<C>::K;
    C* at = blocks.at(cache, slot / PAGE, head, PAGE * dims * sizeof(C)) + slot % PAGE / K * dims * K + slot % K;
    for (int64_t d = 0; d < dims; d++) at[d * K] = x[d];
}

// The same of codes, with their scale. Threads that hold tokens of one group of four write different bytes.
INFC_INLINE void write_k_codes(void* cache, void* scales, const Blocks& blocks, int64_t slot, int64_t head, int64_t dims, const int8_t* x,
                               float scale) {
    if (slot < 0) return;
    auto* at = blocks.at(static_cast<uint8_t*>(cache), slot / PAGE, head, PAGE * dims) + slot % PAGE * 4;
    for (int64_t d = 0; d < dims; d++) at[d / 4 * PAGE * 4 + d % 4] = uint8_t(x[d] + K_BIAS);
    blocks.at(static_cast<float*>(scales), slot / PAGE, head, PAGE * sizeof(float))[slot % PAGE] = scale;
}
INFC_INLINE void write_v_codes(void* cache, void* scales, const Blocks& blocks, int64_t slot, int64_t head, int64_t dims, const int8_t* x,
                               float scale) {
    if (slot < 0) return;
    auto* at = blocks.at(static_cast<int8_t*>(cache), slot / PAGE, head, PAGE * dims) + slot % PAGE / 4 * dims * 4 + slot % 4;
    for (int64_t d = 0; d < dims; d++) at[d * 4] = x[d];
    blocks.at(static_cast<float*>(scales), slot / PAGE, head, PAGE * sizeof(float))[slot % PAGE] = scale;
}

}  // namespace infc
