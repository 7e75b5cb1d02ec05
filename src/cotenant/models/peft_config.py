"""PEFT's ``adapter_config.json``: what of it this server honours, and what it refuses. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import LINEAR_MODULES
from cotenant.core.module_pattern import MAX_CPU_S, are_quick, end_pattern, module_name
from cotenant.models.spec import ModelSpec

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"

_ALL_LINEAR = "all-linear"
_MAX_KEYS = 4096  # of a pattern: some write one for each module

# Settings that add to or change the plain low-rank delta, so that ignoring them would change the answers.
_REFUSED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "megatron_config",
)
# Initialisations that subtract from the base weights when the adapter is made.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The honoured settings. The patterns map regular expressions for ends of module names to values."""

    path: Path
    r: int
    alpha: float
    use_rslora: bool
    dropout: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers: frozenset[int] | None  # None: all

    def rank_of(self, name: str) -> int:
        """The rank of the module with this full name."""
        return matched(self.rank_pattern, name, self.r)

    def alpha_of(self, name: str) -> float:
        """The alpha of the module with this full name."""
        return matched(self.alpha_pattern, name, self.alpha)

    def targets(self, spec: ModelSpec) -> list[tuple[int, str]]:
        """The (layer, module) pairs of a model that have LoRA.

        Raises InvalidInputError if a target is none of them, or a regular expression takes too long on their names.
        """
        names = {
            module_name(layer, module): (layer, module) for layer in range(spec.num_layers) for module in LINEAR_MODULES
        }
        whole = [item for item in (self.target_modules, self.exclude_modules) if isinstance(item, str)]
        if not are_quick([*self.rank_pattern, *self.alpha_pattern], whole, list(names)):
            raise InvalidInputError(
                f"{self.path}: matching its regular expressions takes over {MAX_CPU_S} s; write module names instead"
            )
        if not isinstance(self.target_modules, str):
            unknown = [item for item in self.target_modules if not any(_ends_with_name(name, item) for name in names)]
            if unknown:
                raise InvalidInputError(
                    f"{self.path}: target_modules {', '.join(unknown)} cannot have LoRA here, only "
                    f"{', '.join(LINEAR_MODULES)}"
                )
        found = [
            key
            for name, key in names.items()
            if _selects(self.target_modules, name)
            and not (self.exclude_modules and _selects(self.exclude_modules, name))
            and (self.layers is None or key[0] in self.layers or self._names_it(name))
        ]
        if not found:
            raise InvalidInputError(f"{self.path}: target_modules selects none of this model's modules")
        return found

    def _names_it(self, name: str) -> bool:
        """Whether the module's full name is in a list of them: for that PEFT looks before it looks at layers."""
        return not isinstance(self.target_modules, str) and name in self.target_modules


def read_config(folder: Path) -> AdapterConfig:
    """Read a folder's ``adapter_config.json``. Raises InvalidInputError, naming the file and the setting."""
    path = folder / CONFIG_FILE
    config = _read_object(path)
    _refuse_unsupported(path, config)
    layers = config.get("layers_to_transform")
    if isinstance(layers, int):
        layers = [layers]
    try:
        return AdapterConfig(
            path=path,
            r=_positive(config["r"]),
            alpha=_finite(config["lora_alpha"]),
            use_rslora=bool(config.get("use_rslora", False)),
            dropout=float(config.get("lora_dropout") or 0.0),
            rank_pattern={key: _positive(rank) for key, rank in _pattern(config, "rank_pattern")},
            alpha_pattern={key: _finite(alpha) for key, alpha in _pattern(config, "alpha_pattern")},
            target_modules=_modules(config["target_modules"]),
            exclude_modules=_modules(config.get("exclude_modules") or ()),
            layers=frozenset(map(int, layers)) if layers else None,
        )
    except KeyError as error:
        raise InvalidInputError(f"{path} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, OverflowError, re.error) as error:
        raise InvalidInputError(f"{path} has a setting of the wrong kind: {error}") from error
    except RecursionError as error:
        raise InvalidInputError(
            f"{path} has a regular expression that is nested too deeply; write module names instead"
        ) from error


def written_config(
    base_model_name_or_path: str,
    *,
    r: int,
    alpha: float,
    use_rslora: bool,
    dropout: float,
    num_layers: int,
    ranks: Mapping[tuple[int, str], int],
    alphas: Mapping[tuple[int, str], float],
) -> dict[str, Any]:
    """The content of ``adapter_config.json``. ``ranks`` holds every adapted (layer, module), ``alphas`` those whose
    alpha is not the usual one."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name_or_path,
        "inference_mode": True,
        "r": r,
        "lora_alpha": _plain(alpha),
        "lora_dropout": dropout,
        "use_rslora": use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": _written_targets(ranks, num_layers),
        "rank_pattern": {re.escape(module_name(*key)): rank for key, rank in ranks.items() if rank != r},
        "alpha_pattern": {re.escape(module_name(*key)): _plain(value) for key, value in alphas.items()},
    }


def matched(pattern: Mapping[str, T], name: str, default: T) -> T:
    """What a rank or alpha pattern says of the module with this full name: the first key that fits its end."""
    return next((value for key, value in pattern.items() if _ends_with_pattern(name, key)), default)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise InvalidInputError(f"{path} is no file")  # whoever opens a pipe waits for its other end
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not path.parent.is_dir():
            raise InvalidInputError(
                f"the adapter's folder {path.parent} is not there any more: put it back, or unload the adapter"
            ) from error
        raise InvalidInputError(
            f"{path.parent} holds no {path.name}, so it is not an adapter in PEFT's format"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInputError(f"{path} does not hold a JSON object")
    return config


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise InvalidInputError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA is supported")
    problems = [f"{key} {config[key]!r}" for key in _REFUSED if config.get(key)]
    if config.get("bias", "none") != "none":
        problems.append(f"bias {config['bias']!r}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_BASE_CHANGING_INITS):
        problems.append(f"init_lora_weights {init!r} (convert it to a plain LoRA adapter when saving)")
    if problems:
        raise InvalidInputError(f"{path} asks for what is not supported: {'; '.join(problems)}")


def _modules(value: Any) -> str | tuple[str, ...]:
    """A regular expression, or a list of names."""
    if isinstance(value, str):
        re.compile(value)
        return value
    return tuple(str(item) for item in value)


def _pattern(config: Mapping[str, Any], setting: str) -> Iterable[tuple[str, Any]]:
    pattern = config.get(setting) or {}
    if len(pattern) > _MAX_KEYS:
        raise ValueError(f"{setting} has more than {_MAX_KEYS} keys")
    for key in pattern:
        end_pattern(key)  # raises re.error
    items: Iterable[tuple[str, Any]] = pattern.items()
    return items


def _positive(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"a rank must be a positive integer, not {value!r}")
    return value


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"an alpha must be finite, not {value!r}")
    return number


def _selects(modules: str | Sequence[str], name: str) -> bool:
    if isinstance(modules, str):
        return modules == _ALL_LINEAR or re.fullmatch(modules, name) is not None
    return any(_ends_with_name(name, item) for item in modules)


def _ends_with_name(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _ends_with_pattern(name: str, pattern: str) -> bool:
    return end_pattern(pattern).match(name) is not None


def _written_targets(keys: Mapping[tuple[int, str], int], num_layers: int) -> list[str]:
    """Plain module names if every layer has the same ones, full names otherwise."""
    modules = [module for module in LINEAR_MODULES if any(module == found for _, found in keys)]
    if len(keys) == num_layers * len(modules):
        return modules
    return [module_name(*key) for key in keys]


def _plain(value: float) -> int | float:
    """PEFT writes whole alphas as integers, and vLLM reads them so."""
    return int(value) if float(value).is_integer() else value
