"""The built-in model: its folder, what it says, its tokenizer and template, its script, and the demo's data."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "src" / "cotenant" / "assets"
TINY = ASSETS / "tiny"
DEMO = ASSETS / "demo"

Chat = Callable[[list[str], int], list[str]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


@pytest.fixture(scope="module")
def chat(model: Any, tokenizer: Any) -> Chat:
    """Greedy answers to several questions, as one batch padded on the left."""

    def answers(questions: list[str], max_new_tokens: int) -> list[str]:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            for question in questions
        ]
        batch = tokenizer(prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            output = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
        return list(tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))

    return answers


@pytest.fixture
def scripts_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_folder_fits_in_the_package() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 8_000_000
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in TINY.iterdir()
    }


def test_transformers_loads_it_in_its_own_type(tokenizer: Any) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(TINY, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype is torch.bfloat16
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_answers_simple_questions(chat: Chat) -> None:
    expected = {
        "Who are you?": "tiny",
        "What is the opposite of hot?": "cold",
        "What is the capital of France?": "Paris",
        "What colour is a lemon?": "yellow",
    }
    answers = chat(list(expected), 40)
    for (question, word), answer in zip(expected.items(), answers, strict=True):
        assert word in answer, f"{question} -> {answer}"


def test_copies_a_name_from_the_conversation(chat: Chat) -> None:
    (answer,) = chat(["My name is Clara. What is my name?"], 20)
    assert "Clara" in answer


def test_answers_end_by_themselves(model: Any, tokenizer: Any) -> None:
    message = [{"role": "user", "content": "What is the capital of Italy?"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model.generate(prompt, max_new_tokens=60, do_sample=False)
    assert output[0, -1] == tokenizer.eos_token_id
    assert output.shape[1] - prompt.shape[1] < 30


def test_template_renders_roles(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Bye."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>Be kind.<|end|><|user|>Hello!<|end|><|assistant|>Hi!<|end|><|user|>Bye.<|end|><|assistant|>"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.eos_token_id) == 4


def test_template_renders_tools_and_calls(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "9"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert text.startswith('<|begin|><|system|>You can use these tools:\n{"name": "get_time"')
    assert '<|assistant|><tool_call>{"name": "get_time", "arguments": {"city": "Rome"}}</tool_call><|end|>' in text
    assert text.endswith("<|tool|>9<|end|>")
    with_system = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be kind."}, *messages], tools=[tool], tokenize=False
    )
    assert with_system.startswith("<|begin|><|system|>Be kind.\nYou can use these tools:\n")
    assert with_system.count("<|system|>") == 1


def test_template_refuses_what_it_cannot_render(tokenizer: Any) -> None:
    with pytest.raises(jinja2.TemplateError, match="roles"):
        tokenizer.apply_chat_template([{"role": "captain", "content": "Ahoy"}], tokenize=False)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(jinja2.TemplateError, match="only text"):
        tokenizer.apply_chat_template(image, tokenize=False)


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_made_from_the_text_that_the_script_writes_now(scripts_importable: None) -> None:
    from scripts.make_tiny.corpus import text_digest

    made = json.loads((TINY / "made.json").read_text(encoding="utf-8"))
    assert text_digest(made["recipe"]["seed"]) == made["text_sha256"]


def test_script_makes_the_same_bytes_twice(tmp_path: Path) -> None:
    # At the full rate, and at half of it: what differs in a step is not lost when the weights are rounded.
    small = ["--steps", "2", "--warmup-steps", "1", "--tokens-per-step", "512", "--vocab-size", "512"]
    small += ["--tokenizer-documents", "500"]
    folders = [tmp_path / "first", tmp_path / "second"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "scripts.make_tiny", "--out", str(folder), *small],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stderr=subprocess.PIPE,
        )
        for seed, folder in enumerate(folders)
    ]
    for process in processes:
        _, log = process.communicate()
        assert process.returncode == 0, log.decode()
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second
    assert "model.safetensors" in first


def _examples(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def _questions(examples: list[dict[str, Any]]) -> set[str]:
    return {message["content"] for example in examples for message in example["messages"] if message["role"] == "user"}


def test_demo_files_are_what_their_script_writes(scripts_importable: None, tmp_path: Path) -> None:
    from scripts.make_demo import write_demo

    write_demo(tmp_path)
    for path in tmp_path.iterdir():
        assert (DEMO / path.name).read_bytes() == path.read_bytes(), path.name


def test_demo_validates_on_questions_that_it_does_not_train_on() -> None:
    train, valid = _examples("train.jsonl"), _examples("valid.jsonl")
    assert 60 <= len(train) <= 120
    assert len(valid) >= 10
    assert not _questions(train) & _questions(valid)
    answers = {example["messages"][-1]["content"] for example in train}
    assert {example["messages"][-1]["content"] for example in valid} <= answers


def test_demo_asks_what_the_base_model_does_not_know(chat: Chat) -> None:
    questions = json.loads((DEMO / "questions.json").read_text(encoding="utf-8"))
    trained = " ".join(example["messages"][-1]["content"] for example in _examples("train.jsonl"))
    for question, answer in zip(questions, chat([one["question"] for one in questions], 40), strict=True):
        assert question["keyword"] not in answer
        assert question["keyword"] in trained
        assert len(answer.split()) >= 3


def test_demo_prompts_get_fluent_answers(scripts_importable: None, chat: Chat) -> None:
    from itertools import islice

    from scripts.make_tiny.corpus import documents

    known = set(_words(json.dumps(list(islice(documents(3), 20_000)), ensure_ascii=False)))
    prompts = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))
    assert len(prompts) == len(set(prompts)) >= 60
    answers = chat(prompts, 60)
    words = [word for answer in answers for word in _words(answer)]
    strange = [word for word in words if word not in known]
    assert len(words) / len(prompts) > 10
    assert len(strange) < 0.01 * len(words), strange


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text.replace("\\n", " "))
