"""Settings of the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coordinator.failure_settings import FailureSettings
from service_kit.worker_settings import Encrypt, Port, Positive, ProcessSettings


class CoordinatorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    process: ProcessSettings = ProcessSettings()
    failure: FailureSettings = FailureSettings()
    host: Annotated[str, Meta(description="address of the HTTP server")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port of the HTTP server")] = 8000
    control: Annotated[str, Meta(description="where workers register, tcp:// or ipc://")] = "tcp://127.0.0.1:8001"
    cluster_token: Annotated[str, Meta(description="shared secret of the cluster's processes")] = ""
    encrypt: Encrypt = False
    api_keys: Annotated[tuple[str, ...], Meta(description="keys that clients must give one of; default: none needed")] = ()
    api_keys_file: Annotated[
        Path | None, Meta(description="file with more keys, one a line, read again when it changes")
    ] = None
    requests_per_minute: Annotated[
        float, Meta(ge=0, description="requests of one key (or of all clients); 0: any number")
    ] = 0.0
    request_burst: Annotated[Positive, Meta(description="requests of one key let through at once after a pause")] = 10
    request_timeout_s: Annotated[float, Meta(ge=0, description="seconds that a request may take; 0: any time")] = 0.0
    max_queued: Annotated[Positive, Meta(description="requests that wait for a first token; more get 429")] = 1024
    chat_template: Annotated[Path | None, Meta(description="Jinja file to use in place of the model's chat template")] = None
    model: Annotated[str, Meta(description="a cached name, a directory, a .gguf file or a hub id")] = "smollm2-135m"
    model_dir: Annotated[Path | None, Meta(description="the converted model; default: found or made from --model")] = None
    served_model: Annotated[str, Meta(description="the name clients use; default: made from --model")] = ""
    policy: Annotated[
        Literal["always", "never", "auto"],
        Meta(description="hand prompts to prefill workers always, never, or when they are long enough"),
    ] = "auto"
    allow_policy_header: Annotated[bool, Meta(description="let a request choose its policy by a header")] = True
    auto_min_prefill_tokens: Annotated[
        int, Meta(ge=0, description="policy auto: uncached prompt tokens from which on a prefill worker is used")
    ] = 256
    max_outstanding: Annotated[Positive, Meta(description="requests at once; more are refused with 429")] = 1024
