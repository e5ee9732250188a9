# SPDX-License-Identifier: Apache-2.0
"""Scripts that measure other programs. They may run in another environment, and so import nothing of this package."""
