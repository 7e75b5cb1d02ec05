from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cotenant.core.errors import InvalidInputError
from cotenant.text.chat import ChatTemplate, load_chat_template
from cotenant.text.tokenizer import load_tokenizer
from text.samples import (
    CALLS_WITHOUT_CONTENT,
    GEMMA,
    LLAMA3,
    MARKED,
    MISTRAL,
    QWEN3,
    TEXT_ARGUMENTS,
    THINKING_PROMPT,
    TOOLS,
    byte_level_folder,
    call_message,
    sentencepiece_folder,
    tool_message,
)

SYSTEM = {"role": "system", "content": "Be brief. "}
ASK = {"role": "user", "content": " How <wide> is the “river”? 🙂"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nVery wide.\n"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [ASK],
    [SYSTEM, ASK],
    [ASK, ANSWER, ASK],
    [SYSTEM, ASK, ANSWER, ASK, ANSWER],
    [ASK, call_message(), tool_message(), ANSWER, ASK],
]


def _with_parsed_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """transformers wants the arguments of a call as an object; OpenAI's clients send text."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("source", [LLAMA3, QWEN3, MISTRAL, GEMMA, MARKED, THINKING_PROMPT])
@pytest.mark.parametrize("make_folder", [byte_level_folder, sentencepiece_folder])
def test_text_and_ids_are_those_of_transformers(tmp_path: Path, source: str, make_folder: Any) -> None:
    folder = make_folder(tmp_path, source.replace("%d %B %Y %H:%M:%S.%f", "%Y"))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer, template = load_tokenizer(folder, 2000), load_chat_template(folder, None)
    num_compared = 0
    for messages in CONVERSATIONS:
        for tools in (None, TOOLS):
            for prompt in (True, False):
                wanted = {"tools": tools, "add_generation_prompt": prompt}
                try:
                    text = theirs.apply_chat_template(_with_parsed_arguments(messages), tokenize=False, **wanted)
                except Exception:  # the template refuses: then it must refuse us too
                    if any("tool_calls" in message for message in messages):
                        continue  # unless it takes another form of the calls
                    with pytest.raises(InvalidInputError, match="refuses these messages"):
                        template.render(messages, tools, prompt)
                    continue
                ids = theirs.apply_chat_template(_with_parsed_arguments(messages), return_dict=False, **wanted)
                assert template.render(messages, tools, prompt) == text
                assert template.encode(tokenizer, messages, tools, prompt) == ids
                num_compared += 1
    assert num_compared >= 8


def test_the_start_token_comes_once(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, LLAMA3)
    tokenizer, template = load_tokenizer(folder, 2000), load_chat_template(folder, None)
    ids = template.encode(tokenizer, [ASK])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.encode("x").count(tokenizer.bos_token_id) == 1


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    template = load_chat_template(None, "{{ messages[0].content }}")
    parts: list[dict[str, Any]] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    with pytest.raises(InvalidInputError, match="'image_url'") as caught:
        template.render([ASK, {"role": "user", "content": [*parts, {"type": "image_url"}]}])
    assert caught.value.param == "messages[1].content"


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert load_chat_template(None, "{{ messages[0].role }}").render(messages) == "system"
    knows = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert load_chat_template(None, knows).render(messages) == "yes"
    assert messages[0]["role"] == "developer"


def test_tool_calls_are_given_in_the_form_that_the_template_takes() -> None:
    """As an object first; empty instead of missing content, or text arguments, only where a template fails without."""
    messages = [ASK, call_message()]
    strict = "{{ messages[1].content.strip() }}{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert load_chat_template(None, strict).render(messages) == '{"city": "Paris"}'
    assert '{"city": "Paris"}' in load_chat_template(None, TEXT_ARGUMENTS).render(messages)
    silent = "{{ messages[1].content is defined }} {{ messages[1].tool_calls[0].function.arguments is mapping }}"
    assert load_chat_template(None, silent).render(messages) == "False True"


@pytest.mark.parametrize("function", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " "}])
def test_a_call_without_arguments_has_an_empty_object_of_them(function: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", **function}}
    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '{"name": "now", "arguments": {}}' in load_chat_template(None, QWEN3).render(messages)
    assert call["function"] == {"name": "now", **function}


@pytest.mark.parametrize("content", [None, ""])
def test_a_form_in_which_calls_vanish_is_not_taken(content: str | None) -> None:
    """The function's name stands in the question and among the tools, too: that is no call."""
    asked = {"role": "user", "content": "Call weather"}
    messages = [asked, call_message(content=content), tool_message()]
    concatenated = CALLS_WITHOUT_CONTENT
    printed = concatenated.replace("{{- '<s>' +", "{{- '<s>' ~").replace(" + ", " ~ ")
    objects = concatenated.replace("['arguments']", "['arguments'] | tojson")
    for source in (concatenated, printed, objects):
        text = load_chat_template(None, source).render(messages, TOOLS)
        assert text == '<|bos|>[user]Call weather<s>weather\n{"city": "Paris"}<|eos|>[tool]18 degrees<s>'


def test_calls_are_kept_where_no_form_has_all_of_them() -> None:
    """This template writes no call beside content."""
    messages = [ASK, call_message("Rome", content="Let me look."), tool_message(), call_message(), tool_message()]
    text = load_chat_template(None, CALLS_WITHOUT_CONTENT).render(messages)
    assert "<s>Let me look." in text
    assert "Rome" not in text
    assert '<s>weather\n{"city": "Paris"}' in text


def test_a_template_without_calls_takes_them_as_before() -> None:
    plain = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    assert load_chat_template(None, plain).render([{**ASK, "content": "Hi"}, call_message()]) == "[Hi][]"


def test_reasoning_by_its_other_names() -> None:
    """The first of the three counts; templates of gpt-oss's kind read ``thinking``."""
    template = load_chat_template(None, "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}")
    names = {"reasoning_content": "a", "thinking": "b", "reasoning": "c"}
    assert template.render([{**ANSWER, **names}]) == "a b"
    assert template.render([{**ANSWER, "reasoning": "c", "thinking": "b"}]) == "b b"
    assert template.render([{**ANSWER, "reasoning": "c", "thinking": None}]) == "c c"
    assert template.render([{**ANSWER, "reasoning_content": "a"}]) == "a a"
    assert template.render([ANSWER]) == " "


def test_an_empty_list_of_calls_is_none() -> None:
    template = load_chat_template(None, "{{ 'tool_calls' in messages[0] }}")
    assert template.render([{**ANSWER, "tool_calls": []}]) == "False"


def test_variables_reach_the_template() -> None:
    template = load_chat_template(None, "{{ enable_thinking }} {{ documents }}")
    assert template.render([ASK], enable_thinking=False) == "False None"


class TestWhereATemplateComesFrom:
    def test_the_jinja_file_goes_before_the_configuration(self, tmp_path: Path) -> None:
        folder = byte_level_folder(tmp_path, "old")
        assert load_chat_template(folder, None).render([ASK]) == "old"
        (folder / "chat_template.jinja").write_text("new {{ eos_token }}")
        assert load_chat_template(folder, None).render([ASK]) == "new <|im_end|>"

    def test_a_list_of_named_ones_with_another_for_tools(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
        template = load_chat_template(byte_level_folder(tmp_path, named), None)
        assert template.render([ASK]) == "plain"
        assert template.render([ASK], TOOLS) == "with tools"

    def test_named_files_as_transformers_writes_them(self, tmp_path: Path) -> None:
        named = {"default": "plain", "tool_use": "with tools"}
        tokenizer = PreTrainedTokenizerFast.from_pretrained(byte_level_folder(tmp_path / "model", "old"))
        tokenizer.chat_template = named
        tokenizer.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "additional_chat_templates" / "tool_use.jinja").exists()
        template = load_chat_template(tmp_path / "saved", None)
        assert (template.render([ASK]), template.render([ASK], TOOLS)) == ("plain", "with tools")

    def test_named_files_beside_a_default_in_the_configuration(self, tmp_path: Path) -> None:
        folder = byte_level_folder(tmp_path, "plain")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
        template = load_chat_template(folder, None)
        assert (template.render([ASK]), template.render([ASK], TOOLS)) == ("plain", "with tools")

    def test_the_operator_gives_a_file_or_the_text_itself(self, tmp_path: Path) -> None:
        folder = byte_level_folder(tmp_path / "model", "the model's")
        path = tmp_path / "mine.jinja"
        path.write_text("from a file {{ eos_token }}")
        assert load_chat_template(folder, str(path)).render([ASK]) == "from a file <|im_end|>"
        assert load_chat_template(folder, "inline {{ bos_token }}").render([ASK]) == "inline <|begin_of_text|>"
        assert load_chat_template(None, "inline {{ bos_token }}").render([ASK]) == "inline <|bos|>"

    def test_none_is_an_error_only_when_chat_is_asked_for(self, tmp_path: Path) -> None:
        template = load_chat_template(byte_level_folder(tmp_path), None)
        assert not template.available
        with pytest.raises(InvalidInputError, match="--chat-template") as caught:
            template.render([ASK])
        assert caught.value.code == "chat_template_missing"

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("/nonexistent/template.jinja", "cannot read the file"),
            ("{% if %}", "broken in line 1"),
            ("a\n{% endfor %}", "broken in line 2"),
        ],
    )
    def test_a_bad_override_is_named(self, override: str, words: str) -> None:
        with pytest.raises(InvalidInputError, match=words) as caught:
            load_chat_template(None, override)
        assert caught.value.param == "chat-template"

    def test_a_folder_is_no_template(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match="cannot read the file"):
            load_chat_template(None, str(tmp_path))


class TestATemplateIsAStrangersCode:
    @pytest.mark.parametrize(
        "source",
        [
            "{% include 'SECRET' %}",
            "{% import 'SECRET' as x %}{{ x }}",
            "{% extends 'SECRET' %}",
            "{% from 'SECRET' import x %}{{ x }}",
            "{{ open('SECRET').read() }}",
            "{{ cycler.__init__.__globals__.os.popen('cat SECRET').read() }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ raise_exception.__globals__['json'].codecs.open('SECRET').read() }}",
            "{{ namespace.__init__.__globals__ }}",
            "{{ messages.append(1) }}",
            "{{ range(1000000000) | list | length }}",
        ],
    )
    def test_it_reads_no_file_and_harms_nothing(self, tmp_path: Path, source: str) -> None:
        secret = tmp_path / "secret.txt"
        secret.write_text("{{ 'the secret' }}")
        template = load_chat_template(None, source.replace("SECRET", str(secret)))
        messages = [dict(ASK)]
        with pytest.raises(InvalidInputError, match="refuses these messages") as caught:
            template.render(messages)
        assert "the secret" not in str(caught.value)
        assert messages == [ASK]

    def test_a_models_template_that_looks_like_a_path_is_text(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret.txt"
        secret.write_text("the secret")
        folder = byte_level_folder(tmp_path / "model", "../secret.txt")
        assert load_chat_template(folder, None).render([ASK]) == "../secret.txt"
        named = [{"name": str(secret), "template": "x"}, {"name": "default", "template": str(secret)}]
        folder = byte_level_folder(tmp_path / "other", named)
        assert load_chat_template(folder, None).render([ASK]) == str(secret)

    def test_a_refusal_tells_the_templates_reason(self) -> None:
        template = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"}, {}, "here")
        with pytest.raises(InvalidInputError, match="roles must alternate") as caught:
            template.render([ASK])
        assert caught.value.param == "messages"


def test_the_byte_tokenizers_own_template() -> None:
    tokenizer, template = load_tokenizer(None, 1000), load_chat_template(None, None)
    messages = [SYSTEM, ASK, call_message(), tool_message(), {"role": "assistant", "content": "18"}]
    ids = template.encode(tokenizer, messages, TOOLS, False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == template.render(messages, TOOLS, False)
    assert ids.count(tokenizer.bos_token_id or 0) == 1
    assert ids.count(tokenizer.eos_token_ids[0]) == 6  # five messages and the tools
    with pytest.raises(InvalidInputError, match="Unknown role: nobody"):
        template.render([{"role": "nobody", "content": "x"}])
    with pytest.raises(InvalidInputError, match="no messages"):
        template.render([])
