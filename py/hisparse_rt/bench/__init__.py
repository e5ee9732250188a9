# SPDX-License-Identifier: Apache-2.0
"""Measuring speed: ours, other programs' on the same weights, and what the machine could do at most.

    job        what is to be measured at one depth, as JSON
    ours       measures this package; run as a process of its own
    turns      the same for several depths and profiles at once, which decode in turns
    sessions   how the sessions come about that these measure, and how they decode
    peers/     measure other programs; scripts for their own interpreters, which import nothing of this package
    programs   runs those processes
    ceilings   runs the program that measures memory and arithmetic
    bounds     bytes and operations of a model, which ceilings turn into bounds
    rounds     who is measured when, and what is left out to keep within the time
    report     rows, table, JSON
    together   rows and table of what decoded in turns
    plot       the picture
"""
