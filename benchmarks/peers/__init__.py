# SPDX-License-Identifier: Apache-2.0
"""Int4 linear layers that a user could take instead of awqjit: one adapter a peer, each in a pinned environment."""
