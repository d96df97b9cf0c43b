"""lm-evaluation-harness over kvrelay and over transformers: the same scores, log-likelihoods and greedy texts.

    python tests/clients/evaluation.py [--model smollm2-135m] [--keep DIRECTORY]

Three runs of the tasks in `evaluation/`, all in float32: `hf`, transformers' own model; `local-completions` (echo and
logprobs, prompts as token ids) against a cluster whose policy is always (P and D); and the same with never (one worker does
both).
Every item of the last two is compared with the first run's. Ends with 0 if they agree.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE.parent), str(ROOT)]

from environments import cache_directory, python_environment  # noqa: E402
from http_cluster import kvrelay_up, model_environ  # noqa: E402

from cluster.commands.model import model_store  # noqa: E402

TASKS = HERE / "evaluation"
MULTIPLE_CHOICE, GENERATE = "kvrelay_facts", "kvrelay_beginnings"
TOLERANCE = 1e-3
"""Of one choice's log-likelihood: a sum of up to 20 tokens' float32 logprobs, each computed in another order."""
RUN_S = 1800.0

Samples = dict[str, list[dict[str, Any]]]


def evaluate(python: Path, output: Path, kind: str, **model_args: object) -> Samples:
    """One run of the harness, as its users start it; its samples by task, in the documents' order."""
    options = {
        "--model": kind,
        "--model_args": ",".join(f"{name}={value}" for name, value in model_args.items()),
        "--tasks": f"{MULTIPLE_CHOICE},{GENERATE}",
        "--include_path": TASKS,
        "--output_path": output,
        "--batch_size": "1",
        "--device": "cpu",
    }
    command = [python, "-m", "lm_eval", "run", "--log_samples", *(word for option in options.items() for word in option)]
    environ = {
        **os.environ,
        "HF_DATASETS_CACHE": str(cache_directory() / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # threads that spin for each other cost a busy machine seconds per token
        "OPENAI_API_KEY": "none",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with (output.parent / f"{output.name}.log").open("w") as log:
        done = subprocess.run(command, cwd=TASKS, env=environ, stdout=log, stderr=subprocess.STDOUT, timeout=RUN_S)
    if done.returncode:
        raise SystemExit(f"lm_eval ended with {done.returncode}:\n{Path(log.name).read_text()[-3000:]}")
    samples: Samples = {}
    for task in (MULTIPLE_CHOICE, GENERATE):
        (path,) = output.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        samples[task] = sorted(lines, key=lambda sample: sample["doc_id"])
    return samples


def over_kvrelay(python: Path, scratch: Path, model: str, model_dir: Path, policy: str) -> Samples:
    environ = model_environ(model=model, dtype="float32", served_model="m")
    with kvrelay_up(scratch / f"up-{policy}", "--policy", policy, environ=environ) as cluster:
        url = f"{cluster.url}/v1/completions"
        arguments = {"model": "m", "base_url": url, "tokenizer": model_dir, "tokenizer_backend": "huggingface"}
        samples = evaluate(python, scratch / policy, "local-completions", **arguments, num_concurrent=4, max_retries=1)
        cluster.assert_empty()
        print(f"{policy:>9}: routes {routes(cluster.cluster()['counters'])}")
    return samples


def routes(counters: dict[str, int]) -> dict[str, int]:
    return {name.removeprefix("route_"): count for name, count in counters.items() if name.startswith("route_")}


def likelihoods(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    """Of each choice: log-likelihood, and whether greedy decoding would have written it."""
    return [(float(value), str(greedy) == "True") for value, greedy in sample["filtered_resps"]]


def compare(name: str, samples: Samples, reference: Samples) -> list[str]:
    """What differs; prints a summary."""
    wrong: list[str] = []
    worst = 0.0
    for ours, theirs in zip(samples[MULTIPLE_CHOICE], reference[MULTIPLE_CHOICE], strict=True):
        for choice, (mine, other) in enumerate(zip(likelihoods(ours), likelihoods(theirs), strict=True)):
            worst = max(worst, abs(mine[0] - other[0]))
            if abs(mine[0] - other[0]) > TOLERANCE or mine[1] != other[1]:
                wrong.append(f"{name}: document {ours['doc_id']}, choice {choice}: {mine}, transformers {other}")
        for metric in ("acc", "acc_norm"):
            if ours[metric] != theirs[metric]:
                wrong.append(f"{name}: document {ours['doc_id']}: {metric} {ours[metric]}, transformers {theirs[metric]}")
    for ours, theirs in zip(samples[GENERATE], reference[GENERATE], strict=True):
        if ours["filtered_resps"] != theirs["filtered_resps"]:
            texts = ours["filtered_resps"], theirs["filtered_resps"]
            wrong.append(f"{name}: beginning {ours['doc_id']}: {texts[0]}, transformers {texts[1]}")
    print(f"{name:>9}: {scores(samples)}, largest difference of a log-likelihood {worst:.1e}, {len(wrong)} differences")
    return wrong


def scores(samples: Samples) -> str:
    facts = samples[MULTIPLE_CHOICE]
    return ", ".join(f"{metric} {sum(fact[metric] for fact in facts) / len(facts):.4f}" for metric in ("acc", "acc_norm"))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--keep", type=Path, help="where the harness' own output shall stay")
    arguments = parser.parse_args()
    python = python_environment(
        "lm-eval", ["torch", "transformers", "accelerate", "lm-eval[api]"], constraints=ROOT / "requirements.lock"
    )
    model_dir = model_store(os.environ).resolve(arguments.model, lambda *progress: None).directory
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        wrong: list[str] = []
        try:
            reference = evaluate(python, scratch / "hf", "hf", pretrained=model_dir, dtype="float32")
            print(f"{'hf':>9}: {scores(reference)}, {len(reference[MULTIPLE_CHOICE])} facts")
            for policy in ("always", "never"):
                samples = over_kvrelay(python, scratch, arguments.model, model_dir, policy)
                wrong += compare(policy, samples, reference)
        finally:
            if arguments.keep is not None:
                shutil.copytree(scratch, arguments.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
