"""This package tokenizes prompts, detokenizes output, finds stop strings and renders chat
templates.

Nothing in it imports torch.
"""

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
