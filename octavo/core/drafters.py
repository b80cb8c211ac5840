"""Drafters that run on the host: they guess the next tokens of a sequence from earlier text.

    ngram    searches the same sequence for its last few tokens
    suffix   searches it, and the text that was generated earlier for the same tenant

The model verifies each draft (octavo/core/speculation.py), so a bad drafter costs time and changes
no token.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Protocol

from octavo.types import Sequence


class HostDrafter(Protocol):
    def propose(self, seq: Sequence, count: int) -> array[int]:
        """Guess up to `count` tokens that follow the tokens of the sequence."""

    def finished(self, seq: Sequence) -> None:
        """Store the text of a sequence that has ended."""


class NgramDrafter:
    """Prompt lookup: proposes what followed the last occurrence of the last `longest` to `shortest`
    tokens."""

    def __init__(self, shortest: int, longest: int):
        self.shortest = shortest
        self.longest = longest

    def propose(self, seq: Sequence, count: int) -> array[int]:
        return continuation_of(seq.tokens, seq.tokens, self.shortest, self.longest, count)

    def finished(self, seq: Sequence) -> None:
        """Do nothing: only the sequence itself is searched."""


class SuffixDrafter:
    """Proposes what followed the longest suffix of the sequence that occurs earlier in it, or in
    text that was generated for the same tenant and cache salt.

    Each tenant and salt has the latest `history_tokens` generated tokens, with an index of every
    `shortest` tokens in a row. The least recently used histories are dropped."""

    MAX_HISTORIES = 64

    def __init__(self, shortest: int, longest: int, history_tokens: int = 16384):
        self.shortest = shortest
        self.longest = longest
        self.history_tokens = history_tokens
        self.histories: OrderedDict[tuple[str, str], History] = OrderedDict()

    def propose(self, seq: Sequence, count: int) -> array[int]:
        proposal = continuation_of(seq.tokens, seq.tokens, self.shortest, self.longest, count)
        if proposal:
            return proposal
        history = self.histories.get((seq.request.tenant, seq.request.cache_salt))
        if history is None:
            return array("i")
        return history.continuation(seq.tokens, self.longest, count)

    def finished(self, seq: Sequence) -> None:
        key = (seq.request.tenant, seq.request.cache_salt)
        history = self.histories.pop(key, None)
        if history is None:
            history = History(self.shortest, self.history_tokens)
        history.extend(seq.tokens[seq.kept_prompt_tokens :])
        self.histories[key] = history
        if len(self.histories) > self.MAX_HISTORIES:
            self.histories.popitem(last=False)


class History:
    """Generated text, and where each run of `width` tokens was generated last."""

    def __init__(self, width: int, max_tokens: int):
        self.width = width
        self.max_tokens = max_tokens
        self.tokens = array("i")
        self.end_of: dict[bytes, int] = {}  # run of tokens -> index after its last occurrence

    def extend(self, text: array[int]) -> None:
        """Add a text. It is separated from the one before it by a token that no text contains."""
        self.tokens.append(-1)
        first = len(self.tokens)
        self.tokens += text[-self.max_tokens :]
        self._index(first)
        if len(self.tokens) > 2 * self.max_tokens:
            self.tokens = self.tokens[-self.max_tokens :]
            self.end_of.clear()
            self._index(0)

    def _index(self, first: int) -> None:
        for end in range(first + self.width, len(self.tokens)):
            self.end_of[self.tokens[end - self.width : end].tobytes()] = end

    def continuation(self, text: array[int], longest: int, count: int) -> array[int]:
        end = self.end_of.get(text[-self.width :].tobytes())
        if end is None:
            return array("i")
        # Another occurrence may agree with more of the text, so the history is searched.
        proposal = continuation_of(self.tokens, text, self.width + 1, longest, count)
        if not proposal:
            proposal = self.tokens[end : end + count]
        if -1 in proposal:
            proposal = proposal[: proposal.index(-1)]
        return proposal


def continuation_of(
    corpus: array[int], text: array[int], shortest: int, longest: int, count: int
) -> array[int]:
    """Return up to `count` tokens that follow the last occurrence in `corpus` of the end of `text`.
    The longest end that occurs is used, of at most `longest` tokens. The result is empty if not
    even the last `shortest` tokens occur.

    The search runs over the bytes of the array, which is ten times as fast as comparing Python
    integers."""
    token_bytes = corpus.itemsize
    haystack = corpus.tobytes()
    # The match must not be the end of the text itself.
    end = len(haystack) - (token_bytes if corpus is text else 0)
    match_end = -1
    for length in range(shortest, min(longest, len(text)) + 1):
        pattern = text[-length:].tobytes()
        start = find_last(haystack, pattern, end, token_bytes)
        if start < 0:
            break
        match_end = start + len(pattern)
        end = match_end  # A longer end of the text occurs here too, or further left.
    if match_end < 0:
        return array("i")
    first = match_end // token_bytes
    return corpus[first : first + count]


def find_last(haystack: bytes, pattern: bytes, end: int, token_bytes: int) -> int:
    """Return where whole tokens equal the pattern for the last time before `end`, or -1."""
    start = haystack.rfind(pattern, 0, end)
    while start >= 0 and start % token_bytes:
        start = haystack.rfind(pattern, 0, start + len(pattern) - 1)
    return start
