"""`pagedjax generate`: loads a model, runs the batches, prints what comes."""

import contextlib
import dataclasses
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax as pj
from pagedjax._cli_machine import (
    cache_errors,
    device_memory,
    find_devices,
    find_program_cache,
)
from pagedjax._cli_output import write
from pagedjax._cli_plan import Plan, make_plan
from pagedjax._cli_prompts import (
    CommandError,
    GenerateOptions,
    Prompt,
    check_options,
    encode_prompt,
    read_prompts,
)
from pagedjax._cli_report import Report, kv_bytes_per_token, size_text

_STEPS = 16  # decode steps between two looks at Ctrl-C and the progress bar
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GenerateOptions)}
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
    notes = check_options(options)
    given = read_prompts(options)  # before the model: bad prompts are found at once
    find_devices()
    cache = find_program_cache()
    if cache.failed:
        notes.append(f"compiled programs are not kept: {cache.reason}")
    if cache.folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache.folder))
    with cache_errors() as errors:
        report = _generate(options, given)
    if errors:
        notes.append(
            f"some compiled programs in {cache.folder} cannot be read or written;"
            f" empty that folder: {errors[0]}"
        )
    report.print(notes)


def _generate(options: GenerateOptions, given: list[Prompt]) -> Report:
    """Loads the model, runs the prompts and prints the samples."""
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
    return report


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
        write(text)


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
            write(json.dumps(fields, allow_nan=False) + "\n")
        else:
            name = f"prompt {sample.index}"
            if job.options.n > 1:
                name += f", sample {sample.sample}"
            write(f"--- {name} ({sample.finish_reason})\n{sample.text}\n")


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
            f" many pages for 32-bit numbers: lower {_flags_to_lower(job)}"
        )
    limit = device_memory()
    if limit is not None and _pool_bytes(job) + _other_bytes(job) > limit:
        raise CommandError(_too_large(job, f"this machine has {size_text(limit)}"))


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
    rows = plan.rows * options.rows_per_prompt
    return (
        f"out of memory, {reason}: the pool of {plan.num_pages} x {options.page_size}"
        f" tokens takes {size_text(_pool_bytes(job))}, and what {rows}"
        f" {'samples' if options.num_beams is None else 'beams'} that run at once need"
        f" besides {size_text(_other_bytes(job))}; lower {_flags_to_lower(job)}"
    )


def _pool_bytes(job: _Job) -> int:
    token_bytes = kv_bytes_per_token(job.model)
    return job.plan.num_pages * job.options.page_size * token_bytes


def _other_bytes(job: _Job) -> int:
    """Gives the bytes of logits, their exponentials, tokens and log-probabilities."""
    rows = job.plan.rows * job.options.rows_per_prompt
    return rows * 4 * (2 * job.model.vocab_size + 2 * job.plan.max_new_tokens)


def _flags_to_lower(job: _Job) -> str:
    """Names the flags that made it too large: of those that were given."""
    options = job.options
    if options.num_pages is not None and _pool_bytes(job) > _other_bytes(job):
        wanted = ["num_pages", "page_size"]
    else:
        samples = "n" if options.num_beams is None else "num_beams"
        wanted = [samples, "max_tokens", "batch_size"]
    given = [name for name in wanted if getattr(options, name) != _DEFAULTS[name]]
    flags = [f"--{name.replace('_', '-')}" for name in given or wanted]
    return " or ".join(flags)
