"""Texts to train on, which the target generates itself: questions of users and its answers.

A chat model has learnt what follows the opening of a user's turn. So it continues the opening with
a question (the Magpie method), and then answers the question. Half of the questions come from
questions.py instead, because people ask other questions than the model. No dataset is needed, and
the answers are what the model will generate later.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from octavo.llm import LLM
from octavo.params import SamplingParams
from octavo.train.questions import sample_questions

QUESTION_TEMPERATURE = 0.9
# Half of the answers is generated greedily. The others make the head robust against unlikely words.
TEMPERATURES = (0.0, 0.7)
FIRST_ROUND = 256  # texts of the first round, which measures the speed
ROUND = 4096  # texts of a later round at most
# An answer ends where this many tokens in a row occur for the second time. Small models repeat
# themselves for ever, and a head that is trained on repetitions learns little else.
REPEATED_TOKENS = 16


class Text(NamedTuple):
    token_ids: list[int]
    answer_start: int  # the index of the first token of the answer
    is_greedy: bool


@dataclass(frozen=True)
class TextOptions:
    count: int = 30_000  # texts
    max_question: int = 96  # tokens
    max_answer: int = 320  # tokens
    seed: int = 0
    asked_share: float = 0.5  # fraction of the questions that come from questions.py


def generate_texts(
    llm: LLM,
    options: TextOptions,
    deadline: float,
    on_progress: Callable[[int, int], None],
) -> list[Text]:
    """Generate texts until all are generated or the deadline (time.monotonic()) is near.

    Empty and repeated questions are dropped. `on_progress` is called with the number of texts that
    were tried and the number of all texts.
    """
    texts: list[Text] = []
    num_tried = 0
    round_size = min(FIRST_ROUND, options.count)
    while round_size > 0:
        started = time.monotonic()
        first_seed = (options.seed << 32) + num_tried
        questions = generate_questions(llm, options, round_size, first_seed)
        texts += generate_answers(llm, options, questions, first_seed)
        num_tried += round_size
        on_progress(num_tried, options.count)
        now = time.monotonic()
        affordable_texts = (deadline - now) * round_size / (now - started)
        round_size = int(min(ROUND, options.count - num_tried, affordable_texts))
    return texts


def generate_questions(
    llm: LLM, options: TextOptions, count: int, first_seed: int
) -> list[list[int]]:
    """Return prompts that end where an answer begins."""
    tokenizer = llm.get_tokenizer()
    has_template = tokenizer.chat_template is not None
    template_questions: list[str] = []
    if has_template:
        template_questions = sample_questions(round(options.asked_share * count), first_seed)
        count -= len(template_questions)
        opening = llm.encode_chat([{"role": "user", "content": ""}], continue_final_message=True)
    else:
        start = llm.config.bos_id
        opening = [llm.eos_ids[0] if start is None else start]
    params = [
        SamplingParams(
            temperature=QUESTION_TEMPERATURE,
            max_tokens=options.max_question,
            seed=first_seed + index,
            detokenize=False,
        )
        for index in range(count)
    ]
    outputs = llm.generate([opening] * count, params, use_tqdm=False)
    questions = dict.fromkeys(tuple(output.outputs[0].token_ids) for output in outputs)
    if not has_template:
        return [opening + list(question) for question in questions if question]
    contents = [
        tokenizer.decode(list(question), skip_special_tokens=True).strip() for question in questions
    ]
    contents_and_questions = [*contents, *template_questions]
    random.Random(first_seed).shuffle(contents_and_questions)
    return [
        llm.encode_chat([{"role": "user", "content": content}])
        for content in contents_and_questions
        if content
    ]


def generate_answers(
    llm: LLM, options: TextOptions, prompts: list[list[int]], first_seed: int
) -> list[Text]:
    params = [
        SamplingParams(
            temperature=TEMPERATURES[index % len(TEMPERATURES)],
            max_tokens=options.max_answer,
            seed=first_seed + index,
            detokenize=False,
        )
        for index in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    texts: list[Text] = []
    for prompt, output, param in zip(prompts, outputs, params, strict=True):
        answer = before_repetition(output.outputs[0].token_ids)
        if len(answer) > 1:
            texts.append(Text(prompt + answer, len(prompt), param.temperature == 0))
    return texts


def before_repetition(token_ids: list[int], width: int = REPEATED_TOKENS) -> list[int]:
    """Return the tokens up to where `width` tokens in a row have occurred for the second time."""
    seen: set[tuple[int, ...]] = set()
    for end in range(width, len(token_ids) + 1):
        run = tuple(token_ids[end - width : end])
        if run in seen:
            return token_ids[:end]
        seen.add(run)
    return token_ids
