// SPDX-License-Identifier: Apache-2.0
// What the emulator's own tests share: real instructions as the assembler encodes them, and a record of failures.
#pragma once
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "emulator.h"

#define LOAD(t, p, s) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void *)(p)), "r"((int64_t)(s)) : "memory")
#define LOAD_T1(t, p, s) asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"((const void *)(p)), "r"((int64_t)(s)) : "memory")
#define STORE(t, p, s) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(p)), "r"((int64_t)(s)) : "memory")
#define ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define RELEASE() asm volatile("tilerelease" ::)
#define DOT(op, c, a, b) asm volatile(#op " %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void tile(int t, int count, int bytes) {
    rows[t] = (uint8_t)count;
    row_bytes[t] = (uint16_t)bytes;
  }
  static Config full() {
    Config config;
    for (int t = 0; t < 8; t++) config.tile(t, 16, 64);
    return config;
  }
};
inline void configure(const Config &config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
inline Config configuration() {
  Config config;
  asm volatile("sttilecfg %0" : "=m"(config)::"memory");
  return config;
}

extern int checks, failures;
#define CHECK(condition, ...)                                       \
  do {                                                              \
    checks++;                                                       \
    if (!(condition)) {                                             \
      failures++;                                                   \
      std::printf("line %d: not %s: ", __LINE__, #condition);       \
      std::printf(__VA_ARGS__);                                     \
      std::puts("");                                                \
    }                                                               \
  } while (0)

struct Random {
  uint64_t state;
  uint64_t operator()() {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }
  int below(int limit) { return (int)((*this)() >> 40) % limit; }
  void fill(void *p, size_t count) {
    for (size_t i = 0; i < count; i++) ((uint8_t *)p)[i] = (uint8_t)((*this)() >> 30);
  }
};

// The signal a body raises, 0 for none. Handlers were there before the emulator's, which hands on what is not its own.
extern sigjmp_buf caught;
extern volatile uintptr_t caught_address;
template <class Body> int signal_of(Body body) {
  const int signal = sigsetjmp(caught, 1);
  if (signal) return signal;
  body();
  return 0;
}
