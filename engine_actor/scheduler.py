"""What runs in this step: slots, KV budget, token budget, preemption.

There is no prefill phase and no decode phase here, only tokens not yet computed (the idea is vLLM
V1's). A request that lacks one token decodes; one that lacks more prefills.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from engine_actor.request import NO_SLOT, Phase, Request
from model.slot_kv import SlotKV
from policies.base import Policy

Mode = Literal["separate", "batched", "chunked"]


@dataclass(frozen=True, slots=True)
class Work:
    """The next `count` tokens of a request, to be computed in one forward."""

    request: Request
    count: int


@dataclass(slots=True)
class Plan:
    """One step: forwards that only prefill, then the one that decodes (and carries chunks)."""

    prefills: list[list[Work]] = field(default_factory=list)
    decode: list[Work] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Owns the running list. `kv_budget` caps the tokens cached over all slots together.

    mode `separate`: each prompt is its own forward, before the decode forward;
    `batched`: all prompts of the step share one forward, before the decode forward;
    `chunked`: prompts share the decode forward, `max_step_tokens` rows at most together.
    """

    def __init__(
        self,
        kv: SlotKV,
        policy: Policy,
        *,
        mode: Mode = "chunked",
        max_step_tokens: int = 256,
        kv_budget: int | None = None,
    ) -> None:
        if mode == "chunked" and max_step_tokens <= kv.num_slots:
            raise ValueError(
                f"max_step_tokens ({max_step_tokens}) must exceed the number of slots ({kv.num_slots}), "
                "or a full batch of decodes leaves no room for any prompt"
            )
        self.kv = kv
        self.policy = policy
        self.mode = mode
        self.max_step_tokens = max_step_tokens
        self.kv_budget = kv.num_slots * kv.max_len if kv_budget is None else kv_budget
        self.running: list[Request] = []
        """Slot holders in order of admission."""
        self._held: list[int] = []
        """Slots of finished requests that a gang policy gives back only with the whole batch."""

    @property
    def largest_request(self) -> int:
        """Most tokens (prompt + max_tokens) a request may need: more could never finish."""
        return min(self.kv.max_len, self.kv_budget)

    @property
    def held_slots(self) -> int:
        return len(self._held)

    def plan(self, now: float) -> Plan:
        """Choose this step's work: keep the running ones within budget, then admit, then share rows."""
        plan = Plan()
        self._shrink(plan, now)
        if not plan.preempted:
            self._admit(plan, now)
        plan.decode = [Work(r, 1) for r in self.running if r.phase is Phase.DECODE]
        prefilling = [r for r in self.running if r.phase is Phase.PREFILL]
        if self.mode == "chunked":
            self._chunk(plan, prefilling)
        elif prefilling:
            whole = [Work(r, len(r.tokens) - r.computed) for r in prefilling]
            plan.prefills = [[work] for work in whole] if self.mode == "separate" else [whole]
        return plan

    def retire(self, request: Request) -> None:
        """Take a finished request off the running list and free its slot at once."""
        self.running.remove(request)
        if self.policy.gang:
            self.kv.clear(request.slot)
            self._held.append(request.slot)
            if not self.running:
                while self._held:
                    self.kv.release(self._held.pop())
        else:
            self.kv.release(request.slot)
        request.slot = NO_SLOT

    def preempt(self, request: Request, now: float) -> None:
        """Forget the KV, keep the tokens: the request waits again and will recompute."""
        self.running.remove(request)
        self.kv.release(request.slot)
        request.slot = NO_SLOT
        request.recomputed_tokens += request.computed
        request.computed = 0
        request.num_preemptions += 1
        request.phase = Phase.WAITING
        self.policy.enqueue(request, now)

    def _demand(self) -> int:
        """Tokens cached once every running request has caught up: this step's upper bound."""
        return sum(len(r.tokens) for r in self.running)

    def _shrink(self, plan: Plan, now: float) -> None:
        # The first of the running is safe: someone always finishes, so any pool drains.
        while self._demand() > self.kv_budget:
            victim = cast(Request, self.policy.victim(self.running[1:], now))
            self.preempt(victim, now)
            plan.preempted.append(victim)

    def _admit(self, plan: Plan, now: float) -> None:
        if self.policy.gang and self.running:
            return
        demand = self._demand()
        while (head := cast(Request | None, self.policy.peek(now))) is not None:
            # One token of growth for each neighbour, or the newcomer would be preempted at once.
            watermark = len(self.running)
            if not self.kv.free_slots or demand + len(head.tokens) + watermark > self.kv_budget:
                yielding = cast(Request | None, self.policy.displaced(head, self.running, now))
                if yielding is None:
                    return
                demand -= len(yielding.tokens)
                self.preempt(yielding, now)
                plan.preempted.append(yielding)
                continue
            self.policy.admit(head, now)
            head.slot = self.kv.acquire()
            head.phase = Phase.PREFILL
            head.admitted = now if head.admitted is None else head.admitted
            self.running.append(head)
            plan.admitted.append(head)
            demand += len(head.tokens)

    def _chunk(self, plan: Plan, prefilling: list[Request]) -> None:
        room = self.max_step_tokens - len(plan.decode)
        for request in prefilling:
            count = min(room, len(request.tokens) - request.computed)
            if count == 0:
                return
            plan.decode.append(Work(request, count))
            room -= count
