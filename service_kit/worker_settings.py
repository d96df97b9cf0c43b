"""Settings that prefill and decode workers share; each worker's own Struct is composed of these (`service_kit.settings`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from service_kit.cpus import parse_cpus
from service_kit.logging import LogFormat, LogLevel
from service_kit.units import ByteSize
from transport.fault_rules import parse_rule

TransportName = Literal["auto", "inproc", "shm", "zmq", "ucx"]
AUTO_TRANSPORTS = ("shm", "zmq")
Positive = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0)]
Encrypt = Annotated[bool, Meta(description="encrypt every TCP link by CURVE, with a key made from the cluster token")]


class ProcessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the process runs, whatever it does."""

    drain_s: Annotated[float, Meta(ge=0, description="seconds that running requests get to finish after SIGTERM")] = 30.0
    log_format: Annotated[LogFormat, Meta(description="auto: human on a terminal, else json")] = "auto"
    log_level: Annotated[LogLevel, Meta(description="the least important lines to log")] = "info"
    cpus: Annotated[str, Meta(description="CPUs to run on, such as 0-3,5; default: all")] = ""
    threads: Annotated[Positive | None, Meta(description="compute threads; default: as many as CPUs")] = None

    def __post_init__(self) -> None:
        try:
            parse_cpus(self.cpus)
        except ValueError as error:
            raise ValueError(f"cpus: {error}") from error


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who a worker is, and how it is reached."""

    worker_id: Annotated[str, Meta(description="stable name, such as prefill-0; default: role, host and process id")] = ""
    coordinator: Annotated[str, Meta(description="the coordinator's control address")] = "tcp://127.0.0.1:8001"
    cluster_token: Annotated[str, Meta(description="shared secret of the cluster's processes")] = ""
    encrypt: Encrypt = False
    model: Annotated[str, Meta(description="a cached name, a directory, a .gguf file or a hub id")] = "smollm2-135m"
    model_dir: Annotated[Path | None, Meta(description="the converted model; default: found or made from --model")] = None
    served_model: Annotated[str, Meta(description="the name clients use; default: made from --model")] = ""
    transport: Annotated[
        tuple[TransportName, ...], Meta(description="hand-off transports, best first; auto: shm,zmq", min_length=1)
    ] = ("auto",)
    http_host: Annotated[str, Meta(description="address of /health, /ready and /metrics")] = "127.0.0.1"
    http_port: Annotated[Port | None, Meta(description="port of /health, /ready and /metrics; default: none")] = None
    faults: Annotated[
        tuple[str, ...],
        Meta(description="tests only: what goes wrong on purpose, such as corrupt:put:p=0.1"),
    ] = ()
    faults_file: Annotated[Path | None, Meta(description="tests only: a file with more faults, read when it changes")] = None

    def __post_init__(self) -> None:
        for rule in self.faults:
            try:
                parse_rule(rule)
            except ValueError as error:
                raise ValueError(f"faults: {error}") from error
        if "auto" in self.transport and len(self.transport) > 1:
            raise ValueError("transport: auto stands alone")
        if self.encrypt and "ucx" in self.transport:
            raise ValueError("transport: ucx cannot be encrypted; leave it out, or encrypt")
        if len(set(self.transport)) < len(self.transport):
            raise ValueError("transport: one is named twice")

    @property
    def transport_order(self) -> tuple[str, ...]:
        """The hand-off transports by scheme, best first."""
        return AUTO_TRANSPORTS if self.transport == ("auto",) else self.transport


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engine computes with, and its limits."""

    runner: Annotated[Literal["model", "fake"], Meta(description="fake: forced tokens without a model, for tests")] = "model"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], Meta(description="of weights and KV cache; auto: the model's own")
    ] = "auto"
    device: Annotated[str, Meta(description="cpu, cuda or cuda:N")] = "cpu"
    kernels: Annotated[
        Literal["auto", "torch"], Meta(description="auto: compiled CPU kernels where they can be had; torch: never")
    ] = "auto"
    block_size: Annotated[Positive, Meta(description="tokens per KV block")] = 64
    num_blocks: Annotated[Positive | None, Meta(description="blocks in the KV pool; default: what --kv-memory holds")] = None
    kv_memory: Annotated[ByteSize, Meta(description="size of the KV pool, such as 2GiB")] = ByteSize(2**30)
    max_batched_tokens: Annotated[Positive, Meta(description="tokens per step, over all sequences")] = 2048
    prefill_chunk: Annotated[Positive, Meta(description="tokens of one prompt per step")] = 512
    max_num_sequences: Annotated[Positive, Meta(description="sequences that run at once")] = 64
    max_model_len: Annotated[Positive | None, Meta(description="prompt and output tokens; default: the model's context")] = (
        None
    )
    fake_step_s: Annotated[Seconds, Meta(description="fake runner: seconds per step")] = 0.0
    fake_token_s: Annotated[Seconds, Meta(description="fake runner: seconds per token of a step")] = 0.0
