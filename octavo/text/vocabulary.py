"""Gives llguidance the vocabulary of a model: the bytes of every token, and a tokenizer."""

from __future__ import annotations

from octavo.errors import InvalidRequest
from octavo.text.digit_limit import DigitTokens
from octavo.text.tokenizer import Tokenizer

# A vocabulary must have these bytes as tokens. Some vocabularies lack a few control characters.
PRINTABLE_BYTES = set(range(0x20, 0x7F))
WINDOW_CHARACTERS = 256  # tokenized at once, in addition to a few times the longest token


def make_vocabulary(
    tokenizer: Tokenizer | None, vocab_size: int, end_ids: tuple[int, ...]
) -> Vocabulary:
    """Return the vocabulary of a model. Raises InvalidRequest if llguidance cannot use it."""
    problem = ""
    if tokenizer is None:
        problem = "this engine runs without one"
    elif not end_ids:
        problem = "this model has no token that ends a text"
    elif tokenizer.bytes_by_id.decoding == "other":
        problem = "the text of this model's tokens depends on their neighbours"
    else:
        vocabulary = Vocabulary(tokenizer, vocab_size, end_ids)
        if vocabulary.bytes.keys() >= PRINTABLE_BYTES:
            vocabulary.build_index()
            return vocabulary
        problem = "this model's tokens cannot spell every character"
    raise InvalidRequest(
        f"structured_outputs need a tokenizer that can write anything: {problem}",
        "structured_outputs",
        "unsupported_parameter",
    )


class Vocabulary:
    """The bytes of every token. An id without a token has no bytes and is never allowed.

    llguidance reads the public attributes up to `bytes`, so their names are fixed.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]):
        special_ids = tokenizer.special_ids
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(
            token_id for token_id in special_ids if token_id < vocab_size
        )
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = end_ids[0]
        self.bytes = {
            token[0]: token_id
            for token_id, token in enumerate(self.tokens)
            if len(token) == 1 and token_id not in special_ids
        }
        self.end_ids = end_ids
        self.mask_bytes = -(-vocab_size // 32) * 4
        self._longest_token = max(map(len, self.tokens))
        self._window_characters = WINDOW_CHARACTERS + 4 * self._longest_token
        self._encode = tokenizer.encode

    def build_index(self) -> None:
        """Build the index of llguidance, which takes a while."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise InvalidRequest(
                "structured_outputs need llguidance, which is not installed: pip install "
                "llguidance",
                "structured_outputs",
                "unsupported_parameter",
            ) from None
        self.native = LLTokenizer(self, eos_token=list(self.end_ids))  # type: ignore[arg-type]
        self.digits = DigitTokens(self.tokens, self.bytes.get(ord("x")))

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text that the grammar forces, so that it is split as the model learned it.

        The bytes of the tokens must be exactly those of the text, although a tokenizer may put a
        space before a text, or normalize it.

        At every token llguidance tokenizes all of the remaining text and uses the first token only.
        Tokenizing a text of 100,000 characters took 27 ms at every token. So only the beginning of
        a long text is tokenized, and its last tokens are dropped, because they depend on the text
        after them.
        """
        if len(text) > self._window_characters:
            return self._leading_tokens(text[: self._window_characters])
        text_bytes = text.encode()
        for prefix in ("", "\x02"):  # No merge includes the character U+0002.
            # A text that spells a control token is still text.
            token_ids = self._encode(prefix + text, add_special_tokens=False, parse_special=False)
            token_bytes = sum(len(self.tokens[token_id]) for token_id in token_ids)
            extra_bytes = token_bytes - len(text_bytes)
            first_token = 0
            while extra_bytes > 0:
                extra_bytes -= len(self.tokens[token_ids[first_token]])
                first_token += 1
            text_ids = token_ids[first_token:]
            if b"".join(self.tokens[token_id] for token_id in text_ids) == text_bytes:
                return text_ids
        return [self.bytes[byte] for byte in text_bytes if byte in self.bytes]

    def _leading_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text that continues, without those of its last few characters."""
        token_ids = self(text)
        removed_bytes = 0
        while token_ids and removed_bytes <= self._longest_token:
            removed_bytes += len(self.tokens[token_ids.pop()])
        return token_ids
