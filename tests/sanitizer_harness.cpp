// SPDX-License-Identifier: Apache-2.0
// Runs one rendered kernel, included below, on buffers that end where their data ends, with threads of its own: built
// with AddressSanitizer, UndefinedBehaviorSanitizer or ThreadSanitizer, which torch's process cannot be.
#include KERNEL
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace {

// A block of its own on the heap, so that a byte past its end is a report.
template <class T> std::unique_ptr<T[]> exactly(int64_t count) { return std::unique_ptr<T[]>(new T[count]()); }

// parallel_for of the strictest kind: every index a thread of its own.
int32_t parallel_for(int64_t begin, int64_t end, int64_t, Body body, void *argument) {
  std::vector<std::thread> threads;
  for (int64_t i = begin; i < end; i++) threads.emplace_back(body, i, i + 1, argument);
  for (auto &thread : threads) thread.join();
  return 0;
}

// A pool that gives everything to one thread.
int32_t serial_for(int64_t begin, int64_t end, int64_t, Body body, void *argument) {
  body(begin, end, argument);
  return 0;
}

template <class T> T number(float value);
template <> float number<float>(float value) { return value; }
template <> uint16_t number<uint16_t>(float value) { return float_to_bf16(value); }  // finite read as fp16 too

int run_rows(int64_t rows, int64_t stride, int64_t threads, ParallelFor pool, std::mt19937 &random) {
  std::uniform_real_distribution<float> real(-1, 1);
  // The last row ends with its K-th element: nothing of the stride follows it.
  const int64_t x_count = rows ? (rows - 1) * stride + K : 0;
  auto x = exactly<X>(x_count);
  auto weight = exactly<uint32_t>(BLOCKS * BLOCK_WORDS);
  auto scales = exactly<Scale>(BLOCKS * GROUPS * 16);
  auto zeros = exactly<uint8_t>(BLOCKS * GROUPS * 16);
  auto bias = exactly<float>(N);
  auto y = exactly<X>(rows * N);
  auto second = exactly<X>(rows * N);
  for (int64_t i = 0; i < x_count; i++) x[i] = number<X>(real(random));
  for (int64_t i = 0; i < BLOCKS * BLOCK_WORDS; i++) weight[i] = (uint32_t)random();
  for (int64_t i = 0; i < BLOCKS * GROUPS * 16; i++) scales[i] = number<Scale>(real(random)), zeros[i] = random() & 15;
  for (int64_t i = 0; i < N; i++) bias[i] = real(random);
  std::memset((void *)y.get(), 0xff, rows * N * sizeof(X));
  const int64_t bytes = awqjit_scratch_bytes(rows, threads);
  char *const scratch = (char *)std::aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
  std::memset(scratch, 0xff, (size_t)bytes);
  Call call = {x.get(), weight.get(), scales.get(), SYMMETRIC ? nullptr : zeros.get(), BIAS ? bias.get() : nullptr,
               y.get(), scratch, stride, rows, threads, pool};
  int error = awqjit_int4_mm(&call);
  // The same on one thread must give the same bytes.
  call.y = second.get();
  call.threads = 1;
  call.parallel_for = nullptr;
  error |= awqjit_int4_mm(&call);
  if (std::memcmp(y.get(), second.get(), rows * N * sizeof(X))) error |= 2;
  std::free(scratch);
  if (error) std::printf("rows %lld stride %lld threads %lld: error %d\n", (long long)rows, (long long)stride, (long long)threads, error);
  return error;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int error = 0;
  for (int64_t rows : {0, 1, 2, 3, 7, 8, 9, 17, 40, 129, 150})
    for (int64_t threads : {1, 2, 5})
      for (int64_t stride : {K, K + 3}) {
        error |= run_rows(rows, stride, threads, parallel_for, random);
        error |= run_rows(rows, stride, threads, serial_for, random);
      }
  if (!error) std::puts("sound");
  return error;
}
