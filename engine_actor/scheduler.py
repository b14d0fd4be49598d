"""What runs in this step: slots, KV budget, token budget, preemption.

There is no prefill phase and no decode phase here, only tokens not yet computed (the idea is vLLM
V1's). A request that lacks one token decodes; one that lacks more prefills.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from engine_actor.prefixes import BLOCK, block_keys
from engine_actor.request import NO_SLOT, Phase, PreemptReason, Request
from engine_actor.slots import Prefix, Slots
from engine_actor.step_time import StepTime
from model.executor import Work
from policies.base import Policy

Mode = Literal["separate", "batched", "chunked"]
Reuse = Literal["tenant", "all", "off"]
"""Who may reuse whose computed prefixes. Across tenants, the time to the first token would tell one of them
what another has sent."""

MAX_SCORED_ROWS = 256
"""Rows of prompts that bring their logits in one forward: each is as wide as the vocabulary."""

CALM_TOKENS_PER_SLOT = 2
BUSY_TOKENS_PER_SLOT = 16
"""Fewest and most rows of a step in mode `chunked`, for each slot, unless settings say otherwise. The most
once requests queue, for then slots that wait for their prefill cost everyone more than a longer step, and
where nobody decodes, since there is nobody to disturb."""
STUTTER = 1.8
"""Else a prompt must not make those who decode stutter: a step may take so many times what one takes in which
every slot decodes. Of a plain step that is at most twice (`python -m bench spike`)."""
LEAST_PROMPT_ROWS = 8
"""Beside the decodes, however short steps are to be: a prompt must get on."""


@dataclass(slots=True)
class Plan:
    """One step: forwards of prompts alone, then the one that everybody else shares."""

    prefills: list[list[Work]] = field(default_factory=list)
    batch: list[Work] = field(default_factory=list)
    """A row of each request that decodes, then chunks of prompts."""
    admitted: list[Request] = field(default_factory=list)
    reused: dict[Request, int] = field(default_factory=dict)
    """Tokens that those admitted found computed."""
    copied: int = 0
    """How many of them another slot holds."""
    preempted: dict[Request, PreemptReason] = field(default_factory=dict)


class Scheduler:
    """Owns the running list. `kv_budget` caps the tokens cached over all slots together.

    mode `separate`: each prompt is its own forward, before the decode forward;
    `batched`: all prompts of the step share one forward, before the decode forward;
    `chunked`: prompts share the decode forward, `max_step_tokens` rows at most together; by default as many
    as let a step end within `itl_target` seconds by what steps have taken so far, and without a target
    within STUTTER steps of a full batch, or more while requests wait for a slot or nobody decodes.
    """

    def __init__(
        self,
        slots: Slots,
        policy: Policy,
        *,
        mode: Mode = "chunked",
        max_step_tokens: int | None = None,
        kv_budget: int | None = None,
        prefix_reuse: Reuse = "tenant",
        itl_target: float | None = None,
    ) -> None:
        if mode == "chunked" and max_step_tokens is not None and max_step_tokens <= slots.count:
            raise ValueError(
                f"max_step_tokens ({max_step_tokens}) must exceed the number of slots ({slots.count}), "
                "or a full batch of decodes leaves no room for any prompt"
            )
        self.slots = slots
        self.policy = policy
        self.mode = mode
        self.max_step_tokens = max_step_tokens
        self.prefix_reuse = prefix_reuse
        self.itl_target = itl_target
        self.step_time = StepTime()
        self.kv_budget = slots.count * slots.max_len if kv_budget is None else kv_budget
        self.running: list[Request] = []
        """Slot holders in order of admission."""
        self.lingering: list[Request] = []
        """Finished requests whose policy lets them keep their slots for now."""
        policy.capacity(self.kv_budget)

    @property
    def largest_request(self) -> int:
        """Most tokens (prompt + max_tokens) a request may need: more could never finish."""
        return min(self.slots.max_len, self.kv_budget)

    @property
    def step_tokens(self) -> int:
        """Rows that a step may hold in mode `chunked`, now."""
        if self.max_step_tokens is not None:
            return self.max_step_tokens
        most, target = BUSY_TOKENS_PER_SLOT * self.slots.count, self.itl_target
        if all(r.phase is not Phase.DECODE for r in self.running) or (target is None and self.policy.waiting):
            return most
        if not self.step_time.settled:
            return self._least_step_tokens
        if target is None:
            target = STUTTER * self.step_time.predict(self.slots.count, self.slots.tokens)
        rows = self.step_time.rows_within(target, self.slots.tokens)
        return min(most, max(rows, self._least_step_tokens))

    @property
    def _least_step_tokens(self) -> int:
        if self.max_step_tokens is not None:
            return self.max_step_tokens
        if self.itl_target is not None:
            return self.slots.count + LEAST_PROMPT_ROWS
        return CALM_TOKENS_PER_SLOT * self.slots.count

    def plan(self, now: float) -> Plan:
        """Choose this step's work: keep the running ones within budget, then admit, then share rows."""
        plan = Plan()
        demand = self._shrink(plan, now)
        demand = self._admit(plan, demand, now)
        self.slots.evict(max(0, self.kv_budget - demand))
        decoding = Phase.DECODE
        plan.batch = [Work(r, r.slot, r.computed, 1) for r in self.running if r.phase is decoding]
        for r in self.lingering:
            # Not beyond what it has computed: an aborted one may have had more before it.
            plan.batch.append(Work(r, r.slot, min(r.computed, len(r.tokens) - 1), 1, idle=True))
        prefilling = [r for r in self.running if r.phase is not decoding]
        if not prefilling:
            return plan
        prefilling = self._without_repeats(plan, cast(list[Request], self.policy.order(prefilling, now)))
        if self.mode == "chunked":
            self._chunk(plan, prefilling)
        else:
            plan.prefills = self._whole(prefilling)
        return plan

    def retire(self) -> None:
        """Free the slots of those who are done, at once, unless their policy has them linger."""
        done = [r for r in self.running if r.phase is Phase.FINISHED]
        if done:
            self.running = [r for r in self.running if r.phase is not Phase.FINISHED]
            self.lingering += done
        if not self.lingering:
            return
        if self.policy.releases(len(self.running)):
            for request in self.lingering:
                self.policy.finish(request)
                # What failed may have left anything.
                self.slots.release(request.slot, remember=request.finish_reason != "error")
                request.slot = NO_SLOT
            self.lingering = []
        else:
            for request in done:
                self.slots.clear(request.slot)

    def _preempt(self, request: Request, reason: PreemptReason, plan: Plan, now: float) -> None:
        """Give up the slot, keep the tokens: the request waits again and recomputes what was forgotten."""
        self.running.remove(request)
        self.slots.release(request.slot)
        request.slot = NO_SLOT
        request.forgotten = request.computed
        request.computed = 0
        request.num_preemptions += 1
        request.phase = Phase.WAITING
        self.policy.enqueue(request, now)
        plan.preempted[request] = reason

    def _shrink(self, plan: Plan, now: float) -> int:
        """Preempt until this step fits the budget; returns the tokens cached when it is done.

        The policy's first is never reached, since one request always fits: someone always finishes,
        so any pool drains.
        """
        demand = sum([len(r.tokens) for r in self.running])
        if demand > self.kv_budget:
            order = cast(list[Request], self.policy.order(self.running, now))
            while demand > self.kv_budget:
                victim = order.pop()
                demand -= len(victim.tokens)
                self._preempt(victim, "kv", plan, now)
        return demand

    def _admit(self, plan: Plan, demand: int, now: float) -> int:
        """Give slots to whom the policy names next while there is room; returns the tokens then cached."""
        while (head := cast(Request | None, self.policy.peek(now))) is not None:
            prefix = self._prefix(head) if self.slots.free else None
            reused = prefix.length if prefix else 0
            if not self._fits(head, self.slots.free, demand, len(self.running), reused):
                yielding = self._yielding(head, plan, demand, now)
                if not yielding:
                    break
                for request in yielding:
                    demand -= len(request.tokens)
                    self._preempt(request, "displaced", plan, now)
                continue
            self.policy.admit(head, now)
            if head.admitted is None:
                head.admitted = now
                head.cached_tokens = min(reused, head.prompt_len)
                # Tokens that another engine produced mean that it was charged for the prompt, too.
                self.policy.charge(head, 0 if head.resumed else head.prompt_len - head.cached_tokens, 0)
            head.recomputed_tokens += max(0, head.forgotten - reused)
            head.slot = self.slots.allocate(head.id, self.namespace(head), prefix)
            head.computed = reused
            if prefix:
                plan.reused[head] = prefix.length
                plan.copied += prefix.length if prefix.source != head.slot else 0
            head.phase = Phase.PREFILL
            self.running.append(head)
            plan.admitted.append(head)
            demand += len(head.tokens)
        return demand

    def namespace(self, request: Request) -> tuple[str, str]:
        """Requests of one namespace may share prefixes."""
        return (request.tenant if self.prefix_reuse == "tenant" else "", request.cache_salt)

    def _reusable(self, request: Request) -> int:
        """Leading tokens that need no logits: not the last one, and no prompt token that is to be scored."""
        scored = request.params.prompt_logprobs is not None
        return min(len(request.tokens) - 1, len(request.prompt_scores)) if scored else len(request.tokens) - 1

    def _prefix(self, request: Request) -> Prefix | None:
        """What some slot holds of the request."""
        most = self._reusable(request)
        return self.slots.find(self.namespace(request), request.tokens, request.block_keys, most)

    def _fits(self, request: Request, free_slots: int, demand: int, neighbours: int, reused: int = 0) -> bool:
        """Whether there is a slot, and KV for the request and for all growth until it is prefilled."""
        if neighbours == 0:
            # An empty pool holds whatever was let in at the door.
            return free_slots > 0
        tokens, steps = len(request.tokens), 1
        if self.mode == "chunked":
            steps = math.ceil((tokens - reused) / max(1, self._least_step_tokens - neighbours))
        return free_slots > 0 and demand + tokens + (neighbours + 1) * steps <= self.kv_budget

    def _yielding(self, head: Request, plan: Plan, demand: int, now: float) -> list[Request]:
        """The fewest of those the policy lets `head` displace that make room for it."""
        # Who was admitted in this very step stays: two requests must not trade places within a plan.
        running = self.running[: len(self.running) - len(plan.admitted)]
        candidates = cast(Sequence[Request], self.policy.displaced(head, running, now))
        for count, request in enumerate(candidates, start=1):
            demand -= len(request.tokens)
            if self._fits(head, self.slots.free + count, demand, len(self.running) - count):
                return list(candidates[:count])
        return list(candidates) if self.policy.insists else []

    def _without_repeats(self, plan: Plan, prefilling: list[Request]) -> list[Request]:
        """Leave out who would compute what another computes before it: it has a copy once that is done."""
        if not self.slots.reuse:
            return prefilling
        chosen: list[Request] = []
        under_way: set[int] = set()
        for request in prefilling:
            if (key := self._next_key(request)) is not None and self.slots.known(key):
                self._catch_up(request, plan)
                key = self._next_key(request)
            if key not in under_way:
                chosen.append(request)
                if key is not None:
                    under_way.add(key)
        return chosen

    def _next_key(self, request: Request) -> int | None:
        """Of the block that the request computes next; None if nobody else could compute it."""
        block = request.computed // BLOCK
        if (block + 1) * BLOCK > self._reusable(request):
            return None
        return block_keys(self.namespace(request), request.tokens, request.block_keys)[block]

    def _catch_up(self, request: Request, plan: Plan) -> None:
        """Copy what others have computed of the request since it was admitted."""
        prefix = self._prefix(request)
        if prefix is None or (gained := prefix.length - request.computed) <= 0:
            return
        self.slots.adopt(request.slot, prefix)
        plan.reused[request] = plan.reused.get(request, 0) + gained
        plan.copied += prefix.length
        request.computed = prefix.length
        request.cached_tokens = max(request.cached_tokens, min(prefix.length, request.prompt_len))

    def _whole(self, prefilling: list[Request]) -> list[list[Work]]:
        """Whole prompts, each in its own forward or all in one; those to be scored in pieces."""
        alone: list[list[Work]] = []
        shared: list[Work] = []
        for request in prefilling:
            start, end = request.computed, len(request.tokens)
            if request.params.prompt_logprobs is not None:
                pieces = range(start, end, MAX_SCORED_ROWS)
                alone += [[_prefill(request, at, min(MAX_SCORED_ROWS, end - at))] for at in pieces]
            elif self.mode == "separate":
                alone.append([_prefill(request, start, end - start)])
            else:
                shared.append(_prefill(request, start, end - start))
        return [shared, *alone] if shared else alone

    def _chunk(self, plan: Plan, prefilling: list[Request]) -> None:
        room, scored_room = self.step_tokens - len(plan.batch), MAX_SCORED_ROWS
        for request in prefilling:
            count = min(room, len(request.tokens) - request.computed)
            if request.params.prompt_logprobs is not None:
                count = min(count, scored_room)
                scored_room -= count
            if count:
                plan.batch.append(_prefill(request, request.computed, count))
                room -= count


def _prefill(request: Request, start: int, count: int) -> Work:
    """The next tokens of a request, with the positions that score a prompt token if that is still wanted."""
    work = Work(request, request.slot, start, count)
    if request.params.prompt_logprobs is not None:
        first = max(start, len(request.prompt_scores))
        work.scored = range(first, max(first, min(start + count, request.prompt_len - 1)))
    return work
