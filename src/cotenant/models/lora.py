"""LoRA adapters: low-rank additions to linear modules, for serving and for training.

A module's output gets ``scale * dropout(x) @ A.T @ B.T`` on the rows that belong to the adapter (Hu et al., LoRA,
section 4.1; with rsLoRA the scale is alpha / sqrt(rank) instead of alpha / rank).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import LINEAR_MODULES
from cotenant.core.module_pattern import check_pattern, module_name
from cotenant.models.adapter_files import WEIGHTS_FILE, read_adapter_files, tensor_names
from cotenant.models.dropout import DropoutMasks
from cotenant.models.peft_config import CONFIG_FILE, matched, written_config
from cotenant.models.spec import ModelSpec
from cotenant.models.tensors_in_memory import tensors_in

# Modules that read the same input, in the order in which the decoder fuses their weights.
MODULE_GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))

ModuleKey = tuple[int, str]  # (layer, module)


class LoraPair(NamedTuple):
    """One module's matrices."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]


class PackedBlock(NamedTuple):
    """The part of a packed group that turns some of its ranks into some of the output's columns, scales included."""

    columns: slice | None  # of the output; None: all
    ranks: slice  # rows of the group's ``a``
    b: torch.Tensor  # [columns, ranks]


class PackedGroup(NamedTuple):
    """The frozen matrices of one module group, for one product down and one product up per block."""

    a: torch.Tensor  # [sum of ranks, in]
    blocks: tuple[PackedBlock, ...]

    def to(self, device: torch.device) -> PackedGroup:
        return PackedGroup(self.a.to(device), tuple(block._replace(b=block.b.to(device)) for block in self.blocks))


class LoraAdapter:
    """An adapter for models of shape ``spec``: ``weights`` by (layer, module). Compared by identity.

    ``rank`` and ``alpha`` are what PEFT calls r and lora_alpha; single modules may have another rank, which their
    matrices show, and another alpha, which ``alphas`` lists.

    Trainable adapters hold float32 master weights that require grad. Dropout acts while ``dropout_masks`` is set, which
    is for the rows of one micro-batch; the same forward run again gives the same bits. None: no dropout. Captured
    layers have masks of their own.

    Adapters for serving are frozen and packed: they have no ``weights``, only packed groups.
    """

    slot = -1
    """Where the adapter lies in ``LoraStacks``; -1: not there."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        rank: int,
        alpha: float,
        weights: Mapping[ModuleKey, LoraPair],
        *,
        alphas: Mapping[ModuleKey, float] | None = None,
        use_rslora: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self.name = name
        self.spec = spec
        self.rank = rank
        self.alpha = alpha
        self.weights = dict(weights)
        self.alphas = dict(alphas or {})
        self.use_rslora = use_rslora
        self.dropout = dropout
        self.dropout_masks: DropoutMasks | None = None
        self._scales = {key: self._scale(self.alphas.get(key, alpha), len(a)) for key, (a, _) in self.weights.items()}
        self._packed: dict[ModuleKey, PackedGroup] | None = None

    @classmethod
    def trainable(
        cls,
        spec: ModelSpec,
        *,
        r: int,
        alpha: float,
        target_modules: Sequence[str],
        seed: int,
        dropout: float = 0.0,
        use_rslora: bool = False,
        rank_pattern: Mapping[str, int] | None = None,
        alpha_pattern: Mapping[str, float] | None = None,
        device: torch.device | str = "cpu",
        name: str = "trainable",
    ) -> LoraAdapter:
        """A fresh adapter with PEFT's initialisation: A uniform in ±1/sqrt(in) (Kaiming with a = sqrt 5), B zero.

        The values depend on ``seed`` only, not on ``device``. The patterns map regular expressions for the ends of
        module names to ranks and alphas, as PEFT's do. Raises InvalidInputError for unknown modules, none at all, a
        rank below 1, or a pattern that fits no module.
        """
        unknown = sorted(set(target_modules) - set(LINEAR_MODULES))
        if unknown or not target_modules:
            raise InvalidInputError(
                f"target_modules must be some of {', '.join(LINEAR_MODULES)}; got {', '.join(unknown) or 'none'}",
                param="target_modules",
            )
        if r < 1:
            raise InvalidInputError(f"r must be at least 1, not {r}", param="r")
        rank_pattern, alpha_pattern = rank_pattern or {}, alpha_pattern or {}
        modules = [module for module in LINEAR_MODULES if module in target_modules]
        names = {(layer, module): module_name(layer, module) for layer in range(spec.num_layers) for module in modules}
        check_pattern(rank_pattern, names.values(), "rank_pattern")
        check_pattern(alpha_pattern, names.values(), "alpha_pattern")
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for (layer, module), full_name in names.items():
            rank = matched(rank_pattern, full_name, r)
            num_out, num_in = spec.module_shape(module)
            bound = 1 / math.sqrt(num_in)
            a = torch.empty(rank, num_in).uniform_(-bound, bound, generator=generator).to(device)
            b = torch.zeros(num_out, rank, device=device)
            weights[layer, module] = LoraPair(a.requires_grad_(), b.requires_grad_())
        alphas = {key: matched(alpha_pattern, full_name, alpha) for key, full_name in names.items()}
        different = {key: value for key, value in alphas.items() if value != alpha}
        return cls(name, spec, r, alpha, weights, alphas=different, use_rslora=use_rslora, dropout=dropout)

    @property
    def scale(self) -> float:
        """The factor on the deltas of modules with the usual rank and alpha."""
        return self._scale(self.alpha, self.rank)

    def scale_of(self, layer: int, module: str) -> float:
        """The factor on this module's delta."""
        return self._scales[layer, module]

    def parameters(self) -> list[torch.Tensor]:
        """All matrices, as ``named_parameters`` orders them."""
        return list(self.named_parameters().values())

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """All matrices by the names that checkpoints use, in the order in which training lays them out: by layers and
        groups of modules, a group's A's before its B's."""
        return {
            f"{layer}.{module}.{matrix}": self.weights[layer, module][("A", "B").index(matrix)]
            for layer in range(self.spec.num_layers)
            for modules in MODULE_GROUPS
            for matrix in ("A", "B")
            for module in modules
            if (layer, module) in self.weights
        }

    def trainable_on(self, device: torch.device) -> LoraAdapter:
        """A trainable adapter with the same weights there, which on a CPU are the same tensors."""

        def moved(matrix: torch.Tensor) -> torch.Tensor:
            return matrix.detach().to(device).requires_grad_()

        return self._copy({key: LoraPair(moved(a), moved(b)) for key, (a, b) in self.weights.items()}, None)

    def with_weights(self, named: Mapping[str, torch.Tensor]) -> LoraAdapter:
        """The same adapter with these matrices, by the names of ``named_parameters``."""

        def pair(layer: int, module: str) -> LoraPair:
            return LoraPair(named[f"{layer}.{module}.A"], named[f"{layer}.{module}.B"])

        return self._copy({key: pair(*key) for key in self.weights}, None)

    def snapshot(self) -> LoraAdapter:
        """A copy on the CPU that later training steps leave alone, and that does not require grad."""

        def copied(matrix: torch.Tensor) -> torch.Tensor:
            return matrix.detach().to(device="cpu", copy=True)

        weights = {key: LoraPair(copied(a), copied(b)) for key, (a, b) in self.weights.items()}
        return self._copy(weights, None)

    def with_one_scale(self) -> LoraAdapter:
        """The same deltas with ``scale`` as every module's factor, for loaders that apply one to all; itself if that is
        so already. What a module's factor is besides lies in its B, multiplied in float32."""
        if all(scale == self.scale for scale in self._scales.values()):
            return self
        weights, alphas = {}, {}
        for key, (a, b) in self.weights.items():
            weights[key] = LoraPair(a, (b.float() * (self._scales[key] / self.scale)).to(b.dtype))
            if len(a) != self.rank:
                alphas[key] = self.alpha * self._divisor(len(a)) / self._divisor(self.rank)
        return self._copy(weights, None, alphas)

    def for_serving(self, device: torch.device, dtype: torch.dtype) -> LoraAdapter:
        """A packed copy in the decoder's dtype: two products per module group."""
        packed = {}
        for layer in sorted({layer for layer, _ in self.weights}):
            for modules in MODULE_GROUPS:
                if any((layer, module) in self.weights for module in modules):
                    packed[layer, modules[0]] = self._pack_group(layer, modules, device, dtype)
        return self._copy({}, packed)

    def on_device(self, device: torch.device) -> LoraAdapter:
        """A packed adapter there; itself if that is where it is."""
        assert self._packed is not None
        if all(group.a.device == device for group in self._packed.values()):
            return self
        return self._copy({}, {key: group.to(device) for key, group in self._packed.items()})

    @property
    def is_packed(self) -> bool:
        """Whether ``packed`` may be asked."""
        return self._packed is not None

    def packed(self, layer: int, first_module: str) -> PackedGroup | None:
        """The packed group that begins with ``first_module``; None if no module of it has LoRA."""
        assert self._packed is not None
        return self._packed.get((layer, first_module))

    def fingerprint(self) -> bytes:
        """Of a packed adapter: equal for equal weights, scales included, and different for different ones."""
        assert self._packed is not None
        layout = [(key, [block[:2] for block in blocks]) for key, (_, blocks) in self._packed.items()]
        tensors = [tensor for a, blocks in self._packed.values() for tensor in (a, *(block.b for block in blocks))]
        return fingerprint(repr(layout), tensors)

    def dropout_mask(self, layer: int, module: str, x: torch.Tensor) -> torch.Tensor | None:
        """What to multiply ``x`` [tokens, in] by; see ``DropoutMasks.mask``. None: no dropout to apply."""
        return None if self.dropout_masks is None else self.dropout_masks.mask(layer, module, x)

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / self._divisor(rank)

    def _divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.use_rslora else rank

    def _copy(
        self,
        weights: Mapping[ModuleKey, LoraPair],
        packed: dict[ModuleKey, PackedGroup] | None,
        alphas: Mapping[ModuleKey, float] | None = None,
    ) -> LoraAdapter:
        copy = LoraAdapter(
            self.name,
            self.spec,
            self.rank,
            self.alpha,
            weights,
            alphas=self.alphas if alphas is None else alphas,
            use_rslora=self.use_rslora,
            dropout=self.dropout,
        )
        copy._packed = packed
        return copy

    def _pack_group(self, layer: int, modules: Sequence[str], device: torch.device, dtype: torch.dtype) -> PackedGroup:
        """As one block: its ``b`` is block-diagonal, and zero in the rows of modules without LoRA."""
        present = {module: self.weights[layer, module] for module in modules if (layer, module) in self.weights}
        a = torch.cat([pair.a.detach() for pair in present.values()]).to(device, dtype)  # [ranks, in]
        b = a.new_zeros(sum(self.spec.module_shape(module)[0] for module in modules), len(a))  # [outs, ranks]
        row = column = 0
        for module in modules:
            num_out = self.spec.module_shape(module)[0]
            if module in present:
                matrix = present[module].b.detach().float()  # a file's may be rounded; the product once only
                num_columns = matrix.shape[1]
                b[row : row + num_out, column : column + num_columns] = matrix * self.scale_of(layer, module)
                column += num_columns
            row += num_out
        return PackedGroup(a, (PackedBlock(None, slice(0, len(a)), b),))


def fingerprint(layout: str, tensors: Iterable[torch.Tensor]) -> bytes:
    """A hash of tensors on the CPU, and of ``layout``, which says what they are: 16 bytes."""
    digest = hashlib.blake2b(layout.encode(), digest_size=16)
    for tensor in tensors:
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def read_adapter(folder: Path | str, spec: ModelSpec, max_rank: int) -> LoraAdapter:
    """An adapter from a folder in PEFT's format, on the CPU and in the dtype of its file.

    Raises InvalidInputError as ``read_adapter_files`` does.
    """
    folder = Path(folder)
    files, header, content = read_adapter_files(folder, spec, max_rank)
    config = files.config
    try:
        tensors = tensors_in(content, header)
    except ValueError as error:
        raise InvalidInputError(f"{files.weights_path} is not a readable safetensors file: {error}") from error
    weights = {}
    for key in files.alphas:
        a, b = tensor_names(*key)
        weights[key] = LoraPair(tensors[a], tensors[b])
    return LoraAdapter(
        folder.name,
        spec,
        config.r,
        config.alpha,
        weights,
        alphas={key: alpha for key, alpha in files.alphas.items() if alpha != config.alpha},
        use_rslora=config.use_rslora,
        dropout=config.dropout,
    )


def save_adapter(adapter: LoraAdapter, folder: Path, base_model_name_or_path: str) -> None:
    """Write PEFT's two files into ``folder``, which is made if need be. ``peft`` and vLLM load them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for (layer, module), (a, b) in adapter.weights.items():
        a_name, b_name = tensor_names(layer, module)
        tensors[a_name] = a.detach().cpu().contiguous()
        tensors[b_name] = b.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = written_config(
        base_model_name_or_path,
        r=adapter.rank,
        alpha=adapter.alpha,
        use_rslora=adapter.use_rslora,
        dropout=adapter.dropout,
        num_layers=adapter.spec.num_layers,
        ranks={key: len(a) for key, (a, _) in adapter.weights.items()},
        alphas=adapter.alphas,
    )
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
