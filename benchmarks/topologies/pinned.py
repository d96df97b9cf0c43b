"""Pins a process to CPUs and becomes another program: ``python -m benchmarks.topologies.pinned --cpus 0-1 -- PROGRAM …``.

For servers that are not ours: affinity and thread variables survive an exec, and so does that the program ends with us.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from service_kit.cpus import parse_cpus, pin, thread_environ
from service_kit.parent import end_with_parent


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.topologies.pinned")
    parser.add_argument("--cpus", default="", type=parse_cpus)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    end_with_parent(options.parent_pid)
    environ = dict(os.environ)
    if options.cpus:
        try:
            pin(options.cpus)
        except ValueError as error:
            parser.error(str(error))
        environ = thread_environ(len(options.cpus)) | environ
    program = shutil.which(options.program)
    if program is None:
        parser.error(f"there is no program {options.program}")
    os.execve(program, [program, *options.arguments], environ)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
