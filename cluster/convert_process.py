"""``python -m cluster.convert_process SOURCE TARGET``: converts a model, reporting by `cluster.step_protocol`."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.step_protocol import OnProgress, run_steps
from engine.convert import convert


def main(source: str, target: str) -> int:
    def work(on_progress: OnProgress) -> str:
        convert(Path(source), Path(target), on_progress)
        return target

    return run_steps(work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
