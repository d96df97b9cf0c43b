"""Streams that never pause against a cluster of fake runners, each answer compared with the reference."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import httpx

from engine.fake_runner import reference_output
from wire.ids import RequestId
from wire.sequence import SamplingParams, SequenceSpec, StopRules

UNFINISHED = "\ufffd"
"""What /detokenize makes of a character whose last bytes never came; a stream leaves it out."""

FIRST_ORDINARY = 100
"""Token ids below are left to special tokens, whose text an answer leaves out."""


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    text: str
    num_tokens: int | None  # as the server counted
    route: str
    error: str | None  # the error object, or how the connection broke
    broken: bool  # the connection ended without an end of the stream
    headers: dict[str, str]  # kvrelay's own
    started: float
    ended: float


def _difference(answer: Answer, reference: str) -> str:
    """Where the text leaves the reference, and whether it finds back to it: lost, repeated, or drawn from other KV."""
    at = next((i for i, (a, b) in enumerate(zip(answer.text, reference, strict=False)) if a != b), 0)
    shift = reference.find(answer.text[-20:]) - (len(answer.text) - 20)
    got, wanted = answer.text[max(0, at - 10) : at + 30], reference[max(0, at - 10) : at + 30]
    return (
        f"{len(answer.text)} characters for {len(reference)}, other from {at} on: {got!r} for {wanted!r}; "
        f"end shifted by {shift}; {answer.headers}; took {answer.ended - answer.started:.2f} s"
    )


class SteadyLoad:
    """A context manager: `num_streams` requests at any moment, on a thread of its own."""

    def __init__(self, url: str, vocab_size: int, *, num_streams: int = 8, prompt_tokens: int = 300, max_tokens: int = 100):
        self.answers: list[Answer] = []
        self._url = url
        self._vocab_size = vocab_size
        self._num_streams = num_streams
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._seeds = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="steady load")
        self._failure: BaseException | None = None

    def __enter__(self) -> SteadyLoad:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Running requests come to their end; then every answer is there."""
        self._stop.set()
        self._thread.join(timeout=120.0)
        assert not self._thread.is_alive(), "a request has not ended within two minutes"
        if self._failure is not None and error is None:
            raise self._failure

    def since(self, moment: float) -> list[Answer]:
        return [answer for answer in list(self.answers) if answer.started >= moment]

    def wait_for(self, num_answers: int, deadline_s: float) -> None:
        """So many more answers."""
        wanted, deadline = len(self.answers) + num_answers, time.monotonic() + deadline_s
        while len(self.answers) < wanted:
            assert self._failure is None, self._failure
            assert time.monotonic() < deadline, f"{wanted - len(self.answers)} of {num_answers} answers are missing"
            time.sleep(0.05)

    def wrong(self) -> list[str]:
        """What is wrong with the answers, after the load has ended: text other than the reference's, or a broken stream."""
        complaints = []
        with httpx.Client(base_url=self._url, timeout=30.0) as client:
            for number, answer in enumerate(self.answers):
                if answer.broken:
                    complaints.append(f"{number} by {answer.route}: {answer.error}")
                elif answer.error is None and answer.text != (reference := self._reference(client, answer.prompt)):
                    complaints.append(
                        f"{number} by {answer.route}: {answer.num_tokens} tokens, {_difference(answer, reference)}"
                    )
        return complaints

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]

    def _reference(self, client: httpx.Client, prompt: tuple[int, ...]) -> str:
        tokens = self._reference_tokens(prompt)
        text: str = client.post("/detokenize", json={"tokens": tokens}).raise_for_status().json()["prompt"]
        return text.rstrip(UNFINISHED)

    def _reference_tokens(self, prompt: tuple[int, ...]) -> list[int]:
        spec = SequenceSpec(
            request_id=RequestId("reference"),
            prompt=prompt,
            sampling=SamplingParams(seed=0, temperature=0.0),
            stop=StopRules(max_tokens=self._max_tokens, ignore_eos=True),
        )
        return [token.token_id for token in reference_output(spec, self._vocab_size, 8192).tokens]

    def _next_prompt(self) -> tuple[int, ...]:
        """A prompt that no cache has, whose answer holds ordinary tokens only."""
        while True:
            draw = random.Random(next(self._seeds))
            prompt = tuple(draw.randrange(FIRST_ORDINARY, self._vocab_size) for _ in range(self._prompt_tokens))
            if min(self._reference_tokens(prompt)) >= FIRST_ORDINARY:
                return prompt

    async def _run(self) -> None:
        try:
            async with httpx.AsyncClient(base_url=self._url, timeout=60.0) as client, asyncio.TaskGroup() as tasks:
                for _ in range(self._num_streams):
                    tasks.create_task(self._stream(client))
        except BaseExceptionGroup as group:
            self._failure = group.exceptions[0]

    async def _stream(self, client: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            answer = await self._ask(client, self._next_prompt())
            self.answers.append(answer)
            if answer.error is not None:
                await asyncio.sleep(0.5)

    async def _ask(self, client: httpx.AsyncClient, prompt: tuple[int, ...]) -> Answer:
        body = {
            "model": "smollm2-135m",
            "prompt": list(prompt),
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, text, num_tokens, error, ended_well = time.monotonic(), "", None, None, False
        headers: dict[str, str] = {}
        try:
            async with client.stream(
                "POST", "/v1/completions", json=body, headers={"X-Kvrelay-Policy": "always"}
            ) as response:
                headers = {name: value for name, value in response.headers.items() if name.startswith("x-")}
                if response.status_code != 200:
                    error, ended_well = f"{response.status_code}: {(await response.aread()).decode()[:300]}", True
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        ended_well = True
                    elif line.startswith("data: "):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            error, ended_well = json.dumps(chunk["error"]), True
                        text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                        num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
        except httpx.TransportError as broken:
            error = f"{type(broken).__name__}: {broken}"
        if not ended_well and error is None:
            error = "the stream ended without [DONE]"
        route = headers.get("x-kvrelay-route", "")
        return Answer(
            prompt, text.rstrip(UNFINISHED), num_tokens, route, error, not ended_well, headers, started, time.monotonic()
        )
