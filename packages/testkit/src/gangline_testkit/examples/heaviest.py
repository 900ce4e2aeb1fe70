# gangline_heaviest.py: ranks send their largest gradients. train parallel=ddp launch.processes=2 gradients=heaviest
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.config import GradientsConfig, ShareBelowOne


@dataclass
class Heaviest(GradientsConfig):
    """Sends the largest gradients of a bucket, and adds the rest to the next step (top-k, arXiv 1704.05021)."""

    share: ShareBelowOne = 0.25  # share of a bucket's gradients to send

    def count_sent(self, size, ranks, scatters, itemsize):
        return self.share * size * (itemsize + 8) * (ranks - 1)  # bytes: values and int64 indices, to each other rank

    def count_state(self, size, ranks, scatters):
        return size


def build(config, run):
    from gangline.comm.ordered import Later, sum_rows
    from gangline.gradients import GradientReduction

    class HeaviestReduction(GradientReduction):
        def get_array_shapes(self, layout):
            return {"error": (layout.size,)}

        def reduce(self, bucket, comm):
            flat, error = bucket.flat, bucket.state["error"]
            error += flat
            places = error.abs().topk(max(1, int(config.share * flat.numel()))).indices
            values = error[places]
            error[places] = 0
            every_place = comm.start_all_gather(places)

            def add(every_value):
                rows = flat.new_zeros(comm.size, flat.numel())
                rows.scatter_(1, every_place.wait().view(comm.size, -1), every_value.view(comm.size, -1))
                return sum_rows(rows)  # in rank order, so that all ranks get equal bits

            return Later(comm.start_all_gather(values), add)

    return HeaviestReduction()


@hookimpl
def gangline_gradient_reductions():
    yield Part(
        name="heaviest",
        config=Heaviest,
        build="gangline_heaviest:build",
        summary="Top-k gradients with error feedback",
        layout_dependent="each rank sends only its largest gradients, and adds the rest to its next step",
    )
