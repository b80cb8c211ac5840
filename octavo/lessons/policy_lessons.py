"""Lessons about scheduling policies: which request comes next, and which one makes room."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.lessons.facts import RunFacts
from octavo.lessons.lesson import Lesson, Moment, Reveal
from octavo.lessons.scenario import Arrival, Scenario

# ---- fairness ------------------------------------------------------------------------------------

_TENANTS = (
    *(
        Arrival(topic, prompt=32, reply=reply, tenant="ann")
        for topic, reply in (
            *(("harbour", 12), ("bread", 20), ("printer", 16)),
            *(("garden", 16), ("storm", 16), ("market", 16)),
        )
    ),
    Arrival("harbour", prompt=40, reply=16, at=1, tenant="ben", tail="market", tail_tokens=36),
)
_TWO_SLOTS = {"max_num_seqs": 2}


def _place_of(run: RunFacts, name: str) -> int:
    """Return how many requests were admitted up to this one."""
    order = [run.sequences[event["seq"]].name for event in run.all("admitted")]
    return order.index(name) + 1


def _reveal_fairness(runs: Sequence[RunFacts]) -> Reveal:
    fcfs, fair = runs
    text = (
        f"Under fcfs, ben's request started as number {_place_of(fcfs, 'G')}, and its first token "
        f"came after {fcfs.of('G').ttft:.0f} ms. Under fair it started as number "
        f"{_place_of(fair, 'G')}, after {fair.of('G').ttft:.0f} ms. The policy fair counts the "
        "tokens of each tenant, and the tenant with the lowest counter comes next. A new tenant "
        "starts with the counter of the others, so the time before it arrived gives it no "
        "advantage: C, which came earlier, is next. C raises ann's counter, and then ben comes "
        "next. Running requests keep their slots. The six requests of ann took "
        f"{_last_of_ann(fcfs)} steps under fcfs and {_last_of_ann(fair)} under fair: the total "
        "work is the same, and only its order differs."
    )
    moments = [
        Moment(0, fcfs.step_of("admitted", "G"), "G", "ben is last"),
        Moment(1, fair.step_of("admitted", "G"), "G", "ben is the fourth"),
    ]
    return Reveal(text, moments, (_place_of(fcfs, "G"), _place_of(fair, "G")) == (7, 4))


def _last_of_ann(run: RunFacts) -> int:
    return max(seq.last_step for seq in run.sequences.values() if seq.tenant == "ann")


FAIRNESS = Lesson(
    name="fairness",
    title="Policies: first come, first served is not fair",
    intro="The tenant ann sends six requests at once. One step later, the tenant ben sends one. "
    "There are two batch slots. The first run uses the policy fcfs (first come, first served), the "
    "second uses fair.",
    runs=(
        Scenario("fcfs", _TENANTS, _TWO_SLOTS),
        Scenario("fair", _TENANTS, {**_TWO_SLOTS, "scheduling_policy": "fair"}),
    ),
    question="The seven requests start one after another. At which place does ben's request start, "
    "under fcfs and under fair?",
    choices=("7th and 7th", "7th and 1st", "7th and 4th", "2nd and 2nd"),
    answer=2,
    reveal=_reveal_fairness,
    code=("octavo/core/policy.py:Fair", "octavo/core/queues.py:Queues"),
    test="tests/core/test_policy.py::test_tenants_take_turns_whoever_sends_more",
    page="docs/scheduling.md",
    exercise="exercises/fairness.py",
)

# ---- priority ------------------------------------------------------------------------------------

_URGENT = (
    Arrival("harbour", prompt=48, reply=60),
    Arrival("bread", prompt=48, reply=60),
    Arrival("storm", prompt=48, reply=8, at=20, priority=-5),
)


def _skipped(run: RunFacts) -> str:
    """Return a sentence about the requests that skipped a step for an urgent prompt."""
    names = sorted({run.sequences[event["seq"]].name for event in run.all("unplanned")})
    if not names:
        return ""
    return f"{' and '.join(names)} skipped a step, in which C's prompt was computed alone. "


def _reveal_priority(runs: Sequence[RunFacts]) -> Reveal:
    fcfs, priority = runs
    preempted = priority.all("preempted")
    victim = priority.sequences[preempted[0]["seq"]]
    text = (
        f"{victim.name} lost its batch slot. C's first token came after {fcfs.of('C').ttft:.0f} ms "
        f"under fcfs and after {priority.of('C').ttft:.0f} ms under priority. The price: "
        f"{victim.name} lost {preempted[0]['positions']} computed positions, and "
        f"{victim.recomputed} of them were computed again when it continued; the others were still "
        f"in the prefix cache. {_skipped(priority)}All replies are the same in both runs: a "
        "preemption delays a request and never changes its text."
    )
    moments = [
        Moment(0, fcfs.step_of("waiting", "C"), "C", "C waits for a slot"),
        Moment(1, preempted[0]["step"], victim.name, f"{victim.name} is preempted for C"),
        Moment(
            1, priority.step_of("admitted", victim.name, 1), victim.name, f"{victim.name} continues"
        ),
    ]
    is_right = (
        len(preempted) == 1
        and not fcfs.all("preempted")
        and victim.recomputed < preempted[0]["positions"]
        and all(fcfs.text_of(name) == priority.text_of(name) for name in "ABC")
    )
    return Reveal(text, moments, is_right)


PRIORITY = Lesson(
    name="priority",
    title="Priorities: an urgent request and its price",
    intro="A and B hold both batch slots and generate 60 tokens each. After 20 steps C arrives. It "
    "is urgent: its priority is -5, and a lower number comes first. The first run uses the policy "
    "fcfs, which ignores priorities. The second uses the policy priority.",
    runs=(
        Scenario("fcfs", _URGENT, _TWO_SLOTS),
        Scenario("priority", _URGENT, {**_TWO_SLOTS, "scheduling_policy": "priority"}),
    ),
    question="What happens under the policy priority when C arrives?",
    choices=(
        "C waits until A or B has finished",
        "A or B is aborted, and its client gets an error",
        "A or B loses its slot, and later computes all of its tokens again",
        "A or B loses its slot, and later computes a few tokens again",
    ),
    answer=3,
    reveal=_reveal_priority,
    code=("octavo/core/policy.py:Priority", "octavo/core/urgent_preemption.py:UrgentPreemption"),
    test="tests/core/test_policy.py::test_a_high_priority_request_preempts_for_a_slot",
    page="docs/scheduling.md",
    exercise="exercises/priority.py",
)

LESSONS = (FAIRNESS, PRIORITY)
