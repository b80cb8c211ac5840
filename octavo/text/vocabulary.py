"""A model's vocabulary as llguidance needs it: every token's bytes, and how a text is cut into tokens."""

from __future__ import annotations

from octavo.errors import InvalidRequest
from octavo.text.digits import DigitTokens
from octavo.text.tokenizer import Tokenizer

# bytes that a vocabulary must have as tokens; some lack a few control characters
PRINTABLE = set(range(0x20, 0x7F))
WINDOW = 256  # characters that are tokenised at once, beside a few of the longest tokens


def make_vocabulary(
    tokenizer: Tokenizer | None, vocab_size: int, end_ids: tuple[int, ...]
) -> Vocabulary:
    """A model's vocabulary, as llguidance needs it. Raises InvalidRequest where it cannot be used."""
    why = ""
    if tokenizer is None:
        why = "this engine runs without one"
    elif not end_ids:
        why = "this model has no token that ends a text"
    elif tokenizer.pieces.kind == "other":
        why = "what this model's tokens stand for depends on their neighbours"
    else:
        vocabulary = Vocabulary(tokenizer, vocab_size, end_ids)
        if vocabulary.bytes.keys() >= PRINTABLE:
            vocabulary.index()
            return vocabulary
        why = "this model's tokens cannot spell every character"
    raise InvalidRequest(
        f"structured_outputs need a tokenizer that can write anything: {why}",
        "structured_outputs",
        "unsupported_parameter",
    )


class Vocabulary:
    """Every token's bytes. Ids without a token have none, and are never allowed. The public names up to `bytes` are those that
    llguidance reads from a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]):
        special = tokenizer.special_ids
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(id for id in special if id < vocab_size)
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = end_ids[0]
        self.bytes = {
            token[0]: id
            for id, token in enumerate(self.tokens)
            if len(token) == 1 and id not in special
        }
        self.end_ids = end_ids
        self.mask_bytes = -(-vocab_size // 32) * 4
        self._longest = max(map(len, self.tokens))
        self._window = WINDOW + 4 * self._longest
        self._encode = tokenizer.encode

    def index(self) -> None:
        """Build what takes a while."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise InvalidRequest(
                "structured_outputs need llguidance, which is not installed: pip install llguidance",
                "structured_outputs",
                "unsupported_parameter",
            ) from None
        self.native = LLTokenizer(self, eos_token=list(self.end_ids))  # type: ignore[arg-type]
        self.digits = DigitTokens(self.tokens, self.bytes.get(ord("x")))

    def __call__(self, text: str) -> list[int]:
        """Tokens for a text that is the only one possible, so that it is cut as the model learned it. Their bytes must be exactly
        the text's, though a tokenizer may put a space before a text, or normalise it.

        llguidance asks at every token for all of the text that is left, and uses the first token. So a long text is answered in
        part, without the last tokens, which depend on what follows: a text of 100,000 characters took 27 ms at every token.
        """
        if len(text) > self._window:
            return self._begin(text[: self._window])
        data = text.encode()
        for before in ("", "\x02"):  # a character that nothing merges with
            # a text that spells out a control token is still text
            ids = self._encode(before + text, add_special_tokens=False, parse_special=False)
            extra = sum(len(self.tokens[id]) for id in ids) - len(data)
            first = 0
            while extra > 0:
                extra = extra - len(self.tokens[ids[first]])
                first = first + 1
            if b"".join(self.tokens[id] for id in ids[first:]) == data:
                return ids[first:]
        return [self.bytes[byte] for byte in data if byte in self.bytes]

    def _begin(self, text: str) -> list[int]:
        """The tokens at the beginning of a text that goes on: those before its last few characters."""
        ids = self(text)
        size = 0
        while ids and size <= self._longest:
            size += len(self.tokens[ids.pop()])
        return ids
