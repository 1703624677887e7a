// SPDX-License-Identifier: Apache-2.0
// For LD_PRELOAD, or linked into a program: installs the emulator before the program starts, and answers arch_prctl as a
// machine with AMX would. AMX_EMULATOR_PERMITTED in the environment: for programs that do not ask for permission.
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>

#include "parts.h"

__attribute__((constructor)) static void install(void) {
  amx_install();
  if (getenv("AMX_EMULATOR_PERMITTED")) amx_arch_prctl(0x1023, 18);
}

long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  const long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long), d = va_arg(list, long);
  const long e = va_arg(list, long), f = va_arg(list, long);
  va_end(list);
  if (number == SYS_arch_prctl && a >= 0x1021 && a <= 0x1023) {  // ARCH_GET_XCOMP_SUPP to ARCH_REQ_XCOMP_PERM
    errno = amx_arch_prctl((int)a, (unsigned long)b);
    return errno ? -1 : 0;
  }
  register long fourth __asm__("r10") = d;
  register long fifth __asm__("r8") = e;
  register long sixth __asm__("r9") = f;
  long result;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
                   : "rcx", "r11", "memory");
  if (result < 0 && result > -4096) {
    errno = (int)-result;
    return -1;
  }
  return result;
}
