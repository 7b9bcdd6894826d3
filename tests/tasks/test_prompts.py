import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from triage_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask
from triage_jax.tasks.prompts import encode_prompt, filter_prompts, render_chat, scored_text
from triage_jax.tasks.protocol import Problem
from triage_jax.tasks.tokenizer import char_codec, load_tokenizer, save_tokenizer

CHAT = """
{%- for message in messages %}
    {%- if message.role not in ['system', 'user'] %}
        {{- raise_exception('no such role: ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer in a checkpoint folder: two end ids, and a begin token it adds itself."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": CHAT}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
    return tmp_path


def problem(prompt):
    return Problem(prompt, "2", "x")


def without_template(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


def test_loads_ids_and_template(folder):
    codec = load_tokenizer(folder)
    assert (codec.bos_id, codec.eos_ids, codec.pad_id, codec.vocab_size) == (256, (258, 259), 259, 260)
    assert codec.chat_template == CHAT
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(folder).chat_template == "{{ messages[0].content }}"


def test_chat_prompt_has_only_the_templates_special_tokens(folder):
    codec = load_tokenizer(folder)
    ids = encode_prompt(problem("Is 1 < 2?"), codec)
    assert ids[0] == 257
    assert 256 not in ids
    text = "<|im_start|>user\nIs 1 < 2?<|im_end|>\n<|im_start|>assistant\n"
    assert codec.decode(ids, skip_special_tokens=False) == text
    system = encode_prompt(problem("Is 1 < 2?"), codec, system="Be brief.")
    assert (
        codec.decode(system, skip_special_tokens=False) == "<|im_start|>system\nBe brief.<|im_end|>\n" + text
    )


@pytest.mark.parametrize(("thinking", "ending"), [(None, "\n"), (True, "\n"), (False, "<think></think>")])
def test_enable_thinking_reaches_the_template(folder, thinking, ending):
    codec = load_tokenizer(folder)
    text = render_chat([{"role": "user", "content": "hi"}], codec, enable_thinking=thinking)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + ending.removeprefix("\n")


def test_plain_prompt_starts_with_bos(folder):
    codec = without_template(folder)
    assert encode_prompt(problem("1"), codec) == [256, codec.tokenizer.token_to_id("1")]
    with pytest.raises(ValueError, match="needs a chat template"):
        encode_prompt(problem("1"), codec, system="Be brief.")
    with pytest.raises(ValueError, match="no chat template"):
        render_chat([], codec)


def test_template_refusals_and_escapes(folder):
    codec = load_tokenizer(folder)
    with pytest.raises(ValueError, match="no such role: tool"):
        render_chat([{"role": "tool", "content": "x"}], codec)
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe"):
        render_chat([{"role": "user", "content": "x"}], load_tokenizer(folder))
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}{{ strftime_now('%Y')[:2] }}")
    assert render_chat([{"role": "user", "content": "é<"}], load_tokenizer(folder)).startswith(
        '[{"role": "user", "content": "é<"}]2'
    )


def test_response_text_stops_at_the_first_eos(folder):
    codec = load_tokenizer(folder)
    ids = codec.encode("82<|endoftext|>83<|im_end|>")
    assert codec.response_text(ids) == "82"
    assert codec.decode(ids) == "8283"


def test_long_prompts_are_left_out_and_counted(folder):
    codec = without_template(folder)
    problems = [problem("1" * length) for length in (3, 9, 10, 20)]
    result = filter_prompts(problems, codec, max_tokens=10)
    assert [(kept.prompt, len(ids)) for kept, ids in result.kept] == [("111", 4), ("1" * 9, 10)]
    assert (result.too_long, result.longest) == (2, 21)


def test_missing_files_say_what_is_needed(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: not there \(found: no such folder"):
        load_tokenizer(tmp_path / "none")
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(FileNotFoundError, match=r"'vocab\.json'"):
        load_tokenizer(folder)
    (folder / "vocab.json").rename(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        load_tokenizer(folder)


def test_characters_round_trip_and_unknown_ones_are_refused(tmp_path):
    codec = char_codec()
    assert codec.vocab_size == 16
    task = ArithmeticTask(ArithmeticConfig(digits=2))
    ids = encode_prompt(task.problem(0), codec)
    assert len(ids) == len(task.problem(0).prompt)
    assert codec.response_text([*ids, 1, *ids]) == task.problem(0).prompt
    with pytest.raises(ValueError, match=r"cannot write the prompt '2\*3='"):
        encode_prompt(problem("2*3="), codec)
    with pytest.raises(ValueError, match="distinct"):
        char_codec("11")
    save_tokenizer(codec, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert encode_prompt(task.problem(0), loaded) == ids
    assert (loaded.eos_ids, loaded.pad_id, dict(loaded.special_tokens)) == (
        (1,),
        0,
        dict(codec.special_tokens),
    )


def test_a_thought_that_the_template_opened_stands_before_the_scored_response():
    codec = char_codec("abcdefghijklmnopqrstuvwxyz<>/?\n ")
    response = codec.encode("so")
    for prompt, expected in [
        ("what?\n<think>\n", "<think>so"),
        ("<think>\n</think>\n", "so"),
        ("<think> what?", "so"),
    ]:
        assert scored_text(codec.encode(prompt), response, codec) == expected
