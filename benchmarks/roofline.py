# SPDX-License-Identifier: Apache-2.0
"""The roofline plot of the kernel benchmark: operations a second over operations a byte, below the machine's limits.

Needs matplotlib (the extra ``bench``). The picture names the run it was drawn from, so that an old one is noticed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks import kernel_tables, limit_tables

SHOWN = (
    "awqjit w4a8",
    "awqjit w4a16",
    "vLLM int4_scaled_mm_cpu",
    "zentorch DA8W4",
    "OpenVINO u4, dynamic",
    "GPTQModel AVX512-BF16",
    "torch int4pack",
    "dense bf16",
)
_SOURCE = "drawn from the run of "


def points(result: dict[str, Any], name: str, k: int, n: int) -> list[tuple[float, float]]:
    """(operations a byte of weights, 10^9 operations a second) of a contender, one for each batch size, bf16 x."""
    found = []
    for cell in kernel_tables.cells_of(result, k=k, n=n, group=128, dtype="bf16"):
        time = kernel_tables.median(result, cell, name)
        if time is not None:
            operations = 2 * cell["m"] * k * n
            found.append((operations / cell["contenders"][name]["bytes"], operations / time / 1e9))
    return found


def source_of(picture: Path) -> str | None:
    """The time of the run that a picture was drawn from; None if there is no picture, or it does not say."""
    if not picture.exists():
        return None
    found = re.search(re.escape(_SOURCE) + r"([^<]+)", picture.read_text(encoding="utf-8"))
    return found[1] if found else None


def draw(result: dict[str, Any], path: Path, k: int, n: int) -> None:
    """Write the plot of one layer as SVG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "awqjit"  # the same result gives the same file
    import matplotlib.pyplot as plt
    import numpy as np

    limits = limit_tables.peaks(result)
    figure, axes = plt.subplots(figsize=(9, 6))
    intensity = np.geomspace(1, 10_000, 200)
    for style, (kind, gops) in zip(("-", "--", ":"), limits["gops"].items(), strict=False):
        roof = np.minimum(gops, intensity * limits["gbs"])
        label = f"limit of {kind.removeprefix('dot_')} products, {gops:.0f} GOP/s"
        axes.plot(intensity, roof, color="0.5", linestyle=style, label=label)
    for name in SHOWN:
        known = points(result, name, k, n)
        if known:
            ours = name.startswith("awqjit")
            axes.plot(*zip(*known, strict=True), marker="o", markersize=4, linewidth=2.2 if ours else 1.0, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations for each byte of weights")
    axes.set_ylabel("10⁹ operations a second")
    axes.set_title(f"K={k} N={n}, group size 128, bf16 activations, {limits['threads']} threads")
    axes.grid(which="major", color="0.9")
    axes.legend(fontsize="small", loc="lower right")
    metadata = {"Date": None, "Description": f"{_SOURCE}{result['machine']['time']}"}
    figure.savefig(path, format="svg", bbox_inches="tight", metadata=metadata)
    plt.close(figure)
