# SPDX-License-Identifier: Apache-2.0
"""SYCL kernels for Intel GPUs, compiled by what two wheels bring: no oneAPI installation, no C++ compiler for GPUs.

===============  ==============================================================================================
``wheels``       where intel-sycl-rt and intel-opencl-rt are installed
``shim``         a small C++ library, built here, that lets Python call SYCL's run time
``spirv``        SYCL source to SPIR-V, in a process of its own, for the kernel cache
``spec``         which kernels a problem has, and what is launched for how many rows
``render``       a kernel's source text
``device``       one device: what it can do, its queue, kernels loaded on it
``kernel``       from a problem to something that can be called on tensors
``selftest``     a small problem with a known result, before a device's kernels are trusted
===============  ==============================================================================================
"""
