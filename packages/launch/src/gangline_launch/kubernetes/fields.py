"""The fields that our manifests use, from the published definitions: name, type, whether it must be there.

Ours to keep: no schema is copied. What a manifest holds beyond these, or in another type, is found by `unknown`.

Sources: JobSet v1alpha2, and the Job and the pod in it, at github.com/kubernetes-sigs/jobset
08dfbdfd682714a9ab929633eca8dc95315187e7, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml;
LocalQueue v1beta1 at github.com/kubernetes-sigs/kueue ff69552e79ad21652c36caa97038382e55625cf7,
config/components/crd/bases/kueue.x-k8s.io_localqueues.yaml, served there beside v1beta2, and alone by older Kueues.
Each field here is in them, of this type; what they need, we need, and some more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

META = {"metadata": (dict, True), "metadata.name": (str, True), "metadata.namespace": (str, False)}
_JOB = "spec.replicatedJobs[].template.spec"
_POD = f"{_JOB}.template"
_BOX = f"{_POD}.spec.containers[]"

FIELDS: dict[str, dict[str, tuple[type, bool]]] = {
    "LocalQueue": {
        "apiVersion": (str, True),
        "kind": (str, True),
        **META,
        "spec": (dict, True),
        "spec.clusterQueue": (str, True),
    },
    "JobSet": {
        "apiVersion": (str, True),
        "kind": (str, True),
        **META,
        "metadata.labels": (dict, False),
        "spec": (dict, True),
        "spec.network": (dict, False),
        "spec.network.enableDNSHostnames": (bool, False),
        "spec.network.publishNotReadyAddresses": (bool, False),
        "spec.failurePolicy": (dict, False),
        "spec.failurePolicy.maxRestarts": (int, False),
        "spec.failurePolicy.restartStrategy": (str, False),
        "spec.failurePolicy.rules": (list, False),
        "spec.failurePolicy.rules[].name": (str, True),
        "spec.failurePolicy.rules[].action": (str, True),
        "spec.failurePolicy.rules[].onJobFailureReasons": (list, False),
        "spec.replicatedJobs": (list, True),
        "spec.replicatedJobs[].name": (str, True),
        "spec.replicatedJobs[].replicas": (int, False),
        "spec.replicatedJobs[].template": (dict, True),
        _JOB: (dict, True),
        f"{_JOB}.parallelism": (int, False),
        f"{_JOB}.completions": (int, False),
        f"{_JOB}.completionMode": (str, False),
        f"{_JOB}.backoffLimit": (int, False),
        f"{_JOB}.podFailurePolicy": (dict, False),
        f"{_JOB}.podFailurePolicy.rules": (list, True),
        f"{_JOB}.podFailurePolicy.rules[].action": (str, True),
        f"{_JOB}.podFailurePolicy.rules[].onExitCodes": (dict, False),
        f"{_JOB}.podFailurePolicy.rules[].onExitCodes.operator": (str, True),
        f"{_JOB}.podFailurePolicy.rules[].onExitCodes.values": (list, True),
        f"{_JOB}.podFailurePolicy.rules[].onPodConditions": (list, False),
        f"{_JOB}.podFailurePolicy.rules[].onPodConditions[].type": (str, True),
        f"{_JOB}.podFailurePolicy.rules[].onPodConditions[].status": (str, True),
        _POD: (dict, True),
        f"{_POD}.metadata": (dict, False),
        f"{_POD}.metadata.labels": (dict, False),
        f"{_POD}.metadata.annotations": (dict, False),
        f"{_POD}.spec": (dict, True),
        f"{_POD}.spec.restartPolicy": (str, False),
        f"{_POD}.spec.terminationGracePeriodSeconds": (int, False),
        f"{_POD}.spec.containers": (list, True),
        f"{_BOX}.name": (str, True),
        f"{_BOX}.image": (str, True),
        f"{_BOX}.command": (list, False),
        f"{_BOX}.env": (list, False),
        f"{_BOX}.env[].name": (str, True),
        f"{_BOX}.env[].value": (str, False),
        f"{_BOX}.env[].valueFrom": (dict, False),
        f"{_BOX}.env[].valueFrom.fieldRef": (dict, False),
        f"{_BOX}.env[].valueFrom.fieldRef.fieldPath": (str, True),
        f"{_BOX}.envFrom": (list, False),
        f"{_BOX}.envFrom[].secretRef": (dict, False),
        f"{_BOX}.envFrom[].secretRef.name": (str, True),
        f"{_BOX}.securityContext": (dict, False),
        f"{_BOX}.securityContext.capabilities": (dict, False),
        f"{_BOX}.securityContext.capabilities.add": (list, False),
        f"{_BOX}.resources": (dict, False),
        f"{_BOX}.resources.limits": (dict, False),
        f"{_BOX}.volumeMounts": (list, False),
        f"{_BOX}.volumeMounts[].name": (str, True),
        f"{_BOX}.volumeMounts[].mountPath": (str, True),
        f"{_POD}.spec.volumes": (list, False),
        f"{_POD}.spec.volumes[].name": (str, True),
        f"{_POD}.spec.volumes[].persistentVolumeClaim": (dict, False),
        f"{_POD}.spec.volumes[].persistentVolumeClaim.claimName": (str, True),
        f"{_POD}.spec.volumes[].emptyDir": (dict, False),
        f"{_POD}.spec.volumes[].emptyDir.medium": (str, False),
    },
}
OPEN = ("labels", "annotations", "limits")  # maps whose keys are the user's


def unknown(manifest: Mapping[str, Any]) -> list[str]:
    """What is wrong with an object: fields that the table lacks, of another type, or missing."""
    table = FIELDS[manifest["kind"]]
    return [*_wrong(manifest, "", table), *_missing(manifest, "", table)]


def _wrong(value: Any, path: str, table: Mapping[str, tuple[type, bool]]) -> Iterator[str]:
    if path and not path.endswith("[]"):
        if path not in table:
            yield f"{path} is in no table"
            return
        if type(value) is not table[path][0]:
            yield f"{path} is a {type(value).__name__}"
            return
    if isinstance(value, Mapping) and path.rpartition(".")[2] not in OPEN:
        for name, inner in value.items():
            yield from _wrong(inner, f"{path}.{name}".lstrip("."), table)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, Mapping):
                yield from _wrong(inner, f"{path}[]", table)


def _missing(value: Any, path: str, table: Mapping[str, tuple[type, bool]]) -> Iterator[str]:
    if isinstance(value, Mapping) and path.rpartition(".")[2] not in OPEN:
        for name, (_, needed) in table.items():
            above, _, last = name.rpartition(".")
            if needed and above == path and last not in value:
                yield f"{name} is missing"
        for name, inner in value.items():
            yield from _missing(inner, f"{path}.{name}".lstrip("."), table)
    elif isinstance(value, list):
        for inner in value:
            yield from _missing(inner, f"{path}[]", table)
