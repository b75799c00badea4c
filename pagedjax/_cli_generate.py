"""`pagedjax generate`: loads a model, runs the batches, prints what comes."""

import contextlib
import dataclasses
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax as pj
from pagedjax._cli_plan import Plan, make_plan
from pagedjax._cli_prompts import (
    CommandError,
    GenerateOptions,
    check_options,
    encode_prompt,
    read_prompts,
)
from pagedjax._cli_report import Report, kv_bytes_per_token, size_text

_STEPS = 16  # decode steps between two looks at Ctrl-C and the progress bar
_FINISH_REASONS = {
    pj.Status.STOP: "stop",
    pj.Status.LENGTH: "length",
    pj.Status.OUT_OF_PAGES: "out_of_pages",
}


@dataclasses.dataclass(frozen=True)
class _Job:
    """What all batches of a run share."""

    options: GenerateOptions
    plan: Plan
    model: pj.PagedModel
    params: Any
    tokenizer: Any
    prompts: list[list[int]]
    seed: int


@dataclasses.dataclass(frozen=True)
class _Sample:
    """One line of `--json`."""

    index: int
    sample: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[float | None]
    finish_reason: str
    score: float | None = None  # with --num-beams, and only then printed


def run_generate(options: GenerateOptions) -> None:
    """Runs the command.

    Args:
      options: the flags.

    Raises:
      CommandError: something the user can change.
    """
    check_options(options)
    given = read_prompts(options)  # before the model: bad prompts are found at once
    try:
        jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS names what is not there
        raise CommandError(str(error).splitlines()[0]) from error
    use_compilation_cache()
    began = time.perf_counter()
    loaded = _load(options)
    load_seconds = time.perf_counter() - began

    config, tokenizer = loaded.config, loaded.tokenizer
    prompts = [encode_prompt(p, tokenizer, config.vocab_size) for p in given]
    plan = make_plan(
        [len(prompt) for prompt in prompts],
        [prompt.where for prompt in given],
        num_samples=options.rows_per_prompt,
        max_new_tokens=options.max_tokens,
        page_size=options.page_size,
        num_pages=options.num_pages,
        batch_size=options.batch_size,
        context=config.max_seq_len,
    )
    model, params = loaded.model.paged()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    job = _Job(options, plan, model, params, tokenizer, prompts, seed)
    report = Report(model, plan, options, seed, load_seconds)
    _check_memory(job)
    with _memory_errors(job):
        _run(job, report)
    sys.stdout.flush()
    report.print()


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, if there is one.

    `PAGEDJAX_CACHE_DIR` names another; empty switches it off. JAX's own setting,
    where there is one, is left alone.
    """
    folder = compilation_cache_dir()
    if folder is None or jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))


def compilation_cache_dir() -> Path | None:
    """Gives the folder of compiled programs, or None if they are not kept.

    Example:
      >>> import os
      >>> from pagedjax._cli_generate import compilation_cache_dir
      >>> os.environ["PAGEDJAX_CACHE_DIR"] = "/tmp/programs"
      >>> compilation_cache_dir().name
      'programs'
      >>> del os.environ["PAGEDJAX_CACHE_DIR"]
    """
    name = os.environ.get("PAGEDJAX_CACHE_DIR")
    if name is not None:
        return Path(name).expanduser() if name else None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "pagedjax"
    except RuntimeError:  # no home directory
        return None


def _load(options: GenerateOptions) -> Any:
    from pagedjax import models

    with _progress_bar("loading", "tensor") as advance:
        try:
            return models.load_model(
                options.model,
                dtype=options.dtype,
                progress=lambda done, total: advance(done, total),
            )
        except models.ModelError as error:
            raise CommandError(str(error)) from error


def _run(job: _Job, report: Report) -> None:
    """Runs the batches and prints their samples in the order of the prompts."""
    alone = len(job.prompts) == 1 and job.options.n == 1 and not job.options.json
    alone &= job.options.num_beams is None  # the best so far may yet change
    total = len(job.prompts) * job.options.n
    finished: dict[int, list[_Sample]] = {}
    printed = done = 0
    report.compile_seconds = _compile(job)
    with _progress_bar("generating", "sample", shown=not alone) as advance:
        for batch in job.plan.batches:
            base = done

            def count(out: pj.Generation, base: int = base) -> None:
                ended = np.asarray(out.status) != pj.Status.RUNNING
                held = np.asarray(out.status) != pj.Status.EMPTY
                advance(base + int(np.sum(ended & held)), total)

            if alone:
                out = _run_batch(job, batch, report, _Printer(job.tokenizer), 1)
            else:
                out = _run_batch(job, batch, report, count, _STEPS)
            done += len(batch) * job.options.n
            finished |= _samples_of(job, batch, out)
            while printed in finished:
                samples = finished.pop(printed)
                report.add_samples([(s.token_ids, s.finish_reason) for s in samples])
                if not alone:
                    _print_samples(job, samples)
                printed += 1


def _start(job: _Job, batch: list[int]) -> pj.GenerationState:
    plan, options = job.plan, job.options
    ends = sorted(job.tokenizer.eos_ids)
    prompts = np.zeros((plan.rows, plan.length), np.int32)
    lens, seeds = np.zeros((2, plan.rows), np.int32)
    for row, index in enumerate(batch):
        ids = job.prompts[index]
        prompts[row, : len(ids)] = ids
        lens[row], seeds[row] = len(ids), index
    return pj.start_generation(
        job.model,
        job.params,
        jnp.asarray(prompts),
        jnp.asarray(lens),
        jax.random.key(job.seed),
        max_new_tokens=plan.max_new_tokens,
        num_samples=options.n,
        num_beams=options.num_beams,
        draft=None if options.draft is None else pj.PromptLookup(),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        # As many that never come instead: no other program for --ignore-eos.
        eos_ids=[-1] * len(ends) if options.ignore_eos else ends,
        seeds=jnp.asarray(seeds),
        page_size=options.page_size,
        num_pages=plan.num_pages,
        chunk_size=plan.chunk_size,
    )


def _compile(job: _Job) -> float:
    """Runs the programs on a batch without prompts; gives the seconds it took.

    There is nothing to compute for such a batch, so that is the time to compile
    them or to fetch them from the cache.
    """
    began = time.perf_counter()
    state = _start(job, [])
    state = pj.continue_generation(job.model, job.params, state, num_steps=1)
    jax.block_until_ready(pj.finish_generation(state))
    return time.perf_counter() - began


def _run_batch(
    job: _Job,
    batch: list[int],
    report: Report,
    look: Callable[[pj.Generation], None],
    num_steps: int,
) -> pj.Generation:
    """Runs one batch; `look` sees what there is every `num_steps` steps."""
    began = time.perf_counter()
    state = _start(job, batch)
    jax.block_until_ready(state.status)
    report.prefill_seconds += time.perf_counter() - began
    report.prompt_tokens += sum(len(job.prompts[index]) for index in batch)
    began = time.perf_counter()
    while True:
        out = pj.finish_generation(state)
        look(out)
        if not np.any(np.asarray(out.status) == pj.Status.RUNNING):
            break
        state = pj.continue_generation(
            job.model, job.params, state, num_steps=num_steps
        )
    report.decode_seconds += time.perf_counter() - began
    report.add_pages(out.stats)
    if out.drafts is not None:
        report.add_drafts(out.drafts)
    return out


class _Printer:
    """Prints the text of the only sample as its tokens come."""

    def __init__(self, tokenizer: Any):
        self._stream = tokenizer.stream(skip_special=True, continues=True)
        self._done = 0

    def __call__(self, out: pj.Generation) -> None:
        # On the host: indexing a device array is a program to compile and to run.
        length = int(np.asarray(out.lengths)[0, 0])
        tokens = np.asarray(out.tokens)[0, 0, self._done : length].tolist()
        self._done = length
        text = "".join([self._stream.push(token) for token in tokens])
        if np.asarray(out.status)[0, 0] != pj.Status.RUNNING:
            text += self._stream.finish() + "\n"
        _write(text)


def _samples_of(
    job: _Job, batch: list[int], out: pj.Generation
) -> dict[int, list[_Sample]]:
    """Gives the samples of each prompt of a batch."""
    tokens, logprobs = np.asarray(out.tokens), np.asarray(out.logprobs)
    lengths, status = np.asarray(out.lengths), np.asarray(out.status)

    def sample_of(row: int, index: int, sample: int) -> _Sample:
        length = lengths[row, sample]
        ids = tokens[row, sample, :length].tolist()
        values = logprobs[row, sample, :length].tolist()
        return _Sample(
            index=index,
            sample=sample,
            prompt_token_ids=job.prompts[index],
            token_ids=ids,
            text=job.tokenizer.decode(ids, skip_special=True, continues=True),
            logprobs=[_number(value) for value in values],
            finish_reason=_FINISH_REASONS[pj.Status(int(status[row, sample]))],
            score=None if out.scores is None else _number(out.scores[row, sample]),
        )

    return {
        index: [sample_of(row, index, sample) for sample in range(job.options.n)]
        for row, index in enumerate(batch)
    }


def _number(value: Any) -> float | None:
    """Gives a number that JSON has."""
    return float(value) if math.isfinite(value) else None


def _print_samples(job: _Job, samples: list[_Sample]) -> None:
    for sample in samples:
        if job.options.json:
            fields = dataclasses.asdict(sample)
            if job.options.num_beams is None:
                del fields["score"]
            _write(json.dumps(fields, allow_nan=False) + "\n")
        else:
            name = f"prompt {sample.index}"
            if job.options.n > 1:
                name += f", sample {sample.sample}"
            _write(f"--- {name} ({sample.finish_reason})\n{sample.text}\n")


def _write(text: str) -> None:
    """Writes to stdout at once; characters it cannot encode become "?"."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


@contextlib.contextmanager
def _progress_bar(
    name: str, unit: str, *, shown: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Gives `advance(done, total)`; draws on stderr if that is a terminal."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda done, total: None
        return
    disable = not (shown and sys.stderr.isatty())
    # Nothing is drawn for what ends within the delay, and nothing remains.
    with tqdm(desc=name, unit=unit, disable=disable, delay=0.5, leave=False) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _check_memory(job: _Job) -> None:
    """Refuses what the machine has no memory for, before the machine does."""
    plan, model = job.plan, job.model
    if plan.num_pages * model.num_layers >= 2**31:
        raise CommandError(
            f"a pool of {plan.num_pages} pages in {model.num_layers} layers has too"
            " many pages for 32-bit numbers: lower --num-pages or raise --page-size"
        )
    pool = plan.num_pages * job.options.page_size * kv_bytes_per_token(model)
    slots = plan.rows * job.options.rows_per_prompt
    # Logits and their exponentials; tokens and log-probabilities.
    other = slots * 4 * (2 * model.vocab_size + 2 * plan.max_new_tokens)
    limit = _device_memory()
    if limit is not None and pool + other > limit:
        raise CommandError(_too_large(job, f"this machine has {size_text(limit)}"))


def _device_memory() -> int | None:
    """Gives the memory of the default device in bytes, or None if unknown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):
            return None
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


@contextlib.contextmanager
def _memory_errors(job: _Job) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise CommandError(_too_large(job, "the device is out of memory")) from error


def _too_large(job: _Job, reason: str) -> str:
    plan, options = job.plan, job.options
    pool = plan.num_pages * options.page_size * kv_bytes_per_token(job.model)
    return (
        f"out of memory, {reason}: the pool of {plan.num_pages} x {options.page_size}"
        f" tokens takes {size_text(pool)}, and {plan.rows * options.rows_per_prompt}"
        " samples run at once; lower --num-pages, --page-size, --max-tokens, --n or"
        " --batch-size"
    )
