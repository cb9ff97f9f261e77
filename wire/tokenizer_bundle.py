"""A tokenizer directory as one archive: the files a router needs to build the same tokenizer."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 64 * 1024

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_PATTERNS = ("*.tiktoken", "*.jinja", "*.model")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def members(directory: Path) -> list[Path]:
    """The files of `directory` that belong into the archive, in its order."""
    files = [directory / name for name in _NAMES]
    for pattern in _PATTERNS:
        files += sorted(directory.glob(pattern))
    return [file for file in dict.fromkeys(files) if file.is_file()]


def build(directory: Path) -> bytes:
    """A zip of the directory's tokenizer files; the same files give the same bytes.

    Raises FileNotFoundError when the directory holds none.
    """
    files = members(directory)
    if not files:
        raise FileNotFoundError(f"{directory} holds no tokenizer file")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            info = zipfile.ZipInfo(file.name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, file.read_bytes())
    return buffer.getvalue()


def chunks(archive: bytes) -> Iterator[tuple[bytes, str]]:
    """Pieces of at most CHUNK_BYTES; the last one comes with the archive's SHA-256 in hex."""
    digest = hashlib.sha256(archive).hexdigest()
    for start in range(0, len(archive), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield archive[start:end], digest if end >= len(archive) else ""
