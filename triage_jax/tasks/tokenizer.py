"""A tokenizer with what a checkpoint folder says about it: special tokens, end-of-sequence ids, chat
template.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, kw_only=True)
class TextCodec:
    """Text to token ids and back.

    eos_ids: every id that ends a response. special_tokens: texts by role, as `{"eos_token": "</s>"}`,
    which a chat template may use.
    """

    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer can produce; a checkpoint's embedding may have more rows."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; special tokens written in the text become their ids, none are added unless asked
        for.
        """
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of generated ids. Not an inverse of `encode`: train on the sampled ids, never on re-encoded
        text.
        """
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def response_text(self, ids: Sequence[int]) -> str:
        """Text of a generated response up to its first end-of-sequence id."""
        ends = [position for position, token in enumerate(ids) if token in self.eos_ids]
        return self.decode(ids[: ends[0]] if ends else ids)


def load_tokenizer(path: str | Path) -> TextCodec:
    """Reads `tokenizer.json` and, where present, `tokenizer_config.json`, `generation_config.json`,
    `config.json` and `chat_template.jinja` of a Hugging Face checkpoint folder.

    Raises FileNotFoundError without a tokenizer.json, ValueError if no end-of-sequence token can be found.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        found = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"{file}: not there (found: {found}). Only the fast format is read; a folder with vocab "
            "files or a SentencePiece model must be converted by saving its fast tokenizer first."
        )
    tokenizer = Tokenizer.from_file(str(file))
    settings, generation, model = (
        _read(folder / name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    special = {role: _token_text(settings[role]) for role in _SPECIAL if settings.get(role) is not None}
    named = {role: tokenizer.token_to_id(text) for role, text in special.items()}
    eos = [*_ids(generation.get("eos_token_id", model.get("eos_token_id"))), *_ids(named.get("eos_token"))]
    if not eos:
        raise ValueError(
            f"{folder}: no end-of-sequence token; give eos_token in tokenizer_config.json or eos_token_id in "
            "generation_config.json"
        )
    pad = next((i for i in (named.get("pad_token"), generation.get("pad_token_id")) if i is not None), eos[0])
    return TextCodec(
        tokenizer=tokenizer,
        eos_ids=tuple(dict.fromkeys(eos)),
        pad_id=pad,
        bos_id=named.get("bos_token"),
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
    )


def char_codec(characters: str = "0123456789+-=") -> TextCodec:
    """One id a character, after pad (0), end of sequence (1) and unknown (2); for models trained from
    scratch.

    The default writes the arithmetic task without products in 16 ids.
    """
    if len(set(characters)) != len(characters):
        raise ValueError(f"characters must be distinct, got {characters!r}")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {token: index for index, token in enumerate([*special.values(), *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special.values()]
    )
    return TextCodec(tokenizer=tokenizer, eos_ids=(1,), pad_id=0, special_tokens=special)


def save_tokenizer(codec: TextCodec, path: str | Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, from which `load_tokenizer` gives an equal
    codec.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    codec.tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **codec.special_tokens}
    if codec.chat_template is not None:
        settings["chat_template"] = codec.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _token_text(entry: str | dict) -> str:
    return entry if isinstance(entry, str) else entry["content"]


def _ids(entry: int | list[int] | None) -> list[int]:
    if entry is None:
        return []
    return entry if isinstance(entry, list) else [entry]


def _chat_template(folder: Path, settings: dict) -> str | None:
    """The separate file wins; a list of named templates yields the one called "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
