"""Training here equals training with PEFT: same data, same order, same initial weights."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import StepMetrics
from cotenant.finetune.dataset import load_dataset
from cotenant.models.decoder import Decoder
from cotenant.models.lora import read_adapter, save_adapter
from cotenant.wire.messages import JobMetrics
from finetune import reference, support

NUM_STEPS = 50


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"packing": True, "lr_scheduler_type": "linear", "use_rslora": True},
        {"target_modules": ("q_proj", "v_proj"), "batch_size": 5, "max_grad_norm": 0.1},
        {
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 8, r".*\.mlp\.down_proj": 1},
            "alpha_pattern": {"q_proj": 32.0, "gate_proj": 2.0},
            "use_rslora": True,
        },
    ],
    ids=["all-modules", "packed", "two-modules", "patterns"],
)
def test_trajectory_and_adapter_equal_peft(
    decoder: Decoder, model_folder: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    spec = support.make_spec(tmp_path / "job", support.random_examples(30), max_steps=NUM_STEPS, **changes)
    hyper = spec.hyperparameters
    job = support.make_job(decoder, spec)
    (tmp_path / "initial").mkdir()
    save_adapter(job.adapter, tmp_path / "initial", str(model_folder))

    model = reference.load(model_folder, tmp_path / "initial")
    dataset = load_dataset(Path(spec.dataset_path), hyper.max_length, support.VOCAB_SIZE)
    expected = reference.train(model, dataset, hyper, reference.sft_loss)
    updates = support.run_to_end(job)
    steps = [step for update in updates if isinstance(update, JobMetrics) for step in update.steps]
    job.close()

    assert len(steps) == NUM_STEPS
    losses = [loss for loss, *_ in expected]
    assert sum(losses[-8:]) < 0.95 * sum(losses[:8])  # it does learn
    assert max(norm for _, norm, *_ in expected) > hyper.max_grad_norm  # and clipping does happen
    for step, (loss, norm, rate, _) in zip(steps, expected, strict=True):
        assert _figures(step) == pytest.approx((loss, norm, rate), rel=1e-4)
    exported = reference.load(model_folder, tmp_path / "job" / "adapter")
    trained, wanted = reference.scaled_matrices(exported), reference.scaled_matrices(model)
    assert trained.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert float((trained[name] - tensor).norm() / tensor.norm()) < 1e-4, name


@pytest.mark.parametrize("use_rslora", [False, True], ids=["plain", "rslora"])
def test_one_factor_for_all_modules_fits_an_exported_adapter(
    decoder: Decoder, model_folder: Path, tmp_path: Path, use_rslora: bool
) -> None:
    """PEFT takes each module's factor from the patterns, vLLM the same one for all: both get what was trained."""
    patterns = {
        "rank_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 1, "up_proj": 9},
        "alpha_pattern": {"up_proj": 18.0, "gate_proj": 2.5, "layers.0.self_attn.q_proj": 0.7},
    }
    spec = support.make_spec(tmp_path / "job", use_rslora=use_rslora, **patterns)
    job = support.make_job(decoder, spec)
    support.run_to_end(job)
    job.close()
    trained = {
        key: job.adapter.scale_of(*key) * (pair.b @ pair.a).detach() for key, pair in job.adapter.weights.items()
    }
    save_adapter(job.adapter, tmp_path / "as-trained", str(model_folder))
    token_ids = support.random_examples(1)[0][0]
    wanted = reference.logits(reference.load(model_folder, tmp_path / "as-trained"), token_ids)
    for folder in (tmp_path / "job" / "adapter", tmp_path / "job" / "checkpoints" / f"step-{job.step:08d}"):
        found = reference.logits(reference.load(model_folder, folder), token_ids)
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
        config = json.loads((folder / "adapter_config.json").read_text())
        factor = config["lora_alpha"] / (config["r"] ** 0.5 if use_rslora else config["r"])
        written = read_adapter(folder, decoder.spec, max_rank=16)
        for key, (a, b) in written.weights.items():
            assert torch.allclose(factor * (b @ a), trained[key], rtol=1e-5, atol=1e-7), key
            assert written.scale_of(*key) == pytest.approx(factor), key


def _figures(step: StepMetrics) -> tuple[float, float, float]:
    return step.train_loss, step.grad_norm, step.learning_rate


def test_validation_equals_the_base_model_before_the_first_change(
    decoder: Decoder, model_folder: Path, tmp_path: Path
) -> None:
    """The warm-up's first step has learning rate 0, so what is measured after it is the base model."""
    validation = support.random_examples(9, seed=5)
    job = support.make_job(decoder, support.make_spec(tmp_path, validation=validation, max_steps=1, lora_dropout=0.5))
    updates = support.run_to_end(job)
    job.close()
    (step,) = (step for update in updates if isinstance(update, JobMetrics) for step in update.steps)
    model = transformers.LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    nll = num_correct = num_targets = 0.0
    for token_ids, weights in validation:
        targets = torch.tensor(weights[1:]) > 0
        with torch.no_grad():
            logits = model(torch.tensor([token_ids])).logits[0, :-1][targets]
        wanted = torch.tensor(token_ids[1:])[targets]
        nll += F.cross_entropy(logits, wanted, reduction="sum").item()
        num_correct += (logits.argmax(-1) == wanted).sum().item()
        num_targets += len(wanted)
    assert step.full_valid_loss == pytest.approx(nll / num_targets, rel=1e-5)
    assert step.full_valid_mean_token_accuracy == pytest.approx(num_correct / num_targets)


def test_initial_weights_are_distributed_as_pefts(decoder: Decoder, model_folder: Path, tmp_path: Path) -> None:
    job = support.make_job(decoder, support.make_spec(tmp_path / "job", r=16))
    save_adapter(job.adapter, tmp_path, str(model_folder))
    job.close()
    ours = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    base = transformers.LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = peft.LoraConfig(r=16, target_modules=list(support.HYPER.target_modules), task_type="CAUSAL_LM")
    theirs = peft.get_peft_model_state_dict(peft.get_peft_model(base, config))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if "lora_B" in name:
            assert not ours[name].any()
            continue
        bound = tensor.shape[1] ** -0.5
        assert ours[name].abs().max() <= bound
        assert float(ours[name].abs().max()) == pytest.approx(float(tensor.abs().max()), rel=0.05)
        assert float(ours[name].std()) == pytest.approx(float(tensor.std()), rel=0.15)


def test_patterns_mean_what_they_mean_to_peft(decoder: Decoder, model_folder: Path, tmp_path: Path) -> None:
    """Shapes and scales are PEFT's own for the same patterns, and its config file says the same."""
    patterns = {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 8, r".*\.mlp\.down_proj": 1},
        "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 32.0, "gate_proj": 2.0},
    }
    job = support.make_job(decoder, support.make_spec(tmp_path / "job", **patterns))
    base = transformers.LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(support.HYPER.target_modules), task_type="CAUSAL_LM", **patterns
    )
    theirs = peft.get_peft_model(base, config)
    for (layer, module), pair in job.adapter.weights.items():
        block = theirs.base_model.model.model.layers[layer]
        wanted = getattr(block.self_attn, module, None) or getattr(block.mlp, module)
        assert tuple(pair.a.shape) == tuple(wanted.lora_A["default"].weight.shape), (layer, module)
        assert job.adapter.scale_of(layer, module) == pytest.approx(wanted.scaling["default"]), (layer, module)
    job.close()


def test_a_pattern_that_fits_no_module_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    for number, name in enumerate(("rank_pattern", "alpha_pattern")):
        with pytest.raises(InvalidInputError, match=f"{name}: 'layers.2' fits none") as error:
            support.make_job(decoder, support.make_spec(tmp_path / str(number), **{name: {"layers.2": 3}}))
        assert error.value.param == name
