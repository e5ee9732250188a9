# SPDX-License-Identifier: Apache-2.0
"""Measures OpenVINO GenAI on its CPU plug-in, with its own defaults except for threads. Times are its own metrics."""
from __future__ import annotations

from typing import Any

from protocol import serve


def probe() -> dict[str, Any]:
    import openvino
    import openvino_genai

    return {"version": f"openvino-genai {openvino_genai.__version__}", "kv": kv_type(openvino)}


def kv_type(openvino: Any) -> str:
    """What the CPU plug-in chooses on this processor, such as u8."""
    return str(openvino.Core().get_property("CPU", "KV_CACHE_PRECISION").get_type_name())


def measure(job: dict[str, Any]) -> dict[str, Any]:
    import numpy
    import openvino
    import openvino_genai as genai

    pipeline = genai.LLMPipeline(job["model"], "CPU", INFERENCE_NUM_THREADS=job["threads"])

    def generate(prompts: list[list[int]], n: int) -> Any:
        ids = numpy.array(prompts, dtype=numpy.int64)
        config = genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False, apply_chat_template=False)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        return pipeline.generate(inputs, config).perf_metrics

    generate([job["warm_up"]], 2)
    n_prompts, depth = len(job["prompts"]), len(job["prompts"][0])
    metrics = generate(job["prompts"], job["decode_tokens"] + 1)
    # Milliseconds. Its "time per output token" divides by all tokens of a batch, so steps are timed from the whole.
    first, whole = metrics.get_ttft().mean, metrics.get_generate_duration().mean
    return {
        "prefill": 1000 * n_prompts * depth / first, "decode": 1000 * n_prompts * job["decode_tokens"] / (whole - first),
        "kv": kv_type(openvino),
    }


if __name__ == "__main__":
    serve(probe, measure)
