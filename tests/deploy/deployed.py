"""What is in deploy/, rendered: objects of Kubernetes, and the command lines in them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from chart_values import VALUES
from go_templates import render_chart

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "livescale"
PLAIN = DEPLOY / "kubernetes"
RAY = DEPLOY / "ray"
TOKEN = '{"secret": "00112233445566778899aabbccddeeff"}\n'
Object = dict[str, Any]


def plain_objects() -> list[Object]:
    """What `kubectl apply -k deploy/kubernetes` makes, and keda.yaml."""
    return _kustomized(PLAIN, "keda.yaml")


def ray_objects() -> list[Object]:
    """What `kubectl apply -k deploy/ray` makes."""
    return _kustomized(RAY)


def ray_scripts(objects: list[Object]) -> list[str]:
    """What the containers of a RayCluster run in bash: the head's, then those of its workers."""
    (cluster,) = of_kind(objects, "RayCluster")
    spec = cluster["spec"]
    scripts = []
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["command"] == ["tini", "--", "bash", "-c"]
        (script,) = container["args"]
        scripts.append(str(script))
    return scripts


def chart_objects(values: Object) -> list[Object]:
    return [one for text in render_chart(CHART, values).values() for one in _objects(text)]


def rendered() -> dict[str, list[Object]]:
    """All that is rendered, by where it comes from."""
    charts = {f"chart, {name}": chart_objects(values) for name, values in VALUES.items()}
    return {"plain": plain_objects()} | charts


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def pods(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Each workload, and the spec of its pods."""
    for one in objects:
        if "template" in one.get("spec", {}):
            yield one, one["spec"]["template"]["spec"]


def probed_paths(objects: list[Object]) -> set[str]:
    return {
        container[kind]["httpGet"]["path"]
        for _, pod in pods(objects)
        for container in pod["containers"]
        for kind in ("readinessProbe", "livenessProbe", "startupProbe")
        if kind in container
    }


def pool_yaml(objects: list[Object]) -> str:
    (config,) = of_kind(objects, "ConfigMap")
    return str(config["data"]["pool.yaml"])


def command_of(
    objects: list[Object], verb: str, replaced: dict[str, str], *, is_standby: bool = False
) -> list[str]:
    """The words behind `livescale` of the pods that run this command, with other texts for some
    that the cluster knows."""
    (args,) = (
        container["args"]
        for _, pod in pods(objects)
        for container in pod["containers"]
        if container["args"][0] == verb and ("--standby" in container["args"]) == is_standby
    )
    words = []
    for word in args:
        for text, other in replaced.items():
            word = word.replace(text, other)
        words.append(word)
    return words


# -- helpers, in the order used -------------------------------------------------------------------


def _kustomized(directory: Path, *more: str) -> list[Object]:
    """What a kustomization makes, and the objects of further files."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    names = [*kustomization["resources"], *more]
    objects = [one for name in names for one in _objects((directory / name).read_text())]
    for generated in kustomization["configMapGenerator"]:
        data = {name: (directory / name).read_text() for name in generated["files"]}
        objects.append(_generated("ConfigMap", generated["name"], data))
    for generated in kustomization.get("secretGenerator", []):
        data = dict.fromkeys(generated["files"], base64.b64encode(TOKEN.encode()).decode())
        objects.append(_generated("Secret", generated["name"], data) | {"type": "Opaque"})
    return objects


def _objects(text: str) -> list[Object]:
    return [one for one in yaml.safe_load_all(text) if one]


def _generated(kind: str, name: str, data: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "data": data}
