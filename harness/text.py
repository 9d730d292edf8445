"""Text as tokens for `harness model`, and the batches that are cut of it. Nothing is fetched."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import UsageError, one_line

STDLIB_BYTES = 16_000_000  # of the standard library: more than a run of 200 steps reads
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
BYTES = "bytes"


@dataclass(frozen=True)
class Text:
    """Tokens `(n,)` in int32, and where they come from: the source's name, the tokenizer's, the hash of the text."""

    tokens: torch.Tensor
    source: str
    tokenizer: str
    sha256: str


def load_text(path: Path | None, tokenizer: Path | None) -> Text:
    """A file's text, by default Python's own standard library, in the tokens of a tokenizer, by default its bytes.

    tokenizer: a file tokenizer.json, or a folder that holds one, or vocab.json and merges.txt as GPT-2's does. Raises
    UsageError for what cannot be read, and for a tokenizer without the package that reads it.
    """
    if path is None:
        source, text = "Python's standard library", _standard_library()
    else:
        source, text = path.name, _read(path, "--text")
    digest = hashlib.sha256(text).hexdigest()
    if tokenizer is None:
        return Text(torch.frombuffer(bytearray(text), dtype=torch.uint8).int(), source, BYTES, digest)
    tokens = _tokenizer(tokenizer).encode(text.decode(errors="replace")).ids
    return Text(torch.tensor(tokens, dtype=torch.int32), source, tokenizer.name, digest)


def _read(path: Path, option: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be read: {error.strerror}") from error
    if not data:
        raise UsageError(f"{option} {path} is empty")
    return data


def _standard_library() -> bytes:
    """The sources of the standard library in the order of their names, without its tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = (p for p in sorted(folder.rglob("*.py")) if not STDLIB_LEFT_OUT & set(p.relative_to(folder).parts))
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= STDLIB_BYTES:
            break
    if not text:
        raise UsageError(f"{folder} holds no sources of Python's standard library: give a text with --text FILE")
    return bytes(text[:STDLIB_BYTES])


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the data of a tokenizer."""
    return (folder / "tokenizer.json").is_file() or all((folder / n).is_file() for n in ("vocab.json", "merges.txt"))


def _tokenizer(path: Path):  # type: ignore[no-untyped-def]
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(f"--tokenizer {path} needs the package tokenizers: pip install tokenizers") from error
    if path.is_dir() and not has_tokenizer(path):
        raise UsageError(f"--tokenizer {path} holds neither tokenizer.json nor vocab.json and merges.txt")
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file() or not path.is_dir():
            return tokenizers.Tokenizer.from_buffer(file.read_bytes())
        return tokenizers.ByteLevelBPETokenizer(str(path / "vocab.json"), str(path / "merges.txt"))
    except OSError as error:
        raise UsageError(f"--tokenizer {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # the package raises plain Exception
        raise UsageError(f"--tokenizer {path} cannot be read: {one_line(error)}") from error


def windows(text: Text, count: int, batch: int, context: int) -> torch.Tensor:
    """Batches `(count, batch, context + 1)` of the text's first tokens, one window after the other.

    A window's last token is the next one's first: every token but the first is predicted once. Raises UsageError where
    the text is too short.
    """
    needed = count * batch * context + 1
    if len(text.tokens) < needed:
        raise _too_short(text, f"a context of {context} in {count} batches of {batch} takes", needed)
    return text.tokens[:needed].unfold(0, context + 1, context).reshape(count, batch, context + 1).contiguous()


def drawn(text: Text, count: int, batch: int, context: int, seed: int) -> torch.Tensor:
    """Batches `(count, batch, context + 1)` of windows at places drawn by a seed; the same on every machine."""
    places = len(text.tokens) - context
    if places < 1:
        raise _too_short(text, f"a context of {context} takes", context + 1)
    begins = torch.randint(places, (count, batch, 1), generator=torch.Generator().manual_seed(seed))
    return text.tokens[begins + torch.arange(context + 1)]


def _too_short(text: Text, what: str, needed: int) -> UsageError:
    return UsageError(
        f"{what} {needed} tokens, and {text.source} has {len(text.tokens)}: give a shorter --context or a longer --text"
    )
