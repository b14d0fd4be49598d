"""A conversation as the model was trained to read it: the chat template inside the model's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template


class TemplateError(ValueError):
    """The chat template refuses these messages; the message is the template's own."""


class ChatTemplate:
    """A Jinja template in transformers' sandbox, which gives templates the names they count on.

    Raises ValueError if it is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables` are special tokens by name, such as `bos_token`."""
        self.source = source
        self._variables = variables
        try:
            self.render([{"role": "user", "content": "?"}])
        except TemplateError as error:
            # Refusing this conversation is the template's right.
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                raise ValueError(f"the model's chat template is broken: {error.__cause__}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,  # noqa: ANN401
    ) -> str:
        """The conversation as text. `variables` are the template's own. Raises TemplateError."""
        try:
            rendered, _ = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._variables, **variables},
            )
        except Exception as error:
            # A template is a program that came with the model: given messages it was not written for, it
            # fails in any way a program can.
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        return str(rendered[0])


def read_chat_template(
    folder: Path, config: Mapping[str, Any], variables: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a Hugging Face directory: its own file, or a field of tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    source = file.read_text() if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, variables) if source else None
