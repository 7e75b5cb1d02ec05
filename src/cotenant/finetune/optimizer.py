"""AdamW on float32 master weights, with the gradient clipped by its global norm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch.optim.adamw import adamw

from cotenant.core.job import Hyperparameters
from cotenant.device.transfer import to_host

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW over named float32 weights. ``step`` is the one place where training state changes.

    By torch's functional form: making a ``torch.optim.AdamW`` imports torch's compiler, and every worker would be ready
    so much later.

    The weights become views of one tensor, and their gradients of ``gradient``, zeros at first, in the order in which
    they are given: so a step is a few launches, however many weights there are. Whoever computes gradients adds them
    there; a step leaves zeros.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], hyper: Hyperparameters) -> None:
        self._parameters = dict(parameters)
        self._max_grad_norm = hyper.max_grad_norm
        weights = list(self._parameters.values())
        self._sizes = [weight.numel() for weight in weights]
        self._all = torch.cat([weight.detach().flatten() for weight in weights])
        self.gradient = torch.zeros_like(self._all)  # [elements of all weights]
        parts = zip(weights, self._split(self._all), self._split(self.gradient), strict=True)
        for weight, part, gradient in parts:
            weight.data = part
            weight.grad = gradient
        self._moments: dict[str, torch.Tensor] = {}  # each [elements of all weights]; none before the first step
        self._num_steps = torch.zeros((), device=self._all.device)
        self._run_adamw = partial(
            adamw,
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=hyper.adam_beta1,
            beta2=hyper.adam_beta2,
            eps=hyper.adam_epsilon,
            weight_decay=hyper.weight_decay,
        )

    @torch.no_grad()
    def clip(self, gradient_scale: float = 1.0) -> torch.Tensor:
        """Undo ``gradient_scale``, a power of 2 that the gradient was computed with. Then scale it to a norm of at most
        ``max_grad_norm`` (0: leave it), and return the norm it had, [].

        A norm that is not finite means that the gradient is lost; do not ``step`` then.
        """
        if gradient_scale != 1.0:
            self.gradient /= gradient_scale
        norm: torch.Tensor = torch.linalg.vector_norm(self.gradient)
        if self._max_grad_norm > 0:
            self.gradient *= (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradient, and begin a new one."""
        if not self._moments:
            self._moments = {moment: torch.zeros_like(self._all) for moment in _MOMENTS}
        first, second = (self._moments[moment] for moment in _MOMENTS)
        self._run_adamw([self._all], [self.gradient], [first], [second], [], [self._num_steps], lr=learning_rate)
        self.gradient.zero_()

    def moments(self) -> dict[str, torch.Tensor]:
        """References to the first and second moments, by ``<moment>.<weight's name>``; empty before the first step."""
        return self._moments_by_name(self._moments)

    @property
    def device(self) -> torch.device:
        return self._all.device

    def copied(self, begins: torch.cuda.Event | None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Copies on the CPU of the weights, by name, and of ``moments``; nobody trains them. Returns when they are
        there. ``begins``: on a GPU, when they are what is to be copied."""
        weights = dict(zip(self._parameters, self._split(to_host(self._all, begins)), strict=True))
        moments = {moment: to_host(of_all, begins) for moment, of_all in self._moments.items()}
        return weights, self._moments_by_name(moments)

    def load_moments(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Continue after ``num_steps`` steps with what ``moments`` gave then."""
        device = self._all.device
        self._num_steps = torch.tensor(float(num_steps), device=device)
        self._moments = {
            moment: torch.cat([tensors[f"{moment}.{name}"].flatten() for name in self._parameters]).to(device)
            for moment in _MOMENTS
        }

    def _moments_by_name(self, moments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            f"{moment}.{name}": part
            for moment, of_all in moments.items()
            for name, part in zip(self._parameters, self._split(of_all), strict=True)
        }

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a tensor of the weights' size, one for each weight, of its shape."""
        parts = flat.split(self._sizes)
        return [part.view(weight.shape) for part, weight in zip(parts, self._parameters.values(), strict=True)]
