"""The table that `pagedjax generate` prints at the end."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from pagedjax._cli_output import say, tell
from pagedjax._cli_plan import Plan
from pagedjax._cli_prompts import GenerateOptions
from pagedjax.generate import DraftStats, PagedModel, PageStats


@dataclasses.dataclass
class Report:
    """Adds up a run, batch by batch.

    Attributes:
      model: sizes of the cache.
      plan: sizes of the batches.
      options: the flags.
      seed: of the samples.
      load_seconds: time to load the model.
      compile_seconds: time to compile, or to fetch from the compilation cache.
      prefill_seconds: time of the prompts, each sample's first token included.
      decode_seconds: time of the other tokens.
      prompt_tokens: tokens of all prompts.
      new_tokens: tokens of all samples.
      samples: samples.
      out_of_pages: samples that found no page.
      out_of_context: samples that the model's context ended before --max-tokens.
      pages_used: most pages with an owner, of any batch; the next three are of then.
      pages_shared: of these, pages with several owners.
      tokens_held: tokens in them.
      pages_copied: copy-on-write copies of all batches.
      drafted: tokens drafted.
      accepted: how many of them were right.
    """

    model: PagedModel
    plan: Plan
    options: GenerateOptions
    seed: int
    load_seconds: float
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    samples: int = 0
    out_of_pages: int = 0
    out_of_context: int = 0
    pages_used: int = 0
    pages_shared: int = 0
    tokens_held: float = 0.0
    pages_copied: int = 0
    drafted: int = 0
    accepted: int = 0

    def add_samples(self, samples: Sequence[tuple[list[int], str]]) -> None:
        """Adds samples, each its tokens and its finish reason."""
        self.samples += len(samples)
        self.new_tokens += sum(len(token_ids) for token_ids, _ in samples)
        self.out_of_pages += sum(reason == "out_of_pages" for _, reason in samples)
        self.out_of_context += sum(
            reason == "length" and len(token_ids) < self.options.max_tokens
            for token_ids, reason in samples
        )

    def add_pages(self, stats: PageStats) -> None:
        """Adds the page statistics of a batch."""
        self.pages_copied += int(stats.pages_copied)
        if int(stats.pages_used) > self.pages_used:
            self.pages_used = int(stats.pages_used)
            self.pages_shared = int(stats.pages_shared)
            self.tokens_held = float(stats.tokens_held)

    def add_drafts(self, drafts: DraftStats) -> None:
        """Adds what became of the drafts of a batch."""
        self.drafted += int(np.sum(drafts.drafted))
        self.accepted += int(np.sum(drafts.accepted))

    def print(self, notes: Sequence[str] = ()) -> None:
        """Prints the table to stderr, and notes: what did not go as the flags say."""
        tell("\n" + "".join(f"{name:<15} {value}\n" for name, value in self._rows()))
        for note in (*notes, *self._notes()):
            say(f"note: {note}")

    def _notes(self) -> Iterator[str]:
        if self.out_of_pages:
            yield (
                f"{self.out_of_pages} of {self.samples} samples ran out of pages;"
                f" --num-pages {self.plan.pages_wanted} is enough for all"
            )
        if self.out_of_context:
            yield (
                f"{self.out_of_context} of {self.samples} samples ended where the"
                f" model's context of {self.plan.longest} tokens does, before"
                f" --max-tokens {self.options.max_tokens}"
            )

    def _rows(self) -> list[tuple[str, str]]:
        page_size = self.options.page_size
        token_bytes = kv_bytes_per_token(self.model)
        used = self.pages_used * page_size
        # As a dense cache is made: each row as long as the longest may get.
        running = self.samples // self.options.n * self.options.rows_per_prompt
        sequences = min(running, self.options.rows_per_prompt * self.plan.rows)
        dense = sequences * self.plan.longest
        prefill = _rate(self.prompt_tokens, self.prefill_seconds)
        # The first token of a sample comes with its prompt.
        decode = _rate(self.new_tokens - self.samples, self.decode_seconds)
        rows = [
            ("prompt tokens", f"{self.prompt_tokens:<8} {prefill}"),
            ("new tokens", f"{self.new_tokens:<8} {decode}"),
            (
                "start",
                f"loading {self.load_seconds:.1f} s, compiling"
                f" {self.compile_seconds:.1f} s",
            ),
            (
                "pages",
                f"{self.pages_used} used of {self.plan.num_pages} ({page_size} tokens"
                f" each), {self.pages_shared} shared, {self.pages_copied} copied",
            ),
            (
                "useful memory",
                f"{100 * self.tokens_held / max(used, 1):.1f} % of the places in the"
                " used pages hold a token",
            ),
            (
                "KV cache",
                f"{size_text(used * token_bytes)} of pages used; a dense cache as long"
                f" as the longest sample may get: {size_text(dense * token_bytes)}",
            ),
        ]
        if self.options.draft is not None:
            share = 100 * self.accepted / max(self.drafted, 1)
            rows.append(
                (
                    "drafts",
                    f"{self.drafted} tokens, {self.accepted} accepted ({share:.1f} %)",
                )
            )
        if self.options.temperature > 0:
            rows.append(("seed", str(self.seed)))
        return rows


def kv_bytes_per_token(model: PagedModel) -> int:
    """Gives the bytes of one token's keys and values, in all layers.

    Example:
      >>> from pagedjax import PagedModel
      >>> from pagedjax._cli_report import kv_bytes_per_token
      >>> kv_bytes_per_token(PagedModel(print, 30, 3, 64, 49152))
      46080
    """
    item = jnp.dtype(model.kv_dtype).itemsize
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * item


def size_text(num_bytes: int) -> str:
    """Gives a size for people.

    Args:
      num_bytes: the size in bytes.

    Example:
      >>> from pagedjax._cli_report import size_text
      >>> size_text(3_500_000)
      '3.3 MiB'
    """
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if tokens > 0 and seconds > 0 else ""
