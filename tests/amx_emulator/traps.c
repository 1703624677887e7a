// SPDX-License-Identifier: Apache-2.0
// Signals: which are ours, where the program goes on, and what earlier handlers get.
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "parts.h"

enum { PAGE = 4096, LONGEST = 15, BREAKPOINT = 0xcc, TRAP_FLAG = 0x100 };

// ---- patched sites ----------------------------------------------------------------------------------------------
// An illegal instruction costs a virtual machine several times what a breakpoint does. So the first trap of a site puts
// a breakpoint in the place of its first byte. One byte is written at once: other threads see the old or the new one.
enum { SITES = 1 << 14, PROBES = 64 };
static struct {
  uint64_t address;
  uint8_t first;
} sites[SITES];

static unsigned slot_of(uint64_t address) { return (unsigned)(address * 0x9e3779b97f4a7c15ull >> 50) % SITES; }

static int find_site(uint64_t address) {
  unsigned slot = slot_of(address);
  for (int probe = 0; probe < PROBES; probe++, slot = (slot + 1) % SITES) {
    const uint64_t found = __atomic_load_n(&sites[slot].address, __ATOMIC_ACQUIRE);
    if (found == address) return (int)slot;
    if (!found) break;
  }
  return -1;
}

static void patch_site(uint64_t address) {
  static int lock;  // one at a time: two sites of a page would take its permissions from each other
  while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) amx_system_call(SYS_sched_yield, 0, 0, 0, 0);
  const uint8_t first = *(volatile uint8_t *)address;
  unsigned slot = slot_of(address);
  for (int probe = 0; first != BREAKPOINT && probe < PROBES; probe++, slot = (slot + 1) % SITES) {
    const uint64_t found = __atomic_load_n(&sites[slot].address, __ATOMIC_ACQUIRE);
    if (found && found != address) continue;  // the same: code that was unloaded, and new code lies there
    sites[slot].first = first;
    __atomic_store_n(&sites[slot].address, address, __ATOMIC_RELEASE);
    const long page = (long)(address & ~(uint64_t)(PAGE - 1));
    if (!amx_system_call(SYS_mprotect, page, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, 0)) {
      __atomic_store_n((uint8_t *)address, BREAKPOINT, __ATOMIC_SEQ_CST);
      amx_system_call(SYS_mprotect, page, PAGE, PROT_READ | PROT_EXEC, 0);
    }
    break;
  }
  __atomic_store_n(&lock, 0, __ATOMIC_RELEASE);
}

// The AMX instruction at `address`, which is known to be executable there, seen through a breakpoint.
static int fetch(uint64_t address, struct instruction *out) {
  uint8_t bytes[LONGEST] = {0};
  const size_t left = PAGE - (address & (PAGE - 1)), here = left < LONGEST ? left : LONGEST;
  memcpy(bytes, (const void *)address, here);
  if (bytes[0] == BREAKPOINT) {
    const int slot = find_site(address);
    if (slot < 0) return 0;
    bytes[0] = sites[slot].first;
  }
  const int vex = bytes[0] == 0xc4 || bytes[0] == 0x67 || (bytes[0] & 0xfe) == 0x64 || (bytes[0] & 0xe7) == 0x26;
  const int decoded = amx_decode(bytes, out);
  // The next page is read only where the instruction goes on in it.
  if (here < LONGEST && (decoded ? (size_t)out->length > here : vex && here < 10)) {
    memcpy(bytes + here, (const void *)(address + here), LONGEST - here);
    return amx_decode(bytes, out);
  }
  return decoded;
}

// ---- trace ------------------------------------------------------------------------------------------------------
static struct {
  uint64_t *entries, low, high;
  size_t count, most;
  volatile int on;
} trace;

static void note(const ucontext_t *context, uint64_t address) {
  if (address < trace.low || address >= trace.high || trace.count >= trace.most) return;
  uint64_t *const entry = trace.entries + 17 * trace.count++;
  entry[0] = address;
  for (int i = 0; i < 16; i++) entry[1 + i] = (uint64_t)amx_register(context, i);
}

void amx_trace_start(const void *low, const void *high, uint64_t *entries, size_t most) {
  trace.entries = entries;
  trace.low = (uint64_t)low;
  trace.high = (uint64_t)high;
  trace.count = 0;
  trace.most = most;
  trace.on = 1;
  __asm__ volatile("" ::: "memory");
  __builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() | TRAP_FLAG);
}

size_t amx_trace_stop(void) {
  __builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() & ~(uint64_t)TRAP_FLAG);
  __asm__ volatile("" ::: "memory");  // only now: the instruction that clears the flag traps once more
  trace.on = 0;
  return trace.count;
}

// ---- handlers ---------------------------------------------------------------------------------------------------
static const int signals[4] = {SIGILL, SIGTRAP, SIGSEGV, SIGBUS};
static struct sigaction before[4];

static void hand_on(int signal, siginfo_t *info, void *context) {
  int i = 0;
  while (signals[i] != signal) i++;
  const struct sigaction *const old = &before[i];
  if (old->sa_flags & SA_SIGINFO) {
    old->sa_sigaction(signal, info, context);
  } else if (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN) {
    old->sa_handler(signal);
  } else {  // sent, not raised again by the instruction: where that is a breakpoint it would look different
    struct sigaction standard;
    memset(&standard, 0, sizeof standard);
    sigaction(signal, &standard, 0);
    amx_system_call(SYS_tgkill, getpid(), amx_system_call(SYS_gettid, 0, 0, 0, 0), signal, 0);
  }
}

static void emulate(ucontext_t *context, uint64_t address, struct instruction *one, siginfo_t *info) {
  struct thread_state *const thread = amx_thread();
  const int stepping = trace.on && context->uc_mcontext.gregs[REG_EFL] & TRAP_FLAG;
  thread->counters.traps++;
  for (;;) {
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)address;
    if (stepping) note(context, address);
    const int signal = amx_execute(thread, context, one, address);
    if (signal == SIGILL) {
      info->si_signo = SIGILL;
      info->si_code = ILL_ILLOPN;
      info->si_addr = (void *)address;
      hand_on(SIGILL, info, context);
    }
    if (signal) return;
    address += (uint64_t)one->length;
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)address;
    // On through the instructions that follow at once; near a page's end only where they trap themselves.
    if ((address & (PAGE - 1)) > PAGE - 16 || !fetch(address, one)) break;
  }
  // The first instruction after a signal is executed before the trap flag is looked at.
  if (stepping && !fetch(address, one)) note(context, address);
}

static void on_illegal(int signal, siginfo_t *info, void *opaque) {
  ucontext_t *const context = opaque;
  const int saved = errno;
  const uint64_t address = (uint64_t)context->uc_mcontext.gregs[REG_RIP];
  struct instruction one;
  if (info->si_code <= 0 || !fetch(address, &one)) {  // sent by someone, or an instruction of another kind
    hand_on(signal, info, opaque);
    return;
  }
  if (amx_options[AMX_OPTION_PATCH]) patch_site(address);
  emulate(context, address, &one, info);
  errno = saved;
}

static void on_trap(int signal, siginfo_t *info, void *opaque) {
  ucontext_t *const context = opaque;
  const int saved = errno;
  const uint64_t next = (uint64_t)context->uc_mcontext.gregs[REG_RIP];
  struct instruction one;
  if (info->si_code == TRAP_TRACE && trace.on) {
    if (next >= trace.low && next < trace.high && !fetch(next, &one)) note(context, next);
  } else if (info->si_code == SI_KERNEL && find_site(next - 1) >= 0 && fetch(next - 1, &one)) {
    emulate(context, next - 1, &one, info);
  } else {
    hand_on(signal, info, opaque);
  }
  errno = saved;
}

static void on_memory_fault(int signal, siginfo_t *info, void *opaque) {
  struct thread_state *const thread = amx_thread_or_null();
  if (thread && thread->touching) {
    // Faults inside a row are reported where the row begins to be missing.
    thread->fault_signal = signal;
    thread->fault_code = info->si_code;
    thread->touched = (uintptr_t)info->si_addr;
    siglongjmp(thread->fault, 1);
  }
  hand_on(signal, info, opaque);
}

static void (*const handlers[4])(int, siginfo_t *, void *) = {on_illegal, on_trap, on_memory_fault, on_memory_fault};

int amx_install(void) {
  for (int i = 0; i < 4; i++) {
    struct sigaction current, ours;
    if (sigaction(signals[i], 0, &current)) return errno;
    if (current.sa_flags & SA_SIGINFO && current.sa_sigaction == handlers[i]) continue;
    memset(&ours, 0, sizeof ours);
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    ours.sa_sigaction = handlers[i];
    before[i] = current;
    if (sigaction(signals[i], &ours, 0)) return errno;
  }
  return 0;
}

int amx_uninstall(void) {
  for (int i = 0; i < 4; i++) {
    struct sigaction current;
    if (sigaction(signals[i], 0, &current)) return errno;
    if (current.sa_flags & SA_SIGINFO && current.sa_sigaction == handlers[i] && sigaction(signals[i], &before[i], 0)) return errno;
  }
  return 0;
}
