"""Reads the pooling of a model from the files of sentence-transformers beside it."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.config import PoolerConfig
from octavo.errors import ModelError
from octavo.model.checkpoint import read_json

# The poolings that Octavo has, by their names in sentence-transformers.
SENTENCE_MODES = {"pooling_mode_lasttoken": "LAST", "pooling_mode_mean_tokens": "MEAN"}


def read_pooler_config(directory: Path | None) -> PoolerConfig:
    """Return how the model in a directory makes embeddings.

    A model without such files uses the last token and length 1."""
    modules_file = None if directory is None else directory / "modules.json"
    if modules_file is None or not modules_file.is_file():
        return PoolerConfig()
    try:
        modules = json.loads(modules_file.read_text(encoding="utf-8"))
        kinds = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"cannot read {modules_file}: {error}") from None
    unknown = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        raise ModelError(
            f"{modules_file} has modules that Octavo does not compute: {', '.join(unknown)}. Give "
            'pooler_config={"pooling_type": "LAST"} to use the model without them'
        )
    pooling = "LAST"
    if "Pooling" in kinds:
        settings = read_json(modules_file.parent / kinds["Pooling"] / "config.json")
        modes = [name for name in settings if name.startswith("pooling_mode_") and settings[name]]
        if len(modes) != 1 or modes[0] not in SENTENCE_MODES:
            raise ModelError(
                f"{modules_file.parent} pools with {', '.join(modes) or 'nothing'}, which Octavo "
                "does not do: give pooler_config with the pooling_type LAST or MEAN"
            )
        pooling = SENTENCE_MODES[modes[0]]
    return PoolerConfig(pooling, use_activation="Normalize" in kinds)
