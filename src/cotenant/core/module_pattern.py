"""What Hugging Face checkpoints call the linear modules, and PEFT's rank and alpha patterns: regular expressions for
the ends of these names, and how long matching may take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from cotenant.core.errors import InvalidInputError

MAX_CPU_S = 1

_PARENTS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}

# Matching takes time proportional to the name's length without any of these.
_SLOW = re.compile(r"[(*+?{]")
_MATCH_ALL = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MAX_CPU_S}, {MAX_CPU_S}))
expressions, names = json.load(sys.stdin)
for expression in map(re.compile, expressions):
    for name in names:
        expression.fullmatch(name)
"""


def module_name(layer: int, module: str) -> str:
    """The full name of one of ``core.job.LINEAR_MODULES`` in a layer."""
    return f"model.layers.{layer}.{_PARENTS[module]}.{module}"


def check_pattern(pattern: Mapping[str, object], names: Iterable[str], param: str, *, only_plain: bool = False) -> None:
    """Raises InvalidInputError for a key that fits none of the modules with these full names. ``only_plain``: keys that
    may take long to match are left to others."""
    names = list(names)
    for key in pattern:
        if only_plain and _SLOW.search(key):
            continue
        if not any(end_pattern(key).match(name) for name in names):
            raise InvalidInputError(
                f"{param}: '{key}' fits none of the modules that are trained; their names are like '{names[0]}'",
                code="invalid_hyperparameters",
                param=param,
            )


@lru_cache(maxsize=4096)
def end_pattern(key: str) -> re.Pattern[str]:
    """What must match a module's full name from its beginning for ``key`` to fit its end. Raises ``re.error``."""
    return re.compile(rf"(.*\.)?({key})$")


def are_quick(keys: Sequence[str], expressions: Sequence[str], names: Sequence[str]) -> bool:
    """Whether matching all these names takes at most ``MAX_CPU_S`` seconds: the ``keys`` at their ends, and the
    ``expressions`` whole. What is not quick by its form is tried in a process of its own: ``re`` cannot be stopped,
    and holds the interpreter's lock."""
    tried = [end_pattern(key).pattern for key in keys if _SLOW.search(key)]
    tried += [expression for expression in expressions if _SLOW.search(expression)]
    if not tried:
        return True
    command = [sys.executable, "-I", "-S", "-c", _MATCH_ALL]
    done = subprocess.run(
        command, input=json.dumps([tried, list(names)]), text=True, stderr=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0
