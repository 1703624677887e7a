// SPDX-License-Identifier: Apache-2.0
// Runs one kernel on recorded inputs, without Python, and writes its outputs: `harness KERNEL INPUTS OUTPUTS`. KERNEL is
// a shared library; built with -DLINKED the kernel is part of the program and the argument is only its name.
//
// INPUTS, little-endian: int64 bytes of the weight, of the scales, of the zeros (0: none), of the bias (0: none), size of
// an element of x and y, N, calls; the four blobs; for each call int64 rows, row stride, bytes of x, and x.
// OUTPUTS: for each call y on one thread, y on three, y on three whose floating-point control register is set against
// the kernel (flush to zero, round towards zero).
//
// The C library is all it needs: a compiler's C++ library for another machine takes minutes to build where none is there.
// Each buffer ends at the end of a page that is followed by one that cannot be touched.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

extern "C" {
typedef void (*Body)(int64_t begin, int64_t end, void *argument);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Body body, void *argument);
struct Call {
  const void *x;
  const uint32_t *weight;
  const void *scales;
  const uint8_t *zeros;
  const float *bias;
  void *y;
  void *scratch;
  int64_t x_stride, rows, threads;
  ParallelFor parallel_for;
};
#if defined(LINKED)
const char *awqjit_slug();
int64_t awqjit_scratch_bytes(int64_t rows, int64_t threads);
int32_t awqjit_int4_mm(const Call *call);
#endif
}

namespace {

[[noreturn]] void fail(const char *what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

struct Kernel {
  const char *(*slug)();
  int64_t (*scratch_bytes)(int64_t, int64_t);
  int32_t (*int4_mm)(const Call *);
};
#if defined(LINKED)
Kernel load(const char *) { return {awqjit_slug, awqjit_scratch_bytes, awqjit_int4_mm}; }
#else
Kernel load(const char *path) {
  void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(dlerror());
  Kernel kernel;
  *(void **)&kernel.slug = dlsym(library, "awqjit_slug");
  *(void **)&kernel.scratch_bytes = dlsym(library, "awqjit_scratch_bytes");
  *(void **)&kernel.int4_mm = dlsym(library, "awqjit_int4_mm");
  if (!kernel.slug || !kernel.scratch_bytes || !kernel.int4_mm) fail("the library lacks a function");
  return kernel;
}
#endif

class Guarded {
 public:
  explicit Guarded(int64_t bytes) : bytes_((size_t)bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_ = (bytes_ + page - 1) / page * page;
    base_ = (char *)mmap(nullptr, size_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) fail("no memory");
    base_ += page;
    if (size_ && mprotect(base_, size_, PROT_READ | PROT_WRITE)) fail("no guard page");
    std::memset(base_, POISON, size_);
  }
  Guarded(const Guarded &) = delete;
  char *get() { return base_ + size_ - bytes_; }
  int64_t size() const { return (int64_t)bytes_; }
  // Nothing was written before the buffer, on its first page.
  bool intact() const {
    for (size_t i = 0; i < size_ - bytes_; i++)
      if (base_[i] != POISON) return false;
    return true;
  }

 private:
  static constexpr char POISON = (char)0xff;  // NaN in every type, and no small number
  char *base_;
  size_t bytes_, size_;
};

void read(FILE *file, void *to, int64_t bytes) {
  if (bytes && std::fread(to, 1, (size_t)bytes, file) != (size_t)bytes) fail("the inputs end too soon");
}

uint64_t control() {
  uint64_t value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void set_control(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
constexpr uint64_t HOSTILE = 1 << 24 | 3 << 22;  // FZ, RMode

// parallel_for of the strictest kind: every index a thread of its own.
constexpr int64_t THREADS = 3;
struct Share {
  Body body;
  int64_t index;
  void *argument;
  uint64_t mode;
};
void *work(void *pointer) {
  const Share &share = *(const Share *)pointer;
  set_control(share.mode);
  share.body(share.index, share.index + 1, share.argument);
  if (control() != share.mode) fail("a kernel has changed the caller's floating-point mode");
  return nullptr;
}
int32_t parallel_for(int64_t begin, int64_t end, int64_t, Body body, void *argument) {
  if (end - begin > THREADS) fail("more workers than threads");
  pthread_t threads[THREADS];
  Share shares[THREADS];
  for (int64_t i = 0; i < end - begin; i++) {
    shares[i] = {body, begin + i, argument, control()};
    if (pthread_create(&threads[i], nullptr, work, &shares[i])) fail("no thread");
  }
  for (int64_t i = 0; i < end - begin; i++) pthread_join(threads[i], nullptr);
  return 0;
}

}  // namespace

int main(int count, char **arguments) {
  if (count != 4) fail("harness KERNEL INPUTS OUTPUTS");
  const Kernel kernel = load(arguments[1]);
  FILE *const in = std::fopen(arguments[2], "rb"), *const out = std::fopen(arguments[3], "wb");
  if (!in || !out) fail("inputs or outputs cannot be opened");
  int64_t head[7];
  read(in, head, sizeof head);
  const int64_t element = head[4], columns = head[5];
  Guarded weight(head[0]), scales(head[1]), zeros(head[2]), bias(head[3]);
  Guarded *const blobs[] = {&weight, &scales, &zeros, &bias};
  for (Guarded *blob : blobs) read(in, blob->get(), blob->size());
  for (int64_t i = 0; i < head[6]; i++) {
    int64_t shape[3];
    read(in, shape, sizeof shape);
    Guarded x(shape[2]);
    read(in, x.get(), shape[2]);
    for (int run = 0; run < 3; run++) {
      const int64_t threads = run ? THREADS : 1;
      Guarded y(shape[0] * columns * element), scratch(kernel.scratch_bytes(shape[0], threads));
      if (scratch.size() % 64) fail("scratch memory is not whole cache lines");
      const Call call = {x.get(), (const uint32_t *)weight.get(), scales.get(),
                         zeros.size() ? (const uint8_t *)zeros.get() : nullptr, bias.size() ? (const float *)bias.get() : nullptr,
                         y.get(), scratch.get(), shape[1], shape[0], threads, run ? parallel_for : nullptr};
      const uint64_t before = control();
      if (run == 2) set_control(HOSTILE);
      const int32_t error = kernel.int4_mm(&call);
      const bool kept = control() == (run == 2 ? HOSTILE : before);
      set_control(before);
      if (error) fail("the kernel reports an error");
      if (!kept) fail("a kernel has changed the caller's floating-point mode");
      if (!y.intact() || !scratch.intact()) fail("a write before a buffer");
      if (std::fwrite(y.get(), 1, (size_t)y.size(), out) != (size_t)y.size()) fail("the outputs cannot be written");
    }
  }
  if (std::fclose(out)) fail("the outputs cannot be written");
  std::puts(kernel.slug());
}
