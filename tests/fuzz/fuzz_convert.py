# SPDX-License-Identifier: Apache-2.0
"""Damage the converter's inputs at random for a while: fuzz_convert.py SECONDS [SEED]

Whatever a file holds, conversion ends in a model file or a ConvertError, never in another exception. A find is printed with the
seed that repeats it, and its file is kept."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
import tiny  # noqa: E402
from hisparse_rt.tools.convert import ConvertError, convert  # noqa: E402

TARGETS = ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json")


def damage(data: bytearray, rng: random.Random) -> None:
    """A few changes, most of them near the start, where the structure is."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = min(int(rng.expovariate(1 / 300)), len(data) - 1) if rng.random() < 0.8 else rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 1:
            data[at : at + 8] = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(8, "little")
        elif kind == 2:
            del data[at : at + rng.randrange(1, 20)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        if not data:
            data.append(0)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]


def main(seconds: float, seed: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cfg = tiny.config(num_hidden_layers=1)
        tensors = tiny.weights(cfg)
        tiny.write_hf(folder / "hf", cfg, tensors, generation_config={"eos_token_id": [1, 2]})
        tiny.write_gguf(folder / "m.gguf", cfg, tensors)
        runs, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            rng = random.Random(seed + runs)
            runs += 1
            shutil.rmtree(folder / "try", ignore_errors=True)
            if rng.random() < 0.5:
                shutil.copytree(folder / "hf", folder / "try")
                src, victim = folder / "try", folder / "try" / rng.choice([t for t in TARGETS if (folder / "hf" / t).exists()])
            else:
                (folder / "try").mkdir()
                src = victim = Path(shutil.copy(folder / "m.gguf", folder / "try" / "m.gguf"))
            data = bytearray(victim.read_bytes())
            damage(data, rng)
            victim.write_bytes(data)
            try:
                convert(src, folder / "out.hsr", rng.choice(("f32", "bf16", "q8", "q4")))
            except ConvertError:
                pass
            except Exception as error:
                kept = Path(tempfile.gettempdir()) / f"hisparse_find_{victim.name}"
                shutil.copy(victim, kept)
                print(f"seed {seed + runs - 1}: {type(error).__name__}: {error}; the file is kept as {kept}")
                return 1
    print(f"converter: {runs} damaged inputs, no finds")
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
