"""The cluster as `GET /cluster` shows it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from coordinator.assignments import Assignments
from coordinator.cluster_view import ClusterView, FormerWorker, Member
from coordinator.placement_settings import PlacementSettings
from wire.ids import Incarnation


def cluster_report(
    incarnation: Incarnation,
    settings: PlacementSettings,
    view: ClusterView,
    assignments: Assignments,
    counters: Mapping[str, int],
    outstanding: int,
    now: float,
) -> dict[str, object]:
    """Plain values only. Addresses and tokens of the control plane are left out; ages are in seconds."""
    workers = [_member(member, assignments) for member in view.members.values()]
    workers += [_former(worker, now) for worker in view.former.values()]
    return {
        "coordinator": incarnation,
        "policy": settings.policy,
        "model": view.identity.model if view.identity is not None else None,
        "max_model_len": view.max_model_len,
        "outstanding": outstanding,
        "workers": workers,
        "links": [
            {
                "prefill": view.members[prefill].info.worker_id,
                "decode": view.members[decode].info.worker_id,
                "decode_incarnation": decode,
                "transport": report.transport,
                "path": report.path,
                "gb_per_s": report.gb_per_s,
                "up": report.up,
                "reason": report.reason,
            }
            for (prefill, decode), report in view.links.items()
        ],
        "refused": [_former(worker, now) for worker in view.refused.values()],
        "counters": dict(counters),
    }


def _member(member: Member, assignments: Assignments) -> dict[str, object]:
    info = member.info
    outstanding = assignments.of(info.incarnation)
    return {
        "id": info.worker_id,
        "incarnation": info.incarnation,
        "role": info.role.value,
        "state": member.state.value,
        "load": msgspec.to_builtins(member.load),
        "outstanding": {"sequences": outstanding.sequences, "unseen": outstanding.unseen},
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
        "model": info.model,
        "host": info.host,
        "pid": info.pid,
        "cpus": list(info.cpus),
        "endpoints": [msgspec.to_builtins(endpoint) for endpoint in info.endpoints],
    }


def _former(worker: FormerWorker, now: float) -> dict[str, object]:
    return {
        "id": worker.worker_id,
        "incarnation": worker.incarnation,
        "role": worker.role.value,
        "state": worker.state.value,
        "reason": worker.reason,
        "age_s": round(now - worker.at, 3),
    }
