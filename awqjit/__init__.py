# SPDX-License-Identifier: Apache-2.0
"""int4 inference in PyTorch on CPUs: kernels generated, compiled and cached for exactly your shapes."""

__version__ = "0.1.0"
