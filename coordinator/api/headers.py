"""The headers that kvrelay adds, and those that it reads.

    X-Request-Id         both      echoed if it is 1 to 128 of [A-Za-z0-9._:-], else a new one; a key of nothing inside
    X-Kvrelay-Policy     request   always, never or auto: only where the operator allows it
                         response  the policy that was applied
    X-Kvrelay-Timeout    request   seconds that the whole request may take
    X-Kvrelay-Timeline   request   1: the answer carries each choice's stages in milliseconds as `kvrelay_timeline`
    X-Kvrelay-Route      response  `prefill-0>decode-0`, `decode-0` or `prefill-0`; of several choices the different ones
    X-Kvrelay-Fallback   response  why the policy's wish was not met

Response headers tell what is known when the first byte leaves.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers

from coordinator.api.errors import ApiError, bad_request
from coordinator.generation import Placement, Policy

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_LONGEST_TIMEOUT_S = 86_400
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_POLICIES: dict[str, Policy] = {"always": "always", "never": "never", "auto": "auto"}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the request's headers ask for."""

    policy: Policy | None
    timeline: bool
    timeout_s: float | None = None


def read_wishes(headers: Headers, allow_policy: bool) -> Wishes:
    """
    Raises:
        ApiError: 403 for a policy where none may be chosen, 400 for values that do not exist.
    """
    policy: Policy | None = None
    wanted = headers.get("x-kvrelay-policy")
    if wanted is not None:
        if not allow_policy:
            raise ApiError(
                403,
                "X-Kvrelay-Policy is not allowed on this server.",
                param="X-Kvrelay-Policy",
                code="policy_header_not_allowed",
            )
        policy = _POLICIES.get(wanted.strip().lower())
        if policy is None:
            raise bad_request("X-Kvrelay-Policy must be always, never or auto", param="X-Kvrelay-Policy")
    timeline = headers.get("x-kvrelay-timeline", "0").strip()
    if timeline not in ("0", "1"):
        raise bad_request("X-Kvrelay-Timeline must be 0 or 1", param="X-Kvrelay-Timeline")
    return Wishes(policy, timeline == "1", _timeout_s(headers.get("x-kvrelay-timeout")))


def _timeout_s(given: str | None) -> float | None:
    if given is None:
        return None
    if not _SECONDS.fullmatch(given.strip()) or not 0 < float(given) <= _LONGEST_TIMEOUT_S:
        raise bad_request(
            f"X-Kvrelay-Timeout must be seconds, above 0 and at most {_LONGEST_TIMEOUT_S}", param="X-Kvrelay-Timeout"
        )
    return float(given)


def request_id_for(given: str | None) -> str:
    return given if given is not None and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def route_name(placement: Placement) -> str:
    return ">".join(worker for worker in (placement.prefill, placement.decode) if worker is not None)


def placement_headers(placements: Iterable[Placement | None]) -> dict[str, str]:
    known = [placement for placement in placements if placement is not None]
    values: dict[str, list[str]] = {
        "X-Kvrelay-Route": [route_name(placement) for placement in known],
        "X-Kvrelay-Policy": [placement.policy for placement in known],
        "X-Kvrelay-Fallback": [placement.fallback for placement in known if placement.fallback is not None],
    }
    headers = {}
    for name, found in values.items():
        joined = ", ".join(dict.fromkeys(value for value in found if value))
        if joined:
            headers[name] = _UNPRINTABLE.sub("?", joined)[:1024]
    return headers
