"""A draft head that can be trained: the arithmetic of octavo.model.draft_head in plain PyTorch.

Training repeats what drafting does. Step 0 reads the target's hidden state at every position of a
text at once; step s continues every position by its own output of step s - 1, with the text's next
token. Position a in step s sees the keys of step 0 up to a, and its own keys of steps 1 to s:

    step 0   hidden state of a, token a + 1   -> predicts the target's choice after token a + 1
    step s   output of step s - 1, token a + 1 + s   -> predicts its choice after token a + 1 + s
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.model.base import CausalLM
from octavo.model.draft_head import DraftConfig
from octavo.model.rope import rope_table
from octavo.train.states import TextStates

INITIAL_SIZE = 0.02  # the standard deviation of the first weights
# The modules that the matrices belong to in a checkpoint. Norms belong to the layer.
OWNERS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn.") | dict.fromkeys(
    ("gate_proj", "up_proj", "down_proj"), "mlp."
)
STEP_WEIGHT = 0.8  # the loss of each chained step counts less, because fewer drafts reach it


class TextBatch(NamedTuple):
    """Texts of similar length, padded at their end. The hidden states are those of all tokens."""

    token_ids: Tensor  # [N, T]
    hidden: Tensor  # [N, T, hidden] float32
    choices: Tensor  # [N, T]
    in_answer: Tensor  # [N, T] bool: the token after this one belongs to the answer


def batch_texts(states: list[TextStates]) -> TextBatch:
    def padded(name: str) -> Tensor:
        rows = [getattr(state, name) for state in states]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    token_ids = padded("token_ids")
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)
    starts = torch.tensor([state.answer_start for state in states], device=token_ids.device)
    lengths = torch.tensor([len(state.token_ids) for state in states], device=token_ids.device)
    in_answer = (positions >= starts[:, None] - 1) & (positions < lengths[:, None] - 1)
    return TextBatch(token_ids, padded("hidden").float(), padded("choices"), in_answer)


class ChainStep(NamedTuple):
    """One chained step for all positions of a batch, shortened to those that have a target."""

    hidden: Tensor  # [N, P, hidden] the head's output
    target: Tensor  # [N, P, hidden] the target's hidden state that it should predict the choice of
    choices: Tensor  # [N, P] the choice
    in_answer: Tensor  # [N, P] bool


class TrainableHead(nn.Module):
    rope: Tensor
    head_rows: Tensor

    def __init__(self, config: DraftConfig, target: CausalLM, token_ids: Tensor):
        """`token_ids` are the target's ids of the draft tokens, in ascending order."""
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        query_size = config.num_heads * config.head_dim
        key_size = config.num_kv_heads * config.head_dim
        sizes = {
            "q_proj": (query_size, 2 * hidden),
            "k_proj": (key_size, 2 * hidden),
            "v_proj": (key_size, 2 * hidden),
            "o_proj": (hidden, query_size),
            "gate_proj": (config.intermediate_size, hidden),
            "up_proj": (config.intermediate_size, hidden),
            "down_proj": (hidden, config.intermediate_size),
        }
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(size) * INITIAL_SIZE) for name, size in sizes.items()}
            | {name: nn.Parameter(torch.ones(hidden)) for name in norms}
        )
        self.norm = nn.Parameter(torch.ones(hidden))
        self.register_buffer("rope", rope_table(config.rope, config.head_dim, config.max_position))
        self.token_ids = token_ids
        self.head_rows = target.head_rows(token_ids).float()
        self.embed = target.embed.forward  # a function: the embedding is not trained

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained weights by their names in a checkpoint."""
        weights = {
            f"midlayer.{OWNERS.get(name, '')}{name}.weight": weight
            for name, weight in self.weights.items()
        }
        return {**weights, "norm.weight": self.norm}

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._normalise(hidden, self.norm), self.head_rows)

    def chain(self, batch: TextBatch, count: int) -> Iterator[ChainStep]:
        """Yield `count` chained steps for every position of the texts."""
        length = batch.token_ids.shape[1]
        with torch.no_grad():
            embedded = self.embed(batch.token_ids.flatten())
        embedded = embedded.view(*batch.token_ids.shape, -1).float()
        hidden = batch.hidden
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(min(count, length - 1)):
            num_positions = length - 1 - step  # the last ones have no token after them
            past = [(key[:, :, :num_positions], value[:, :, :num_positions]) for key, value in past]
            following = slice(step + 1, length)
            hidden = self._layer(embedded[:, following], hidden[:, :num_positions], past, step)
            yield ChainStep(
                hidden=hidden,
                target=batch.hidden[:, following],
                choices=batch.choices[:, following],
                in_answer=batch.in_answer[:, following],
            )

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), weight, self.config.norm_eps)

    def _layer(
        self, embedded: Tensor, hidden: Tensor, past: list[tuple[Tensor, Tensor]], step: int
    ) -> Tensor:
        """Compute the layer for [N, P, hidden]. The keys and values are appended to `past`."""
        weights = self.weights
        joined = torch.cat(
            (
                self._normalise(embedded, weights["input_layernorm"]),
                self._normalise(hidden, weights["hidden_norm"]),
            ),
            2,
        )
        query = self._rotate(self._heads(joined, "q_proj"), step)
        repeats = self.config.num_heads // self.config.num_kv_heads
        key = self._rotate(self._heads(joined, "k_proj"), step).repeat_interleave(repeats, 1)
        value = self._heads(joined, "v_proj").repeat_interleave(repeats, 1)
        past.append((key, value))
        attended = chained_attention(query, past, self.config.scale).transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(attended, weights["o_proj"])
        normed = self._normalise(hidden, weights["post_attention_layernorm"])
        gate = F.silu(F.linear(normed, weights["gate_proj"]))
        return hidden + F.linear(gate * F.linear(normed, weights["up_proj"]), weights["down_proj"])

    def _heads(self, joined: Tensor, name: str) -> Tensor:
        """joined [N, P, 2 * hidden] -> [N, heads, P, D]"""
        projected = F.linear(joined, self.weights[name])
        return projected.unflatten(2, (-1, self.config.head_dim)).transpose(1, 2)

    def _rotate(self, heads: Tensor, step: int) -> Tensor:
        """Rotate heads [N, heads, P, D], whose first position is `step`."""
        cos, sin = self.rope[step : step + heads.shape[2]].unbind(1)
        first, second = heads.float().chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return rotated.to(heads.dtype)


def chained_attention(query: Tensor, past: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """query [N, heads, P, D] -> [N, heads, P, D]

    A position sees the keys of the first entry of `past` up to itself, and in each later entry its
    own key alone.
    """
    (first_key, first_value), *later = past
    num_positions = query.shape[2]
    future = torch.ones(num_positions, num_positions, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ first_key.transpose(2, 3)).masked_fill(future, -torch.inf)
    later_scores = [(query * key).sum(3, keepdim=True) for key, _ in later]
    weights = (torch.cat((scores, *later_scores), 3).float() * scale).softmax(3).to(query.dtype)
    attended = weights[..., :num_positions] @ first_value
    for index, (_, value) in enumerate(later):
        attended = attended + weights[..., num_positions + index, None] * value
    return attended


def chain_loss(head: TrainableHead, batch: TextBatch, count: int, is_draft: Tensor) -> Tensor:
    """Return the cross entropy between the target's and the head's distribution of draft tokens.

    It is the mean over positions in answers whose choice is a draft token, summed over the steps.
    is_draft [vocabulary] tells which tokens are draft tokens.
    """
    loss = torch.zeros((), device=batch.hidden.device)
    for index, step in enumerate(head.chain(batch, count)):
        counted = (step.in_answer & is_draft[step.choices]).nonzero(as_tuple=True)
        with torch.no_grad():
            target_logits = F.linear(step.target[counted], head.head_rows)
            probabilities = target_logits.float().softmax(1)
        log_predicted = head.logits(step.hidden[counted]).float().log_softmax(1)
        cross_entropy = -(probabilities * log_predicted).sum() / max(1, len(counted[0]))
        loss = loss + STEP_WEIGHT**index * cross_entropy
    return loss


@torch.no_grad()
def accepted_counts(head: TrainableHead, batch: TextBatch, count: int) -> Tensor:
    """Return [2, count]: at how many positions each step was reached, and was accepted there.

    A step is reached if the drafts of all earlier steps were the choices of the target.
    """
    counts = torch.zeros(2, count, dtype=torch.int64)
    accepted = torch.ones_like(batch.in_answer)
    for index, step in enumerate(head.chain(batch, count)):
        reached = accepted[:, : step.choices.shape[1]] & step.in_answer
        drafts = head.token_ids[head.logits(step.hidden).argmax(2)]
        accepted = reached & (drafts == step.choices)
        counts[0, index] = int(reached.sum())
        counts[1, index] = int(accepted.sum())
    return counts
