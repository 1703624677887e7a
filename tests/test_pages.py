# SPDX-License-Identifier: Apache-2.0
"""Large packed weights lie on huge pages, and are tensors like any other."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path

import pytest
import torch

from awqjit import pages
from awqjit.layout import pack
from awqjit.weight import QuantizedWeight

LARGE = (512, 64, 4096 // 64)  # 8 MiB of int32
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the mapping around a tensor that are on huge pages."""
    size, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            start, end = (int(part, 16) for part in found.groups())
            inside = start < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end
        elif inside and line.startswith("AnonHugePages:"):
            size += int(line.split()[1]) * 1024
    return size


def test_a_large_tensor_is_on_huge_pages_once_it_is_written() -> None:
    if not SETTING.exists() or "[never]" in SETTING.read_text():
        pytest.skip(f"the system gives no huge pages ({SETTING})")
    tensor = pages.empty(LARGE, torch.int32, torch.device("cpu")).fill_(1)
    if not huge_bytes(torch.empty(1 << 25).fill_(1)) and not huge_bytes(tensor):
        pytest.skip("the system has no free huge pages now")
    assert huge_bytes(tensor) >= tensor.nbytes // 2


@pytest.mark.parametrize("shape", [LARGE, (3, 5, 16)], ids=["large", "small"])
def test_it_is_a_tensor_like_any_other(shape: tuple[int, ...]) -> None:
    tensor = pages.empty(shape, torch.int32, torch.device("cpu"))
    tensor.random_()
    assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == torch.int32
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert tensor.data_ptr() % 64 == 0
    assert torch.equal(copy.deepcopy(tensor), tensor)
    file = io.BytesIO()
    torch.save(tensor, file)
    assert file.tell() < tensor.nbytes + 4096
    file.seek(0)
    assert torch.equal(torch.load(file), tensor)
    assert torch.equal(tensor.clone().share_memory_(), tensor)


def test_other_devices_are_left_to_torch() -> None:
    assert pages.empty(LARGE, torch.int32, torch.device("meta")).is_meta


def test_memory_goes_back_when_the_tensor_goes() -> None:
    tensor = pages.empty(LARGE, torch.int32, torch.device("cpu")).fill_(1)
    address = f"{tensor.data_ptr():x}"
    assert address in Path("/proc/self/maps").read_text()
    del tensor
    assert not any(line.startswith(f"{address}-") for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_packed_weight_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(pages, "empty", lambda *args: asked.append(args) or torch.empty(args[0], dtype=args[1]))
    pack(QuantizedWeight(torch.ones(2, 32, dtype=torch.int32), torch.ones(1, 32), None, 16, 16, 32))
    assert asked == [((2, 2, 16), torch.int32, torch.device("cpu"))]
