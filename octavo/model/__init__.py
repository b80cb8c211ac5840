"""The models. Importing this package registers every architecture that comes with Octavo."""

from octavo.model import decoder, gpt2
from octavo.model.base import CausalLM, Slot, build, registry

__all__ = ["CausalLM", "Slot", "build", "decoder", "gpt2", "registry"]
