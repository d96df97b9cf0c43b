"""Runs other people's clients against a cluster of ours, each in an environment of its own. See README.md."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from fake_reference import VOCAB_SIZE, fake_model_dir  # noqa: E402
from http_cluster import kvrelay_up, model_environ  # noqa: E402
from tiny_models import write_tiny_tokenizer  # noqa: E402


def python_client(packages: list[str], script: str) -> Callable[[Path, str], int]:
    def run(directory: Path, url: str) -> int:
        venv.create(directory, with_pip=True)
        python = directory / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        return subprocess.run([python, HERE / script, url]).returncode

    return run


def npm_client(directory: Path, url: str) -> int:
    directory.mkdir()
    subprocess.run(["npm", "install", "--silent", "openai"], cwd=directory, check=True)
    script = directory / "client.mjs"
    script.write_text((HERE / "npm_client.mjs").read_text())
    return subprocess.run(["node", script, url]).returncode


def schemathesis(directory: Path, url: str) -> int:
    venv.create(directory, with_pip=True)
    subprocess.run([directory / "bin" / "python", "-m", "pip", "install", "-q", "schemathesis"], check=True)
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [directory / "bin" / "schemathesis", "run", f"{url}/openapi.json", "--url", url, "--checks", checks]
    return subprocess.run([*command, "--max-examples", str(EXAMPLES), "--exclude-path", "/metrics"]).returncode


CLIENTS: dict[str, Callable[[Path, str], int]] = {
    "openai": python_client(["openai"], "openai_client.py"),
    "litellm": python_client(["litellm"], "litellm_client.py"),
    "langchain": python_client(["langchain-openai"], "langchain_client.py"),
    "npm": npm_client,
    "schemathesis": schemathesis,
}
EXAMPLES = 500

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*CLIENTS, []])
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    arguments = parser.parse_args()
    EXAMPLES = arguments.examples
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = fake_model_dir(Path(scratch) / "model")
        write_tiny_tokenizer(model_dir, VOCAB_SIZE)
        environ = model_environ(model_dir=model_dir, runner="fake", served_model="m", block_size=16, num_blocks=512)
        with kvrelay_up(Path(scratch) / "run", "--policy", "always", environ=environ) as cluster:
            codes = {name: CLIENTS[name](Path(scratch) / name, cluster.url) for name in arguments.names or CLIENTS}
            cluster.assert_empty()
    print(codes)
    sys.exit(any(codes.values()))
