# SPDX-License-Identifier: Apache-2.0
"""Kernels that other packages compile: each is imported when a problem is run on it, not before."""
