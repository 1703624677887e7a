// SPDX-License-Identifier: Apache-2.0
// The emulator's own tests. `selftest NAME` runs one of them, and fails if a check in it does.
#include "selftest.h"

#include <sys/mman.h>

#include <cstdlib>
#include <ctime>
#include <initializer_list>

int checks, failures;
sigjmp_buf caught;
volatile uintptr_t caught_address;

void test_products();
void test_subnormals();
void test_threads();

extern "C" {
Config selftest_config = Config::full();
extern char traced[], traced_end[];  // labels in test_registers
}

namespace {

void catch_signal(int signal, siginfo_t *info, void *) {
  caught_address = (uintptr_t)info->si_addr;
  siglongjmp(caught, signal);
}

alignas(64) uint8_t memory[1 << 15], got[16][64];

// Stores what a load has brought to tile 5, and compares with rows `stride` apart.
bool loaded(const uint8_t *from, int64_t stride) {
  std::memset(got, 0, sizeof got);
  STORE(5, got, 64);
  for (int i = 0; i < 16; i++)
    if (std::memcmp(got[i], from + i * stride, 64)) return false;
  return true;
}


void test_addressing() {
  Random random{99};
  random.fill(memory, sizeof memory);
  asm volatile("ldtilecfg selftest_config(%%rip)" ::: "memory");
  CHECK(configuration().rows[7] == 16, "relative to the next instruction");
  configure(Config());
  asm volatile("lea selftest_config-40(%%rip), %%r9\n\tmov $5, %%r10d\n\tldtilecfg (%%r9,%%r10,8)" ::: "r9", "r10", "memory");
  CHECK(configuration().row_bytes[0] == 64, "a configuration has an ordinary address");
  const uint8_t *const m = memory;
  const int64_t s = 96;
#define FORM(text, from, stride, setup)                                                                   \
  asm volatile(setup "\n\ttileloadd " text ", %%tmm5" ::[m] "r"(m), [s] "r"(s)                            \
               : "rax", "rcx", "rdx", "r8", "r12", "r13", "r14", "r15", "memory");                        \
  CHECK(loaded(from, stride), "%s", text)
  FORM("(%[m],%[s],1)", m, 96, "");
  FORM("(%[m],%[s],2)", m, 192, "");
  FORM("(%[m],%[s],4)", m, 384, "");
  FORM("(%[m],%[s],8)", m, 768, "");
  FORM("127(%[m],%[s],1)", m + 127, 96, "");
  FORM("128(%[m],%[s],1)", m + 128, 96, "");
  FORM("4096(%[m],%[s],1)", m + 4096, 96, "");
  FORM("-64(%%r15,%%rcx,1)", m, 96, "lea 64(%[m]), %%r15; mov %[s], %%rcx");
  FORM("-4096(%%r13,%%rax,1)", m, 96, "lea 4096(%[m]), %%r13; mov %[s], %%rax");
  FORM("(%%r12,%%rax,1)", m, 96, "mov %[m], %%r12; mov %[s], %%rax");
  FORM("(%%r13,%%r14,1)", m, 96, "mov %[m], %%r13; mov %[s], %%r14");
  FORM("(%%r8,%%r12,1)", m, 96, "mov %[m], %%r8; mov %[s], %%r12");
  FORM("(%%rcx,%%rax,1)", m + 4096, -96, "lea 4096(%[m]), %%rcx; mov %[s], %%rax; neg %%rax");
  FORM("(%%r12)", m, 0, "mov %[m], %%r12");
  FORM("%%fs:(%%rcx,%%rax,1)", m, 96, "mov %%fs:0, %%rdx; mov %[m], %%rcx; sub %%rdx, %%rcx; mov %[s], %%rax");
#undef FORM
}
// A base of rbp or rsp cannot be left to the compiler: it may need them in between.
void test_frame_registers() {
  configure(Config::full());
  const uint8_t *const m = memory;
  asm volatile("mov %%rbp, %%r8\n\tmov %0, %%rbp\n\ttileloadd 8(%%rbp,%1,1), %%tmm5\n\tmov %%r8, %%rbp" ::"r"(m), "r"((int64_t)64) : "r8", "memory");
  CHECK(loaded(m + 8, 64), "rbp");
  uint8_t *stack;
  asm volatile("mov %%rsp, %0" : "=r"(stack));
  alignas(64) uint8_t copy[1024];
  asm volatile("tileloadd -1024(%%rsp,%1,1), %%tmm5\n\ttilestored %%tmm5, (%0,%1,1)" ::"r"(copy), "r"((int64_t)0) : "memory");
  CHECK(!std::memcmp(copy, stack - 1024, 64), "rsp");
  // Nothing but a base without any register: an absolute address below 2 GiB.
  void *const low = mmap((void *)0x10000000, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  CHECK(low != MAP_FAILED, "no page at 0x10000000");
  std::memcpy(low, memory, 4096);
  asm volatile("tileloadd 0x10000040(,%0,1), %%tmm5" ::"r"((int64_t)64) : "memory");
  CHECK(loaded((uint8_t *)low + 64, 64), "absolute");
  asm volatile("mov $0x10000000, %%eax\n\tmovabs $0xf00000000, %%rcx\n\tor %%rcx, %%rax\n\ttileloadd (%%eax,%0,1), %%tmm5" ::"r"((int32_t)64) : "rax", "rcx", "memory");
  CHECK(loaded((uint8_t *)low, 64), "32-bit address");
}

void test_configuration() {
  Config config, nothing;
  for (int t = 0; t < 8; t++) config.tile(t, 1 + t, 4 * (t + 3));
  configure(config);
  Config back = configuration();
  CHECK(!std::memcmp(&config, &back, 64), "configured");
  nothing.palette = 0;
  RELEASE();
  back = configuration();
  CHECK(!std::memcmp(&nothing, &back, 64), "released");
  configure(config);
  configure(nothing);
  back = configuration();
  CHECK(!std::memcmp(&nothing, &back, 64), "palette 0");
  configure(Config::full());
  LOAD(3, memory, 64);
  configure(Config::full());
  std::memset(got, 1, sizeof got);
  STORE(3, got, 64);
  for (int i = 0; i < 16 * 64; i++) CHECK(!got[i / 64][i % 64], "byte %d is left over", i);
}

void test_faults() {
  const auto config_fault = [](void (*change)(Config &)) {
    Config config = Config::full();
    change(config);
    return signal_of([&] { configure(config); });
  };
  CHECK(config_fault([](Config &) {}) == 0, "a good configuration");
  CHECK(config_fault([](Config &c) { c.palette = 2; }) == SIGSEGV, "palette");
  CHECK(config_fault([](Config &c) { c.reserved[13] = 1; }) == SIGSEGV, "reserved");
  CHECK(config_fault([](Config &c) { c.row_bytes[3] = 65; }) == SIGSEGV, "bytes");
  CHECK(config_fault([](Config &c) { c.rows[3] = 17; }) == SIGSEGV, "rows");
  CHECK(config_fault([](Config &c) { c.rows[3] = 0; }) == SIGSEGV, "no rows");
  CHECK(config_fault([](Config &c) { c.row_bytes[3] = 0; }) == SIGSEGV, "no bytes");
  CHECK(config_fault([](Config &c) { c.tile(8, 16, 64); }) == SIGSEGV, "ninth tile");
  CHECK(config_fault([](Config &c) { c.tile(15, 16, 64); }) == SIGSEGV, "sixteenth tile");
  RELEASE();
  CHECK(signal_of([] { ZERO(0); }) == SIGILL, "tilezero unconfigured");
  CHECK(signal_of([] { LOAD(0, memory, 64); }) == SIGILL, "tileloadd unconfigured");
  CHECK(signal_of([] { STORE(0, got, 64); }) == SIGILL, "tilestored unconfigured");
  CHECK(signal_of([] { DOT(tdpbusd, 0, 1, 2); }) == SIGILL, "tdpbusd unconfigured");
  const auto dot_fault = [](int tile, int rows, int bytes) {
    Config config = Config::full();
    config.tile(tile, rows, bytes);
    configure(config);
    return signal_of([] { DOT(tdpbusd, 0, 1, 2); });
  };
  CHECK(dot_fault(3, 16, 64) == 0, "good shapes");
  CHECK(dot_fault(1, 8, 64) == SIGILL, "rows of a");
  CHECK(dot_fault(2, 16, 32) == SIGILL, "columns of b");
  CHECK(dot_fault(1, 16, 32) == SIGILL, "depth of a");
  CHECK(dot_fault(2, 8, 64) == SIGILL, "depth of b");
  CHECK(dot_fault(0, 16, 62) == SIGILL, "bytes not a multiple of 4");
  CHECK(dot_fault(1, 0, 0) == SIGILL, "unused tile");
  configure(Config::full());
  // The assembler refuses equal tiles: tdpbusd %tmm1, %tmm1, %tmm0 and %tmm1, %tmm0, %tmm0.
  CHECK(signal_of([] { asm volatile(".byte 0xc4, 0xe2, 0x71, 0x5e, 0xc1"); }) == SIGILL, "a is b");
  CHECK(signal_of([] { asm volatile(".byte 0xc4, 0xe2, 0x71, 0x5e, 0xc0"); }) == SIGILL, "c is a");
  CHECK(signal_of([] { asm volatile("ud2"); }) == SIGILL, "another illegal instruction");
  CHECK(signal_of([] { asm volatile("int3"); }) == SIGTRAP, "another breakpoint");
  CHECK(signal_of([] { LOAD(0, 16, 64); }) == SIGSEGV && caught_address == 16, "nothing at 16");

  char *const page = (char *)mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(page + 4096, 4096, PROT_NONE);
  const auto load_at_end = [&](int rows, int width, int over) {
    Config config = Config::full();
    config.tile(0, rows, width);
    configure(config);
    return signal_of([&] { LOAD(0, page + 4096 - rows * width + over, width); });
  };
  CHECK(load_at_end(5, 60, 0) == 0, "five rows fit");
  CHECK(load_at_end(5, 60, 4) == SIGSEGV, "four bytes too many");
  CHECK(caught_address == (uintptr_t)page + 4096, "fault at %zx", (size_t)caught_address);
  CHECK(load_at_end(16, 64, 64) == SIGSEGV, "a row too many");
  // Once the memory is there, the instruction goes on with the row it stopped at.
  CHECK(configuration().start_row == 15, "row %d", configuration().start_row);
  mprotect(page + 4096, 4096, PROT_READ | PROT_WRITE);
  configure(Config::full());
  mprotect(page, 4096, PROT_READ);
  CHECK(signal_of([&] { STORE(0, page, 64); }) == SIGSEGV, "a store to memory that may only be read");
}

void test_permission() {
  uint64_t mask = 0;
  CHECK(amx_arch_prctl(0x1022, (unsigned long)&mask) == 0 && !(mask >> 18 & 1), "not permitted yet: %zx", (size_t)mask);
  CHECK(signal_of([] { configure(Config::full()); }) == SIGILL, "not permitted");
  CHECK(std::strstr(amx_last_fault(), "permission"), "%s", amx_last_fault());
  amx_set(AMX_OPTION_DENY, 28);
  CHECK(amx_arch_prctl(0x1023, 18) == 28, "ENOSPC");
  CHECK(signal_of([] { configure(Config::full()); }) == SIGILL, "denied");
  amx_set(AMX_OPTION_DENY, 0);
  CHECK(amx_arch_prctl(0x1023, 17) == 22, "not the right component");
  CHECK(amx_arch_prctl(0x1023, 18) == 0 && amx_permission_requests() == 2, "%d requests", amx_permission_requests());
  CHECK(amx_arch_prctl(0x1022, (unsigned long)&mask) == 0 && mask >> 18 & 1, "permitted: %zx", (size_t)mask);
  CHECK(signal_of([] { configure(Config::full()); }) == 0, "permitted");
}

void test_counters() {
  configure(Config::full());
  amx_reset();
  amx_counters total;
  ZERO(0);
  LOAD(1, memory, 64);
  LOAD_T1(2, memory + 32, 64);
  DOT(tdpbssd, 0, 1, 2);
  DOT(tdpbf16ps, 0, 1, 3);
  STORE(0, got, 64);
  amx_total(&total);
  CHECK(total.executed[AMX_TDPBSSD] == 1 && total.executed[AMX_TDPBF16PS] == 1 && total.executed[AMX_TDPBUSD] == 0, "dots");
  CHECK(total.executed[AMX_TILELOADD] == 1 && total.executed[AMX_TILELOADDT1] == 1, "loads");
  CHECK(total.executed[AMX_TILEZERO] == 1 && total.executed[AMX_TILESTORED] == 1, "zero and store");
  CHECK(total.executed[AMX_LDTILECFG] == 0 && total.rows == 48 && total.split_loads == 16, "%zu split", (size_t)total.split_loads);
  CHECK(total.undefined_reads == 1, "%zu undefined", (size_t)total.undefined_reads);
  configure(Config::full());
  STORE(1, got, 64);
  amx_total(&total);
  CHECK(total.executed[AMX_LDTILECFG] == 1 && total.undefined_reads == 2, "a configuration undefines tiles");
  CHECK(total.traps <= 8, "%zu traps", (size_t)total.traps);
}

// Everything else the program sees is as it was: vectors, masks, flags. And the trace has the right addresses.
void test_registers() {
  configure(Config::full());
  alignas(64) static uint8_t in[32][64], out[32][64];
  Random random{3};
  random.fill(in, sizeof in);
  LOAD(1, in, 64);
  LOAD(2, in, 64);
  ZERO(0);
  uint64_t mask = 0x123456789abcdefull, mask_after, flags, flags_after;
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) \
  X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31)
#define READ(n) "vmovdqu64 64*" #n "(%[in]), %%zmm" #n "\n\t"
#define WRITE(n) "vmovdqu64 %%zmm" #n ", 64*" #n "(%[out])\n\t"
#define NAME(n) "xmm" #n,
  asm volatile(EACH(READ) "kmovq %[mask], %%k3\n\tstc\n\tpushfq\n\tpop %[f0]\n\ttdpbusd %%tmm2, %%tmm1, %%tmm0\n\t"
               "tdpbf16ps %%tmm2, %%tmm1, %%tmm0\n\tpushfq\n\tpop %[f1]\n\tkmovq %%k3, %[after]\n\t" EACH(WRITE)
               : [after] "=&r"(mask_after), [f0] "=&r"(flags), [f1] "=&r"(flags_after)
               : [in] "r"(in), [out] "r"(out), [mask] "r"(mask)
               : EACH(NAME) "k3", "memory");
  CHECK(!std::memcmp(in, out, sizeof in), "vectors");
  CHECK(mask == mask_after, "masks");
  CHECK(flags == flags_after, "flags %zx, then %zx", (size_t)flags, (size_t)flags_after);

  static uint64_t entries[17 * 100];
  amx_trace_start(traced, traced_end, entries, 100);
  asm volatile(".globl traced\ntraced: mov $7, %%ecx\n\ttilezero %%tmm0\n\ttilezero %%tmm1\n\tinc %%rcx\n\tinc %%rcx\n"
               ".globl traced_end\ntraced_end:" ::: "rcx");
  const size_t count = amx_trace_stop();
  CHECK(count == 5, "%zu instructions", count);
  const uint64_t at[5] = {0, 5, 10, 15, 18}, rcx[5] = {0, 7, 7, 7, 8};
  for (size_t i = 0; i < count && i < 5; i++) {
    CHECK(entries[17 * i] - (uint64_t)traced == at[i], "instruction %zu at %zu", i, (size_t)(entries[17 * i] - (uint64_t)traced));
    CHECK(i == 0 || entries[17 * i + 2] == rcx[i], "rcx before instruction %zu: %zu", i, (size_t)entries[17 * i + 2]);
  }
}

// Prints how many tile instructions a second an inner loop of a kernel gets.
void measure_speed() {
  configure(Config::full());
  const auto seconds = [] {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
  };
  const double start = seconds();
  const int repeats = 20000;
  for (int i = 0; i < repeats; i++) {
    LOAD(4, memory, 64);
    LOAD(6, memory + 2048, 64);
    DOT(tdpbssd, 0, 4, 6);
    LOAD(7, memory + 3072, 64);
    DOT(tdpbssd, 1, 4, 7);
    LOAD(5, memory + 1024, 64);
    DOT(tdpbssd, 2, 5, 6);
    DOT(tdpbssd, 3, 5, 7);
  }
  std::printf("%.0f\n", 8 * repeats / (seconds() - start));
  checks++;
}

const struct {
  const char *name;
  void (*run)();
} tests[] = {{"products", test_products},     {"subnormals", test_subnormals},   {"threads", test_threads},
             {"addressing", test_addressing}, {"frame", test_frame_registers},   {"configuration", test_configuration},
             {"faults", test_faults},         {"permission", test_permission},   {"counters", test_counters},
             {"registers", test_registers},   {"speed", measure_speed}};

}  // namespace

int main(int count, char **arguments) {
  const char *const wanted = count > 1 ? arguments[1] : "";
  for (int signal : {SIGILL, SIGTRAP, SIGSEGV, SIGBUS}) {
    struct sigaction action = {};
    action.sa_sigaction = catch_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(signal, &action, nullptr);
  }
  if (amx_install()) return 3;
  for (const auto &test : tests) {
    if (std::strcmp(test.name, wanted)) continue;
    if (std::strcmp(wanted, "permission") && amx_arch_prctl(0x1023, 18)) return 3;
    if (sigsetjmp(caught, 1)) return std::printf("an unexpected signal: %s\n", amx_last_fault()), 2;
    test.run();
    return failures || !checks;
  }
  std::puts("no such test");
  return 3;
}
