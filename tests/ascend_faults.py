"""Faults of the parameters of the Ascend C kernels, and what cannot be noticed."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of a parameter.

    Attributes:
        name: what is wrong.
        file: in `ascend_bridge/kernels`.
        right: the text that is there, once: a statement, with its semicolon, or an
            expression that may stand in brackets.
        wrong: what takes its place.
        recompile: it cannot be chosen at run time and has a library of its own.
    """

    name: str
    file: str
    right: str
    wrong: str
    recompile: bool = False


FAULTS = (
    Fault(
        "a tile over the capacity of the unified buffer",
        "plan.h",
        "2 * (2 * tile * head_dim * 2)",
        "-100000",
    ),
    Fault(
        "a misaligned operand",
        "paged_attention.h",
        "left - fold + at",
        "left - fold + at - 4",
    ),
    Fault(
        "a page id outside the pool is used",
        "paged_attention.h",
        "page < 0 || page >= num_pages_",
        "false",
    ),
    Fault(
        "a page past the pool by one is used",
        "paged_attention.h",
        "page >= num_pages_",
        "page > num_pages_",
    ),
    Fault(
        "a row to be voided is not marked",
        "paged_attention.h",
        "fault_ ? 1.0f : 0.0f",
        "0.0f",
    ),
    Fault(
        "short rows of K and V",
        "paged_attention.h",
        "static_cast<uint16_t>(dim_ / kHalfBlock)",
        "static_cast<uint16_t>(dim_ / kHalfBlock - 1)",
    ),
    Fault(
        "the gap between the rows of a head",
        "paged_attention.h",
        "static_cast<uint16_t>((kv_heads_ - 1) * dim_ / kHalfBlock)",
        "static_cast<uint16_t>(0)",
    ),
    Fault(
        "page ids that are no whole 32 bytes",
        "common.h",
        "(end - begin_ + 7) / 8 * 8",
        "end - begin_",
    ),
    Fault(
        "page ids cut short",
        "common.h",
        "(wanted < kIds ? wanted : kIds)",
        "(wanted < kIds ? wanted - 8 : kIds)",
    ),
    Fault(
        "wrong event id",
        "common.h",
        "AscendC::WaitFlag<kEvent>(id);",
        "AscendC::WaitFlag<kEvent>(static_cast<event_t>((id + 1) % 4));",
    ),
    Fault(
        "wait for the wrong pipe",
        "common.h",
        "order<HardEvent::MTE2_S>();",
        "order<HardEvent::MTE2_V>();",
    ),
    Fault(
        "a queue too shallow",
        "paged_attention.h",
        "AscendC::TQue<TPosition::VECIN, 2> tiles_;",
        "AscendC::TQue<TPosition::VECIN, 1> tiles_;",
        recompile=True,
    ),
    Fault(
        "results are not in an output queue",
        "paged_attention.h",
        "AscendC::TQue<TPosition::VECOUT, 1> results_;",
        "AscendC::TQue<TPosition::VECCALC, 1> results_;",
        recompile=True,
    ),
    Fault(
        "one buffer for two tiles",
        "paged_attention.h",
        "pipe->InitBuffer(tiles_, 2, 2 * tile_ * dim_ * sizeof(T));",
        "pipe->InitBuffer(tiles_, 1, 2 * tile_ * dim_ * sizeof(T));",
    ),
    Fault(
        "a buffer too small",
        "paged_attention.h",
        "pipe->InitBuffer(spread_buffer_, kMaxTile * kLanes * sizeof(float));",
        "pipe->InitBuffer(spread_buffer_, kMaxTile * sizeof(float));",
    ),
    Fault(
        "no scale",
        "paged_attention.h",
        "AscendC::Muls(query_, query_, query_scale_, dims);",
        "",
    ),
    Fault(
        "the maximum is not taken before the exponent",
        "paged_attention.h",
        "row_maxima(fresh_, scores_, compact_, group_, count);",
        "AscendC::Duplicate(fresh_, 0.0f, group_ * kLanes); settle();",
    ),
    Fault(
        "the maximum of the tile, not the running one",
        "paged_attention.h",
        "AscendC::Max(fresh_, fresh_, maxima_, all);",
        "",
    ),
    Fault(
        "no rescale of the sums",
        "paged_attention.h",
        "AscendC::Mul(sums_, sums_, decay_, all);",
        "",
    ),
    Fault(
        "no rescale of the values",
        "paged_attention.h",
        "scale_rows(result_, decay_, group_, dim_);",
        "",
    ),
    Fault(
        "one key too many",
        "paged_attention.h",
        "visit_tile(smaller(tile_, high_ - at));",
        "visit_tile(smaller(tile_, high_ - at + 1));",
    ),
    Fault(
        "one key too few",
        "paged_attention.h",
        "end < length ? static_cast<int32_t>(end) : length",
        "end < length ? static_cast<int32_t>(end) : length - 1",
    ),
    Fault(
        "a window too long by one",
        "paged_attention.h",
        "larger(0, length - window_)",
        "larger(0, length - window_ - 1)",
    ),
    Fault(
        "splits that overlap",
        "paged_attention.h",
        "begin + split_tokens_",
        "begin + split_tokens_ + 1",
    ),
    Fault(
        "K in the place of V",
        "paged_attention.h",
        "tile[tile_ * dim_]",
        "tile[0]",
    ),
    Fault(
        "q of another head",
        "paged_attention.h",
        "q_[(int64_t{slot_} * heads_ + head_ * group_) * dim_]",
        "q_[(int64_t{slot_} * heads_ + head_) * dim_]",
    ),
    Fault(
        "half of the soft cap",
        "paged_attention.h",
        "AscendC::Muls(square, square, 0.25f, lanes, rows, each);",
        "AscendC::Muls(square, square, 0.5f, lanes, rows, each);",
    ),
    Fault(
        "a soft cap that bends too little",
        "paged_attention.h",
        "times < 2",
        "times < 1",
    ),
    Fault(
        "one row too many of a capped tile at once",
        "paged_attention.h",
        "larger(1, tile_ * dim_ / 2 / kMaxTile)",
        "larger(1, tile_ * dim_ / 2 / kMaxTile) + 1",
    ),
    Fault(
        "the running maximum starts at 0",
        "paged_attention.h",
        "AscendC::Duplicate(maxima_, kLowest, lanes);",
        "AscendC::Duplicate(maxima_, 0.0f, lanes);",
    ),
    Fault(
        "the maximum of the parts starts at 0",
        "combine.h",
        "AscendC::Duplicate(top_, kLowest, kSpan);",
        "AscendC::Duplicate(top_, 0.0f, kSpan);",
    ),
    Fault(
        "the maximum of a tile starts at 0",
        "lanes.h",
        "float most = kLowest;",
        "float most = 0;",
        recompile=True,
    ),
    Fault(
        "a void row voids what the core does next",
        "paged_attention.h",
        "fault_ = false;\n    low_ = 0;",
        "low_ = 0;",
    ),
    Fault(
        "results are cut and not rounded",
        "combine.h",
        "kNarrow",
        "AscendC::RoundMode::CAST_TRUNC",
    ),
    Fault(
        "a sum of NaN counts as an empty row",
        "combine.h",
        "sum_.GetValue(i * kLanes) != 0",
        "sum_.GetValue(i * kLanes) > 0",
    ),
    Fault(
        "a length past the table row is used",
        "paged_attention.h",
        "smaller(lens_.GetValue(slot_), pages_per_slot_ * page_size_)",
        "lens_.GetValue(slot_)",
    ),
    Fault(
        "no soft cap",
        "paged_attention.h",
        "if (soft_cap_ > 0) cap_scores(count);",
        "",
    ),
    Fault(
        "a mask of 128 float lanes",
        "common.h",
        "smaller(kRepeatFloats, dim - at)",
        "dim - at",
    ),
    Fault(
        "two cores do the same item",
        "paged_attention.h",
        "item += AscendC::GetBlockNum()",
        "item += 1",
    ),
    Fault(
        "the parts are not rescaled",
        "combine.h",
        "scale_rows(part, weight_, count_, dim_);",
        "",
    ),
    Fault(
        "the total is not rescaled",
        "combine.h",
        "scale_rows(total_, decay_, count_, dim_);",
        "",
    ),
    Fault(
        "the last split is left out",
        "combine.h",
        "split < splits_",
        "split < splits_ - (splits_ > 1)",
    ),
    Fault(
        "a fault mark is not looked at",
        "combine.h",
        "if (fault_.GetValue(i * kLanes) != 0) "
        "AscendC::Duplicate(total_[i * dim_], 0.0f, dim_);",
        "",
    ),
    Fault(
        "an empty row has a finite lse",
        "combine.h",
        "sum_.GetValue(i * kLanes) != 0",
        "true",
    ),
    Fault(
        "a void row has an lse",
        "combine.h",
        "fault_.GetValue(i * kLanes) == 0",
        "true",
    ),
    Fault(
        "a place outside the pool is written",
        "reshape_and_cache.h",
        "place < 0 || place >= places_",
        "false",
    ),
    Fault(
        "a negative place is written",
        "reshape_and_cache.h",
        "place < 0",
        "false",
    ),
    Fault(
        "a short copy of rows",
        "reshape_and_cache.h",
        "rows * size",
        "rows * size - 16",
    ),
    Fault(
        "a copy that is no whole 32 bytes",
        "reshape_and_cache.h",
        "AscendC::DataCopy(to[place * row_ + at], some[i * size], size);",
        "AscendC::DataCopy(to[place * row_ + at], some[i * size], size - 8);",
    ),
    Fault(
        "the rest of a row is a whole chunk",
        "reshape_and_cache.h",
        "row_ - at < chunk_",
        "false",
    ),
    Fault(
        "a destination outside the pool is written",
        "block_copy.h",
        "to < 0 || to >= num_pages_",
        "false",
    ),
    Fault(
        "a source outside the pool is read",
        "block_copy.h",
        "page < 0 || page >= num_pages_",
        "false",
    ),
    Fault(
        "the rest of a page is a whole chunk",
        "block_copy.h",
        "page_ - at < chunk_",
        "false",
    ),
    Fault(
        "destinations of the sources before",
        "block_copy.h",
        "larger(0, cumsum_.GetValue(source - 1))",
        "0",
    ),
    Fault(
        "V is not copied",
        "block_copy.h",
        "item % 2 == 0 ? k_ : v_",
        "item % 2 == 0 ? k_ : k_",
    ),
)

# What cannot be noticed, each with the reason. Key: "file: text", or with " #n" for
# the n-th of equal texts in a file; value: (architectures, reason).
_READ = (
    "a scalar read has ended when the next instruction is issued; a wait for prudence"
)
ALLOWED: dict[str, tuple[tuple[int, ...], str]] = {
    "lanes.h: the maximum of a tile starts at 0": (
        (2201,),
        "an instruction takes the maximum there; the line is the 910A's",
    ),
    "common.h: order<HardEvent::S_MTE2>();": ((1001, 2201), _READ),
    "combine.h: order<HardEvent::S_V>();": ((1001, 2201), _READ),
    "lanes.h: order<HardEvent::S_V>(); #2": ((1001,), _READ),
    "paged_attention.h: settle(); #14": (
        (1001,),
        "the scalar unit takes the maximum of the capped scores there, behind V_S",
    ),
}
