"""A chat template is a program that came with the model: what it cannot do is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.chat_template import ChatTemplate, TemplateError, read_chat_template
from app.tokenizer import Tokenizer
from tests.app.test_text import llama_2

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_what_the_template_refuses_is_said(source: str, said: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(TemplateError, match=said):
        template.render(HI)


def test_a_broken_template_is_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"template is broken: .*endfor"):
        ChatTemplate("{% for m in messages %}", {})


def test_a_model_without_one_says_where_to_go_instead() -> None:
    with pytest.raises(TemplateError, match="/v1/completions"):
        Tokenizer(llama_2(), {}).encode_chat(HI)


def test_the_last_message_can_be_continued() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.content }}>\n{% endfor %}", {})
    turns = [*HI, {"role": "assistant", "content": "Well,"}]
    shown = template.render(turns, add_generation_prompt=False, continue_final_message=True)
    assert shown == "<Hi>\n<Well,"


def test_a_file_of_its_own_goes_before_the_configuration(tmp_path: Path) -> None:
    def shown(config: dict[str, object]) -> str:
        template = read_chat_template(tmp_path, config, {"bos_token": "<s>"})
        return template.render(HI) if template else "none"

    assert shown({}) == "none"
    assert shown({"chat_template": "{{ bos_token }}1"}) == "<s>1"
    named = [{"name": "tool_use", "template": "2"}, {"name": "default", "template": "3"}]
    assert shown({"chat_template": named}) == "3"
    (tmp_path / "chat_template.jinja").write_text("4")
    assert shown({"chat_template": named}) == "4"
