"""Settings of a network by its name: `launch.fabric=infiniband_sharp`. Each line with its source. Torch-free.

What the user has set in the environment stays; what a site tunes beyond these lines belongs into launch.setup.
"""

from __future__ import annotations

from dataclasses import dataclass

NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
OFI = "https://github.com/aws/aws-ofi-nccl/wiki/Environment-Variables"
EFA = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html"
GKE = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"


@dataclass(frozen=True)
class FabricLine:
    """A variable of the ranks' environment (`setup`: a line of shell on each node instead), why, and who says so."""

    name: str
    value: str
    why: str
    source: str
    setup: bool = False


_INFINIBAND = (
    FabricLine("NCCL_IB_HCA", "mlx5", "adapters whose names begin so carry the traffic of GPUs", NCCL),
    FabricLine("NCCL_NET", "IB", "an error where InfiniBand is not usable, instead of sockets", NCCL),
)
FABRICS: dict[str, tuple[FabricLine, ...]] = {
    "default": (),
    "infiniband": _INFINIBAND,
    "infiniband_sharp": (
        _INFINIBAND[0],
        FabricLine("NCCL_COLLNET_ENABLE", "1", "sums in the switches; takes NVIDIA's SHARP plugin and daemon", NCCL),
    ),
    "roce": (
        *_INFINIBAND,
        FabricLine("NCCL_IB_ROCE_VERSION_NUM", "2", "the GID of RoCE v2, which routers pass on", NCCL),
        FabricLine("NCCL_IB_ADDR_FAMILY", "AF_INET", "its GID of IPv4", NCCL),
    ),
    "efa": (
        FabricLine("FI_PROVIDER", "efa", "libfabric takes EFA, and no sockets", OFI),
        FabricLine("NCCL_SOCKET_IFNAME", "^docker,lo", "what connects ranks at the start is no bridge", EFA),
    ),
    "gcp_tcpxo": (
        FabricLine("NCCL_LIB_DIR", "/usr/local/nvidia/lib64", "where Google's plugin lies on a node", GKE),
        FabricLine(
            "nccl-env-profile",
            ". /usr/local/nvidia/lib64/nccl-env-profile.sh",
            "the settings that go with the plugin's version",
            GKE,
            setup=True,
        ),
    ),
}


def variables(fabric: str) -> dict[str, str]:
    """For the environment of the ranks."""
    return {line.name: line.value for line in FABRICS[fabric] if not line.setup}


def setup(fabric: str) -> list[str]:
    """Lines of shell on each node."""
    return [line.value for line in FABRICS[fabric] if line.setup]
