"""Training of draft heads. `train_draft.py` is the recipe; docs/draft-head.md explains it."""
