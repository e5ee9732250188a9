# SPDX-License-Identifier: Apache-2.0
"""Measuring speed: ours, other programs' on the same weights, and what the machine could do at most.

    job        what is to be measured at one depth, as JSON
    ours       measures this package; run as a process of its own
    peers/     measure other programs; scripts for their own interpreters, which import nothing of this package
    programs   runs those processes
    ceilings   runs the program that measures memory and arithmetic
    bounds     bytes and operations of a model, which ceilings turn into bounds
    rounds     who is measured when, and what is left out to keep within the time
    report     rows, table, JSON
    plot       the picture
"""
