// SPDX-License-Identifier: Apache-2.0
// An emulator of the Intel AMX tile instructions for x86-64 Linux machines without AMX.
//
// The instructions are illegal there. Loaded into a process, the emulator takes the signal, decodes the instruction that
// raised it, does its work on tiles of its own and goes on behind it: the machine code under test is the one that ships.
// Behaviour is that of the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, faults included.
#pragma once
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum amx_kind {
  AMX_LDTILECFG,
  AMX_STTILECFG,
  AMX_TILERELEASE,
  AMX_TILEZERO,
  AMX_TILELOADD,
  AMX_TILELOADDT1,
  AMX_TILESTORED,
  AMX_TDPBSSD,
  AMX_TDPBSUD,
  AMX_TDPBUSD,
  AMX_TDPBUUD,
  AMX_TDPBF16PS,
  AMX_KINDS
};

struct amx_counters {
  uint64_t executed[AMX_KINDS];
  uint64_t traps;            // signals taken: one may serve several instructions that stand side by side
  uint64_t rows;             // rows of memory that tile loads and stores touched
  uint64_t split_loads;      // of those of loads, the ones that lie in two cache lines
  uint64_t undefined_reads;  // tiles read that nothing has written since the tiles were configured
  uint64_t faults;
};

enum amx_option {
  AMX_OPTION_STRICT,  // 1: without amx_arch_prctl(ARCH_REQ_XCOMP_PERM) before, an instruction is illegal. Default 1
  AMX_OPTION_PATCH,   // 1: a site that has trapped becomes a breakpoint, which is faster. Default 1
  AMX_OPTION_DENY,    // an errno that requests for permission fail with, 0 for none. Default 0
  AMX_OPTION_TELL,    // 1: write every fault to standard error. Default 0
  AMX_OPTIONS
};

int amx_install(void);    // take SIGILL, SIGTRAP, SIGSEGV and SIGBUS; earlier handlers get what is not ours. 0: done
int amx_uninstall(void);  // give them back
void amx_set(int option, long value);

void amx_reset(void);  // all counters of all threads to 0
void amx_total(struct amx_counters *out);
int amx_of_thread(int index, struct amx_counters *out);  // 0 when there is no such thread; each that used tiles has one

// What the system call answers on a machine with AMX: 0, or an errno. Remembers that permission was requested.
int amx_arch_prctl(int code, unsigned long argument);
int amx_permission_requests(void);
void amx_forget_permission(void);

const char *amx_last_fault(void);

// Single-steps the calling thread, and notes every instruction between low and high that it executes: 17 words each,
// its address and rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 ... r15 before it.
void amx_trace_start(const void *low, const void *high, uint64_t *entries, size_t most);
size_t amx_trace_stop(void);  // entries written

#ifdef __cplusplus
}
#endif
