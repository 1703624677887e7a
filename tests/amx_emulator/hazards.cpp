// SPDX-License-Identifier: Apache-2.0
// Code of the shape of a kernel's in which each store is lost as soon as a compiler does not know that a tile is loaded
// from it: int4 weights are unpacked into a local tile again and again, and the sums leave the tiles through another.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define STEPS 2
#if defined(INTRINSICS)
struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static const TileShapes TILE_SHAPES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
#define TILES_CONFIGURE() _tile_loadconfig(&TILE_SHAPES)
#define TILES_RELEASE() _tile_release()
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, p) _tile_loadd(t, p, 64)
#define TILE_STORE(t, p) _tile_stored(t, p, 64)
#define TILE_DOT(c, a, b) _tile_dpbssd(c, a, b)
#else
#include TILES
#endif

// c = a [16, 256] times q - 8 [256, 16], doubled. a: four tiles. q: 4 x 8 x 64 bytes, the rows 0-7 of a tile in their low
// nibbles, the rows 8-15 in their high ones.
extern "C" __attribute__((visibility("default"))) void multiply(const int8_t *__restrict a, const uint8_t *__restrict q, int32_t *__restrict c) {
  alignas(64) int8_t weights[1024];
  alignas(64) int32_t sums[256];
  TILES_CONFIGURE();
  TILE_ZERO(0);
#pragma GCC unroll 4
  for (int depth = 0; depth < 4; depth++) {
#pragma GCC unroll 8
    for (int row = 0; row < 8; row++) {
      const __m512i bytes = _mm512_loadu_si512(q + depth * 512 + row * 64), low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
      _mm512_store_si512(weights + row * 64, _mm512_sub_epi8(_mm512_and_si512(bytes, low), eight));
      _mm512_store_si512(weights + 512 + row * 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(bytes, 4), low), eight));
    }
    TILE_LOAD(4, a + depth * 1024);
    TILE_LOAD(6, weights);
    TILE_DOT(0, 4, 6);
  }
  TILE_STORE(0, sums);
  TILES_RELEASE();
  for (int i = 0; i < 256; i++) c[i] = 2 * sums[i];
}
