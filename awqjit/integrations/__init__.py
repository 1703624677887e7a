# SPDX-License-Identifier: Apache-2.0
"""Bridges to other packages, each imported only when it is used."""
