# SPDX-License-Identifier: Apache-2.0
"""Texts: one to calibrate quantization with, another to evaluate models on. README.md says whose they are."""
