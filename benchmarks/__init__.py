# SPDX-License-Identifier: Apache-2.0
"""Measurements of awqjit beside plain torch; see README.md in this folder."""
