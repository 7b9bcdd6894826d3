"""Problems as token ids: chat template, encoding, and the length limit."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triage_jax.tasks.protocol import Problem
from triage_jax.tasks.tokenizer import TextCodec

Message = Mapping[str, str]

THINK = "<think>"


@dataclass(frozen=True)
class PromptFilter:
    """Prompts that fit, in order, and what became of the rest. longest: tokens of the longest prompt seen."""

    kept: list[tuple[Problem, list[int]]]
    too_long: int
    longest: int


def encode_prompt(
    problem: Problem, codec: TextCodec, *, system: str | None = None, enable_thinking: bool | None = None
) -> list[int]:
    """Token ids of the prompt, ready for the response to follow.

    With a chat template the prompt is a user message (after a system message, if given) and the template
    alone decides which special tokens appear. Without one it is plain text with the tokenizer's own
    beginning-of-sequence token, if it has one. `enable_thinking` reaches the template only when it is not
    None. Raises ValueError on a system text without a template, or if the tokenizer cannot write some
    character of the prompt.
    """
    if codec.chat_template is None:
        if system is not None:
            raise ValueError("a system text needs a chat template, and this tokenizer has none")
        ids = codec.encode(problem.prompt, add_special_tokens=True)
        while ids and ids[-1] in codec.eos_ids:
            ids = ids[:-1]
        _check_known(problem.prompt, ids, codec)
        return ids
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": problem.prompt})
    return codec.encode(render_chat(messages, codec, enable_thinking=enable_thinking))


def render_chat(messages: list[Message], codec: TextCodec, *, enable_thinking: bool | None = None) -> str:
    """The chat template's text for `messages`, with the opening of the assistant's turn.

    Raises ValueError if there is no template, or with the template's own words if it refuses the messages.
    """
    if codec.chat_template is None:
        raise ValueError("this tokenizer has no chat template")
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    try:
        return _compiled(codec.chat_template).render(
            messages=messages, add_generation_prompt=True, **codec.special_tokens, **options
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refused {len(messages)} messages: {error}") from error


def scored_text(prompt: Sequence[int], response: Sequence[int], codec: TextCodec) -> str:
    """A response as a verifier should read it: with `<think>` before it where the chat template opened the thought.

    A thought that the token limit cut off would else be read as an answer.
    """
    tail = codec.decode(prompt[-8:], skip_special_tokens=False).rstrip()
    return (THINK if tail.endswith(THINK) else "") + codec.response_text(response)


def filter_prompts(
    problems: Iterable[Problem],
    codec: TextCodec,
    *,
    max_tokens: int,
    system: str | None = None,
    enable_thinking: bool | None = None,
) -> PromptFilter:
    """Encodes the problems and leaves out, and counts, those of more than `max_tokens` tokens."""
    kept, too_long, longest = [], 0, 0
    for problem in problems:
        ids = encode_prompt(problem, codec, system=system, enable_thinking=enable_thinking)
        longest = max(longest, len(ids))
        if len(ids) > max_tokens:
            too_long += 1
        else:
            kept.append((problem, ids))
    return PromptFilter(kept, too_long, longest)


def _check_known(prompt: str, ids: list[int], codec: TextCodec) -> None:
    """Training on a prompt that reads `<unk>` teaches nothing; some checkpoints call their end token
    unknown, too.
    """
    unknown = codec.special_tokens.get("unk_token")
    if unknown is None or unknown in (
        codec.special_tokens.get("bos_token"),
        codec.special_tokens.get("eos_token"),
    ):
        return
    if codec.tokenizer.token_to_id(unknown) in ids and unknown not in prompt:
        read = codec.decode(ids, skip_special_tokens=False)
        raise ValueError(f"the tokenizer cannot write the prompt {prompt[:80]!r}: it reads {read[:80]!r}")


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """Checkpoints are data from elsewhere: their templates run in jinja's immutable sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
