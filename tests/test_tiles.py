# SPDX-License-Identifier: Apache-2.0
"""The tiles that tuning tries: enough of them in every regime, and none that changes a bit of a result."""

from __future__ import annotations

import itertools
from dataclasses import replace

import compilers
import numpy as np
import pytest
import rows
import torch
from strategies import RawWeight, Shape

from awqjit import cache, launch, tiles
from awqjit.layout import pack
from awqjit.render import render
from awqjit.spec import KernelSpec, Problem
from awqjit.target import EVERY_ROWS, TARGETS, Tile, target

MODES = [(row, bits) for row in TARGETS for bits in row.act_bits]


def name_of(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("row", "bits"), MODES, ids=name_of)
def test_every_regime_of_every_row_has_a_dozen_candidates(row: object, bits: int, dtype: str) -> None:
    default = row.tile(bits, dtype)  # type: ignore[attr-defined]
    for regime in tiles.REGIMES:
        found = tiles.candidates(regime, default, row, bits, dtype)  # type: ignore[arg-type]
        assert len(found) == len(set(found)) >= 12
        assert found[0] == default
        assert {tiles.refusal(tile, row, bits, dtype) for tile in found} == {""}  # type: ignore[arg-type]


@pytest.mark.parametrize("rows_of_a_pass", range(1, 17))
def test_a_w4a16_tile_is_tried_only_if_every_pass_adds_with_as_many_accumulators(rows_of_a_pass: int) -> None:
    row = target("avx512_bf16")
    vocabulary, default = row.vocabulary(16, "bf16"), row.tile(16, "bf16")
    tile = replace(default, decode_rows=rows_of_a_pass)

    def accumulators(one: Tile, m: int) -> list[int]:
        passes = -(-m // one.decode_rows)
        bounds = [m * i // passes for i in range(passes + 1)]
        return [vocabulary.chains_for(b - a) for a, b in itertools.pairwise(bounds) for _ in range(a, b)]

    same = all(accumulators(tile, m) == accumulators(default, m) for m in range(1, 129))
    assert bool(tiles.refusal(tile, row, 16, "bf16")) is not same
    assert not tiles.refusal(tile, target("avx512_vnni"), 8, "bf16")  # integers are exact in any order


@pytest.mark.parametrize(
    "tile",
    [
        Tile(prefetch=8191),
        Tile(row_chunk=1),
        Tile(rows=32, blocks=8),
        Tile(split_rows=7),
        Tile(decode_rows=2, split_rows=EVERY_ROWS),
    ],
)
def test_other_tiles_are_refused(tile: Tile) -> None:
    assert tiles.refusal(tile, target("avx512_bf16"), 16, "bf16")


def test_matrix_tiles_are_not_traded_for_vector_code() -> None:
    row = target("amx_bf16")
    assert "vector code" in tiles.refusal(replace(row.tile(16, "bf16"), split_rows=EVERY_ROWS), row, 16, "bf16")
    assert tiles.refusal(replace(row.tile(16, "bf16"), decode_rows=9), row, 16, "bf16")  # M = 9 would leave the tiles


def some(found: tuple[Tile, ...], of: int) -> tuple[Tile, ...]:
    return found[:: max(1, len(found) // of)]


@pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++")
@pytest.mark.parametrize(("row", "bits"), rows.COMPILED)
def test_candidates_give_the_defaults_results_bit_for_bit(row: str, bits: int) -> None:
    chosen = rows.target_of(row)
    shape = Shape(136, 40, 64)  # a short last group, a block that is not full
    rng = np.random.default_rng(5)
    weight = RawWeight(
        shape,
        q=torch.from_numpy(rng.integers(0, 16, (shape.k, shape.n), dtype=np.uint8)),
        z=torch.from_numpy(rng.integers(0, 16, (shape.groups, shape.n), dtype=np.uint8)),
        s=torch.from_numpy(rng.uniform(0.002, 0.03, (shape.groups, shape.n)).astype(np.float32)),
        name="seed 5",
    )
    packed = pack(weight.quantized())
    problem = Problem(shape.k, shape.n, shape.group, "bf16", "fp32", symmetric=False, bias=False, act_bits=bits)
    default = chosen.tile(bits, "bf16")
    kernels = []
    for regime in tiles.REGIMES:
        for tile in (default, *some(tiles.candidates(regime, default, chosen, bits, "bf16")[1:], 2)):
            spec = KernelSpec(problem, chosen, tile)
            path = cache.fetch(cache.Request(spec.slug, render(spec), chosen.flags)).path
            kernels.append(launch.CompiledKernel.load(spec, path))
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 31, 33, 65, 130, 257):
        x = torch.from_numpy(rng.standard_normal((m, shape.k)).astype(np.float32)).to(torch.bfloat16)
        results = [kernel(x, packed.weight, packed.scales, packed.zeros, None) for kernel in kernels]
        for kernel, result in zip(kernels, results, strict=True):
            assert torch.equal(result, results[0]), f"{kernel.spec.tile} at M={m}"
