// SPDX-License-Identifier: Apache-2.0
// bf16 matrices of 256 x 256 x 256 on AMX in 32 x 32 blocks, B packed in tiles: what has been measured in public on
// Sapphire Rapids, and the model of benchmarks/amx_core.py is compared with.
#include <stdint.h>

struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static const TileShapes SHAPES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

#define ZERO(t) asm volatile("tilezero %%tmm" #t :)
#define LOAD(t, p, step) asm volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((int64_t)(step)) : "memory")
#define STORE(t, p, step) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"((int64_t)(step)) : "memory")
#define DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c :)

// a_step: bytes from row to row of a row-major A, or 64 for A in tiles. b: [8 column pairs][8 depths][2 tiles].
extern "C" void multiply(const char *a, int64_t a_step, const char *b, char *c) {
  const int64_t second = 16 * a_step, depth = a_step == 64 ? 2048 : 64, rows = a_step == 64 ? 8 * 2048 : 32 * a_step;
  asm volatile("ldtilecfg %0" : : "m"(SHAPES));
  for (int64_t m = 0; m < 8; m++)
    for (int64_t n = 0; n < 8; n++) {
      ZERO(0);
      ZERO(1);
      ZERO(2);
      ZERO(3);
#pragma GCC unroll 8
      for (int64_t k = 0; k < 8; k++) {
        const char *x = a + m * rows + k * depth, *w = b + (n * 8 + k) * 2048;
        LOAD(4, x, a_step);
        LOAD(6, w, 64);
        DOT(0, 4, 6);
        LOAD(5, x + second, a_step);
        DOT(2, 5, 6);
        LOAD(7, w + 1024, 64);
        DOT(1, 4, 7);
        DOT(3, 5, 7);
      }
      char *y = c + m * 32 * 1024 + n * 128;
      STORE(0, y, 1024);
      STORE(1, y + 64, 1024);
      STORE(2, y + 16 * 1024, 1024);
      STORE(3, y + 16 * 1024 + 64, 1024);
    }
  asm volatile("tilerelease");
}
