from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.finetune.dataset import load_dataset
from cotenant.finetune.microbatch import split
from finetune.support import write_examples


def test_cut_to_max_length(tmp_path: Path) -> None:
    path = write_examples(tmp_path / "d", [([5, 6, 7, 8], [0, 0, 1, 1]), ([9, 10], [0, 0.5])])
    dataset = load_dataset(path, max_length=3, vocab_size=20)
    assert dataset.lengths == (3, 2)
    assert dataset[0].token_ids.tolist() == [5, 6, 7]
    assert dataset.loss_weights == (1.0, 0.5)  # the weight of the token that was cut off doesn't count
    assert dataset.num_targets == (1, 1)


def test_first_token_is_never_a_target(tmp_path: Path) -> None:
    path = write_examples(tmp_path / "d", [([5, 6], [1, 1]), ([7], [1])])
    dataset = load_dataset(path, max_length=8, vocab_size=20)
    assert dataset[0].weights.tolist() == [0, 1]
    assert dataset.loss_weights == (1.0, 0.0)


def test_one_example_and_one_without_weight(tmp_path: Path) -> None:
    path = write_examples(tmp_path / "d", [([5, 6, 7], [0, 0, 0])])
    dataset = load_dataset(path, max_length=8, vocab_size=20)
    assert len(dataset) == 1
    assert not dataset.trainable


def test_no_examples(tmp_path: Path) -> None:
    dataset = load_dataset(write_examples(tmp_path / "d", []), max_length=8, vocab_size=20)
    assert len(dataset) == 0
    assert not dataset.trainable


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "token_ids": torch.tensor([1, 2, 3], dtype=torch.int32),
        "weights": torch.tensor([0.0, 1.0, 1.0]),
        "offsets": torch.tensor([0, 3], dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weights": None}, "'weights' is missing"),
        ({"token_ids": torch.tensor([1, 2, 3])}, "'token_ids' must be"),
        ({"weights": torch.tensor([0.0, 1.0])}, "3 tokens but 2 weights"),
        ({"weights": torch.tensor([0.0, float("nan"), 1.0])}, "not finite"),
        ({"weights": torch.tensor([0.0, -1.0, 1.0])}, "negative"),
        ({"token_ids": torch.tensor([1, 2, 20], dtype=torch.int32)}, "vocabulary"),
        ({"token_ids": torch.tensor([1, -2, 3], dtype=torch.int32)}, "vocabulary"),
        ({"offsets": torch.tensor([0, 2])}, "cover"),
        ({"offsets": torch.tensor([], dtype=torch.int64)}, "cover"),
        ({"offsets": torch.tensor([0, 2, 2, 3])}, "example 2 has no tokens"),
    ],
)
def test_bad_content_is_refused(tmp_path: Path, changes: dict[str, torch.Tensor | None], problem: str) -> None:
    tensors = {name: tensor for name, tensor in (_tensors() | changes).items() if tensor is not None}
    safetensors.torch.save_file(tensors, tmp_path / "d")
    with pytest.raises(InvalidInputError, match=problem):
        load_dataset(tmp_path / "d", max_length=8, vocab_size=20)


def test_torn_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = write_examples(tmp_path / "d", [([5, 6, 7], [0, 1, 1])])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_dataset(path, max_length=8, vocab_size=20)
    with pytest.raises(InvalidInputError, match="does not exist"):
        load_dataset(tmp_path / "missing", max_length=8, vocab_size=20)


def test_a_file_that_the_disk_does_not_give_is_no_fault_of_its_content(tmp_path: Path) -> None:
    with pytest.raises(CotenantError, match=r"cannot be read: .*directory") as failed:
        load_dataset(tmp_path, max_length=8, vocab_size=20)
    assert failed.value.code == "io_error"


def test_split_keeps_whole_examples_within_the_budget(tmp_path: Path) -> None:
    lengths = [30, 5, 12, 12, 7, 25, 3]
    path = write_examples(tmp_path / "d", [([4] * length, [1.0] * length) for length in lengths])
    dataset = load_dataset(path, max_length=40, vocab_size=20)
    parts = split(dataset, range(len(lengths)), max_tokens=24)
    assert sorted(example for part in parts for example in part.examples) == list(range(len(lengths)))
    for part in parts:
        assert part.num_tokens == sum(lengths[example] for example in part.examples)
        assert part.num_targets == part.num_tokens - len(part.examples)
        assert part.max_length == max(lengths[example] for example in part.examples)
        assert part.num_tokens <= 24 or len(part.examples) == 1
    assert len(parts) == 4  # 30 and 25 alone, 12+12, 7+5+3
