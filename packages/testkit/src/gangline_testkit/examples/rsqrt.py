# gangline_rsqrt.py: falls as one over the root of the step. train schedule=rsqrt schedule.power=0.4
# (Vaswani et al., arXiv 1706.03762, section 5.3)
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.config import PositiveFloat, ScheduleConfig


@dataclass
class Rsqrt(ScheduleConfig):
    power: PositiveFloat = 0.5  # how fast the rate falls after the warm-up


def build(config, run):
    top = config.warmup(run) + 1
    return lambda step: min((step + 1) / top, (top / (step + 1)) ** config.power)


@hookimpl
def gangline_parts():
    yield Part(group="schedule", name="rsqrt", config=Rsqrt, build="gangline_rsqrt:build", summary="Falls as 1/root")
