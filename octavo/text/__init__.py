"""Text in and out of a model: tokenizers, incremental detokenisation, stop strings, chat templates. No torch."""

from octavo.text.chat import ChatTemplate, encode_chat, select_template
from octavo.text.detokenize import Detokenizer, StopChecker, TextStream
from octavo.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopChecker",
    "TextStream",
    "Tokenizer",
    "encode_chat",
    "select_template",
]
