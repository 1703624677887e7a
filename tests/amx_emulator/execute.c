// SPDX-License-Identifier: Apache-2.0
// What the instructions do, on the tiles of the thread that executes them, and the faults they raise.
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "parts.h"

enum { ARCH_GET_FS = 0x1003, ARCH_GET_GS = 0x1004 };
enum { ARCH_GET_XCOMP_SUPP = 0x1021, ARCH_GET_XCOMP_PERM = 0x1022, ARCH_REQ_XCOMP_PERM = 0x1023 };
enum { XTILECFG = 17, XTILEDATA = 18 };

long amx_options[AMX_OPTIONS] = {[AMX_OPTION_STRICT] = 1, [AMX_OPTION_PATCH] = 1};
static __thread struct thread_state *mine __attribute__((tls_model("initial-exec")));
static struct thread_state *all;
static int permitted, requests;
static char last_fault[256];

// Not through libc's wrapper: a signal handler runs this, and the wrapper may be replaced (see traps.c).
long amx_system_call(long number, long a, long b, long c, long d) {
  register long fourth __asm__("r10") = d;
  long result;
  __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth) : "rcx", "r11", "memory");
  return result;
}

struct thread_state *amx_thread_or_null(void) { return mine; }

struct thread_state *amx_thread(void) {
  if (mine) return mine;
  // Pages straight from the kernel: malloc must not be called in a signal handler. Kept when the thread ends.
  struct thread_state *made = mmap(0, sizeof *made, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) _exit(127);
  made->next = __atomic_load_n(&all, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&all, &made->next, made, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
  return mine = made;
}

void amx_reset(void) {
  for (struct thread_state *one = __atomic_load_n(&all, __ATOMIC_ACQUIRE); one; one = one->next)
    memset(&one->counters, 0, sizeof one->counters);
}

int amx_of_thread(int index, struct amx_counters *out) {
  struct thread_state *one = __atomic_load_n(&all, __ATOMIC_ACQUIRE);
  while (one && index--) one = one->next;
  if (one) *out = one->counters;
  return one != 0;
}

void amx_total(struct amx_counters *out) {
  struct amx_counters one;
  memset(out, 0, sizeof *out);
  for (int i = 0; amx_of_thread(i, &one); i++)
    for (size_t word = 0; word < sizeof one / 8; word++) ((uint64_t *)out)[word] += ((uint64_t *)&one)[word];
}

void amx_set(int option, long value) { amx_options[option] = value; }

int amx_arch_prctl(int code, unsigned long argument) {
  if (code == ARCH_REQ_XCOMP_PERM) {
    if (argument != XTILEDATA) return EINVAL;
    requests++;
    if (amx_options[AMX_OPTION_DENY]) return (int)amx_options[AMX_OPTION_DENY];
    permitted = 1;
    return 0;
  }
  if (code != ARCH_GET_XCOMP_SUPP && code != ARCH_GET_XCOMP_PERM) return EINVAL;
  const int all_of_it = code == ARCH_GET_XCOMP_SUPP || permitted;
  *(uint64_t *)argument = 0xe7 | 1ull << XTILECFG | (uint64_t)all_of_it << XTILEDATA;
  return 0;
}
int amx_permission_requests(void) { return requests; }
void amx_forget_permission(void) { permitted = requests = 0; }
const char *amx_last_fault(void) { return last_fault; }

static void note_fault(struct thread_state *thread, const struct instruction *one, const char *why) {
  const char *const parts[] = {amx_name(one->kind), ": ", why};
  size_t length = 0;
  for (int i = 0; i < 3; i++)
    for (const char *p = parts[i]; *p && length < sizeof last_fault - 2; p++) last_fault[length++] = *p;
  last_fault[length] = 0;
  thread->counters.faults++;
  if (amx_options[AMX_OPTION_TELL]) {
    amx_system_call(SYS_write, 2, (long)last_fault, (long)length, 0);
    amx_system_call(SYS_write, 2, (long)"\n", 1, 0);
  }
}

// #UD: the caller hands SIGILL on.
static int illegal(struct thread_state *thread, const struct instruction *one, const char *why) {
  note_fault(thread, one, why);
  return SIGILL;
}

static int send(int signal, int code, uintptr_t address) {
  siginfo_t info;
  memset(&info, 0, sizeof info);
  info.si_signo = signal;
  info.si_code = code;
  info.si_addr = (void *)address;
  amx_system_call(SYS_rt_tgsigqueueinfo, getpid(), amx_system_call(SYS_gettid, 0, 0, 0, 0), signal, (long)&info);
  return signal;
}

// #GP, which Linux makes a SIGSEGV without an address.
static int protection(struct thread_state *thread, const struct instruction *one, const char *why) {
  note_fault(thread, one, why);
  return send(SIGSEGV, SI_KERNEL, 0);
}

// Memory of the program, which may not be there: on_memory_fault in traps.c then jumps back into amx_execute.
static void copy(struct thread_state *thread, void *to, const void *from, size_t count, const void *theirs, int row) {
  thread->touched = (uintptr_t)theirs;
  thread->touched_row = row;
  thread->touching = 1;
  memcpy(to, from, count);
  __asm__ volatile("" ::: "memory");
  thread->touching = 0;
}

static void clear(struct thread_state *thread) {
  memset(thread->tile, 0, sizeof thread->tile);
  thread->palette = thread->start_row = 0;
  memset(thread->rows, 0, sizeof thread->rows);
  memset(thread->row_bytes, 0, sizeof thread->row_bytes);
  thread->written = 0;
}

// Palette, start row, 14 bytes of 0; bytes a row of 16 tiles, two bytes each; rows of 16 tiles, one byte each.
static int configure(struct thread_state *thread, const struct instruction *one, uint64_t address) {
  uint8_t bytes[64];
  uint16_t widths[16];
  copy(thread, bytes, (const void *)address, 64, (const void *)address, 0);
  memcpy(widths, bytes + 16, sizeof widths);
  const uint8_t *rows = bytes + 48;
  if (bytes[0] > 1) return protection(thread, one, "there is no such palette");
  if (bytes[0] == 0) return clear(thread), 0;
  for (int i = 2; i < 16; i++)
    if (bytes[i]) return protection(thread, one, "reserved bytes are not 0");
  for (int t = 0; t < 16; t++) {
    if (t >= 8 && (widths[t] || rows[t])) return protection(thread, one, "there are only eight tiles");
    if (widths[t] > 64) return protection(thread, one, "more than 64 bytes a row");
    if (rows[t] > 16) return protection(thread, one, "more than 16 rows");
    if (!widths[t] != !rows[t]) return protection(thread, one, "rows without bytes or bytes without rows");
  }
  clear(thread);
  thread->palette = 1;
  thread->start_row = bytes[1];
  memcpy(thread->rows, rows, 8);
  memcpy(thread->row_bytes, widths, 16);
  return 0;
}

static void store_configuration(struct thread_state *thread, uint64_t address) {
  uint8_t bytes[64] = {thread->palette, thread->start_row};
  memcpy(bytes + 16, thread->row_bytes, 16);
  memcpy(bytes + 48, thread->rows, 8);
  copy(thread, (void *)address, bytes, 64, (const void *)address, 0);
}

static const char *unusable(const struct thread_state *thread, int tile) {
  if (!thread->palette) return "the tiles are not configured in this thread";
  if (!thread->rows[tile]) return "the configuration leaves this tile out";
  if (thread->row_bytes[tile] & 3) return "bytes a row are not a multiple of 4";
  return 0;
}

static int move(struct thread_state *thread, const struct instruction *one, uint64_t address, uint64_t stride) {
  const int store = one->kind == AMX_TILESTORED, t = one->destination;
  const char *why = unusable(thread, t);
  if (why) return illegal(thread, one, why);
  if (thread->start_row >= thread->rows[t]) return illegal(thread, one, "the start row is behind the last");
  const size_t width = thread->row_bytes[t];
  struct amx_counters *const counters = &thread->counters;
  if (store && !(thread->written >> t & 1)) counters->undefined_reads++;
  if (!store) memset(thread->tile[t].row[thread->start_row], 0, (size_t)(16 - thread->start_row) * 64);
  for (int row = thread->start_row; row < thread->rows[t]; row++) {
    uint8_t *const theirs = (uint8_t *)(address + (uint64_t)row * stride), *const ours = thread->tile[t].row[row];
    if (store) copy(thread, theirs, ours, width, theirs, row);
    else copy(thread, ours, theirs, width, theirs, row);
    counters->rows++;
    counters->split_loads += !store && ((uintptr_t)theirs & 63) + width > 64;
  }
  thread->start_row = 0;
  if (!store) thread->written |= 1u << t;
  return 0;
}

static int dot(struct thread_state *thread, const struct instruction *one) {
  const int c = one->destination, a = one->first, b = one->second;
  if (c == a || c == b || a == b) return illegal(thread, one, "the three tiles are not distinct");
  const int used[3] = {c, a, b};
  for (int i = 0; i < 3; i++) {
    const char *why = unusable(thread, used[i]);
    if (why) return illegal(thread, one, why);
    thread->counters.undefined_reads += !(thread->written >> used[i] & 1);
  }
  const int rows = thread->rows[c], columns = thread->row_bytes[c] / 4, depth = thread->rows[b];
  if (thread->rows[a] != rows) return illegal(thread, one, "the first operand has other rows than the sum");
  if (thread->row_bytes[b] != thread->row_bytes[c]) return illegal(thread, one, "the second operand has other columns than the sum");
  if (thread->row_bytes[a] / 4 != depth) return illegal(thread, one, "the operands have different depths");
  struct tile *const tile = thread->tile;
  if (one->kind == AMX_TDPBF16PS) amx_dot_bf16(rows, columns, depth, tile + c, tile + a, tile + b);
  else amx_dot_int8(one->kind, rows, columns, depth, tile + c, tile + a, tile + b);
  thread->start_row = 0;
  thread->written |= 1u << c;
  return 0;
}

static uint64_t segment_base(int segment) {
  uint64_t base = 0;
  if (segment) amx_system_call(SYS_arch_prctl, segment == 0x64 ? ARCH_GET_FS : ARCH_GET_GS, (long)&base, 0, 0);
  return base;
}

int amx_execute(struct thread_state *thread, ucontext_t *context, const struct instruction *one, uint64_t at) {
  if (amx_options[AMX_OPTION_STRICT] && !permitted)
    return illegal(thread, one, "permission was not requested (arch_prctl ARCH_REQ_XCOMP_PERM)");
  uint64_t address = (uint64_t)(int64_t)one->displacement;
  if (one->relative) address += at + (uint64_t)one->length;
  if (one->base >= 0) address += (uint64_t)amx_register(context, one->base);
  // A configuration has an ordinary address; of a tile the index is what lies between two rows.
  uint64_t stride = one->index >= 0 ? (uint64_t)amx_register(context, one->index) << one->shift : 0;
  if (one->kind == AMX_LDTILECFG || one->kind == AMX_STTILECFG) address += stride;
  if (one->address32) address = (uint32_t)address;
  address += segment_base(one->segment);
  if (sigsetjmp(thread->fault, 0)) {  // memory that is not there: a handler may repair it, and the instruction goes on
    thread->touching = 0;
    if (one->kind >= AMX_TILELOADD) thread->start_row = (uint8_t)thread->touched_row;
    note_fault(thread, one, "no such memory");
    return send(thread->fault_signal, thread->fault_code, thread->touched);
  }
  int signal = 0;
  switch (one->kind) {
    case AMX_LDTILECFG: signal = configure(thread, one, address); break;
    case AMX_STTILECFG: store_configuration(thread, address); break;
    case AMX_TILERELEASE: clear(thread); break;
    case AMX_TILEZERO: {
      const char *why = unusable(thread, one->destination);
      if (why) return illegal(thread, one, why);
      memset(&thread->tile[one->destination], 0, sizeof(struct tile));
      thread->start_row = 0;
      thread->written |= 1u << one->destination;
      break;
    }
    case AMX_TILELOADD:
    case AMX_TILELOADDT1:
    case AMX_TILESTORED: signal = move(thread, one, address, stride); break;
    default: signal = dot(thread, one);
  }
  thread->counters.executed[one->kind] += !signal;
  return signal;
}
