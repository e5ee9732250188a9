# SPDX-License-Identifier: Apache-2.0
"""What rows attended so far, page by page, of one layer and key-value head: which rows count, and which pages are forced when."""

from __future__ import annotations

import numpy as np

PAGE, RUN = 64, 128


class History:
    """`appends` are the lengths of the pieces in which the session was given its tokens; what comes behind them was sampled."""

    def __init__(self, appends: list[int], rules) -> None:
        self.rules = rules
        ends = np.cumsum(appends)
        self.pieces = [(int(end) - length, int(end)) for end, length in zip(ends, appends, strict=True)]
        self.mass = np.zeros(1)
        self.list: list[int] = []

    def _piece(self, row: int) -> tuple[int, int]:
        return next(((first, end) for first, end in self.pieces if row < end), (row, row + 1))

    def votes(self, row: int) -> bool:
        return row + 1 == self._piece(row)[1] or row % PAGE == PAGE - 1

    def _makes_list(self, row: int) -> bool:
        first, end = self._piece(row)
        tail = max(first, (end - 1) // RUN * RUN)
        return row in (first, tail, end - 1) or self.rules.window == PAGE and row % RUN == 0

    def forced(self, row: int) -> list[int]:
        """Pages that the row attends beside its budget."""
        if self.rules.forced and self._makes_list(row):
            begin, end = self.rules.sink // PAGE, row // PAGE + 1 - self.rules.window // PAGE
            pages = np.arange(begin, max(begin, end))
            mass = np.array([self.mass[page] if page < len(self.mass) else 0 for page in pages])
            self.list = sorted(pages[np.argsort(-mass, kind="stable")][: self.rules.forced].tolist())
        return self.list

    def add(self, row: int, scores: np.ndarray, visible: np.ndarray) -> None:
        """scores [heads of the group][rows][tokens]; visible [rows][tokens]."""
        if not self.rules.forced or not self.votes(row):
            return
        for head in scores:
            s = np.where(visible[row], head[row], -np.inf)
            p = np.exp(s - s.max())
            p = np.pad(p / p.sum(), (0, -len(p) % PAGE)).reshape(-1, PAGE).sum(axis=1)
            self.mass = np.pad(self.mass, (0, max(0, len(p) - len(self.mass)))) + p
