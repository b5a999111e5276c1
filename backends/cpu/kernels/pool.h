// The executor: a pool of threads runs a whole step table, every kernel on all threads, a spin barrier after each step.
//
// Workers spin between steps and for spin_us after a run, then sleep on a futex. Nothing is allocated inside a run. One
// run at a time per pool: a second caller is told (return 1), never mixed in.
#pragma once
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__SSE4_2__)
#include <nmmintrin.h>
#endif

struct infc_run {
    const int64_t* dims;                 // live values, in the order of Program.dims
    int64_t thread, threads;
    void* scratch;                       // this thread's, infc::SCRATCH_BYTES, 64-byte aligned
    void* pool;                          // for infc::sync
    int64_t ahead;                       // bytes: weights that stream are fetched into L2 this far ahead
    int64_t kv_run;                      // bytes from a run of KV blocks to the next (paged.h); 0: each cache lies alone
};
typedef void (*infc_kernel)(void* const* buf, const infc_run* run);
struct infc_step { infc_kernel fn; void* const* buf; };

namespace infc {

constexpr int64_t SCRATCH_BYTES = 4 << 20;
// Prefetch into L2 this far ahead. Which distance pays depends on how loaded the memory is and on the format; none fits all. Zen 4,
// 2 threads, products of SmolLM2 with one row, share of a pure read of the same bytes at 39 to 50 GB/s:
//     ahead   512 B    2 KiB   4 KiB   6 KiB   12 KiB
//     bf16    0.98     0.98    0.99    0.97    0.94         at 23 GB/s: 4 KiB 0.87, 6 KiB 0.85, 12 KiB 0.73
//     w8      0.98     0.98    0.88    0.84    0.86
//     w8a8    0.99     0.98    0.98    0.93    0.90
//     w4      0.95     0.74    0.84    0.86    0.85
//     w4a8    0.99     0.86    0.87    0.91    0.87         on another machine, at 31 GB/s, 12 KiB was 1.14 times 2 KiB
// So each table of steps finds out: its first runs take turns, then the fastest is kept, and asked again now and then.
constexpr int64_t AHEAD = 4 << 10;                                     // of what has no table: a pure read is the same to 3 %
constexpr int64_t DISTANCES[] = {AHEAD, 512, 8 << 10};

struct Trial {
    static constexpr uint32_t COUNT = sizeof DISTANCES / sizeof *DISTANCES, ROUNDS = 5, PERIOD = 512;       // runs
    const void* table;
    uint32_t run, best;
    uint64_t ns[COUNT][ROUNDS];                                        // of each distance, in order

    bool on() const { return run < COUNT * ROUNDS; }
    int64_t ahead() const { return DISTANCES[on() ? run % COUNT : best]; }
    void took(uint64_t time) {
        if (on()) {
            uint64_t* sorted = ns[run % COUNT];
            uint32_t at = run / COUNT;
            for (; at > 0 && sorted[at - 1] > time; at--) sorted[at] = sorted[at - 1];
            sorted[at] = time;
        }
        if (++run == PERIOD) run = 0;
        if (run != COUNT * ROUNDS) return;
        best = 0;                                                      // by the median: one lucky run decides nothing
        for (uint32_t i = 1; i < COUNT; i++)
            if (ns[i][ROUNDS / 2] < ns[best][ROUNDS / 2]) best = i;
    }
};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

inline void futex_wait(const uint32_t* word, uint32_t seen) {          // returns at once unless *word is still `seen`
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
inline void futex_wake(const uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0); }

// Each thread owns one cache line and counts the barriers it has reached; a thread leaves when no count is behind its own.
// Counts only grow (and wrap), so nothing is ever reset. `waiting` counts those who sleep until this thread arrives.
struct alignas(64) Line { uint32_t reached, waiting; };

// Spins at a barrier before sleeping: about 50 us on Zen 4, longer than two threads with a core each are ever apart in a
// balanced step. With fewer cores than threads the late one needs ours. (Not sched_yield: on Linux 6.6 and later each call
// moves the caller's deadline further off, and a storm of them starved a thread for two minutes.)
constexpr int BARRIER_SPINS = 1024;

struct Pool {
    int64_t threads;
    uint64_t spin_ns;
    Line* lines;                                         // [threads]
    char* scratch;                                       // [threads][SCRATCH_BYTES]
    size_t scratch_bytes;
    pthread_t* workers;                                  // [threads - 1]
    // the run in hand, written by the caller before `generation` moves
    alignas(64) const infc_step* steps;
    int64_t n;
    const int64_t* dims;
    void (*job)(Pool*, int64_t, void*);                  // instead of steps, if not null
    void* job_data;
    bool stop;
    int64_t ahead;                                       // of this run
    int64_t kv_run;                                      // of every run
    static constexpr int TRIALS = 32;
    Trial trials[TRIALS];                                // by table, the latest one that has the place
    alignas(64) uint32_t generation;                     // the futex word
    alignas(64) uint32_t sleepers;
    alignas(64) uint32_t busy;

    void barrier(int64_t thread) {
        if (threads == 1) return;
        const uint32_t mine = lines[thread].reached + 1;
        __atomic_store_n(&lines[thread].reached, mine, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&lines[thread].waiting, __ATOMIC_SEQ_CST)) futex_wake(&lines[thread].reached);
        for (int64_t other = 0; other < threads; other++) wait_at_barrier(lines[other], mine);
    }

    static void wait_at_barrier(Line& line, uint32_t until) {
        auto behind = [&](uint32_t reached) { return int32_t(reached - until) < 0; };
        for (int spins = 0; spins < BARRIER_SPINS; spins++) {
            if (!behind(__atomic_load_n(&line.reached, __ATOMIC_ACQUIRE))) return;
            pause();
        }
        __atomic_fetch_add(&line.waiting, 1, __ATOMIC_SEQ_CST);
        for (uint32_t seen; behind(seen = __atomic_load_n(&line.reached, __ATOMIC_SEQ_CST));) futex_wait(&line.reached, seen);
        __atomic_fetch_sub(&line.waiting, 1, __ATOMIC_SEQ_CST);
    }

    void play(int64_t thread, uint64_t* step_ns) {
        if (job) {
            job(this, thread, job_data);
            return barrier(thread);
        }
        const infc_step* table = steps;                  // copied: after the last barrier the caller may already write the
        const int64_t count = n;                         // next run's
        infc_run run{dims, thread, threads, scratch + thread * SCRATCH_BYTES, this, ahead, kv_run};
        if (step_ns) step_ns[0] = now_ns();
        for (int64_t i = 0; i < count; i++) {
            table[i].fn(table[i].buf, &run);
            barrier(thread);
            if (step_ns) step_ns[i + 1] = now_ns();
        }
    }

    void launch() {                                      // wake everyone, then work as thread 0
        __atomic_fetch_add(&generation, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST)) futex_wake(&generation);
    }

    void wait_for(uint32_t seen) {                       // spin, then sleep, until generation leaves `seen`
        uint64_t until = 0;
        for (uint32_t spins = 1; __atomic_load_n(&generation, __ATOMIC_ACQUIRE) == seen; spins++) {
            pause();
            if (spins % 64) continue;
            uint64_t now = now_ns();
            if (!until) until = now + spin_ns;
            if (now < until) continue;
            __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
            futex_wait(&generation, seen);
            __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
        }
    }

    Trial& trial(const void* table) {
        Trial& found = trials[(reinterpret_cast<uintptr_t>(table) >> 6) % TRIALS];
        if (found.table != table) found = Trial{table, 0, 0, {}};
        return found;
    }

    bool enter() { return !__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE); }
    void leave() { __atomic_store_n(&busy, 0, __ATOMIC_RELEASE); }

    void run_job(void (*f)(Pool*, int64_t, void*), void* data) {
        job = f, job_data = data;
        launch();
        play(0, nullptr);
        job = nullptr;
    }
};

// All threads meet inside a kernel; every thread of the step must call it equally often.
inline void sync(const infc_run* r) { static_cast<Pool*>(r->pool)->barrier(r->thread); }
inline char* scratch_of(const infc_run* r, int64_t thread) {
    return static_cast<char*>(r->scratch) + (thread - r->thread) * SCRATCH_BYTES;
}

// Linux gives a process AMX's registers when it asks for them, once for all its threads: Documentation/arch/x86/xstate.rst.
inline bool may_use_registers() {
#if defined(__AMX_TILE__)
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return true;
#endif
}

struct Worker { Pool* pool; int64_t thread; };

inline void* work(void* p) {
    Worker w = *static_cast<Worker*>(p);
    free(p);
    for (uint32_t seen = 0;; seen++) {
        w.pool->wait_for(seen);
        if (w.pool->stop) return nullptr;
        w.pool->play(w.thread, nullptr);
    }
}

// ---- CRC-32C (Castagnoli), as RFC 3720: reflected, initial value and final xor all ones --------------------------------
constexpr uint32_t CRC_POLY = 0x82f63b78;

struct CrcTables {                                       // slicing by 8, for machines without the instruction
    uint32_t t[8][256];
    constexpr CrcTables() : t{} {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) c = c & 1 ? (c >> 1) ^ CRC_POLY : c >> 1;
            t[0][i] = c;
        }
        for (int s = 1; s < 8; s++)
            for (int i = 0; i < 256; i++) t[s][i] = (t[s - 1][i] >> 8) ^ t[0][t[s - 1][i] & 255];
    }
};
static constexpr CrcTables CRC_TABLES{};

inline uint32_t crc_step8(uint32_t crc, uint64_t v) {
#if defined(__SSE4_2__)
    return uint32_t(_mm_crc32_u64(crc, v));
#else
    v ^= crc;
    const auto& t = CRC_TABLES.t;
    return t[7][v & 255] ^ t[6][v >> 8 & 255] ^ t[5][v >> 16 & 255] ^ t[4][v >> 24 & 255] ^ t[3][v >> 32 & 255] ^
           t[2][v >> 40 & 255] ^ t[1][v >> 48 & 255] ^ t[0][v >> 56];
#endif
}
inline uint32_t crc_step1(uint32_t crc, uint8_t b) { return (crc >> 8) ^ CRC_TABLES.t[0][(crc ^ b) & 255]; }

inline uint32_t crc_mul(uint32_t a, uint32_t b) {        // a * b mod P, polynomials over GF(2), bit 31 is x**0
    uint32_t p = 0;
    for (uint32_t m = 1u << 31; m; m >>= 1) {
        if (a & m) p ^= b;
        b = b & 1 ? (b >> 1) ^ CRC_POLY : b >> 1;
    }
    return p;
}
inline uint32_t crc_shift(int64_t bytes) {               // x**(8 * bytes) mod P: what appending zeros multiplies by
    uint32_t result = 1u << 31, square = 1u << 23;       // x**0, x**8
    for (; bytes; bytes >>= 1) {
        if (bytes & 1) result = crc_mul(result, square);
        square = crc_mul(square, square);
    }
    return result;
}

// Copies (dst may be null: only reads) and returns the CRC state after `bytes`. Three lanes hide the latency of the
// instruction (3 cycles, one per cycle); their results are shifted into place and added.
inline uint32_t crc_copy(char* dst, const char* src, int64_t bytes) {
    auto word = [&](int64_t at) {
        uint64_t v;
        memcpy(&v, src + at, 8);
        if (dst) memcpy(dst + at, &v, 8);
        return v;
    };
    int64_t lane = bytes / 24 * 8;
    uint32_t a = 0xffffffff, b = 0, c = 0;
    for (int64_t i = 0; i < lane; i += 8) {
        if (i % 64 == 0) {                               // three streams are too many for some prefetchers
            __builtin_prefetch(src + i + 2048);
            __builtin_prefetch(src + lane + i + 2048);
            __builtin_prefetch(src + 2 * lane + i + 2048);
        }
        a = crc_step8(a, word(i));
        b = crc_step8(b, word(lane + i));
        c = crc_step8(c, word(2 * lane + i));
    }
    if (lane) {
        uint32_t by_lane = crc_shift(lane);
        a = crc_mul(crc_mul(a, by_lane) ^ b, by_lane) ^ c;
    }
    for (int64_t i = 3 * lane; i < bytes; i++) {
        if (dst) dst[i] = src[i];
        a = crc_step1(a, uint8_t(src[i]));
    }
    return ~a;
}

struct CopyJob { char* dst; const char* src; int64_t bytes, chunk, next; uint32_t* crc; };

inline void copy_chunks(Pool*, int64_t, void* data) {
    auto* j = static_cast<CopyJob*>(data);
    for (;;) {
        int64_t i = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED), at = i * j->chunk;
        if (at >= j->bytes) return;
        int64_t size = j->bytes - at < j->chunk ? j->bytes - at : j->chunk;
        uint32_t crc = crc_copy(j->dst ? j->dst + at : nullptr, j->src + at, size);
        if (j->crc) j->crc[i] = crc;
    }
}

struct ReadJob { const char* p; int64_t bytes; uint64_t sum; };

inline void read_share(Pool* pool, int64_t thread, void* data) {
    typedef uint64_t u64x8 __attribute__((vector_size(64)));
    auto* j = static_cast<ReadJob*>(data);
    int64_t lines = j->bytes / 64, begin = lines * thread / pool->threads, end = lines * (thread + 1) / pool->threads;
    u64x8 s[4] = {};
    int64_t i = begin;
    for (; i + 4 <= end; i += 4)
        for (int k = 0; k < 4; k++) {
            const char* p = j->p + (i + k) * 64;
            __builtin_prefetch(p + AHEAD, 0, 2);
            u64x8 v;
            memcpy(&v, p, 64);
            s[k] += v;
        }
    for (; i < end; i++) {
        u64x8 v;
        memcpy(&v, j->p + i * 64, 64);
        s[0] += v;
    }
    s[0] += s[1] + s[2] + s[3];
    uint64_t sum = 0;
    for (int k = 0; k < 8; k++) sum += s[0][k];
    if (thread == 0)
        for (int64_t k = lines * 64; k < j->bytes; k++) sum += uint8_t(j->p[k]);
    __atomic_fetch_add(&j->sum, sum, __ATOMIC_RELAXED);
}

}  // namespace infc

extern "C" {

void infc_pool_destroy(void* p) {
    auto* pool = static_cast<infc::Pool*>(p);
    if (!pool) return;
    pool->stop = true;
    pool->launch();
    for (int64_t i = 0; i + 1 < pool->threads; i++) pthread_join(pool->workers[i], nullptr);
    munmap(pool->scratch, pool->scratch_bytes);
    free(pool->lines);
    free(pool->workers);
    free(pool);
}

// threads - 1 workers and the caller; NULL when memory, a thread or (errno EPERM) a register was refused
void* infc_pool_create(int threads, int64_t spin_us) {
    using namespace infc;
    if (threads < 1 || spin_us < 0) return nullptr;
    if (!may_use_registers()) return errno = EPERM, nullptr;
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, sizeof(Pool))) return nullptr;
    memset(memory, 0, sizeof(Pool));
    auto* pool = static_cast<Pool*>(memory);
    pool->spin_ns = uint64_t(spin_us) * 1000;
    void* lines = nullptr;
    if (posix_memalign(&lines, 64, size_t(threads) * sizeof(Line)) == 0) memset(lines, 0, size_t(threads) * sizeof(Line));
    pool->scratch_bytes = size_t(threads * SCRATCH_BYTES);
    void* scratch = mmap(nullptr, pool->scratch_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pool->lines = static_cast<Line*>(lines);
    pool->workers = static_cast<pthread_t*>(calloc(size_t(threads), sizeof(pthread_t)));
    if (!lines || scratch == MAP_FAILED || !pool->workers) {
        if (scratch != MAP_FAILED) munmap(scratch, pool->scratch_bytes);
        free(lines), free(pool->workers), free(pool);
        return nullptr;
    }
    madvise(scratch, pool->scratch_bytes, MADV_HUGEPAGE);
    pool->scratch = static_cast<char*>(scratch);
    pool->threads = 1;
    for (int t = 1; t < threads; t++) {
        auto* w = static_cast<Worker*>(malloc(sizeof(Worker)));
        if (w) *w = Worker{pool, t};
        if (!w || pthread_create(&pool->workers[t - 1], nullptr, work, w)) {
            free(w);
            infc_pool_destroy(pool);
            return nullptr;
        }
        pool->threads = t + 1;
    }
    return pool;
}

// Says how far apart the KV blocks' runs lie (infc_run.kv_run); between runs only.
void infc_pool_kv(void* p, int64_t run_bytes) { static_cast<infc::Pool*>(p)->kv_run = run_bytes; }

// step_ns, if not null, receives n + 1 times (ns, CLOCK_MONOTONIC): the start, and the end of each step. 0; 1 if busy.
int infc_pool_run(void* p, const infc_step* steps, int64_t n, const int64_t* dims, uint64_t* step_ns) {
    auto* pool = static_cast<infc::Pool*>(p);
    if (!pool->enter()) return 1;
    infc::Trial& trial = pool->trial(steps);
    pool->steps = steps, pool->n = n, pool->dims = dims, pool->ahead = trial.ahead();
    const uint64_t start = infc::now_ns();
    pool->launch();
    pool->play(0, step_ns);
    trial.took(infc::now_ns() - start);
    pool->leave();
    return 0;
}

// reads every byte once, prefetched, all threads: the limit a memory-bound step is measured against. Returns a checksum.
uint64_t infc_pool_read(void* p, const void* bytes_at, int64_t bytes) {
    auto* pool = static_cast<infc::Pool*>(p);
    infc::ReadJob job{static_cast<const char*>(bytes_at), bytes, 0};
    if (!pool->enter()) return 0;
    pool->run_job(infc::read_share, &job);
    pool->leave();
    return job.sum;
}

// copies src to dst (NULL: reads only) in chunks shared among the threads; crc_out (or NULL) receives the CRC-32C of each
// chunk. Returns the CRC-32C of the whole if crc_out is given, else 0.
uint32_t infc_pool_copy(void* p, void* dst, const void* src, int64_t bytes, int64_t chunk, uint32_t* crc_out) {
    auto* pool = static_cast<infc::Pool*>(p);
    if (bytes <= 0 || chunk <= 0 || !pool->enter()) return 0;
    infc::CopyJob job{static_cast<char*>(dst), static_cast<const char*>(src), bytes, chunk, 0, crc_out};
    pool->run_job(infc::copy_chunks, &job);
    pool->leave();
    if (!crc_out) return 0;
    int64_t n = (bytes + chunk - 1) / chunk, last = bytes - (n - 1) * chunk;
    uint32_t whole = crc_out[0], by_chunk = infc::crc_shift(chunk), by_last = infc::crc_shift(last);
    for (int64_t i = 1; i < n; i++) whole = infc::crc_mul(whole, i + 1 < n ? by_chunk : by_last) ^ crc_out[i];
    return whole;
}

}  // extern "C"
