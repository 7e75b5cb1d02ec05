"""From an uploaded training file to encoded examples, or to an error that says which line is wrong and how."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import DPO, SUPERVISED
from cotenant.text.chat import ChatTemplate, load_chat_template
from cotenant.text.example_format import example_problems
from cotenant.text.examples import EncodedExample, encode_example, encode_preference, write_examples
from cotenant.text.preference_format import Preference, PreferenceError, read_preference
from cotenant.text.prepared_file import MIN_EXAMPLES, PreparedFile
from cotenant.text.strict_json import parse_json
from cotenant.text.tokenizer import Tokenizer, load_tokenizer

MAX_PROBLEMS = 5
_LINE = re.compile(r"Line (\d+)")
MAX_LINE_BYTES = 16 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


class _LineError(Exception):
    """One line is wrong. The text stands for itself: it names the line."""


def prepare_training_file(
    source: str | Path,
    target: str | Path,
    model_folder: str | Path | None,
    chat_template: str | None,
    vocab_size: int,
    max_length: int | None,
    min_examples: int = MIN_EXAMPLES,
    param: str = "training_file",
    method: str = SUPERVISED,
    cut_length: int | None = None,
) -> PreparedFile:
    """Validate and encode ``source`` and write the examples to ``target`` (atomically).

    With ``method`` 'dpo' each line becomes two sequences, one after the other: the chosen answer's, the rejected one's.
    For a process of its own: arguments and result are plain, and InvalidInputError travels whole. OSError where a file
    cannot be read or written.
    """
    folder = None if model_folder is None else Path(model_folder)
    examples = validate_and_encode(
        Path(source),
        load_tokenizer(folder, vocab_size),
        load_chat_template(folder, chat_template),
        max_length,
        min_examples,
        param,
        method,
        cut_length,
    )
    write_examples(Path(target), examples)
    lengths = [example.num_tokens for example in examples]
    num_trained_tokens = sum(example.num_trained_tokens for example in examples)
    num_examples = len(examples) // (2 if method == DPO else 1)
    return PreparedFile(num_examples, sum(lengths), num_trained_tokens, max(lengths, default=0))


def validate_and_encode(
    path: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    max_length: int | None,
    min_examples: int = MIN_EXAMPLES,
    param: str = "training_file",
    method: str = SUPERVISED,
    cut_length: int | None = None,
) -> list[EncodedExample]:
    """The examples of a JSONL file in OpenAI's chat format, encoded; with ``method`` 'dpo' those of preferences, of
    which each gives two.

    Reads line by line. InvalidInputError with code ``invalid_<param>`` lists up to ``MAX_PROBLEMS`` problems, or has
    code ``invalid_n_examples`` if the file has fewer than ``min_examples``. No example is dropped or cut in silence.
    ``cut_length``: as many tokens of each example will be trained on; what weights are beyond them is left open.
    """
    if not template.available:
        raise InvalidInputError(
            "This model has no chat template, so chat examples cannot be written as it reads them; start the server "
            "with --chat-template",
            code="chat_template_missing",
            param=param,
        )
    encode_line = (
        partial(_encode_preference, lambda pair: encode_preference(tokenizer, template, pair, max_length, cut_length))
        if method == DPO
        else partial(_encode_line, lambda example: encode_example(tokenizer, template, example, max_length, cut_length))
    )
    examples: list[EncodedExample] = []
    num_examples = 0
    problems: list[str] = []
    for number, line in _numbered_lines(path):
        try:
            examples.extend(encode_line(number, line))
            num_examples += 1
        except _LineError as error:
            problems.extend(error.args)
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise InvalidInputError(_listed(problems), code=f"invalid_{param}", param=param)
    if num_examples < min_examples:
        kind = param.removesuffix("_file").capitalize()
        raise InvalidInputError(
            f"{kind} file has {num_examples} example(s), but must have at least {min_examples} "
            f"example{'s' if min_examples > 1 else ''}",
            code="invalid_n_examples",
            param=param,
        )
    return examples


def _listed(problems: list[str]) -> str:
    lines: dict[str, list[str]] = {}
    for problem in problems[:MAX_PROBLEMS]:
        line = _LINE.match(problem)
        lines.setdefault(problem[line.end() :] if line else problem, []).append(line.group(1) if line else "")
    text = "Invalid file format. " + " ".join(_of_lines(what, numbers) for what, numbers in lines.items())
    return f"{text} There may be more: checking stopped here." if len(problems) >= MAX_PROBLEMS else text


def _of_lines(what: str, numbers: list[str]) -> str:
    """One sentence for what is wrong with several lines."""
    others = sorted(set(numbers) - {numbers[0]}, key=int)
    same = f" The same in line{'s' if len(others) > 1 else ''} {', '.join(others)}." if others else ""
    return f"Line {numbers[0]}{what}.{same}" if numbers[0] else f"{what}."


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes | _LineError]]:
    """Every line that should hold an example, with its number from 1; in place of one that cannot be read, the error.

    Empty lines are skipped at the end and an error elsewhere. A byte order mark is dropped.
    """
    empty: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(_bounded_lines(file), start=1):
            if number == 1 and line is not None:
                if line.startswith(_UTF16_BOMS):
                    yield 1, _LineError("The file is not UTF-8 but UTF-16; save it as UTF-8")
                    return
                if b"\0" in line[:2]:
                    yield 1, _LineError("The file is not UTF-8 but binary or UTF-16; save it as UTF-8")
                    return
                line = line.removeprefix(_BOM)
            if line is not None and not line.strip():
                empty = empty or number
                continue
            if empty is not None:
                yield empty, _LineError(f"Line {empty} is empty")
                empty = None
            yield number, line if line is not None else _LineError(f"Line {number} has over {MAX_LINE_BYTES} bytes")


def _bounded_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file; None for one that is too long to be held."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        yield None


def _encode_line(
    encode: Callable[[dict[str, Any]], EncodedExample], number: int, line: bytes | _LineError
) -> tuple[EncodedExample, ...]:
    example = _parse(number, line)
    try:
        problems = example_problems(example)
        if problems:
            raise _LineError(*(f"Line {number}{problem}" for problem in problems))
        return (encode(example),)
    except InvalidInputError as error:
        raise _LineError(f"Line {number}: {error.message}") from error
    except RecursionError as error:
        raise _LineError(f"Line {number} is nested too deeply") from error


def _encode_preference(
    encode: Callable[[Preference], tuple[EncodedExample, EncodedExample]], number: int, line: bytes | _LineError
) -> tuple[EncodedExample, ...]:
    example = _parse(number, line)
    try:
        return encode(read_preference(example))
    except PreferenceError as error:
        raise _LineError(*(f"Line {number}{problem}" for problem in error.args)) from error
    except InvalidInputError as error:
        raise _LineError(f"Line {number}, {error.message}") from error
    except RecursionError as error:
        raise _LineError(f"Line {number} is nested too deeply") from error


def _parse(number: int, line: bytes | _LineError) -> dict[str, Any]:
    if isinstance(line, _LineError):
        raise line
    try:
        value = parse_json(line.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _LineError(
            f"Line {number} is not UTF-8: byte 0x{line[error.start]:02X} at position {error.start + 1} of the line"
        ) from error
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        # JSON takes a carriage return for a space, so where it alone ends lines all of them come as one.
        follows = error.msg == "Extra data" and error.doc[: error.pos].rstrip(" \t").endswith("\r")
        hint = " (a carriage return alone ends no line; end each with a line feed)" if follows else ""
        raise _LineError(f"Line {number} is not valid JSON: {problem} at character {error.colno}{hint}") from error
    except RecursionError as error:
        raise _LineError(f"Line {number} is nested too deeply") from error
    except ValueError as error:
        raise _LineError(f"Line {number} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        hint = " (one JSON object a line is expected, not one list)" if isinstance(value, list) else ""
        raise _LineError(f"Line {number} is not a dictionary{hint}")
    return value
