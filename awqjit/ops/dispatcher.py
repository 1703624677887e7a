# SPDX-License-Identifier: Apache-2.0
"""The C++ implementation of ``int4_mm``: compiled at first use like a kernel, registered over the Python one.

A call in Python costs some 15 microseconds, as much as the arithmetic of a small layer. The dispatcher
(``templates/cpu/dispatcher.cpp.jinja``) takes the calls whose arguments it has seen before, and asks Python for the
rest.

Most of what it needs is in torch's stable C interface. What is not (whether a tensor is more than numbers in memory,
how a Python exception leaves a C++ function) is looked up by name in torch's libraries and checked. Where any of it is
missing the Python implementation stays, and :func:`state` says why.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from typing import Any

import torch
from torch import Tensor

from awqjit import cache, config, launch, store
from awqjit.errors import AwqJitError
from awqjit.ops import matmul
from awqjit.render import render_dispatcher

_log = logging.getLogger("awqjit")

_FUNCTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("torch_cpu", ("aoti_torch_library_init_impl",)),
    ("torch_cpu", ("torch_library_impl",)),
    ("torch_cpu", ("aoti_torch_delete_tensor_object",)),
    ("torch_cpu", ("aoti_torch_new_tensor_handle",)),
    ("torch_cpu", ("aoti_torch_get_dim",)),
    ("torch_cpu", ("aoti_torch_get_sizes",)),
    ("torch_cpu", ("aoti_torch_get_strides",)),
    ("torch_cpu", ("aoti_torch_get_dtype",)),
    ("torch_cpu", ("torch_get_const_data_ptr",)),
    ("torch_cpu", ("aoti_torch_empty_strided",)),
    ("torch_cpu", ("aoti_torch_check",)),
    ("torch_cpu", ("torch_get_num_threads",)),
    ("torch_cpu", ("aoti_torch_grad_mode_is_enabled",)),
    ("torch_cpu", ("torch_parallel_for",)),
    # Before torch 2.13 an optional's value is freed as it was made: by C++'s operator delete.
    ("torch_cpu", ("torch_delete_stable_ivalue", "_ZdlPv")),
    ("c10", ("_ZNK3c1010TensorImpl13requires_gradEv",)),
    ("c10", ("_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE",)),
    ("c10", ("_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",)),
    (
        "torch_python",
        (
            "_ZN5torch42handle_torch_function_no_python_arg_parserEN3c108ArrayRefIP7_objectEES3_S3_PKcS3_S6_"
            "NS_17TorchFunctionNameE",
        ),
    ),
    ("python", ("PyGILState_Ensure",)),
    ("python", ("PyGILState_Release",)),
    ("python", ("Py_BuildValue",)),
    ("python", ("Py_DecRef",)),
)
"""``struct Torch`` of the template, in order: the library, and names of which the first that exists is taken."""

_MODES = ("Python", "Functionalize", "FuncTorchDynamicLayerBackMode")
"""Dispatch keys of the modes that intercept operators after autograd."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8)
_ARGUMENTS = 11
_TENSORS = frozenset({0, 1, 2, 3, 4, 9})  # places in the schema, optional ones included
_VERSION = 2 << 56 | 10 << 48  # torch 2.10, whose stable interface this is written for


class _Entry(ctypes.Structure):
    """``struct Entry`` of the template."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("in_features", "out_features", "group_size", "act_bits", "layout", "blocks", "words", "groups")
        ),
        *((name, ctypes.c_int32) for name in ("x_dtype", "scale_dtype", "has_zeros", "has_bias")),
        *((name, ctypes.c_void_p) for name in ("int4_mm", "scratch_bytes", "next")),
    )


class _Settings(ctypes.Structure):
    """``struct Settings`` of the template."""

    _fields_ = (
        ("key_set", ctypes.c_int64),
        ("plain", ctypes.c_uint64),
        ("modes", ctypes.c_uint16 * 4),
        ("dtypes", ctypes.c_int32 * 5),
    )


class _Miss(ctypes.Structure):
    """``struct Miss`` of the template."""

    _fields_ = (("arguments", ctypes.c_uint64 * _ARGUMENTS), ("autograd", ctypes.c_int64), ("result", ctypes.c_void_p))


class _UnusableError(AwqJitError):
    """This torch lacks something the dispatcher needs."""


class _Hook:
    """What torch is told the arguments' type is, when the dispatcher has it call Python."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args)


class _State:
    """The dispatcher of this process. ``reason`` is why there is none: not asked for yet, or what stood against it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried = False
        self.reason: str | None = "no compiled kernel has been called yet"
        self.library: ctypes.CDLL | None = None
        self.entries: list[_Entry] = []  # the library keeps their addresses
        self.known: set[tuple[Any, ...]] = set()


_state = _State()


def _after_fork_in_child() -> None:
    _state.lock = threading.Lock()  # another thread may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def state() -> str | None:
    """None when the dispatcher serves ``int4_mm`` in this process, else why Python does."""
    return _state.reason


def obstacle() -> str | None:
    """Why this process cannot have a dispatcher, as far as it shows without compiling one; None if nothing does."""
    try:
        if not config.DISPATCHER.read():
            return f"{config.DISPATCHER.name}=0"
        _addresses()
    except AwqJitError as error:
        return str(error)
    return None


def request() -> store.Request:
    """The dispatcher as the cache knows it."""
    source, flags = render_dispatcher()
    return store.Request("dispatcher", source, flags)


def int4_mm(*args: Any, **named: Any) -> Tensor:
    """The Python implementation of the operator, which makes the dispatcher ready when a compiled kernel has run."""
    y = matmul.int4_mm(*args, **named)
    if not _state.tried and isinstance(matmul.kernel_for(*args, **named), launch.CompiledKernel):
        install()
    return y


def install() -> None:
    """Compile or find the dispatcher and register it; once per process. What stands against it is kept, not raised."""
    with _state.lock:
        if _state.tried:
            return
        try:
            if not config.DISPATCHER.read():
                raise _UnusableError(f"{config.DISPATCHER.name}=0")
            if launch.in_forked_child():
                raise _UnusableError("this process was forked before its first int4_mm")
            _state.library = _register(ctypes.CDLL(str(cache.fetch(request()).path)))
            _state.reason = None
        except (AwqJitError, OSError, AttributeError) as error:
            _state.reason = str(error)
            _log.info("int4_mm stays in Python: %s", error)
        _state.tried = True


def forget() -> None:
    """Let the dispatcher ask Python again which kernel serves a call; one that could not be had is tried again."""
    with _state.lock:
        _state.tried = _state.library is not None
        if _state.library is not None:
            _state.library.awqjit_forget()
        _state.known.clear()


def _register(library: ctypes.CDLL) -> ctypes.CDLL:
    functions = _addresses()
    keep = (_Hook(), _serve)
    for thing in keep:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))  # the library calls them for as long as the process lives
    table = (ctypes.c_void_p * (len(functions) + len(keep)))(*functions, *(id(thing) for thing in keep))
    # The first call may come under inference mode, whose tensors have fewer keys than others, or a default device.
    with torch.inference_mode(False):
        plain = torch.empty(1, device="cpu")
        key_set = _find_key_set(library)
    settings = _Settings(
        key_set=key_set,
        plain=torch._C._dispatch_keys(plain).raw_repr(),
        modes=(ctypes.c_uint16 * 4)(*(getattr(torch._C.DispatchKey, name).value for name in _MODES)),
        dtypes=(ctypes.c_int32 * 5)(*_dtype_numbers()),
    )
    library.awqjit_register.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Settings), ctypes.c_void_p, ctypes.c_uint64)
    library.awqjit_register.restype = ctypes.c_int32
    library.awqjit_add.argtypes = (ctypes.POINTER(_Entry),)
    library.awqjit_add.restype = None
    library.awqjit_forget.restype = None
    with _Handles(plain) as (handle,):
        step = library.awqjit_register(ctypes.addressof(table), settings, handle, _VERSION)
    if step:
        raise _UnusableError(f"torch refused step {step} of its registration")
    return library


def _addresses() -> list[int]:
    """The functions of :data:`_FUNCTIONS`."""
    found = []
    for where, names in _FUNCTIONS:
        library = ctypes.pythonapi if where == "python" else launch.torch_library(where)
        function = next((getattr(library, name) for name in names if hasattr(library, name)), None)
        if function is None:
            raise _UnusableError(f"torch {torch.__version__} has no {names[0]}")
        found.append(ctypes.cast(function, ctypes.c_void_p).value or 0)
    return found


def _dtype_numbers() -> list[int]:
    """The numbers by which torch's C interface knows :data:`_DTYPES`."""
    return [
        getattr(launch.torch_library(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")() for dtype in _DTYPES
    ]


def _find_key_set(library: ctypes.CDLL) -> int:
    """Where a TensorImpl keeps its dispatch keys: the one offset that is right for tensors of very different keys."""
    with torch.inference_mode():
        inference = torch.empty(1, device="cpu")
    probes = [
        torch.empty(1, device="cpu"),
        torch.empty(1, device="cpu", dtype=torch.int32, requires_grad=False),
        torch.empty(1, device="cpu", requires_grad=True),
        torch.empty(1, device="meta"),
        inference,
        torch.empty(1, device="cpu", dtype=torch.complex64).conj(),
        torch.empty(1, device="cpu", dtype=torch.complex64).conj().imag,
    ]
    find = library.awqjit_find_key_set
    find.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    find.restype = ctypes.c_int64
    key_sets = (ctypes.c_uint64 * len(probes))(*(torch._C._dispatch_keys(probe).raw_repr() for probe in probes))
    with _Handles(*probes) as handles:
        offset = find((ctypes.c_void_p * len(probes))(*handles), key_sets, len(probes))
    if offset < 0:
        raise _UnusableError(f"torch {torch.__version__} keeps a tensor's dispatch keys where they are not looked for")
    return offset


class _Handles:
    """Handles of tensors for the length of a block."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors

    def __enter__(self) -> tuple[int, ...]:
        self._handles = tuple(_handle(tensor) for tensor in self._tensors)
        return self._handles

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            _tensor(handle)


_PyCapsule_New = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_PyCapsule_GetPointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _handle(tensor: Tensor) -> int:
    """A new handle of a tensor, to be freed by :func:`_tensor` or by the library."""
    return _PyCapsule_GetPointer(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)


def _tensor(handle: int) -> Tensor:
    """The tensor of a handle, which is freed."""
    # Not the function for a single handle: that one leaves it allocated.
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_PyCapsule_New(handle, None, None)])[0]


def _serve(address: int) -> None:
    """Answer a call that the dispatcher could not: run it, and let the dispatcher know the kernel for the next time."""
    miss = _Miss.from_address(address)
    args: list[Any] = []
    for place, value in enumerate(miss.arguments):
        if place in _TENSORS:
            args.append(_tensor(value) if value else None)
        else:
            args.append(ctypes.c_int64(value).value)
    if miss.autograd:
        y = matmul.int4_mm_autograd(*args)
    else:
        y = matmul.int4_mm(*args)
        _remember(*args)
    miss.result = _handle(y)


def _remember(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    act_bits: int,
    perm: Tensor | None,
    layout: int,
) -> None:
    kernel = matmul.kernel_for(
        x, weight, scales, zeros, bias, in_features, out_features, group_size, act_bits, perm, layout
    )
    if not isinstance(kernel, launch.CompiledKernel) or (perm is not None and perm.numel()):
        return
    numbers = dict(zip(_DTYPES, _dtype_numbers(), strict=True))
    blocks, words, _ = weight.shape
    has_zeros, has_bias = zeros is not None and zeros.numel() > 0, bias is not None
    key = (in_features, out_features, group_size, act_bits, layout, x.dtype, scales.dtype, has_zeros, has_bias)
    with _state.lock:
        if _state.library is None or key in _state.known:
            return
        _state.known.add(key)
        entry = _Entry(
            in_features,
            out_features,
            group_size,
            act_bits,
            layout,
            blocks,
            words,
            scales.shape[1],
            numbers[x.dtype],
            numbers[scales.dtype],
            has_zeros,
            has_bias,
            kernel.address("awqjit_int4_mm"),
            kernel.address("awqjit_scratch_bytes"),
            None,
        )
        _state.entries.append(entry)
        _state.library.awqjit_add(entry)
