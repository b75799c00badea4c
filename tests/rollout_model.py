"""What a rollout should do, in plain Python, and a toy model it can foretell.

`Simulation` follows the same policy as the program with lists and dictionaries: pages
are names, owners are counted, a prefix is a tuple of tokens. It shares no code with
what it checks.
"""

import dataclasses

import jax
import jax.numpy as jnp

import pagedjax as pj

VOCAB = 11


def next_token(tokens, params):
    """The toy model in plain Python: depends on every token and its position."""
    total = sum((t + 1) * (7 * p + params[0]) for p, t in enumerate(tokens))
    return (total + params[1]) % VOCAB


def apply(params, pool, tokens, batch, rows=None):
    """The toy model on pages: reads the tokens and positions back from the pool."""
    pool = pj.write_kv(
        pool,
        0,
        (tokens + 1).astype(jnp.float32)[:, None, None],
        batch.positions.astype(jnp.float32)[:, None, None],
        batch.pages,
        batch.offsets,
    )
    slots = jnp.arange(tokens.shape[0])
    if batch.cu_q_lens is not None:
        slots = jnp.searchsorted(batch.cu_q_lens[1:], slots, side="right")
    size = pool.page_size
    places = jnp.arange(batch.page_indices.shape[1] * size)
    pages = batch.page_indices.at[slots[:, None], (places // size)[None, :]].get(
        mode="clip"
    )
    k, v = (
        held.at[pages, (places % size)[None, :]].get(mode="fill", fill_value=0)
        for held in (pool.k_pages[..., 0, 0], pool.v_pages[..., 0, 0])
    )
    seen = places[None, :] <= batch.positions[:, None]
    total = jnp.sum(jnp.where(seen, k * (7 * v + params[0]), 0), axis=1)
    chosen = (total.astype(jnp.int32) + params[1]) % VOCAB
    chosen = chosen if rows is None else chosen[rows]
    return pool, jax.nn.one_hot(chosen, VOCAB)


MODEL = pj.PagedModel(apply, num_layers=1, num_kv_heads=1, head_dim=1, vocab_size=VOCAB)


@dataclasses.dataclass
class Row:
    request: int
    pages: list
    length: int  # tokens there is room for
    fed: int
    order: int


@dataclasses.dataclass
class Entry:
    serial: int
    parent: int
    page: int
    depth: int
    last_used: int


class Simulation:
    """Runs the requests; what happened is in the attributes."""

    def __init__(
        self,
        prompts,
        budgets,
        params,
        eos,
        reserve,
        longest_first,
        *,
        num_samples,
        num_slots,
        num_pages,
        page_size,
        prefix_entries,
        num_places,
    ):
        self.prompts, self.budgets, self.params, self.eos = (
            prompts,
            budgets,
            params,
            eos,
        )
        self.reserve, self.n, self.num_slots = reserve, num_samples, num_slots
        self.longest_first = longest_first
        self.num_pages, self.size = num_pages, page_size
        self.num_entries, self.num_places = prefix_entries, num_places
        total = len(prompts) * num_samples
        self.out = [[] for _ in range(total)]
        self.status = [self.first_status(r // num_samples) for r in range(total)]
        self.waiting = {r for r, s in enumerate(self.status) if s == "RUNNING"}
        self.rows = {}  # slot -> Row
        self.owners = {}  # page -> count
        self.fresh = 0
        self.index, self.clock = {}, 0
        self.retry, self.admissions = True, 0
        self.steps = self.mixed = self.fed = self.forked = self.found = 0
        self.copied = self.peak = 0
        self.admitted_at, self.ended_at = [-1] * total, [-1] * total
        self.preemptions = [0] * total

    def first_status(self, b):
        if not self.prompts[b]:
            return "EMPTY"
        if self.budgets[b] == 0:
            return "LENGTH"
        if self.pages_of(self.longest(b)) > self.num_pages:
            return "UNSERVABLE"
        return "RUNNING"

    def run(self):
        while "RUNNING" in self.status:
            while self.may_admit():
                self.admit()
            while any(map(self.is_feeding, self.rows.values())) and (
                not self.may_admit()
            ):
                self.step()
            while (
                self.rows
                and not any(map(self.is_feeding, self.rows.values()))
                and not self.may_admit()
            ):
                self.step()
        return self

    # --- admission ------------------------------------------------------------------

    def may_admit(self):
        return self.retry and self.waiting and len(self.rows) < self.num_slots

    def rank(self, request):
        size = self.budgets[request // self.n] if self.longest_first else 0
        return -size, request

    def admit(self):
        request = min(self.waiting, key=self.rank)
        slot = min(set(range(self.num_slots)) - set(self.rows))
        b = request // self.n
        prompt = self.prompts[b]
        total = len(prompt) + len(self.out[request])
        sources = [
            s
            for s, row in sorted(self.rows.items())
            if row.request // self.n == b and not self.is_feeding(row)
        ]
        hits = self.lookup(prompt, len(prompt) - 1)
        found = len(hits) * self.size
        shared = len(prompt) - 1 if sources else found
        blocked = any(
            self.coming(row.request // self.n, b) > shared
            for row in self.rows.values()
            if self.is_feeding(row)
        )
        if blocked:
            self.retry = False
            return
        source = self.rows[sources[0]].pages if sources else [e.page for e in hits]
        pages = source[: self.pages_of(shared)]
        for page in pages:
            self.owners[page] += 1
        need = self.pages_of(total) - shared // self.size
        room = self.free_pages() + len(self.evictable())
        if need + self.spare(b, total) > room:
            for page in pages:
                self.drop(page)
            self.retry = False
            return
        self.evict(need - self.free_pages())
        if shared % self.size:
            self.drop(pages.pop())
            self.copied += 1
        pages = pages + [self.take() for _ in range(need)]
        self.rows[slot] = Row(request, pages, total, shared, self.admissions)
        self.admissions += 1
        self.waiting.remove(request)
        self.retry = True
        self.admitted_at[request] = self.steps
        if sources:
            self.forked += shared
        else:
            self.found += shared

    def coming(self, a, b):
        if a == b:
            return len(self.prompts[b]) - 1
        if not self.num_entries:
            return 0
        alike = 0
        for x, y in zip(self.prompts[a], self.prompts[b], strict=False):
            if x != y:
                break
            alike += 1
        return min(alike, len(self.prompts[b]) - 1) // self.size * self.size

    def spare(self, b, total):
        more = [
            self.pages_of(self.longest(row.request // self.n)) - len(row.pages)
            for row in self.rows.values()
        ]
        own = self.pages_of(self.longest(b)) - self.pages_of(total)
        if self.reserve:
            return sum(more) + own
        return sum(min(m, 1) for m in more) + min(own, 1) if self.rows else 0

    # --- steps ----------------------------------------------------------------------

    def step(self):
        mixed = any(map(self.is_feeding, self.rows.values()))
        self.make_room()
        emits, done, settled = [], [], 0
        for _, row in sorted(self.rows.items()):
            if not self.is_feeding(row):
                if row.length % self.size == 0:
                    row.pages.append(self.take())
                row.length += 1
                row.fed += 1
                settled += 1
                emits.append(row)
        budget = self.num_places - settled
        for row in sorted(self.rows.values(), key=lambda row: row.order):
            count = min(budget, row.length - row.fed)
            row.fed += count
            budget -= count
            self.fed += count
            if count and row.fed == row.length:
                done.append(row)
        for row in (row for _, row in sorted(self.rows.items())):
            if any(row is d for d in done):
                self.insert(row)
        self.peak = max(self.peak, len(self.owners))
        self.steps += 1
        self.mixed += mixed
        self.retry = self.retry or bool(done)
        for slot, row in sorted(self.rows.items()):
            if any(row is e for e in [*emits, *done]):
                self.emit(slot, row)

    def emit(self, slot, row):
        r = row.request
        b = r // self.n
        self.out[r].append(next_token([*self.prompts[b], *self.out[r]], self.params))
        if self.out[r][-1] == self.eos:
            self.status[r] = "STOP"
        elif len(self.out[r]) >= self.budgets[b]:
            self.status[r] = "LENGTH"
        else:
            return
        self.ended_at[r] = self.steps
        self.retry = True
        self.release(slot)

    def make_room(self):
        while (short := self.shortage()) > 0:
            self.evict(short)
            if self.shortage() > 0:
                slot = max(self.rows, key=lambda slot: self.rows[slot].order)
                request = self.rows[slot].request
                self.preemptions[request] += 1
                self.waiting.add(request)
                self.retry = False
                self.release(slot)

    def shortage(self):
        wants = [
            row
            for row in self.rows.values()
            if not self.is_feeding(row) and row.length % self.size == 0
        ]
        return len(wants) - self.free_pages()

    # --- the prefix index -----------------------------------------------------------

    def lookup(self, prompt, num_tokens):
        if not self.num_entries:
            return []
        hits = self.find(prompt, num_tokens)
        self.clock += 1
        return hits

    def find(self, prompt, num_tokens):
        hits, parent = [], 0
        for k in range(num_tokens // self.size):
            entry = self.index.get(tuple(prompt[: (k + 1) * self.size]))
            if entry is None or entry.parent != parent:
                break
            hits.append(entry)
            entry.last_used = self.clock
            parent = entry.serial
        return hits

    def insert(self, row):
        if not self.num_entries:
            return
        prompt = self.prompts[row.request // self.n]
        hits = self.find(prompt, len(prompt))
        new = []
        for k in range(len(hits), len(prompt) // self.size):
            if tuple(prompt[: (k + 1) * self.size]) in self.index:
                break
            new.append(k)
        unused = self.num_entries - len(self.index)
        self.evict(len(new) - unused, keep=self.clock)
        parent = hits[-1].serial if hits else 0
        for i, k in enumerate(new):
            if len(self.index) == self.num_entries:
                break
            serial = self.clock + 1 + i
            page = row.pages[k]
            self.index[tuple(prompt[: (k + 1) * self.size])] = Entry(
                serial, parent, page, k, self.clock
            )
            self.owners[page] += 1
            parent = serial
        self.clock += 1 + len(new)

    def evictable(self, keep=None):
        return [
            prefix
            for prefix, entry in self.index.items()
            if self.owners[entry.page] == 1 and entry.last_used != keep
        ]

    def evict(self, count, keep=None):
        victims = sorted(
            self.evictable(keep),
            key=lambda p: (self.index[p].last_used, -self.index[p].depth),
        )
        for prefix in victims[: max(count, 0)]:
            self.drop(self.index.pop(prefix).page)

    # --- pages ----------------------------------------------------------------------

    def take(self):
        assert self.free_pages() > 0
        self.fresh += 1
        self.owners[self.fresh] = 1
        return self.fresh

    def drop(self, page):
        self.owners[page] -= 1
        if not self.owners[page]:
            del self.owners[page]

    def release(self, slot):
        for page in self.rows.pop(slot).pages:
            self.drop(page)

    def free_pages(self):
        return self.num_pages - len(self.owners)

    def pages_of(self, tokens):
        return -(-tokens // self.size)

    def longest(self, b):
        return len(self.prompts[b]) + self.budgets[b] - 1

    @staticmethod
    def is_feeding(row):
        return row.fed < row.length
