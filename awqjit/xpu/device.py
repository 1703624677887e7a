# SPDX-License-Identifier: Apache-2.0
"""SYCL devices as the rest of the package sees them: what one can do, its queue, the kernels loaded on it.

A device goes by a text: "xpu:0" for torch's first XPU; "xpu:cpu", in tests alone, for the CPU as a SYCL device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from awqjit import store
from awqjit.errors import ArgumentError, SyclError
from awqjit.machine import Machine, Xpu
from awqjit.xpu import shim, wheels
from awqjit.xpu.spec import XpuTarget

CPU = "xpu:cpu"
"""The CPU as a SYCL device, see :func:`cpu_as_xpu`."""


class Device:
    """One SYCL device. Thread-safe.

    Args:
        name: what the device goes by.
        facts: what selection knows of it.
        own_queue: a queue to use instead of torch's current stream; calls then wait for their kernels.
    """

    def __init__(self, name: str, facts: Xpu, own_queue: int | None = None) -> None:
        self.name, self.facts = name, facts
        self._own_queue = own_queue
        self._kernels: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    @property
    def shim(self) -> shim.Shim:
        return shim.load()

    def target(self, row: str) -> XpuTarget:
        """What kernels of a row ("sycl_dpas" or "sycl") are rendered for."""
        leaf = None if row == "sycl" else "visa" if self._own_queue is None else "emulated"
        return XpuTarget(row, self.facts.lanes, leaf)

    def queue(self) -> int:
        """Address of the ``sycl::queue`` of torch's current stream on this device."""
        if self._own_queue is not None:
            return self._own_queue
        return torch.xpu.current_stream(torch.device(self.name)).sycl_queue

    def kernel(self, module: bytes, function: str) -> int:
        """A kernel of a SPIR-V module, loaded once: stays valid while the process lives.

        Raises:
            SyclError: the device does not take it.
        """
        key = (store.digest(module), function)
        with self._lock:
            kernel = self._kernels.get(key)
            if kernel is None:
                kernel = self._kernels[key] = self.shim.load(self.queue(), module, function)
        return kernel

    def finish(self, queue: int) -> None:
        """After the launches of a call: where the tensors are the CPU's, they are read without asking the queue."""
        if self._own_queue is not None:
            self.shim.wait(queue)


_devices: dict[str, Device] = {}


def get(name: str) -> Device:
    """The device that goes by ``name``.

    Raises:
        SyclError: torch finds no such device.
    """
    device = _devices.get(name)
    if device is None:
        reason = absent()
        if reason is not None:
            raise SyclError(f"device {name}", reason)
        properties = torch.xpu.get_device_properties(torch.device(name))
        device = _devices.setdefault(name, Device(name, facts_of(properties)))
    return device


def absent() -> str | None:
    """Why torch has no XPU here; None if it has one."""
    if torch.xpu.is_available():
        return None
    if not torch.xpu._is_compiled():
        return f"this torch ({torch.__version__}) is built without XPU support"
    return "torch.xpu finds no device"


def facts_of(properties: object) -> Xpu:
    """What selection wants to know, from ``torch.xpu.get_device_properties``."""
    sizes = getattr(properties, "sub_group_sizes", [16])
    return Xpu(
        name=str(getattr(properties, "name", "an Intel GPU")),
        # A matrix unit of 8 columns comes with sub-groups of 8; one of 16 has no smaller ones.
        lanes=8 if 8 in sizes else 16,
        dpas=bool(getattr(properties, "has_subgroup_matrix_multiply_accumulate", False)),
    )


def describe(here: Machine, name: str | None = None) -> Machine:
    """A machine with what is known of one of its XPUs. Builds nothing and raises nothing.

    Args:
        here: what :func:`awqjit.machine.detect` found.
        name: the device; None for torch's current XPU.
    """
    reason = absent() if name != CPU else None
    if reason is not None:
        return replace(here, xpu=None, no_xpu=reason)
    facts = get(name or f"xpu:{torch.xpu.current_device()}").facts
    return replace(here, xpu=replace(facts, no_sycl=wheels.lacking()), no_xpu="")


def require_wheels() -> None:
    """
    Raises:
        MissingDependencyError, SyclError: SYCL kernels cannot be compiled; names the extra to install.
    """
    wheels.find()


def name_of(device: torch.device) -> str:
    """What a tensor's device goes by.

    Raises:
        ArgumentError: it is the CPU, which has a packed layout of its own (outside of :func:`cpu_as_xpu`).
    """
    if device.type == "cpu":
        if CPU not in _devices:
            raise ArgumentError("layout", "2 on the CPU", "1: layout 2 is for kernels of other devices")
        return CPU
    return f"{device.type}:{device.index or 0}"


@contextmanager
def cpu_as_xpu(lanes: int = 16, dpas: bool = True) -> Iterator[Device]:
    """For tests: CPU tensors in layout 2 are computed on Intel's CPU SYCL device while the block runs.

    All that runs for an XPU runs here too, with two exceptions: the queue is this process's own, waited for after each
    call, and the matrix unit's instruction is emulated.

    Args:
        lanes: 16 or 8, which kind of device to act as.
        dpas: whether to act as one with a matrix unit.

    Raises:
        MissingDependencyError: the wheels are not installed.
        SyclError: they do not work here.
    """
    # Read by the run time when it first looks for devices, once a process.
    os.environ["OCL_ICD_FILENAMES"] = str(wheels.find().opencl)
    loaded = shim.load()
    queue = loaded.cpu_queue()
    facts = Xpu(f"{loaded.device_name(queue)} (as a SYCL device)", lanes, dpas)
    before = _devices.get(CPU)
    device = _devices[CPU] = Device(CPU, facts, queue)
    try:
        yield device
    finally:
        if before is None:
            del _devices[CPU]
        else:
            _devices[CPU] = before
