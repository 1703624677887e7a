// SPDX-License-Identifier: Apache-2.0
// Random tiles of random shapes against scalar models written from the definition, and what an instruction must not touch.
#include <sched.h>

#include <cmath>
#include <thread>
#include <vector>

#include "selftest.h"

namespace {

typedef uint8_t Tile[16][64];

void model_int8(bool a_signed, bool b_signed, int rows, int columns, int depth, Tile c, const Tile a, const Tile b) {
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < columns; n++) {
      int64_t sum = 0;
      for (int k = 0; k < 4 * depth; k++) {
        const uint8_t x = a[m][k], w = b[k / 4][4 * n + k % 4];
        sum += (int64_t)(a_signed ? (int8_t)x : (int)x) * (b_signed ? (int8_t)w : (int)w);
      }
      uint32_t old;
      std::memcpy(&old, &c[m][4 * n], 4);
      old += (uint32_t)sum;
      std::memcpy(&c[m][4 * n], &old, 4);
    }
}

float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }
float from_bf16(const uint8_t *p) {
  uint32_t bits = (uint32_t)(p[0] | p[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return flushed(value);
}
void model_bf16(int rows, int columns, int depth, Tile c, const Tile a, const Tile b) {
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < columns; n++) {
      float part[2] = {0, 0}, sum;
      for (int k = 0; k < 2 * depth; k++)
        part[k % 2] = flushed(std::fma(from_bf16(&a[m][2 * k]), from_bf16(&b[k / 2][4 * n + 2 * (k % 2)]), part[k % 2]));
      std::memcpy(&sum, &c[m][4 * n], 4);
      sum = flushed(flushed(sum) + flushed(part[0] + part[1]));
      std::memcpy(&c[m][4 * n], &sum, 4);
    }
}

// bf16 of all magnitudes whose products still are numbers, subnormal ones among them.
void fill_bf16(Random &random, uint8_t *p, size_t count) {
  for (size_t i = 0; i + 1 < count; i += 2) {
    const int exponent = random.below(8) ? 90 + random.below(70) : random.below(3) * 40;
    const uint16_t value = (uint16_t)(random.below(2) << 15 | exponent << 7 | random.below(128));
    std::memcpy(p + i, &value, 2);
  }
}

const char *const names[] = {"tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud", "tdpbf16ps"};

// c = tile 1, a = tile 2, b = tile 7: no two of the fields that name them are alike.
bool one_product(Random &random, int op) {
  const int rows = 1 + random.below(16), columns = 1 + random.below(16), depth = 1 + random.below(16);
  Config config;
  config.tile(1, rows, 4 * columns);
  config.tile(2, rows, 4 * depth);
  config.tile(7, depth, 4 * columns);
  configure(config);
  Tile a = {}, b = {}, c = {}, wanted, got;
  const int a_stride = 64 + 2 * random.below(50), b_stride = 64 + 2 * random.below(50), c_stride = 64 + random.below(100);
  std::vector<uint8_t> a_memory(16 * a_stride + 64), b_memory(16 * b_stride + 64), c_memory(16 * c_stride + 64);
  for (auto *memory : {&a_memory, &b_memory, &c_memory}) {
    if (op < 4 || memory == &c_memory) random.fill(memory->data(), memory->size());
    else fill_bf16(random, memory->data(), memory->size());
  }
  for (int i = 0; i < rows; i++) std::memcpy(a[i], &a_memory[i * a_stride], 4 * depth);
  for (int i = 0; i < depth; i++) std::memcpy(b[i], &b_memory[i * b_stride], 4 * columns);
  for (int i = 0; i < rows; i++) std::memcpy(c[i], &c_memory[i * c_stride], 4 * columns);
  if (op == 4)  // the sum to start from: numbers, not any bytes
    for (int i = 0; i < rows; i++)
      for (int n = 0; n < columns; n++) {
        const float value = (float)(random.below(20001) - 10000) * (random.below(4) ? 1e-3f : 1e-41f);
        std::memcpy(&c[i][4 * n], &value, 4);
        std::memcpy(&c_memory[i * c_stride + 4 * n], &value, 4);
      }
  std::memcpy(wanted, c, sizeof c);
  std::memset(got, 0xee, sizeof got);
  LOAD(2, a_memory.data(), a_stride);
  LOAD_T1(7, b_memory.data(), b_stride);
  LOAD(1, c_memory.data(), c_stride);
  switch (op) {
    case 0: DOT(tdpbssd, 1, 2, 7); break;
    case 1: DOT(tdpbsud, 1, 2, 7); break;
    case 2: DOT(tdpbusd, 1, 2, 7); break;
    case 3: DOT(tdpbuud, 1, 2, 7); break;
    default: DOT(tdpbf16ps, 1, 2, 7);
  }
  STORE(1, got, 64);
  if (op < 4) model_int8(op < 2, op == 0 || op == 2, rows, columns, depth, wanted, a, b);
  else model_bf16(rows, columns, depth, wanted, a, b);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 64; j++)  // what lies outside the tile stays as it was
      if (got[i][j] != (i < rows && j < 4 * columns ? wanted[i][j] : 0xee)) return false;
  return true;
}

}  // namespace

void test_products() {
  Random random{88172645463325252ull};
  for (int i = 0; i < 2000; i++) CHECK(one_product(random, i % 5), "%s, repeat %d", names[i % 5], i);
}

// Whatever the program has told MXCSR, and told neither by nor to the instruction.
void test_subnormals() {
  Config config;
  for (int t = 0; t < 3; t++) config.tile(t, 1, 4);
  configure(config);
  const uint32_t before = __builtin_ia32_stmxcsr();
  const uint16_t a[2] = {0x0001, 0x1c80}, b[2] = {0x7180, 0x1c80};  // 2^-133 * 2^100, 2^-70 * 2^-70
  float sum = 0;
  for (const uint32_t mode : {0x1f80u, 0x9fc0u}) {
    __builtin_ia32_ldmxcsr(mode);
    LOAD(0, &sum, 64);
    LOAD(1, a, 64);
    LOAD(2, b, 64);
    DOT(tdpbf16ps, 0, 1, 2);
    STORE(0, &sum, 64);
    const uint32_t after = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before);
    CHECK(sum == 0 && after == mode, "%g, mode %x became %x", sum, mode, after);
  }
}

void test_threads() {
  std::vector<std::thread> threads;
  int wrong[8] = {};
  for (int t = 0; t < 8; t++)
    threads.emplace_back([&, t] {
      Random random{1234567u + 7919u * (unsigned)t};
      for (int i = 0; i < 200; i++) {
        wrong[t] += !one_product(random, i % 4);
        if (i % 8 == 0) sched_yield();
      }
      RELEASE();
    });
  for (auto &thread : threads) thread.join();
  for (int t = 0; t < 8; t++) CHECK(!wrong[t], "thread %d: %d wrong", t, wrong[t]);
  // A thread that configured no tiles has none, whatever the others have.
  configure(Config::full());
  int signal = 0;
  std::thread([&] { signal = signal_of([] { ZERO(0); }); }).join();
  CHECK(signal == SIGILL, "signal %d", signal);
}
