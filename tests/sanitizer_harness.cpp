// SPDX-License-Identifier: Apache-2.0
// Runs one rendered kernel, included below, with threads of its own: built with AddressSanitizer,
// UndefinedBehaviorSanitizer or ThreadSanitizer, which torch's process cannot be.
//
// Sanitizers do not see masked vector loads and stores. So each buffer ends at the end of a page, and the next page
// cannot be touched: one byte too far is a fault of the hardware's.
#include KERNEL
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <sys/mman.h>

namespace {

template <class T> class Guarded {
 public:
  explicit Guarded(int64_t count) {
    const size_t page = 4096, size = ((size_t)count * sizeof(T) + page - 1) / page * page;
    bytes_ = size + 2 * page;  // a forbidden page before and one behind
    base_ = (char *)mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED || (size && mprotect(base_ + page, size, PROT_READ | PROT_WRITE))) std::abort();
    data_ = (T *)(base_ + page + size) - count;
  }
  ~Guarded() { munmap(base_, bytes_); }
  Guarded(const Guarded &) = delete;
  T *get() { return data_; }
  T &operator[](int64_t i) { return data_[i]; }

 private:
  char *base_;
  size_t bytes_;
  T *data_;
};

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
  Guarded<X> x(x_count);
  Guarded<uint32_t> weight(BLOCKS * BLOCK_WORDS);
  Guarded<Scale> scales(BLOCKS * GROUPS * 16);
  Guarded<uint8_t> zeros(BLOCKS * GROUPS * 16);
  Guarded<float> bias(N);
  Guarded<X> y(rows * N);
  Guarded<X> second(rows * N);
  for (int64_t i = 0; i < x_count; i++) x[i] = number<X>(real(random));
  for (int64_t i = 0; i < BLOCKS * BLOCK_WORDS; i++) weight[i] = (uint32_t)random();
  for (int64_t i = 0; i < BLOCKS * GROUPS * 16; i++) scales[i] = number<Scale>(real(random)), zeros[i] = random() & 15;
  for (int64_t i = 0; i < N; i++) bias[i] = real(random);
  std::memset((void *)y.get(), 0xff, rows * N * sizeof(X));
  const int64_t bytes = awqjit_scratch_bytes(rows, threads);
  if (bytes % 64) return std::puts("scratch that is not whole cache lines"), 4;
  Guarded<char> scratch(bytes);
  std::memset(scratch.get(), 0xff, (size_t)bytes);
  Call call = {x.get(), weight.get(), scales.get(), SYMMETRIC ? nullptr : zeros.get(), BIAS ? bias.get() : nullptr,
               y.get(), scratch.get(), stride, rows, threads, pool};
  int error = awqjit_int4_mm(&call);
  // The same on one thread must give the same bytes.
  call.y = second.get();
  call.threads = 1;
  call.parallel_for = nullptr;
  error |= awqjit_int4_mm(&call);
  if (std::memcmp(y.get(), second.get(), rows * N * sizeof(X))) error |= 2;
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
