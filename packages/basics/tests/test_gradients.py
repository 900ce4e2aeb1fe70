"""`gradients=onebit` and `gradients=bf16`: codes, bytes sent, error feedback, refused combinations."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gangline.batch import Batch
from gangline.comm.base import Comm
from gangline.comm.wrap import Wrapped
from gangline.config.check import find_problems
from gangline.config.defaults import build_default_run
from gangline.config.sections import Recompute
from gangline.gradients import Bucket, BucketLayout, GradientReduction
from gangline.mesh import Mesh
from gangline.model.compose import Composed
from gangline.model.init import initialise
from gangline.plugin.registry import build
from gangline.runtime import Job
from gangline.train.build import list_notices as notices_of
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.gradients.codec import Bfloat16, Signs
from gangline_basics.gradients.coded import CodedSum
from gangline_basics.gradients.config import CHUNK
from gangline_basics.launch.config import LocalLaunch
from gangline_basics.parallel.reduction_state import ReductionState
from gangline_testkit import rank
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import build_small_run

CODECS = {"bf16": Bfloat16, "onebit": Signs}


class Counting(Wrapped):
    """Comm that counts the bytes this rank sends in the collectives of compressed sums."""

    def __init__(self, inner: Comm, into: Counter[str]) -> None:
        super().__init__(inner)
        self.into = into

    def _all_gather(self, x, into, background):
        self.into["all_gather"] += x.numel() * x.itemsize
        return self.inner._all_gather(x, into, background)

    def _all_to_all(self, x, in_splits, out_splits, background):
        self.into["all_to_all"] += x.numel() * x.itemsize
        return self.inner._all_to_all(x, in_splits, out_splits, background)


class OneBucket:
    """Sums buckets of one layout repeatedly. scatters: whether to reduce-scatter the buckets, else all-reduce."""

    def __init__(self, reduction: GradientReduction, comm: Comm, size: int, scatters: bool) -> None:
        self.reduction, self.comm, self.layout = reduction, comm, BucketLayout(size, (), comm.size, scatters)
        self.state = ReductionState(reduction, [self.layout], self.layout, torch.empty(0)).views

    def sum(self, x: Tensor, step: int = 0) -> Tensor:
        bucket = Bucket(self.layout, x.clone(), self.state, step)
        start = self.reduction.reduce_scatter if self.layout.scatters else self.reduction.reduce
        return start(bucket, self.comm).wait()


def group() -> Comm:
    return rank.make_comms(Mesh.of({"dp_shard": rank.world}), False).get_comm("dp_shard")


def one_sum(reduction: str, parts: list[list[float]], scatters: bool) -> Tensor:
    mine = torch.tensor(parts[rank.index])
    return OneBucket(CodedSum(CODECS[reduction]()), group(), mine.numel(), scatters).sum(mine)


def repeated_sum(reduction: str, times: int, scatters: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total of `times` sums, kept errors, exact sum), of this rank's range if `scatters`, else complete."""
    comm = group()
    mine = torch.randn(1000, generator=torch.Generator().manual_seed(rank.index))
    bucket = OneBucket(CodedSum(CODECS[reduction]()), comm, mine.numel(), scatters)
    total = sum(bucket.sum(mine) for _ in range(times))
    true, half = comm.all_reduce(mine.clone()), len(mine) // comm.size
    lost = comm.all_reduce(bucket.state["worker"].clone())[:, :half].reshape(-1)
    if not scatters:
        lost += comm.all_gather(bucket.state["server"].clone())[:, :half].reshape(-1)
        return total, lost, true
    own = slice(comm.index * half, (comm.index + 1) * half)
    return total, lost[own], true[own]


def counted_sum(reduction: str, size: int, scatters: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    OneBucket(CodedSum(CODECS[reduction]()), Counting(group(), found), size, scatters).sum(torch.ones(size))
    return found


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 10_000))
def test_onebit_code_keeps_signs_and_chunk_means(rows, chunks, seed):
    x = torch.randn(rows, chunks * CHUNK, generator=torch.Generator().manual_seed(seed))
    code = Signs().encode(x)
    assert code.shape == (rows, chunks * (4 + CHUNK // 8))
    y = Signs().decode(code, torch.float32)
    assert torch.equal(y >= 0, x >= 0)
    wanted = x.view(rows, chunks, CHUNK).abs().mean(-1, keepdim=True).expand(-1, -1, CHUNK)
    assert torch.equal(y.abs(), wanted.reshape(rows, -1))


def test_bfloat16_code_equals_bfloat16_rounding():
    x = torch.randn(2, 37)
    assert torch.equal(Bfloat16().decode(Bfloat16().encode(x), torch.float32), x.bfloat16().float())


@pytest.mark.parametrize("scatters", [True, False])
def test_bfloat16_gradients_are_summed_in_float32(scatters):
    """Check 1 + 3 · 2⁻⁹, which would stay 1 if it was summed in bfloat16."""
    parts = [[1.0, 2.0**-9, 2.0**-9, 2.0**-9], [2.0**-9] * 4, [2.0**-9] * 4, [2.0**-9] * 4]
    ranks = get_pool(4).run(one_sum, "bf16", parts, scatters)
    total = torch.tensor(parts).sum(0)
    for index, found in enumerate(ranks):
        assert torch.equal(found, total[index : index + 1] if scatters else total.bfloat16().float())
    assert float(total[0]) > float(torch.tensor(1.0).bfloat16())


@pytest.mark.parametrize("scatters", [True, False])
def test_error_feedback_preserves_gradient_sum(scatters):
    """Check that the total of many sums of a constant gradient differs from the exact total only by the kept errors."""
    sums, errors, true = zip(*get_pool(2).run(repeated_sum, "onebit", 40, scatters), strict=True)
    for total, lost, expected in zip(sums, errors, true, strict=True):
        assert torch.allclose(total + lost, 40 * expected, atol=1e-3)
        assert float((total / 40 - expected).abs().mean()) < 0.1 * float(expected.abs().mean())


@pytest.mark.parametrize(("reduction", "bits"), [("bf16", 16), ("onebit", 1 + 32 / CHUNK)])
@pytest.mark.parametrize("scatters", [True, False])
def test_compressed_sum_sends_expected_bytes(reduction, bits, scatters):
    size, n = 64 * CHUNK, 4
    for found in get_pool(n).run(counted_sum, reduction, size, scatters):
        each = int(bits * size / n / 8)  # bytes of one rank's range
        assert found == Counter(all_to_all=n * each, **({} if scatters else {"all_gather": each}))


@pytest.mark.parametrize(
    ("processes", "notices"), [(1, ["gradients=bf16 has no effect: the run has only one"]), (2, [])]
)
def test_compression_without_data_parallel_peers_gives_notice(processes, notices):
    run = build_default_run(parallel="ddp", gradients="bf16", launch=LocalLaunch(processes=processes))
    found = notices_of(run, Mesh.of(run.parallel.size_axes(processes)))
    assert [notice for notice, expected in zip(found, notices, strict=True) if expected not in notice] == []


def local_arrays(gradients: str) -> tuple[list[tuple[str, tuple[int, ...]]], list[int], bool]:
    """Return (kept arrays with shapes, first rows of local shards, whether a step fills worker arrays) under ddp."""
    run = build_small_run(
        "parallel=ddp", f"gradients={gradients}", "gradients.start_step=0", "parallel.bucket_mb=0.01", "precision=fp32"
    )
    composed, mesh = Composed.of(run), Mesh.of({"dp_replicate": rank.world})
    finish = make_finish(Recompute.none, False)
    job = Job(composed, mesh, rank.make_comms(mesh, False), build(run.precision, run), finish)
    runtime = build(run.parallel, job)
    initialise(runtime.shards(), composed.plan, 0)
    tokens = torch.arange(13)[None] + rank.index
    position, mask = torch.arange(12)[None], torch.ones(1, 12, dtype=torch.bool)
    runtime.step([Batch(tokens[:, :-1], tokens[:, 1:], mask, position, torch.tensor([rank.index]), step=0)])
    registry, shards = runtime.local()
    filled = all(shard.local.any() for shard in shards if shard.name.endswith("worker"))
    return [(name, registry[name].shape) for name in registry], [shard.offset[0] for shard in shards], filled


def test_ddp_saves_error_feedback_arrays_of_each_rank():
    names, rows, filled = zip(*get_pool(2).run(local_arrays, "onebit"), strict=True)
    assert names[0] == names[1]
    assert len(names[0]) > 4, "a worker's and a server's error for each of several buckets"
    assert all(name.startswith("local/gradients/") and shape[0] == 2 for name, shape in names[0])
    assert [set(held) for held in rows] == [{0}, {1}]
    assert all(filled)


def test_loss_scale_with_error_feedback_is_refused():
    """Check onebit with fp16: a step that overflows would leave inf in the error feedback arrays."""
    (problem,) = find_problems(build_default_run(parallel="ddp", gradients="onebit", precision="fp16"))
    assert problem.what == "gradients=onebit does not work with precision=fp16."
    assert not find_problems(build_default_run(parallel="ddp", gradients="bf16", precision="fp16"))


def test_explain_counts_bytes_of_ddp_reductions():
    found = {}
    for gradients in ("sum", "bf16", "onebit"):
        run, mesh = build_default_run(parallel="ddp", gradients=gradients), Mesh.of({"dp_replicate": 2})
        explained = run.parallel.explain(run, mesh)
        (rank_explained,) = explained.ranks
        (sent,) = rank_explained.transfers
        found[gradients] = sent.bytes, rank_explained.bytes.get("gradient reduction state", 0), explained.parameters
    (plain, kept, numbers), (rounded, none, _), (signs, errors, _) = found.values()
    assert (kept, none) == (0, 0)
    assert rounded == plain / 2
    assert signs == pytest.approx(plain * (1 + 32 / CHUNK) / 32, abs=8)
    assert errors == 4 * (numbers + numbers // 2)


def name_state_arrays(bucket_mb: float, name: str = "") -> set[str]:
    """Return the names of the state arrays of onebit under ddp. name: name of the gradients part."""
    run = build_small_run("parallel=ddp", "gradients=onebit", f"parallel.bucket_mb={bucket_mb}", "precision=fp32")
    composed, mesh = Composed.of(run), Mesh.of({"dp_replicate": rank.world})
    job = Job(
        composed, mesh, rank.make_comms(mesh, False), build(run.precision, run), make_finish(Recompute.none, False)
    )
    job.reduction.name = name or job.reduction.name
    return set(build(run.parallel, job).local()[0])


def test_error_feedback_array_names_identify_part_and_buckets():
    """Check that names change with buckets and part, because the arrays then belong to other parameters."""
    names, again, other_buckets, other_part = (
        get_pool(2).run(name_state_arrays, *settings)[0]
        for settings in ((0.01,), (0.01,), (0.02,), (0.01, "theirs/onebit"))
    )
    assert names == again
    assert all(name.startswith("local/gradients/gangline-basics/onebit/") for name in names)
    assert not names & other_buckets
    assert not names & other_part


def test_error_feedback_array_cannot_be_replaced():
    """Check that a reduction can change a kept array only in place, because a replaced array would not be saved."""
    layout = BucketLayout(512, (), 2)
    state = ReductionState(CodedSum(Signs()), [layout], layout, torch.empty(0))
    with pytest.raises(TypeError):
        state.views["worker"] = torch.zeros(2, 256)
