# SPDX-License-Identifier: Apache-2.0
"""The commands of hisparse-rt. Each module has HELP, add_arguments(parser) and run(args) -> exit code."""
