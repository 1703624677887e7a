// SPDX-License-Identifier: Apache-2.0
// Machine code to struct instruction. All AMX instructions have a three-byte VEX prefix and lie in opcode map 0F 38.
#define _GNU_SOURCE
#include <string.h>

#include "parts.h"

const char *amx_name(int kind) {
  static const char *const names[AMX_KINDS] = {"ldtilecfg", "sttilecfg",  "tilerelease", "tilezero", "tileloadd", "tileloaddt1",
                                               "tilestored", "tdpbssd",   "tdpbsud",     "tdpbusd",  "tdpbuud",   "tdpbf16ps"};
  return names[kind];
}

int64_t amx_register(const ucontext_t *context, int number) {
  static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                 REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[places[number]];
}

static int dot_kind(int opcode, int prefix) {  // prefix: 0 none, 1 0x66, 2 0xf3, 3 0xf2
  static const int int8[4] = {AMX_TDPBUUD, AMX_TDPBUSD, AMX_TDPBSUD, AMX_TDPBSSD};
  if (opcode == 0x5e) return int8[prefix];
  return prefix == 2 ? AMX_TDPBF16PS : -1;
}

static int memory_kind(int opcode, int prefix) {
  if (opcode == 0x49) return prefix == 0 ? AMX_LDTILECFG : prefix == 1 ? AMX_STTILECFG : -1;
  return prefix == 3 ? AMX_TILELOADD : prefix == 1 ? AMX_TILELOADDT1 : prefix == 2 ? AMX_TILESTORED : -1;
}

int amx_decode(const uint8_t *code, struct instruction *out) {
  const uint8_t *p = code;
  memset(out, 0, sizeof *out);
  out->base = out->index = -1;
  for (; p - code < 4; p++) {  // the prefixes that may stand before VEX
    if (*p == 0x67) out->address32 = 1;
    else if (*p == 0x64 || *p == 0x65) out->segment = *p;
    else if (*p != 0x2e && *p != 0x36 && *p != 0x3e && *p != 0x26) break;  // those segments begin at 0
  }
  if (p[0] != 0xc4) return 0;
  const int r = !(p[1] & 0x80), x = !(p[1] & 0x40), b = !(p[1] & 0x20), map = p[1] & 31;
  const int wide = p[2] >> 7, third = ~p[2] >> 3 & 15, length = p[2] >> 2 & 1, prefix = p[2] & 3, opcode = p[3];
  const int mod = p[4] >> 6, reg = p[4] >> 3 & 7, rm = p[4] & 7;
  if (map != 2 || wide || length) return 0;
  p += 5;
  if (opcode == 0x5e || opcode == 0x5c) {
    out->kind = dot_kind(opcode, prefix);
    if (out->kind < 0 || mod != 3 || r || b || third > 7) return 0;  // there are eight tiles
    out->destination = reg;
    out->first = rm;
    out->second = third;
    out->length = (int)(p - code);
    return 1;
  }
  if ((opcode != 0x49 && opcode != 0x4b) || third || r) return 0;
  if (opcode == 0x49 && mod == 3) {
    const int release = prefix == 0 && reg == 0 && rm == 0, zero = prefix == 3 && rm == 0;
    if (b || !(release || zero)) return 0;
    out->kind = release ? AMX_TILERELEASE : AMX_TILEZERO;
    out->destination = reg;
    out->length = (int)(p - code);
    return 1;
  }
  out->kind = memory_kind(opcode, prefix);
  if (out->kind < 0 || mod == 3) return 0;
  if (opcode == 0x49 ? reg != 0 : rm != 4) return 0;  // a tile's address has to have the byte with base and index
  out->destination = reg;
  int displacement_bytes = mod == 1 ? 1 : mod == 2 ? 4 : 0;
  if (rm == 4) {
    const int sib = *p++, index = (sib >> 3 & 7) | x << 3;
    out->shift = sib >> 6;
    if (index != 4) out->index = index;
    if ((sib & 7) == 5 && mod == 0) displacement_bytes = 4;
    else out->base = (sib & 7) | b << 3;
  } else if (rm == 5 && mod == 0) {
    out->relative = 1;
    displacement_bytes = 4;
  } else {
    out->base = rm | b << 3;
  }
  if (displacement_bytes == 1) out->displacement = (int8_t)*p;
  if (displacement_bytes == 4) memcpy(&out->displacement, p, 4);
  out->length = (int)(p - code) + displacement_bytes;
  return 1;
}
