"""Policies: pure functions from a snapshot of the machine to a plan for the next iteration."""

from __future__ import annotations

from cotenant.core.errors import InvalidInputError
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import Policy
from cotenant.scheduler.policies.adaptive import AdaptivePolicy
from cotenant.scheduler.policies.chunked import ChunkedPolicy
from cotenant.scheduler.policies.fineinfer import FineInferPolicy
from cotenant.scheduler.policies.harli import HarliPolicy
from cotenant.scheduler.policies.inference_only import InferenceOnlyPolicy
from cotenant.scheduler.policies.lifecycle import LifecyclePolicy
from cotenant.scheduler.policies.llmstation import LlmStationPolicy
from cotenant.scheduler.policies.multitask import MultitaskPolicy
from cotenant.scheduler.policies.static import StaticPolicy
from cotenant.scheduler.policies.temporal import TemporalPolicy
from cotenant.scheduler.policies.whole_step import WholeStepPolicy


def create_policy(name: str, predictor: LatencyPredictor) -> Policy:
    """The policy of this name (`--policy`). Raises InvalidInputError for an unknown one."""
    policies: dict[str, Policy] = {
        "multitask": MultitaskPolicy(predictor),
        "adaptive": AdaptivePolicy(predictor),
        "harli": HarliPolicy(predictor),
        "llmstation": LlmStationPolicy(predictor),
        "static": StaticPolicy(predictor),
        "chunked": ChunkedPolicy(predictor),
        "inference-only": InferenceOnlyPolicy(),
        "whole-step": WholeStepPolicy(),
        "temporal": TemporalPolicy(),
        "lifecycle": LifecyclePolicy(),
        "fineinfer": FineInferPolicy(predictor),
    }
    if name not in policies:
        raise InvalidInputError(f"--policy: {name!r} is not one of {', '.join(policies)}", param="policy")
    return policies[name]


__all__ = ["Policy", "create_policy"]
