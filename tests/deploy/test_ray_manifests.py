"""deploy/ray: what KubeRay and Kubernetes would take, and right about the program and about Ray."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from deployed import DEPLOY, Object, of_kind, ray_objects, ray_scripts

from livescale.config.ray import RayConfig, load_ray_config
from livescale.config.reading import given_flags, load_config
from livescale.main import build_parser

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "ray-kuberay-v1.json").read_text())
VERSIONS = ("1.37", "1.29")


def cluster() -> Object:
    (found,) = of_kind(ray_objects(), "RayCluster")
    return found


def groups() -> list[Object]:
    """Of the head, then of the workers."""
    spec = cluster()["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def pod_of(group: Object) -> Object:
    pod: Object = group["template"]["spec"]
    return pod


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(version: str) -> None:
    for one in ray_objects():
        if one["apiVersion"].startswith("ray.io/"):
            jsonschema.validate(one, SCHEMA)
        else:
            kubernetes_validate.validate(one, version, strict=True)
    for group in groups():
        as_object = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "one"}}
        as_object["template"] = group["template"]
        kubernetes_validate.validate(as_object, version, strict=True)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("enableInTreeAutoscalling",), True),
        (("authOptions", "mode"), "tokens"),
        (("autoscalerOptions", "upscalingMode"), "Fast"),
        (("headGroupSpec", "rayStartParams", "num-cpus"), 0),
    ],
)
def test_the_schema_refuses_what_is_wrong(place: tuple[str, ...], value: object) -> None:
    wrong = copy.deepcopy(cluster())
    inner: Any = wrong["spec"]
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_the_head_runs_a_command_that_the_program_takes(tmp_path: Path) -> None:
    (line,) = [x for x in ray_scripts(ray_objects())[0].splitlines() if x.startswith("livescale ")]
    words = shlex.split(line.removesuffix("&").replace("$(POD_IP)", "10.0.0.1"))[1:]
    arguments = build_parser("serve").parse_args(words)
    assert arguments.ray == "auto"
    assert str(arguments.config) == "/etc/livescale/pool.yaml"
    file = tmp_path / "pool.yaml"
    (settings,) = of_kind(ray_objects(), "ConfigMap")
    file.write_text(settings["data"]["pool.yaml"])
    config = load_config(file, arguments.models, {}, given_flags(arguments))
    assert config.models
    (http,) = [p for p in ports(groups()[0]) if p["name"] == "http"]
    assert http["containerPort"] == config.port
    pod = pod_of(groups()[0])
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/etc/livescale"]]["configMap"]["name"] == settings["metadata"]["name"]
    # The pool drains while Ray is there, 5 s after the Service has let the pod go.
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert pod["terminationGracePeriodSeconds"] >= config.drain_timeout_s + 5 + 15


def test_a_pod_of_the_worker_group_is_a_host(tmp_path: Path) -> None:
    ray = ray_settings(tmp_path)
    (hosts,) = cluster()["spec"]["workerGroupSpecs"]
    # KubeRay puts the value into a shell's command.
    (value,) = shlex.split(hosts["rayStartParams"]["resources"])
    assert json.loads(value) == {ray.host_resource: 1}
    assert "resources" not in cluster()["spec"]["headGroupSpec"]["rayStartParams"]
    assert hosts["minReplicas"] <= hosts["replicas"] <= hosts["maxReplicas"]
    assert hosts["minReplicas"] <= ray.hosts_min
    assert ray.hosts_max is not None
    assert ray.hosts_max <= hosts["maxReplicas"]


def test_ray_asks_for_a_token_on_every_node_and_scales() -> None:
    spec = cluster()["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    # Which KubeRay does from this version of Ray on.
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52, 0)
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["idleTimeoutSeconds"] > 0
    # None of the containers says otherwise.
    for group in groups():
        for container in pod_of(group)["containers"]:
            assert not any(e["name"].startswith("RAY_") for e in container.get("env", []))


def test_the_version_of_ray_is_the_one_that_the_package_takes() -> None:
    text = (DEPLOY.parent / "pyproject.toml").read_text()
    least, below = cluster()["spec"]["rayVersion"].split(".")[:2], None
    below = f"{least[0]}.{int(least[1]) + 1}"
    assert f'"ray>={".".join(least)},<{below}"' in text
    document = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    assert f"ray[default]=={cluster()['spec']['rayVersion']}" in document


def test_pods_are_confined_and_probed() -> None:
    for group in groups():
        pod = pod_of(group)
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        named = {port["name"] for port in ports(group)}
        for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
            (asked,) = (v for k, v in container[kind].items() if k in ("httpGet", "tcpSocket"))
            assert asked["port"] in named
    # A head that is ready only with hosts would never have any: they reach it by its Service.
    head = pod_of(groups()[0])["containers"][0]
    assert head["readinessProbe"]["httpGet"]["path"] == "/live"
    (hosts,) = cluster()["spec"]["workerGroupSpecs"]
    (raylet,) = ports(hosts)
    assert hosts["rayStartParams"]["node-manager-port"] == str(raylet["containerPort"])


def test_services_and_policies_name_what_is_there() -> None:
    labels = [group["template"]["metadata"]["labels"].items() for group in groups()]
    head_ports = {port["name"] for port in ports(groups()[0])}
    (service,) = of_kind(ray_objects(), "Service")
    assert [own >= service["spec"]["selector"].items() for own in labels] == [True, False]
    assert all(port["targetPort"] in head_ports for port in service["spec"]["ports"])
    everywhere, head = of_kind(ray_objects(), "NetworkPolicy")
    chosen = everywhere["spec"]["podSelector"]["matchLabels"].items()
    assert all(own >= chosen for own in labels)
    chosen = head["spec"]["podSelector"]["matchLabels"].items()
    assert [own >= chosen for own in labels] == [True, False]
    asked = {port["port"] for rule in head["spec"]["ingress"] for port in rule["ports"]}
    assert asked == {"http", "dashboard"} <= head_ports


def ports(group: Object) -> list[Object]:
    found: list[Object] = pod_of(group)["containers"][0]["ports"]
    return found


def ray_settings(tmp_path: Path) -> RayConfig:
    file = tmp_path / "pool.yaml"
    file.write_text((DEPLOY / "ray" / "pool.yaml").read_text())
    return load_ray_config(file, load_config(file, [], {}, {}))
