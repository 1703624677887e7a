// SPDX-License-Identifier: Apache-2.0
// What the parts of the emulator know of each other.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include "emulator.h"

struct instruction {
  int kind, length;
  int destination, first, second;  // tiles; of a load or store only the destination
  int segment;                     // 0x64 for fs, 0x65 for gs, else 0
  int address32, relative, base, index, shift;  // base and index: general registers, -1 for none
  int32_t displacement;
};

struct tile {
  uint8_t row[16][64] __attribute__((aligned(64)));
};

struct thread_state {
  struct tile tile[8];
  uint8_t palette, start_row, rows[8];
  uint16_t row_bytes[8];
  uint32_t written;  // bit t: tile t has been written since the configuration
  volatile int touching, touched_row, fault_signal, fault_code;  // while memory of the program is read or written
  volatile uintptr_t touched;
  sigjmp_buf fault;
  struct amx_counters counters;
  struct thread_state *next;
};

// decoder.c: 1 when an AMX instruction stands at `code`, which holds at least 15 bytes
int amx_decode(const uint8_t *code, struct instruction *out);
const char *amx_name(int kind);
int64_t amx_register(const ucontext_t *context, int number);

// arithmetic.c
void amx_dot_int8(int kind, int rows, int columns, int depth, struct tile *c, const struct tile *a, const struct tile *b);
void amx_dot_bf16(int rows, int columns, int depth, struct tile *c, const struct tile *a, const struct tile *b);

// execute.c
struct thread_state *amx_thread(void);       // this thread's, made at its first use
struct thread_state *amx_thread_or_null(void);
int amx_execute(struct thread_state *thread, ucontext_t *context, const struct instruction *one, uint64_t at);
// 0: done; else the signal that the hardware's fault becomes, SIGSEGV and SIGBUS already sent

extern long amx_options[AMX_OPTIONS];
long amx_system_call(long number, long a, long b, long c, long d);
