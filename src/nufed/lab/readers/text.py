"""Texts as data: the roles of Shakespeare, and a user's own folder of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from nufed.data.samples import Samples
from nufed.data.text import characters, windows
from nufed.errors import InputError, in_short, require, shown
from nufed.lab.readers.files import data_limit, read_bounded

# of a character or token in memory: a number of 8 bytes twice, in a list and in two arrays
TOKEN_BYTES = 32


def roles(play: str) -> dict[str, str]:
    """What every role says in a play: speeches with the line ``ROLE:`` first and a blank one last.

    >>> roles("A:\\nHello.\\n\\nB:\\nWho?\\n\\nA:\\nMe.\\nBob.\\n")
    {'A': 'Hello.\\nMe.\\nBob.', 'B': 'Who?'}
    """
    said: dict[str, list[str]] = {}
    for speech in play.split("\n\n"):
        head, _, lines = speech.strip("\n").partition("\n")
        if head.endswith(":") and lines:
            said.setdefault(head[:-1], []).append(lines)
    return {role: "\n".join(speeches) for role, speeches in said.items()}


def of_texts(
    texts: Mapping[str, str], length: int, least: int, tokenizer: str | None, known: str = ""
) -> Samples:
    """Windows of every owner's text, as characters or as tokens of a tokenizer."""
    if tokenizer is None:
        return windows(characters(texts, known)[1], length, least)
    encode = read_tokenizer(tokenizer)
    return windows({owner: encode(text) for owner, text in texts.items()}, length, least)


def read_tokenizer(place: str) -> Callable[[str], list[int]]:
    """The function from text to token identifiers of a Hugging Face tokenizer, read locally.

    ``place``: a folder, or a name that the local cache of Hugging Face holds; nothing is
    downloaded.
    """
    require(isinstance(place, str) and bool(place), "data.args.tokenizer", place, "must be text")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError('a tokenizer needs transformers: pip install "nufed[hf]"') from None
    try:
        loaded = AutoTokenizer.from_pretrained(
            place, local_files_only=True, trust_remote_code=False, use_fast=True
        )
    except Exception as error:  # transformers may raise anything
        raise InputError(
            f"the tokenizer {shown(place)} can't be read ({in_short(error)}): give the folder of a "
            "tokenizer, or download it before with the tools of Hugging Face"
        ) from None

    def encode(text: str) -> list[int]:
        return list(loaded(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


def own_texts(
    path: str = "", length: int = 80, least: int = 10, tokenizer: str | None = None
) -> Samples:
    """Your own texts, to predict next characters or tokens: a folder with a .txt file per agent.

    Args:
        path: the folder; an agent is called like its file.
        length: characters or tokens of a sample.
        least: samples that an agent must have; others are left out.
        tokenizer: the folder of a Hugging Face tokenizer; by default tokens are the characters of
            all texts in their order.
    """
    require(isinstance(path, str) and bool(path), "data.args.path", path, "must name a folder")
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(
            f"= {shown(path)}: is not a folder with a .txt file per agent", "data.args.path"
        )
    left, texts = data_limit() // TOKEN_BYTES, {}
    for file in sorted(folder.glob("*.txt")):
        try:
            content = read_bounded(file, left)
            texts[file.stem] = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(f"{file} can't be used: it is not text in UTF-8") from None
        except (OSError, InputError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{file} can't be used: {reason}") from None
        left -= len(content)
    if not texts:
        raise InputError(f"{folder} holds no .txt file: give one per agent")
    return of_texts(texts, length, least, tokenizer)
