# SPDX-License-Identifier: Apache-2.0
"""Measures llama.cpp through llama-cpp-python, with its own defaults except for threads and context."""
from __future__ import annotations

import time
from typing import Any

from protocol import serve


def probe() -> dict[str, Any]:
    import llama_cpp

    return {"version": f"llama-cpp-python {llama_cpp.__version__}", "kv": "f16"}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    import llama_cpp as api

    api.llama_backend_init()
    n_prompts, depth, steps = len(job["prompts"]), len(job["prompts"][0]), job["decode_tokens"]
    model = api.llama_model_load_from_file(job["model"].encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {job['model']}")
    params = api.llama_context_default_params()
    params.n_ctx = n_prompts * (-(-(depth + steps + 1) // 256) * 256)  # each sequence gets an equal part, in steps of 256
    params.n_seq_max = n_prompts
    params.n_threads = params.n_threads_batch = job["threads"]
    context = api.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp makes no context of {params.n_ctx} tokens")
    sequences = Sequences(api, context)

    sequences.append(0, job["warm_up"])
    sequences.step([1])
    sequences.clear()

    began = time.perf_counter()
    for i, prompt in enumerate(job["prompts"]):
        sequences.append(i, prompt)
    prefill = time.perf_counter() - began
    # Which tokens follow makes no difference to the speed; taking them from the prompts spares this peer its sampling.
    began = time.perf_counter()
    for step in range(steps):
        sequences.step([prompt[step % depth] for prompt in job["prompts"]])
    decode = time.perf_counter() - began
    return {"prefill": n_prompts * depth / prefill, "decode": n_prompts * steps / decode, "kv": "f16"}


class Sequences:
    """The sequences of one context, advanced by llama_decode."""

    def __init__(self, api: Any, context: Any) -> None:
        self.api, self.context, self.n_batch = api, context, api.llama_n_batch(context)
        self.batch = api.llama_batch_init(self.n_batch, 0, 1)
        self.clear()

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.positions = [0] * self.api.llama_n_seq_max(self.context)

    def append(self, sequence: int, ids: list[int]) -> None:
        """Compute a prompt. Only its last token gets logits."""
        for start in range(0, len(ids), self.n_batch):
            part = ids[start : start + self.n_batch]
            last = start + len(part) == len(ids)
            self._decode([(token, sequence, last and i == len(part) - 1) for i, token in enumerate(part)])

    def step(self, tokens: list[int]) -> None:
        """One more token for each of the first sequences."""
        self._decode([(token, sequence, True) for sequence, token in enumerate(tokens)])

    def _decode(self, rows: list[tuple[int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, sequence, wants_logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, self.positions[sequence], wants_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            self.positions[sequence] += 1
        if self.api.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")
        self.api.llama_synchronize(self.context)


if __name__ == "__main__":
    serve(probe, measure)
