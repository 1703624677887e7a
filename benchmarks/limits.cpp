// SPDX-License-Identifier: Apache-2.0
// What one core can do: dot products without memory traffic, and a sum over memory. Each function is one thread's share.

#include <cstddef>
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

// One round: 16 independent accumulators, more than latency times instructions a cycle of any x86 CPU so far.
#define ROUND(STEP) \
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) \
    STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)

typedef float Lanes __attribute__((vector_size(64)));

// Only asm keeps the compiler from folding the loop or parking accumulators in memory.
#define DECLARE(i) Lanes a##i = {};
#define KEEP(i) total += a##i;
#define DOT_LOOP(NAME, INSTRUCTION) \
    EXPORT float NAME(int64_t rounds) { \
        Lanes b = {}; \
        ROUND(DECLARE) \
        for (int64_t r = 0; r < rounds; ++r) { \
            ROUND(INSTRUCTION) \
        } \
        Lanes total = {}; \
        ROUND(KEEP) \
        return total[0]; \
    }

#ifdef __AVX512VNNI__
#define INT8(i) asm volatile("vpdpbusd %1, %1, %0" : "+v"(a##i) : "v"(b));
DOT_LOOP(dot_int8, INT8)
#endif

#ifdef __AVX512BF16__
#define BF16(i) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(a##i) : "v"(b));
DOT_LOOP(dot_bf16, BF16)
#endif

#ifdef __AVX512F__
#define FP32(i) asm volatile("vfmadd231ps %1, %1, %0" : "+v"(a##i) : "v"(b));
DOT_LOOP(dot_fp32, FP32)
#endif

// bytes: a multiple of 512. Eight chains; a page ahead is prefetched, as the kernels do.
EXPORT int64_t read_memory(const char* data, int64_t bytes) {
    typedef int64_t Words __attribute__((vector_size(64)));
    Words sums[8] = {};
    for (int64_t i = 0; i < bytes; i += 512) {
        for (int j = 0; j < 8; ++j) {
            Words words;
            std::memcpy(&words, data + i + 64 * j, sizeof words);
            __builtin_prefetch(data + i + 64 * j + 4096);
            sums[j] += words;
        }
    }
    for (int j = 1; j < 8; ++j) sums[0] += sums[j];
    return sums[0][0] + sums[0][7];
}
