"""Named sets of network settings (NCCL, EFA, TCPXO) for `launch.fabric`, each setting with its source. Torch-free.

Environment variables that the user has set take precedence. Further tuning for a site belongs in launch.setup.
"""

from __future__ import annotations

from dataclasses import dataclass

# Names, values and defaults are from these pages. They are untested: no such network was available.
NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
OFI = "https://github.com/aws/aws-ofi-nccl/blob/2daf7d303aa139a03140aa530957d10521e4478d/doc/efa-env-var.md"
_GKE = (
    "https://github.com/GoogleCloudPlatform/container-engine-accelerators/blob/089e022496faec95606d663eda8767078d347e34"
)
TCPXO = f"{_GKE}/gpudirect-tcpxo/nccl-test-latest.yaml"
# Link to the vendor's guide; its table of variables was not read.
GKE = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"


@dataclass(frozen=True)
class FabricLine:
    """Environment variable of the ranks (or with `setup` a shell line on each node), with its reason and source."""

    name: str
    value: str
    why: str
    source: str
    setup: bool = False


_INFINIBAND = (
    FabricLine("NCCL_IB_HCA", "mlx5", "use the adapters whose names start with mlx5 for GPU traffic", NCCL),
    FabricLine("NCCL_NET", "IB", "fail if InfiniBand is unusable, instead of using TCP sockets", NCCL),
)
FABRICS: dict[str, tuple[FabricLine, ...]] = {
    "default": (),
    "infiniband": _INFINIBAND,
    "infiniband_sharp": (
        _INFINIBAND[0],
        FabricLine(
            "NCCL_COLLNET_ENABLE", "1", "reduce in the switches; requires NVIDIA's SHARP plugin and daemon", NCCL
        ),
    ),
    "roce": (
        *_INFINIBAND,
        FabricLine("NCCL_IB_ROCE_VERSION_NUM", "2", "use the GID of RoCE v2, which is routable", NCCL),
        FabricLine("NCCL_IB_ADDR_FAMILY", "AF_INET", "use the IPv4 GID of the adapter", NCCL),
    ),
    "efa": (
        FabricLine("FI_PROVIDER", "efa", "needed up to aws-ofi-nccl 1.5.0; later versions select efa on EC2", OFI),
        FabricLine(
            "NCCL_SOCKET_IFNAME", "^docker,lo", "exclude Docker bridges and loopback from NCCL's bootstrap", NCCL
        ),
    ),
    "gcp_tcpxo": (
        FabricLine(
            "nccl-lib-dir",
            'export NCCL_LIB_DIR="${NCCL_LIB_DIR:-/usr/local/nvidia/lib64}"',
            "path of Google's NCCL plugin in a GKE pod; for another path, set NCCL_LIB_DIR before",
            TCPXO,
            setup=True,
        ),
        FabricLine(
            "ld-library-path",
            'export LD_LIBRARY_PATH="$NCCL_LIB_DIR${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
            "let NCCL find the plugin",
            TCPXO,
            setup=True,
        ),
        FabricLine(
            "nccl-env-profile",
            '. "$NCCL_LIB_DIR/nccl-env-profile.sh" || exit 2',
            "load the plugin's settings; the job fails without this file, because NCCL would use sockets",
            GKE,
            setup=True,
        ),
        FabricLine(
            "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY", "/dev/aperture_devices", "path of the plugin's devices", TCPXO
        ),
    ),
}

_EFA = "https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html"  # this page was not read
_SHARED = "https://github.com/Mellanox/k8s-rdma-shared-dev-plugin/blob/master/README.md"
# (example of the resource that a pod requests to see a network adapter, its source). The name after rdma/ is set by the
# site, in the settings of its device plugin.
POD_DEVICES: dict[str, tuple[str, str]] = {
    "infiniband": ("rdma/hca_shared_devices_a:1", _SHARED),
    "infiniband_sharp": ("rdma/hca_shared_devices_a:1", _SHARED),
    "roce": ("rdma/hca_shared_devices_a:1", _SHARED),
    "efa": ("vpc.amazonaws.com/efa:32", _EFA),
}


def get_variables(fabric: str) -> dict[str, str]:
    """Return the environment variables that `fabric` sets for ranks, name -> value."""
    return {line.name: line.value for line in FABRICS[fabric] if not line.setup}


def get_setup_lines(fabric: str) -> list[str]:
    """Return the shell lines of `fabric` that each node runs before its agent."""
    return [line.value for line in FABRICS[fabric] if line.setup]
