# SPDX-License-Identifier: Apache-2.0
"""How good sparse attention is: behind `hisparse-rt eval`."""
