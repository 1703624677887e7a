# SPDX-License-Identifier: Apache-2.0
"""One SYCL source to one SPIR-V module: a program, not a module. It may crash; nothing else must go down with it.

usage: spirv_process.py LIBSYCL LIBINTELOCL SHIM SOURCE OUTPUT [OPTION ...]

Started by :mod:`awqjit.xpu.spirv` without site-packages. Needs the standard library alone, so that it starts at once.
"""

import ctypes
import os
import sys
import textwrap

MAGIC = b"\x03\x02\x23\x07"
"""What a SPIR-V module begins with, on a little-endian machine."""


def main(arguments: list[str]) -> str:
    """Compile; what went wrong, or nothing."""
    sycl, opencl, shim, source, output, *options = arguments
    os.environ["OCL_ICD_FILENAMES"] = opencl
    ctypes.CDLL(sycl, mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(shim)
    library.awqjit_sycl_error.restype = ctypes.c_char_p
    library.awqjit_sycl_cpu_queue.restype = ctypes.c_void_p
    queue = library.awqjit_sycl_cpu_queue()
    if not queue:
        return f"error: no CPU device to compile with: {library.awqjit_sycl_error().decode(errors='replace')}"
    with open(source, "rb") as file:
        text = file.read()
    spirv, size, log = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_char_p()
    failed = library.awqjit_sycl_compile(
        ctypes.c_void_p(queue),
        text,
        (ctypes.c_char_p * max(1, len(options)))(*map(os.fsencode, options)),
        ctypes.c_size_t(len(options)),
        ctypes.byref(spirv),
        ctypes.byref(size),
        ctypes.byref(log),
    )
    said = (log.value or b"").decode(errors="replace").strip()
    if failed:
        why = library.awqjit_sycl_error().decode(errors="replace")
        # Behind a general remark stands what the compiler says, of a file that it gave a name of its own.
        why = textwrap.dedent(why.partition("Detailed information:\n")[2]).replace("rtc_0.cpp", "kernel.cpp") or why
        return "\n".join(filter(None, (said, why if "error" in why else f"error: {why}")))
    module = ctypes.string_at(spirv, size.value)
    if said:
        print(said)
    if not module.startswith(MAGIC):
        return f"error: the compiler gave {len(module)} bytes that are no SPIR-V"
    with open(output, "wb") as file:
        file.write(module)
    return ""


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status:
        print(status, flush=True)
    sys.stdout.flush()
    # Without the run time's own shutdown, which has nothing to save and may crash after the work is done.
    os._exit(1 if status else 0)
