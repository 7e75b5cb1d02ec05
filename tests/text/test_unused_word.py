from __future__ import annotations

from cotenant.text.chat import load_chat_template
from cotenant.text.unused_word import unused_word
from text.samples import CALLS_WITHOUT_CONTENT, call_message, tool_message


def test_a_word_is_found_in_one_pass_over_a_text_that_has_many_like_it() -> None:
    class Text(str):
        num_searches = 0

        def __contains__(self, part: object) -> bool:
            Text.num_searches += 1
            return super().__contains__(str(part))

    taken = [number for number in range(3000) if number != 2000]
    text = Text(" ".join(f"StandIn{number}For" for number in reversed(taken)))
    assert unused_word("StandIn", text) == "StandIn2000For"
    assert Text.num_searches <= 1
    assert unused_word("StandIn", "StandIn00For StandIn1Fo StandInStandIn0For") == "StandIn1For"


def test_words_that_mark_calls_in_the_text_do_not_confuse() -> None:
    template = load_chat_template(None, CALLS_WITHOUT_CONTENT)
    words = "CalledFunction CalledFunction0For CalledFunction0For0E CalledFunction1For"
    messages = [{"role": "user", "content": words}, call_message("Rome"), tool_message(), call_message("Paris")]
    text = template.render(messages, None, False)
    assert text.count("<s>weather") == 2
