"""AdamW on float32 master weights, with the gradient clipped by its global norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cotenant.core.job import Hyperparameters

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """``torch.optim.AdamW`` over named weights. ``step`` is the one place where training state changes."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], hyper: Hyperparameters) -> None:
        self._parameters = dict(parameters)
        self._max_grad_norm = hyper.max_grad_norm
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=hyper.learning_rate,
            betas=(hyper.adam_beta1, hyper.adam_beta2),
            eps=hyper.adam_epsilon,
            weight_decay=hyper.weight_decay,
            fused=True,
        )

    def clip(self, gradient_scale: float = 1.0) -> float:
        """Undo ``gradient_scale``, a power of 2 that the gradient was computed with. Then scale the gradient to a norm
        of at most ``max_grad_norm`` (0: leave it), and return the norm it had.

        A norm that is not finite means that the gradient is lost; do not ``step`` then.
        """
        if gradient_scale != 1.0:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= gradient_scale
        max_norm = self._max_grad_norm if self._max_grad_norm > 0 else float("inf")
        return float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), max_norm))

    def step(self, learning_rate: float) -> None:
        """Apply the accumulated gradient and drop it. A weight without gradient counts as one with gradient 0."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, torch.Tensor]:
        """References to the first and second moments, by ``<moment>.<weight's name>``; empty before the first step."""
        return {
            f"{moment}.{name}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
            for moment in _MOMENTS
        }

    def load_moments(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Continue after ``num_steps`` steps with what ``moments`` gave then."""
        for name, parameter in self._parameters.items():
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(num_steps), device=parameter.device),
                **{moment: tensors[f"{moment}.{name}"].to(parameter.device, copy=True) for moment in _MOMENTS},
            }


def warm_up() -> None:
    """Make torch load what it loads at the first backward and the first optimizer step: a second or two in which a
    worker that serves requests had better not be."""
    weight = torch.zeros(1, requires_grad=True)
    torch.autograd.backward(weight * 1.0, torch.zeros(1))
    optimizer = Optimizer({"weight": weight}, Hyperparameters())
    optimizer.clip()
    optimizer.step(0.0)
