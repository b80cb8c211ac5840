"""Small tokenizers of every kind in use, trained here on a few sentences, and texts that are hard
on them."""

from __future__ import annotations

import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from octavo.text.gguf_tokenizer import LLAMA3, META_SYMBOL

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and doesn't stop at 12345 fences.",
    "def main(args):\n    return [x ** 2 for x in range(10) if x != 3]  # squares",
    "Größe, naïve café, übermäßig; ça va? Привет, мир! こんにちは世界 你好，世界",
    "Numbers: 3.14159, 1,000,000 and 0xFF. E-mail: someone@example.org <tag attr='v'>",
    "there is the thing that they think the other then thought through",
    "\n\n\tindented\n\t\ttwice\r\n   spaces   in   runs     \n",
] * 3

TEXTS = [
    *SENTENCES[:6],
    "",
    " ",
    "a",
    " leading space",
    "trailing space ",
    "    four, then  two\n\n\n and newlines\t\ttabs",
    "emoji: 👍🏽 👩‍👩‍👧‍👦 🇫🇷 and combining e\u0301 n\u0303 \u0e01\u0e33",
    "digits 7 42 007 1234567890   99\n\n3",
    "I'll, you've, THEY'RE, don't; it's",
    "العربية עברית हिन्दी ภาษาไทย 한국어 ﬁ ½ Ⅷ ²",
    "zero\u200bwidth, nbsp\u00a0here, \ufeffbom, \u2028line, \x00nul \x7f",
    "<s> </s> <unk> <pad> <|im_start|>user\nhi<|im_end|> <0x41> <|endoftext|>",
    "▁meta▁ symbols ▁▁",
    "x" * 300,
    "{{ not a template }} {% nor this %} ${or} this\\n",
]

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(
    split: str | None = None, bos: bool = False, specials: list[str] = SPECIALS
) -> Tokenizer:
    """GPT-2's kind, or Llama 3's and Qwen's with their regular expression."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = (
        level
        if split is None
        else pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), level]
        )
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.add_tokens(
        [
            AddedToken("<think>", normalized=False, special=False),
            AddedToken(" naïve token", normalized=False),
        ]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{specials[0]} $A",
            pair=f"{specials[0]} $A {specials[0]} $B",
            special_tokens=[(specials[0], 0)],
        )
    return tokenizer


def sentencepiece(
    prefix: str = "first", specials: tuple[str, ...] = ("<unk>", "<s>", "</s>")
) -> Tokenizer:
    """Llama 2's kind. prefix: "first" and "always" as Metaspace has it, "never" as in Gemma,
    "legacy" by a normalizer."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(META_SYMBOL, prepend_scheme="always")
    trained.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: id for id, token in enumerate([*names, *state["vocab"]])}
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=specials[0], fuse_unk=True, byte_fallback=True)
    )
    if prefix == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(META_SYMBOL), normalizers.Replace(" ", META_SYMBOL)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            META_SYMBOL, prepend_scheme=prefix, split=False
        )
    steps = [decoders.Replace(META_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        steps if prefix == "never" else [*steps, decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in specials]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """A unigram model with a Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    """A kind whose tokens have no bytes of their own: the next token decides about the space before
    it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.WordPieceTrainer(
            vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False
        ),
    )
    return tokenizer


KINDS = {
    "byte-level": byte_level,
    "llama-3": lambda: byte_level(LLAMA3, bos=True),
    "sentencepiece": sentencepiece,
    "sentencepiece-legacy": lambda: sentencepiece("legacy"),
    "gemma": lambda: sentencepiece("never"),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}
