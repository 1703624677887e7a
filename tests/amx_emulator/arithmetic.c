// SPDX-License-Identifier: Apache-2.0
// The dot products of tiles, on AVX512: fast enough to run a kernel's whole test suite.
#include <immintrin.h>
#include <string.h>

#include "parts.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vnni")))

// c[m][n] += sum over k and j of a[m][4 k + j] * b[k][4 n + j], modulo 2^32. VPDPBUSD has an unsigned and a signed
// operand: s8 * s8 is (a + 128) * b - 128 * b, u8 * u8 is a * (b - 128) + 128 * a.
AVX512 void amx_dot_int8(int kind, int rows, int columns, int depth, struct tile *c, const struct tile *a, const struct tile *b) {
  const __mmask16 valid = (__mmask16)((1u << columns) - 1);
  const __m512i flip = _mm512_set1_epi8((char)0x80), sixty_four = _mm512_set1_epi8(64);
  __m512i too_much = _mm512_setzero_si512();
  if (kind == AMX_TDPBSSD)
    for (int k = 0; k < depth; k++) too_much = _mm512_dpbusd_epi32(too_much, flip, _mm512_load_si512(b->row[k]));
  for (int m = 0; m < rows; m++) {
    __m512i sum = _mm512_sub_epi32(_mm512_load_si512(c->row[m]), too_much), missing = _mm512_setzero_si512();
    for (int k = 0; k < depth; k++) {
      int four;
      memcpy(&four, &a->row[m][4 * k], 4);
      const __m512i x = _mm512_set1_epi32(four), w = _mm512_load_si512(b->row[k]);
      switch (kind) {
        case AMX_TDPBSSD: sum = _mm512_dpbusd_epi32(sum, _mm512_xor_si512(x, flip), w); break;
        case AMX_TDPBSUD: sum = _mm512_dpbusd_epi32(sum, w, x); break;
        case AMX_TDPBUSD: sum = _mm512_dpbusd_epi32(sum, x, w); break;
        default:
          sum = _mm512_dpbusd_epi32(sum, x, _mm512_xor_si512(w, flip));
          missing = _mm512_dpbusd_epi32(missing, x, sixty_four);
      }
    }
    sum = _mm512_add_epi32(sum, _mm512_slli_epi32(missing, 1));
    _mm512_store_si512(c->row[m], _mm512_maskz_mov_epi32(valid, sum));
  }
}

// Even and odd elements are summed apart from 0 in fused multiply-adds, the two sums added, then added to c. Rounded to
// nearest even; subnormal operands and results count as 0, whatever MXCSR says.
AVX512 __attribute__((noinline)) static void dot_bf16(int rows, int columns, int depth, struct tile *c, const struct tile *a, const struct tile *b) {
  const __mmask16 valid = (__mmask16)((1u << columns) - 1);
  const __m512i high = _mm512_set1_epi32((int)0xffff0000);
  for (int m = 0; m < rows; m++) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < depth; k++) {
      int pair;
      memcpy(&pair, &a->row[m][4 * k], 4);
      const __m512i x = _mm512_set1_epi32(pair), w = _mm512_load_si512(b->row[k]);
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)), _mm512_castsi512_ps(_mm512_and_si512(w, high)), odd);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(c->row[m]), _mm512_add_ps(even, odd));
    _mm512_store_ps(c->row[m], _mm512_maskz_mov_ps(valid, sum));
  }
}

void amx_dot_bf16(int rows, int columns, int depth, struct tile *c, const struct tile *a, const struct tile *b) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80 | _MM_FLUSH_ZERO_ON | 0x0040);  // 0x0040: subnormal operands are 0
  dot_bf16(rows, columns, depth, c, a, b);
  _mm_setcsr(before);
}
