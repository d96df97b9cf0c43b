"""May this sequence enter at all? Asked once, at submit; what passes can fit some worker."""

from __future__ import annotations

from coordinator.cluster_view import ClusterView
from coordinator.failure_reasons import FailureReason
from coordinator.generation import Policy
from coordinator.placement_settings import PlacementSettings
from coordinator.retries import GiveUp
from wire.control import Role
from wire.sequence import SequenceSpec


def refusal(
    view: ClusterView, settings: PlacementSettings, spec: SequenceSpec, policy: Policy, outstanding: int, stopping: bool
) -> GiveUp | None:
    """Why not, or None. What can never fit is the client's fault (400), whatever the load; the rest may be tried again."""
    if stopping:
        return GiveUp(FailureReason.SHUTTING_DOWN, "the coordinator is shutting down")
    decode = [member.info for member in view.members.values() if member.info.role is Role.DECODE]
    limit = view.max_model_len
    if not decode or limit is None or view.identity is None:
        return GiveUp(FailureReason.NO_WORKER, "no decode worker is ready")
    wanted = spec.stop.max_tokens - len(spec.resumed)
    total = len(spec.prompt) + spec.stop.max_tokens
    prompt_only = spec.stop.max_tokens == 0 and spec.prompt_logprobs is not None
    if not spec.prompt or (wanted < 1 and not prompt_only):
        return GiveUp(FailureReason.INVALID, "a sequence needs at least one prompt token and one token to generate")
    if total > limit:
        return GiveUp(
            FailureReason.TOO_LONG,
            f"the model's context is {limit} tokens; {total} were asked for ({len(spec.prompt)} in the prompt, "
            f"{spec.stop.max_tokens} to generate)",
        )
    block_size = view.identity.block_size
    most = max(info.num_blocks for info in decode)
    if -(-total // block_size) > most:
        return GiveUp(
            FailureReason.TOO_LONG, f"{total} tokens do not fit into any decode worker ({most * block_size} tokens)"
        )
    prefill = [member.info.num_blocks for member in view.members.values() if member.info.role is Role.PREFILL]
    if policy == "always" and settings.no_prefill == "fail" and prefill:
        tokens = len(spec.prompt) + len(spec.resumed)
        if -(-tokens // block_size) > max(prefill):
            held = max(prefill) * block_size
            return GiveUp(
                FailureReason.TOO_LONG, f"a prompt of {tokens} tokens does not fit any prefill worker ({held} tokens)"
            )
    if outstanding >= settings.max_outstanding:
        return GiveUp(FailureReason.TOO_MANY, f"{outstanding} sequences are running or waiting, as many as are allowed")
    return None
