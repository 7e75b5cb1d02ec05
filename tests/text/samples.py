"""Small real tokenizers, trained on the spot, and chat templates in the styles that are met in the wild."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The river is wide and slow, and the boats wait for the wind.",
    "Who asked about the weather? It rains in Zürich, it snows in Kraków.",
    'A tool call looks like {"name": "weather", "arguments": {"city": "Paris", "days": 3}}.',
    "日本語の文章も少しあります。Γειά σου Κόσμε! 🙂🚀",
    "system user assistant tool\n\nYou are a helpful assistant.\nToday Date: 1 January 2025\n",
    "<think>\nfirst think, then answer\n</think>\n\nThe answer is 42.",
] * 4

SPECIALS = [
    "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>",
    "<|im_end|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip

LLAMA3 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + strftime_now('%d %B %Y %H:%M:%S.%f') + '\n\n' }}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}
{{- system + '<|eot_id|>' }}
{%- for message in rest %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one tool call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- (call.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + (message.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# Thinking is kept only behind the last question, and an empty one is written into a last answer without.
QWEN3 = """{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'assistant' %}
{%- set thinking = '' %}
{%- if '</think>' in content %}
{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thinking) %}{{ '<think>\n' + thinking + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# The system message is merged into the first question, the tools stand before the last one, roles must alternate.
MISTRAL = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(turn=0, last=0) %}
{%- for message in rest %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}
{%- endif %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (system + '\n\n' if system and loop.first else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{{ (call.function | tojson) + (']' if loop.last else ', ') }}{% endfor %}
{{- eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}
{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}
"""

# The system message goes into the question that is being asked, and into no other.
MISTRAL_LATE_SYSTEM = MISTRAL.replace("loop.first", "loop.last")

# Nothing ends a turn but the mark of the next one.
NEXT_MARK = """{%- for message in messages %}
{{- '<s>' if message.role == 'assistant' else '</s>' }}{{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<s>' }}{% endif %}
"""

# Calls that are written as the client sent them, by a template that never heard of null.
TEXT_ARGUMENTS = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is not none %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# DeepSeek's way: calls only where the content is null, and then with the arguments as text.
CALLS_WITHOUT_CONTENT = """{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for call in message['tool_calls'] %}
{{- '<s>' + call['function']['name'] + '\n' + call['function']['arguments'] + eos_token }}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}{{ '<s>' + message['content'] + eos_token }}
{%- else %}{{ '[' + message['role'] + ']' + message['content'] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<s>' }}{% endif %}
"""

GEMMA = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' + (message.content | trim) }}
{{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

# The prompt opens the thinking that past turns no longer show; only the very last turn is ended.
THINKING_PROMPT = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '[A]' + message.content.split('</think>')[-1] }}{% if loop.last %}{{ eos_token }}{% endif %}
{%- else %}{{ '[U]' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[A]<think>\n' }}{% endif %}
"""

# Thinking that comes in a field of its own.
REASONING = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content is string %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

MARKED = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# A header for the assistant that no generation prompt asks for.
NO_PROMPT = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
"""


def byte_level_folder(folder: Path, template: Any = None, **config: Any) -> Path:
    """A tokenizer as Llama 3 and Qwen have it: byte-level BPE that adds a start token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"])
    _add_start_token(tokenizer, "<|begin_of_text|>")
    # A setting that some published files carry; it must have no effect.
    tokenizer.enable_truncation(16)
    return _save(tokenizer, folder, template, {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>", **config})


def sentencepiece_folder(folder: Path, template: Any = None, **config: Any) -> Path:
    """A tokenizer as Llama 2 and Mistral have it: BPE over words that begin with ▁, unknown characters as bytes."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[chr(code) for code in range(ord("!"), ord("~"))],
        limit_alphabet=100,
        show_progress=False,
    )
    trained.train_from_iterator(SENTENCES, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = _sentencepiece_normalizer()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    _add_start_token(tokenizer, "<s>")
    return _save(tokenizer, folder, template, {"bos_token": "<s>", "eos_token": "</s>", **config})


def unigram_folder(folder: Path) -> Path:
    """Unigram with Metaspace on both sides."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _save(tokenizer, folder, None, {"bos_token": "<s>", "eos_token": "</s>"})


def _sentencepiece_normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _add_start_token(tokenizer: tokenizers.Tokenizer, token: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )


def _save(tokenizer: tokenizers.Tokenizer, folder: Path, template: Any, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a “city” <now>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def call_message(city: str = "Paris", call_id: str = "call00001", content: str | None = None) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps({"city": city})},
            }
        ],
    }


def tool_message(text: str = "18 degrees", call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
