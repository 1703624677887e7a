// SPDX-License-Identifier: Apache-2.0
// What one core can do: dot products without memory traffic, and a sum over memory. `together` runs them on several.

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

// One round: 16 independent accumulators, more than latency times instructions a cycle of any x86 CPU so far.
#define ROUND(STEP) \
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) \
    STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)

#ifndef WIDTH  // bytes of a register: 64, or 32 for what kernels in 256-bit registers can reach at most
#define WIDTH 64
#endif
typedef float Lanes __attribute__((vector_size(WIDTH)));

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
#elif defined(__AVXVNNI__) && WIDTH == 32
#define INT8(i) asm volatile("{vex} vpdpbusd %1, %1, %0" : "+x"(a##i) : "x"(b));
DOT_LOOP(dot_int8, INT8)
#endif

#ifdef __AVX512BF16__
#define BF16(i) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(a##i) : "v"(b));
DOT_LOOP(dot_bf16, BF16)
#endif

#if defined(__AVX512F__) || (defined(__FMA__) && WIDTH == 32)
#define FP32(i) asm volatile("vfmadd231ps %1, %1, %0" : "+v"(a##i) : "v"(b));
DOT_LOOP(dot_fp32, FP32)
#endif

// bytes: a multiple of 2048. Several streams at once, eight chains; 4 KiB ahead in each is prefetched.
template <int STREAMS>
static int64_t sum(const char* data, int64_t bytes) {
    typedef int64_t Words __attribute__((vector_size(WIDTH)));
    constexpr int PARTS = 64 / WIDTH;  // registers of a cache line
    constexpr int LINES = 8 / STREAMS;  // of each stream in one round
    const int64_t part = bytes / STREAMS;
    Words sums[8] = {};
    for (int64_t i = 0; i < part; i += 64 * LINES) {
        for (int s = 0; s < STREAMS; ++s) {
            for (int j = 0; j < LINES; ++j) {
                const char* line = data + s * part + i + 64 * j;
                __builtin_prefetch(line + 4096);
                for (int part = 0; part < PARTS; ++part) {
                    Words words;
                    std::memcpy(&words, line + part * WIDTH, sizeof words);
                    sums[s * LINES + j] += words;
                }
            }
        }
    }
    for (int j = 1; j < 8; ++j) sums[0] += sums[j];
    return sums[0][0] + sums[0][WIDTH / 8 - 1];
}

EXPORT int64_t read_1(const char* data, int64_t bytes) { return sum<1>(data, bytes); }
EXPORT int64_t read_2(const char* data, int64_t bytes) { return sum<2>(data, bytes); }
EXPORT int64_t read_4(const char* data, int64_t bytes) { return sum<4>(data, bytes); }

// ---- threads: each on a CPU of its own, all off at the same moment ----

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

static void pin(int cpu) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // may be refused; then the system places it
#else
    (void)cpu;
#endif
}

struct Share {
    int64_t (*read)(const char*, int64_t);
    float (*dot)(int64_t);
    const char* data;
    int64_t amount;
    int cpu, threads;
    int* waiting;
    double start, end;
    double result;  // keeps the work from being removed
};

static void* run_share(void* pointer) {
    Share& share = *static_cast<Share*>(pointer);
    pin(share.cpu);
    __atomic_add_fetch(share.waiting, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(share.waiting, __ATOMIC_ACQUIRE) < share.threads) sched_yield();
    share.start = now();
    share.result = share.read ? double(share.read(share.data, share.amount)) : double(share.dot(share.amount));
    share.end = now();
    return nullptr;
}

constexpr int MOST_THREADS = 1024;

// Seconds from the first start to the last end, or -1. Each thread does `amount` (rounds, or bytes of data after those
// of the thread before it) of whichever function is given.
EXPORT double together(void* read, void* dot, const char* data, int64_t amount, int threads, const int* cpus) {
    static Share shares[MOST_THREADS];
    static pthread_t handles[MOST_THREADS];
    if (threads < 1 || threads > MOST_THREADS) return -1;
    int waiting = 0;
    for (int i = 0; i < threads; ++i) {
        shares[i] = {reinterpret_cast<int64_t (*)(const char*, int64_t)>(read), reinterpret_cast<float (*)(int64_t)>(dot),
                     data + i * amount, amount, cpus[i], threads, &waiting, 0, 0, 0};
        if (pthread_create(&handles[i], nullptr, run_share, &shares[i])) {
            __atomic_store_n(&waiting, MOST_THREADS, __ATOMIC_RELEASE);  // lets those that wait go
            for (int j = 0; j < i; ++j) pthread_join(handles[j], nullptr);
            return -1;
        }
    }
    double start = 1e300, end = 0;
    for (int i = 0; i < threads; ++i) {
        pthread_join(handles[i], nullptr);
        start = shares[i].start < start ? shares[i].start : start;
        end = shares[i].end > end ? shares[i].end : end;
    }
    return end - start;
}

struct Ball {
    alignas(64) int64_t turn;
    int64_t rounds;
    int first, second;
    double seconds;
};

static void* return_ball(void* pointer) {
    Ball& ball = *static_cast<Ball*>(pointer);
    pin(ball.second);
    for (int64_t i = 0; i < ball.rounds; ++i) {
        while (__atomic_load_n(&ball.turn, __ATOMIC_ACQUIRE) != 2 * i + 1) {}
        __atomic_store_n(&ball.turn, 2 * i + 2, __ATOMIC_RELEASE);
    }
    return nullptr;
}

static void* serve_ball(void* pointer) {
    Ball& ball = *static_cast<Ball*>(pointer);
    pin(ball.first);
    pthread_t other;
    if (pthread_create(&other, nullptr, return_ball, &ball)) return nullptr;
    double start = 0;
    for (int64_t i = 0; i < ball.rounds; ++i) {
        if (i == ball.rounds / 2) start = now();  // the first half waits for the other thread to start
        __atomic_store_n(&ball.turn, 2 * i + 1, __ATOMIC_RELEASE);
        while (__atomic_load_n(&ball.turn, __ATOMIC_ACQUIRE) != 2 * i + 2) {}
    }
    ball.seconds = now() - start;
    pthread_join(other, nullptr);
    return nullptr;
}

// Nanoseconds until a write of one CPU is seen by another, or -1.
EXPORT double ping_pong(int first, int second, int64_t rounds) {
    Ball ball = {0, rounds, first, second, -1};
    pthread_t server;
    if (rounds < 2 || pthread_create(&server, nullptr, serve_ball, &ball)) return -1;
    pthread_join(server, nullptr);
    return ball.seconds < 0 ? -1 : ball.seconds / double(rounds - rounds / 2) / 2 * 1e9;
}
