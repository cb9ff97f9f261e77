"""Tokenizers of tiny models, made from the standard library's own sources."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

SIZE = 2048  # tokens, special ones included

# Pure-Python modules that every supported release has, as the training text.
CORPUS = (
    "argparse",
    "ast",
    "calendar",
    "codecs",
    "configparser",
    "csv",
    "dataclasses",
    "difflib",
    "doctest",
    "enum",
    "functools",
    "heapq",
    "inspect",
    "locale",
    "mailbox",
    "optparse",
    "pickle",
    "random",
    "shutil",
    "smtplib",
    "statistics",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "traceback",
    "typing",
)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# How Qwen tokenizers cut text before merging (Qwen2Tokenizer of transformers builds the same one).
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _corpus() -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    return [(library / f"{module}.py").read_text(encoding="utf-8") for module in CORPUS]


def byte_level_bpe(special: tuple[str, ...]) -> Any:
    """A Qwen-like tokenizer of SIZE tokens, the special ones last."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def word_piece() -> Any:
    """A BERT tokenizer of SIZE tokens, the special ones first.

    Not trained: the trainer numbers its "##" characters in the order of a hash map. WordPiece takes the
    longest match, so the printable characters and the most frequent words do as well.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    words = Counter(word for text in _corpus() for word in re.findall(r"[a-z]{2,}", text.lower()))
    tokens = [*BERT_TOKENS, *characters, *(f"##{character}" for character in characters)]
    frequent = sorted(words, key=lambda word: (-words[word], word))
    tokens += [form for word in frequent for form in (word, f"##{word}")][: SIZE - len(tokens)]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(BERT_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer
