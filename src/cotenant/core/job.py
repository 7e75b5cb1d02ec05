"""A fine-tuning job: its settings and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# The methods of training, as the API calls them.
SUPERVISED = "supervised"
DPO = "dpo"
METHODS = (SUPERVISED, DPO)

# The learning-rate schedules, by transformers' names, with the settings that ``lr_scheduler_kwargs`` may hold.
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "min_lr_ratio", "num_cycles"),
}
DEFAULT_LR_END = 1e-7  # of "polynomial"

# What ``metric_for_best_model`` may name (rewards with method 'dpo' alone): the field of ``StepMetrics``, and whether
# greater is better.
BEST_METRICS: Mapping[str, tuple[str, bool]] = {
    "loss": ("full_valid_loss", False),
    "mean_token_accuracy": ("full_valid_mean_token_accuracy", True),
    "rewards/accuracies": ("full_valid_preference.accuracies", True),
    "rewards/margins": ("full_valid_preference.margins", True),
}


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Everything that shapes the result of a job, resolved: no 'auto' is left. Names are TRL's and PEFT's.

    ``batch_size`` is the number of examples (packed rows with ``packing``, pairs with method 'dpo') per optimizer step;
    ``per_device_train_batch_size * gradient_accumulation_steps`` is mapped to it where the job is created.
    ``max_steps`` -1 means: as many as ``n_epochs`` gives. ``warmup_steps`` 0 leaves ``warmup_ratio`` to decide.
    ``eval_steps``/``save_steps`` 0: only at the end of each epoch. ``rank_pattern`` and ``alpha_pattern`` give modules
    whose name ends with a regular expression another ``r`` or ``lora_alpha``; the first that fits counts.
    ``early_stopping_patience``: evaluations without progress after which the job ends; 0: it never does.
    ``save_total_limit``: checkpoints that are kept, the newest and the best in any case; None or 0: all.
    ``load_best_model_at_end``: the best step's adapter is exported, not the last one's. ``beta`` and
    ``label_smoothing`` are of method 'dpo' alone.
    """

    method: str = SUPERVISED
    n_epochs: int = 3
    batch_size: int = 8
    learning_rate: float = 2e-4
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, float] = field(default_factory=dict)
    warmup_ratio: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    max_steps: int = -1
    max_length: int = 2048
    packing: bool = False
    gradient_checkpointing: bool = False
    eval_steps: int = 0
    save_steps: int = 0
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str = "loss"
    early_stopping_patience: int = 0
    early_stopping_threshold: float = 0.0
    seed: int = 42
    r: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    use_rslora: bool = False
    target_modules: tuple[str, ...] = LINEAR_MODULES
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    beta: float = 0.1
    label_smoothing: float = 0.0

    @property
    def selects(self) -> bool:
        """Whether steps are compared on the validation file. Then every evaluation measures all of it."""
        return self.load_best_model_at_end or self.early_stopping_patience > 0

    @property
    def max_rank(self) -> int:
        """What --max-lora-rank has to be at least: ``r`` counts unless ``rank_pattern`` names all that is trained."""
        unnamed = set(self.target_modules) - self.rank_pattern.keys()
        return max((*self.rank_pattern.values(), *([self.r] if unnamed else [])))

    @property
    def trained(self) -> str:
        """What is trained, as far as the time of its tasklets depends on it: jobs of which this is the same may learn
        from each other's times."""
        parts = [self.method, f"r={self.r}", "+".join(sorted(self.target_modules))]
        parts += [f"{name}={rank}" for name, rank in sorted(self.rank_pattern.items())]
        parts += ["dropout"] if self.lora_dropout > 0 else []
        parts += ["gradient_checkpointing"] if self.gradient_checkpointing else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the worker needs to run a job. Paths are absolute and lie in the data folder.

    ``dataset_path`` and ``validation_path`` hold tokenised examples (``text.examples`` describes the format).
    ``recorded_step``: the last step whose metrics the store already has; later ones are reported again.
    """

    job_id: str
    base_model: str
    folder: str
    dataset_path: str
    validation_path: str | None
    adapter_name: str
    hyperparameters: Hyperparameters
    recorded_step: int = 0


@dataclass(frozen=True, slots=True)
class PreferenceMetrics:
    """Means over pairs, as TRL's DPOTrainer defines them. A reward is beta times how much likelier (in log-probability)
    an answer is than under the base; ``accuracies``: the share of pairs whose chosen answer has the greater reward."""

    chosen: float
    rejected: float
    accuracies: float
    margins: float
    logps_chosen: float
    logps_rejected: float


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step's figures, as in OpenAI's result file. Validation fields only where it ran.

    With method 'dpo' losses are DPO's, and token accuracies those of the chosen answers.
    """

    step: int
    epoch: float
    train_loss: float
    train_mean_token_accuracy: float
    learning_rate: float
    grad_norm: float
    tokens: int
    valid_loss: float | None = None
    valid_mean_token_accuracy: float | None = None
    full_valid_loss: float | None = None
    full_valid_mean_token_accuracy: float | None = None
    preference: PreferenceMetrics | None = None
    valid_preference: PreferenceMetrics | None = None
    full_valid_preference: PreferenceMetrics | None = None
