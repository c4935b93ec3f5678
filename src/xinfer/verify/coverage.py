"""Which kernels the recordings of a model use, so that cases can be made for each of them.

An op chooses its kernel by the rows of a recording and by the keys that there may be: a prompt of another length, or a
cache that has grown, may run kernels that no other case comes to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from xinfer.gpu_model.forward import Network, Pass, Workspace
from xinfer.gpu_model.steps import ROW_BUCKETS, Steps
from xinfer.ops import WantedKernels
from xinfer.verify.findings import Case


def recorded_variants(steps: Steps, network: Network, space: Workspace, n: int) -> frozenset[str]:
    """The kernels of every layer in a recording of n rows, which is not run."""
    wanted = WantedKernels()
    asked = Pass(network, space, n, wanted)
    asked.embed()
    for i in range(network.config.num_hidden_layers):
        asked.layer(i)
    if space is steps.one:
        asked.head(steps.logits)
    return frozenset(wanted.variants)


def prompts_for_every_kernel(steps: Steps, cases: Iterable[Case], longest: int) -> tuple[list[Case], list[str]]:
    """Further prompts, of `longest` tokens at most, and the kernels that only longer ones would come to."""
    network, cases = steps.network(), list(cases)
    size = steps.max_rows
    tried = {steps.bucket(rows) for case in cases if not case.n_steps for rows in _chunks(case.n_prompt, size)}
    by_rows = {n: recorded_variants(steps, network, steps.many, n) for n in ROW_BUCKETS if n <= size}
    known = recorded_variants(steps, network, steps.one, 1).union(*(by_rows.get(n, ()) for n in tried))
    more, missed = [], set[str]()
    for n, used in by_rows.items():
        length = min(n, longest)
        if used <= known:
            continue
        if steps.bucket(length) == n:
            more.append(prompt_of(length))
            known |= used
        else:
            missed |= used - known
    return more, sorted(missed)


def prompt_of(length: int) -> Case:
    """A prompt and its name."""
    return Case(name=f"prompt of {length} {'token' if length == 1 else 'tokens'}", n_prompt=length)


@contextmanager
def full_context(steps: Steps) -> Iterator[Network]:
    """The network as it is recorded when the cache has grown to the whole context; the cache itself stays small."""
    network = steps.network()
    scratch_bytes, counter_bytes = steps.attention_bytes(steps.context)
    scratch = steps.device.create_buffer(scratch_bytes, "device", "attention splits of a full context")
    try:
        steps.device.upload(scratch[:counter_bytes], bytes(counter_bytes))
        yield dataclasses.replace(network, scratch=scratch, max_keys=steps.context)
    finally:
        scratch.release()


def _chunks(n: int, size: int) -> list[int]:
    return [min(size, n - first) for first in range(0, n, size)]
