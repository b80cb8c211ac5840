"""The models. Importing this package registers every architecture that comes with Octavo."""

from octavo.model import decoder, gpt2
from octavo.model.base import CausalLM, WeightTarget, build, registry

__all__ = ["CausalLM", "WeightTarget", "build", "decoder", "gpt2", "registry"]
