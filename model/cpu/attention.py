"""Attention over slot KV on a CPU, exact in every mix: each query row has its own fixed order of additions.

A row's bits depend neither on the rows beside it nor on how the work is cut into threads and tiles:

* keys lie in blocks of `LANES` positions (see backend.py): vector lanes are neighbouring keys and
  a score sums over head_dim in order;
* values are read as they are: lanes are head_dim and the sum runs over keys in order;
* the tiles are explicit fused multiply-adds, and nothing is compiled with fast-math, so no
  compiler may reorder or contract anything depending on where a loop ends.

Positions beyond a row's own are excluded by selection, never by multiplying with zero: whatever a
freed slot holds, NaN included, cannot reach a result.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from model.backend import HeadLayout, Rope
from model.batch import IntArray
from model.cpu.jit import ALONE, F32, I64, LANES, combine, exp, kernel, parallel_kernel
from model.cpu.rows import inverse_rms
from model.storage import SlotStorage

TILE_QUERIES = 6
"""Queries that share each load: 6 x 16 accumulators fit the registers of AVX2 and of AVX-512."""
ITEM_QUERIES = 24
"""Queries of one work item: they share the keys and values in the cache."""
VALUE_KEYS = 64
"""Keys whose values are summed before the next tile; they fit the first-level cache."""

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INDEX = ir.IntType(64)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [offset])


def _load_lanes(builder: Any, pointer: Any) -> Any:
    return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def _store_lanes(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def _splat(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), zeros)


def _multiply_add(builder: Any, sums: list[Any], scalars: list[Any], lanes: Any) -> None:
    """sums[m] += scalars[m] * lanes, rounded once."""
    signature = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    fma = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32")
    for total, scalar in zip(sums, scalars, strict=True):
        product = [_splat(builder, builder.load(scalar)), lanes, builder.load(total)]
        builder.store(builder.call(fma, product), total)


@intrinsic(prefer_literal=True)
def _score_tile(
    typing_context: Any, queries: Any, q: Any, q_at: Any, q_step: Any, keys: Any, key_at: Any,
    head_dim: Any, scores: Any, score_at: Any, score_step: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """scores[m, lane] = sum over d, in order, of q[m, d] * keys[d, lane], for `queries` rows m."""
    count = queries.literal_value
    signature = types.void(queries, q, q_at, q_step, keys, key_at, head_dim, scores, score_at, score_step)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        q_start = _pointer(context, builder, sig.args[1], args[1], args[2])
        key_start = _pointer(context, builder, sig.args[4], args[4], args[5])
        score_start = _pointer(context, builder, sig.args[7], args[7], args[8])
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(count)]
        rows = [builder.mul(args[3], ir.Constant(_INDEX, m)) for m in range(count)]
        with cgutils.for_range(builder, args[6]) as loop:
            lanes = _load_lanes(
                builder, builder.gep(key_start, [builder.mul(loop.index, ir.Constant(_INDEX, LANES))])
            )
            scalars = [builder.gep(q_start, [builder.add(row, loop.index)]) for row in rows]
            _multiply_add(builder, sums, scalars, lanes)
        for m in range(count):
            target = builder.gep(score_start, [builder.mul(args[9], ir.Constant(_INDEX, m))])
            _store_lanes(builder, builder.load(sums[m]), target)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def _value_tile(
    typing_context: Any, queries: Any, weights: Any, weight_at: Any, weight_step: Any, values: Any,
    value_at: Any, value_step: Any, keys: Any, out: Any, out_at: Any, out_step: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """out[m, lane] += sum over `keys` keys k, in order, of weights[m, k] * values[k, lane]."""
    count = queries.literal_value
    signature = types.void(
        queries, weights, weight_at, weight_step, values, value_at, value_step, keys, out, out_at, out_step
    )

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        weight_start = _pointer(context, builder, sig.args[1], args[1], args[2])
        value_start = _pointer(context, builder, sig.args[4], args[4], args[5])
        out_start = _pointer(context, builder, sig.args[8], args[8], args[9])
        targets = [
            builder.gep(out_start, [builder.mul(args[10], ir.Constant(_INDEX, m))]) for m in range(count)
        ]
        sums = [cgutils.alloca_once_value(builder, _load_lanes(builder, target)) for target in targets]
        rows = [builder.mul(args[3], ir.Constant(_INDEX, m)) for m in range(count)]
        with cgutils.for_range(builder, args[7]) as loop:
            lanes = _load_lanes(builder, builder.gep(value_start, [builder.mul(loop.index, args[6])]))
            scalars = [builder.gep(weight_start, [builder.add(row, loop.index)]) for row in rows]
            _multiply_add(builder, sums, scalars, lanes)
        for total, target in zip(sums, targets, strict=True):
            _store_lanes(builder, builder.load(total), target)
        return context.get_dummy_value()

    return signature, generate


@kernel
def _head(
    x: F32, norm: F32, eps: np.float32, cos: F32, sin: F32, scale: np.float32, to: F32, step: int, lanes: F32
) -> None:
    """Normalise (if there is a norm) and rotate one head, and store it scaled, `step` floats apart."""
    half = len(x) // 2
    if len(norm) > 0:
        factor = inverse_rms(x, eps, lanes)
        for i in range(len(x)):
            x[i] = x[i] * factor * norm[i]
    for i in range(half):
        to[i * step] = (x[i] * cos[i] - x[i + half] * sin[i]) * scale
        to[(i + half) * step] = (x[i + half] * cos[i] + x[i] * sin[i]) * scale


@kernel
def _softmax_weights(scores: F32, keys: int, lanes: F32) -> np.float32:
    """Turn the first `keys` scores into exp(score - max), in place, and return their sum.

    The rest of the last block becomes zero whatever it held.
    """
    end = (keys + LANES - 1) // LANES * LANES
    for j in range(keys, end):
        scores[j] = -np.inf
    lanes[:] = -np.inf
    for i in range(0, end, LANES):
        for j in range(LANES):
            lanes[j] = scores[i + j] if scores[i + j] > lanes[j] else lanes[j]
    top = lanes[0]
    for j in range(1, LANES):
        top = max(top, lanes[j])
    for j in range(end):
        scores[j] = exp(scores[j] - top)
    lanes[:] = 0
    for i in range(0, end, LANES):
        for j in range(LANES):
            lanes[j] += scores[i + j]
    return combine(lanes)


@kernel
def _scores(
    count: int, q: F32, q_at: int, head_dim: int, keys: F32, key_at: int,
    scores: F32, score_at: int, score_step: int,
) -> None:  # fmt: skip
    """Scores of `count` queries over one block of keys, as few tiles as possible."""
    while count >= 6:
        _score_tile(6, q, q_at, head_dim, keys, key_at, head_dim, scores, score_at, score_step)
        count -= 6
        q_at += 6 * head_dim
        score_at += 6 * score_step
    if count == 5:
        _score_tile(5, q, q_at, head_dim, keys, key_at, head_dim, scores, score_at, score_step)
    elif count == 4:
        _score_tile(4, q, q_at, head_dim, keys, key_at, head_dim, scores, score_at, score_step)
    elif count == 3:
        _score_tile(3, q, q_at, head_dim, keys, key_at, head_dim, scores, score_at, score_step)
    elif count == 2:
        _score_tile(2, q, q_at, head_dim, keys, key_at, head_dim, scores, score_at, score_step)
    elif count == 1:
        _score_tile(1, q, q_at, head_dim, keys, key_at, head_dim, scores, score_at, score_step)


@kernel
def _values(
    count: int, weights: F32, at: int, step: int, values: F32, value_at: int, width: int,
    keys: int, out: F32, out_at: int,
) -> None:  # fmt: skip
    """Add `keys` weighted values to the outputs of `count` queries, as few tiles as possible."""
    while count >= 6:
        for d in range(0, width, LANES):
            _value_tile(6, weights, at, step, values, value_at + d, width, keys, out, out_at + d, width)
        count -= 6
        at += 6 * step
        out_at += 6 * width
    for d in range(0, width, LANES):
        if count == 5:
            _value_tile(5, weights, at, step, values, value_at + d, width, keys, out, out_at + d, width)
        elif count == 4:
            _value_tile(4, weights, at, step, values, value_at + d, width, keys, out, out_at + d, width)
        elif count == 3:
            _value_tile(3, weights, at, step, values, value_at + d, width, keys, out, out_at + d, width)
        elif count == 2:
            _value_tile(2, weights, at, step, values, value_at + d, width, keys, out, out_at + d, width)
        elif count == 1:
            _value_tile(1, weights, at, step, values, value_at + d, width, keys, out, out_at + d, width)


@kernel
def plan_items(positions: I64, slots: I64, group: int, heads: int, workers: int) -> tuple[I64, I64]:
    """Cut the rows into work items and share them out.

    Returns (items, bounds): items [n, 4] = first row, rows, position of the first row, slot, where
    adjacent rows of one slot at ascending positions stay together up to ITEM_QUERIES queries;
    worker w takes the (item, head) pairs bounds[w] .. bounds[w + 1], about the same work each.
    """
    most = max(1, ITEM_QUERIES // group)
    items = np.empty((len(positions), 4), np.int64)
    n = 0
    for row in range(len(positions)):
        if (
            row > 0
            and items[n - 1, 1] < most
            and slots[row] == slots[row - 1]
            and positions[row] == positions[row - 1] + 1
        ):
            items[n - 1, 1] += 1
        else:
            items[n, 0], items[n, 1], items[n, 2], items[n, 3] = row, 1, positions[row], slots[row]
            n += 1
    items = items[:n]
    # A key is read once per item, however few queries share it: count that as half a tile's work.
    cost = (items[:, 1] * group + TILE_QUERIES // 2) * (items[:, 2] + items[:, 1] + LANES)
    share = cost.sum() * heads / workers
    bounds = np.zeros(workers + 1, np.int64)
    worker, done = 1, 0
    for pair in range(n * heads):
        if worker < workers and done + cost[pair // heads] / 2 >= share * worker:
            bounds[worker] = pair
            worker += 1
        done += cost[pair // heads]
    bounds[worker:] = n * heads
    return items, bounds


@kernel
def _attend_item(
    first: int, rows: int, position: int, head: int, group: int, q: F32, q_at: int, head_dim: int,
    keys: F32, key_at: int, values: F32, value_at: int, width: int, scores: F32, score_at: int,
    step: int, sums: F32, sum_at: int, lanes: F32, out: F32,
) -> None:  # fmt: skip
    """Attention of `rows` adjacent rows of one slot for the query heads that share one KV head.

    q, keys, values, scores and sums are flat, with the place where the item's part begins; scores
    [queries, step] and sums [queries, width] are the worker's own scratch. Query m belongs to row
    first + m // group, at position + m // group, and sees the keys up to there.
    """
    count = rows * group
    for block in range((position + rows + LANES - 1) // LANES):
        key_block = key_at + block * head_dim * LANES
        _scores(count, q, q_at, head_dim, keys, key_block, scores, score_at + block * LANES, step)
    shared = position + 1
    sums[sum_at : sum_at + count * width] = 0.0
    total = np.empty(count, np.float32)
    for m in range(count):
        at = score_at + m * step
        total[m] = _softmax_weights(scores[at : at + step], position + m // group + 1, lanes)
    for k in range(0, shared, VALUE_KEYS):
        n = min(VALUE_KEYS, shared - k)
        _values(count, scores, score_at + k, step, values, value_at + k * width, width, n, sums, sum_at)
    for m in range(count):
        # The keys that only the later rows of the item see: each query on its own, still in order.
        at = score_at + m * step + shared
        rest = value_at + shared * width
        _values(1, scores, at, step, values, rest, width, m // group, sums, sum_at + m * width)
        row, at = first + m // group, (head * group + m % group) * head_dim
        for d in range(head_dim):
            out[row, at + d] = sums[sum_at + m * width + d] / total[m]


@kernel
def _store_row(
    qkv: F32, q_norm: F32, k_norm: F32, eps: np.float32, cos: F32, sin: F32, scale: np.float32,
    position: int, keys: F32, values: F32, q: F32, row: int,
) -> None:  # fmt: skip
    """Normalise and rotate one row's heads; its queries go to q, its keys and values to its slot."""
    kv_heads, _, group, head_dim = q.shape
    lanes = np.empty(LANES, np.float32)
    for h in range(kv_heads):
        for g in range(group):
            at = (h * group + g) * head_dim
            _head(qkv[at : at + head_dim], q_norm, eps, cos, sin, scale, q[h, row, g], 1, lanes)
        at = (kv_heads * group + h) * head_dim
        block = keys[h, position // LANES].reshape(-1)[position % LANES :]
        _head(qkv[at : at + head_dim], k_norm, eps, cos, sin, np.float32(1.0), block, LANES, lanes)
        at += kv_heads * head_dim
        values[h, position, :head_dim] = qkv[at : at + head_dim]


@parallel_kernel
def attend(
    qkv: F32, q_norm: F32, k_norm: F32, eps: np.float32, cos: F32, sin: F32, scale: np.float32,
    positions: I64, slots: I64, items: I64, bounds: I64, keys: F32, values: F32, q: F32,
    scores: F32, sums: F32, out: F32,
) -> None:  # fmt: skip
    """Write the rows' keys and values into their slots, then attend: one layer.

    qkv: [rows, (heads + 2 * kv_heads) * head_dim]; q_norm, k_norm: [head_dim] or empty;
    cos, sin: [context, head_dim / 2]; positions, slots: [rows]; items, bounds: from plan_items;
    keys: [slots, kv_heads, blocks, head_dim, LANES]; values: [slots, kv_heads, max_len, width];
    q: [kv_heads, rows, group, head_dim], scores: [workers, queries, step] and
    sums: [workers, queries, width]: scratch; out: [rows, heads * head_dim].
    """
    kv_heads, rows, group, head_dim = q.shape
    width = values.shape[3]
    flat_q, flat_keys, flat_values = q.reshape(-1), keys.reshape(-1), values.reshape(-1)
    flat_scores, flat_sums = scores.reshape(-1), sums.reshape(-1)
    if qkv.size <= ALONE:
        for row in range(rows):
            p, slot = positions[row], slots[row]
            _store_row(
                qkv[row], q_norm, k_norm, eps, cos[p], sin[p], scale, p, keys[slot], values[slot], q, row
            )
    else:
        for row in prange(rows):
            p, slot = positions[row], slots[row]
            _store_row(
                qkv[row], q_norm, k_norm, eps, cos[p], sin[p], scale, p, keys[slot], values[slot], q, row
            )
    key_head, value_head = keys[0, 0].size, values[0, 0].size
    for worker in prange(len(bounds) - 1):
        lanes = np.empty(LANES, np.float32)
        for pair in range(bounds[worker], bounds[worker + 1]):
            first, count, position, slot = items[pair // kv_heads]
            h = pair % kv_heads
            region = slot * kv_heads + h
            _attend_item(
                first, count, position, h, group,
                flat_q, (h * rows + first) * group * head_dim, head_dim,
                flat_keys, region * key_head, flat_values, region * value_head, width,
                flat_scores, worker * scores[0].size, scores.shape[2],
                flat_sums, worker * sums[0].size, lanes, out,
            )  # fmt: skip


class CpuAttention:
    """The numba kernel: exact in every mix because each query row has its own fixed order."""

    def __init__(self, layout: HeadLayout, rope: Rope) -> None:
        self._layout = layout
        self._cos, self._sin = rope.cos.numpy(), rope.sin.numpy()
        self._scale = np.float32(1.0 / math.sqrt(layout.head_dim))
        self._eps = np.float32(layout.norm_eps)
        self._no_norm = np.empty(0, np.float32)
        self._scores = np.empty((0, 0, 0), np.float32)

    def begin(self, positions: IntArray, slots: IntArray, storage: SlotStorage) -> None:
        """Cut the rows into work items; scratch grows with the longest sequence."""
        heads, group = self._layout.n_kv_head, self._layout.n_head // self._layout.n_kv_head
        workers = numba.get_num_threads()
        self._positions, self._slots = positions, slots
        self._keys, self._values = storage.keys.numpy(), storage.values.numpy()
        self._items, self._bounds = plan_items(positions, slots, group, heads, workers)
        queries = max(ITEM_QUERIES, group)
        self._q = np.empty((heads, len(positions), group, self._layout.head_dim), np.float32)
        self._sums = np.empty((workers, queries, self._values.shape[-1]), np.float32)
        # A stride of whole pages would send every query's scores to the same cache set.
        step = math.ceil((positions.max() + 1) / LANES) * LANES + LANES
        if self._scores.shape[0] != workers or self._scores.shape[2] < step:
            self._scores = np.empty((workers, queries, step), np.float32)

    def __call__(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """See Attention."""
        out = torch.empty(qkv.shape[0], self._layout.n_head * self._layout.head_dim)
        attend(
            qkv.numpy(),
            self._no_norm if q_norm is None else q_norm.numpy(),
            self._no_norm if k_norm is None else k_norm.numpy(),
            self._eps,
            self._cos,
            self._sin,
            self._scale,
            self._positions,
            self._slots,
            self._items,
            self._bounds,
            self._keys[layer],
            self._values[layer],
            self._q,
            self._scores,
            self._sums,
            out.numpy(),
        )
        return out
