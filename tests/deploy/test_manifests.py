"""Kubernetes manifests and the Helm chart: valid by the API's schemas, and right about the program
that they run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from chart_values import VALUES
from deployed import (
    CHART,
    DEPLOY,
    PLAIN,
    TOKEN,
    Object,
    chart_objects,
    command_of,
    of_kind,
    plain_objects,
    pods,
    pool_yaml,
    rendered,
)
from go_templates import merge

from livescale.common.addresses import parse_address
from livescale.config.pool import PoolConfig
from livescale.config.reading import given_flags, load_config
from livescale.gateway.metrics.metrics_page import HELP, PREFIX
from livescale.main import build_parser
from livescale.runtime.wire.token import read_token

SCHEMAS = Path(__file__).parent / "schemas"
#: of the API of Kubernetes: the newest that is held against, and the oldest that the chart takes
VERSIONS = ("1.37", "1.29")
CLUSTER = {"$(POD_IP)": "10.0.0.1", "$(POD_NAME)": "livescale-host-0"}
GRACE_S = 15

every_way = pytest.mark.parametrize("objects", rendered().values(), ids=rendered().keys())


def config_of(objects: list[Object], tmp_path: Path) -> PoolConfig:
    """The head's settings, as `serve` would read them from its file and its command line."""
    file = tmp_path / "pool.yaml"
    file.write_text(pool_yaml(objects))
    words = command_of(objects, "serve", CLUSTER | {"/etc/livescale/pool.yaml": str(file)})
    arguments = build_parser(words[0]).parse_args(words)
    return load_config(arguments.config, arguments.models, {}, given_flags(arguments))


def chosen_by(selector: Object, labels: list[dict[str, str]]) -> list[dict[str, str]]:
    """Those of the labels of pods that the selector chooses."""
    wanted = selector["matchLabels"].items()
    among = {rule["key"]: rule["values"] for rule in selector.get("matchExpressions", [])}
    assert all(rule["operator"] == "In" for rule in selector.get("matchExpressions", []))
    return [
        own
        for own in labels
        if own.items() >= wanted and all(own.get(key) in values for key, values in among.items())
    ]


def component(one: Object) -> str:
    """Of a workload."""
    return str(one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


@pytest.mark.parametrize("version", VERSIONS)
@every_way
def test_objects_are_valid(objects: list[Object], version: str) -> None:
    scaled = json.loads((SCHEMAS / "scaledobject-keda-v1alpha1.json").read_text())
    for one in objects:
        if one["apiVersion"].startswith("keda.sh/"):
            jsonschema.validate(one, scaled)
        else:
            kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    objects = plain_objects()
    of_kind(objects, "Deployment")[0]["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(of_kind(objects, "Deployment")[0], VERSIONS[0], strict=True)


@every_way
def test_names_and_selectors_lead_somewhere(objects: list[Object]) -> None:
    named = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(named)) == len(named)
    labels = [one["spec"]["template"]["metadata"]["labels"] for one, _ in pods(objects)]
    for one, pod in pods(objects):
        # A workload chooses its own pods alone.
        own = one["spec"]["template"]["metadata"]["labels"]
        assert [labels.index(found) for found in chosen_by(one["spec"]["selector"], labels)] == [
            labels.index(own)
        ]
        for spread in pod.get("topologySpreadConstraints", []):
            assert own in chosen_by(spread["labelSelector"], labels)
    for service in of_kind(objects, "Service"):
        assert chosen_by({"matchLabels": service["spec"]["selector"]}, labels)
    budgets = of_kind(objects, "PodDisruptionBudget")
    kept = [own for one in budgets for own in chosen_by(one["spec"]["selector"], labels)]
    # A pod of two budgets could never be evicted.
    assert all(kept.count(own) == 1 for own in kept)
    for policy in of_kind(objects, "NetworkPolicy"):
        assert chosen_by(policy["spec"]["podSelector"], labels)
    (hosts,) = of_kind(objects, "StatefulSet")
    assert ("Service", hosts["spec"]["serviceName"]) in named
    for one, pod in pods(objects):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes), one
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in named
    for scaler in of_kind(objects, "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in named
    for binding in of_kind(objects, "RoleBinding"):
        (account,) = binding["subjects"]
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in named
        assert (account["kind"], account["name"]) in named


@every_way
def test_commands_and_settings_are_the_programs_own(objects: list[Object], tmp_path: Path) -> None:
    config = config_of(objects, tmp_path)
    assert config.workers == 0
    assert config.models
    words = command_of(objects, "join", CLUSTER)
    arguments = build_parser("join").parse_args(words)
    assert arguments.workers >= 1
    host, port = parse_address(arguments.head, "head", is_own=False)
    assert config.listen is not None
    assert parse_address(config.listen, "listen")[1] == port
    heads = [f"{host}:{port}", *(config.heads.split(",") if config.heads is not None else [])]
    for host, port in (parse_address(head, "heads", is_own=False) for head in heads):
        (control,) = (s for s in of_kind(objects, "Service") if s["metadata"]["name"] == host)
        assert [p["port"] for p in control["spec"]["ports"]] == [port]
        # The head is ready only when hosts have joined.
        assert control["spec"]["publishNotReadyAddresses"]


@every_way
def test_gateways_join_where_hosts_do_and_serve_as_the_head_does(
    objects: list[Object], tmp_path: Path
) -> None:
    config = config_of(objects, tmp_path)
    if not any(component(one) == "gateway" for one, _ in pods(objects)):
        return
    words = command_of(objects, "gateway", CLUSTER)
    own = build_parser("gateway").parse_args(words)
    hosts = build_parser("join").parse_args(command_of(objects, "join", CLUSTER))
    assert own.join == hosts.head
    assert own.token_file == Path(str(config.token_file))
    assert own.name == CLUSTER["$(POD_NAME)"]
    given = vars(own)
    for name in ("api_key_file", "ssl_certfile", "ssl_keyfile", "tls_dir"):
        assert given.get(name) == getattr(config, name)
    assert (own.host, int(own.port)) == (config.host, config.port)


@every_way
def test_of_two_heads_one_acts_by_a_lease(objects: list[Object], tmp_path: Path) -> None:
    """Both are told the same but that one stands by, and only where the lease is one of Kubernetes
    do they have an account, which may use that lease alone."""
    config = config_of(objects, tmp_path)
    heads = [(one, pod) for one, pod in pods(objects) if component(one) in ("head", "standby")]
    assert (len(heads) == 2) == (config.lease is not None)
    is_kubernetes = config.lease is not None and config.lease.startswith("kubernetes:")
    for _, pod in heads:
        assert pod["automountServiceAccountToken"] == is_kubernetes
        assert ("serviceAccountName" in pod) == is_kubernetes
        mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert config.lease is None or is_kubernetes or str(Path(config.lease).parent) in mounts
    roles = of_kind(objects, "Role")
    assert (len(roles) == 1) == is_kubernetes
    for role in roles:
        named, unnamed = role["rules"]
        assert config.lease == f"kubernetes:{named['resourceNames'][0]}"
        assert (named["verbs"], unnamed["verbs"]) == (["get", "update"], ["create"])
        for rule in role["rules"]:
            assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
    if config.lease is not None:
        first = command_of(objects, "serve", CLUSTER)
        second = command_of(objects, "serve", CLUSTER, is_standby=True)
        assert build_parser("serve").parse_args(second).standby
        own = {word for word in {*first, *second} if not word.startswith(("--log-level", "--st"))}
        assert own <= {*first} & {*second}


@every_way
def test_ports_agree(objects: list[Object], tmp_path: Path) -> None:
    config = config_of(objects, tmp_path)
    assert config.listen is not None
    ports = {"http": config.port, "control": int(config.listen.rpartition(":")[2])}
    scheme = "HTTP" if config.ssl_certfile is None else "HTTPS"
    for one, pod in pods(objects):
        (container,) = pod["containers"]
        if one["kind"] == "Deployment":
            wanted = ["http"] if component(one) == "gateway" else ["http", "control"]
            own = {p["name"]: p["containerPort"] for p in container["ports"]}
            assert own == {name: ports[name] for name in wanted}
            for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
                asked = container[kind]["httpGet"]
                assert (asked["port"], asked.get("scheme", "HTTP")) == ("http", scheme)
    for service in of_kind(objects, "Service"):
        for port in service["spec"].get("ports", []):
            assert port["targetPort"] in ports
    for policy in of_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            for port in rule["ports"]:
                assert port["port"] in (*ports, 1024)


@every_way
def test_there_is_time_to_drain(objects: list[Object], tmp_path: Path) -> None:
    config = config_of(objects, tmp_path)
    for one, pod in pods(objects):
        waits_s = 0
        for container in pod["containers"]:
            before = container.get("lifecycle", {}).get("preStop")
            if before is not None:
                command, seconds = before["exec"]["command"]
                assert command == "sleep"
                waits_s = int(seconds)
        grace_s = pod["terminationGracePeriodSeconds"]
        assert grace_s >= config.drain_timeout_s + waits_s + GRACE_S, one["metadata"]["name"]


@every_way
def test_pods_are_confined_and_get_no_variables_of_services(objects: list[Object]) -> None:
    """A Service named livescale… makes variables LIVESCALE_…, which `serve` would refuse."""
    for _, pod in pods(objects):
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is ("serviceAccountName" in pod)
        assert pod["securityContext"]["runAsNonRoot"] is True
        # Secrets are root's: without a group the user could not read them.
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o400
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounts = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
            assert "/tmp" in mounts


@every_way
def test_hosts_are_scaled_by_a_figure_that_the_gateway_shows(objects: list[Object]) -> None:
    arguments = build_parser("join").parse_args(command_of(objects, "join", CLUSTER))
    for scaler in of_kind(objects, "ScaledObject"):
        (trigger,) = scaler["spec"]["triggers"]
        asked = trigger["metadata"]
        figure = f"{PREFIX}workers_wanted"
        assert figure.removeprefix(PREFIX) in HELP
        assert figure in asked.get("query", asked.get("valueLocation"))
        target = asked.get("threshold", asked.get("targetValue"))
        assert int(target) == arguments.workers
        assert trigger["metricType"] == "AverageValue"
        if "url" in asked:
            scheme, _, place = asked["url"].partition("://")
            assert (scheme == "https") == ("unsafeSsl" in asked)
            name, _, port = place.partition("/")[0].partition(":")
            (service,) = (
                s
                for s in of_kind(objects, "Service")
                if s["metadata"]["name"] == name.split(".")[0]
            )
            assert [p["port"] for p in service["spec"]["ports"]] == [int(port)]


def test_gpus_are_as_many_as_workers() -> None:
    objects = chart_objects(VALUES["gpu"])
    arguments = build_parser("join").parse_args(command_of(objects, "join", CLUSTER))
    (hosts,) = of_kind(objects, "StatefulSet")
    limits = hosts["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == arguments.workers == 8
    assert arguments.device == "cuda"


def test_the_token_that_the_document_makes_is_one(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o400)
    assert read_token(file).secret in TOKEN
    assert '{"secret": "%s"}' in (DEPLOY.parent / "docs" / "deploy.md").read_text()


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_values_fit_their_schema(values: Object) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    own = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(merge(own, values), schema)
    assert set(own) == set(schema["properties"]) - {"global"}


@pytest.mark.parametrize(
    "values",
    [
        {"host": {}},
        {"hosts": {"device": "abacus"}},
        {"hosts": {"devices": 0}},
        {"pool": {"listen": "10.0.0.1:7000"}},
        {"pool": {"models": []}},
        {"head": {"readinessPath": "/metrics"}},
        {"token": {"secretName": ""}},
        {"tls": {"headSecret": "tls-head"}},
        {"tls": {"hostsSecret": "tls-hosts"}},
        {"tls": {"gatewaysSecret": "tls-gateways"}},
        {"https": {"certificate": "x"}},
        {"standby": {"lease": "pool.lease"}},
        {"pool": {"heads": "10.0.0.1:7000"}},
        {"pool": {"lease": "/lease"}},
        {"pool": {"ssl_certfile": "cert.pem"}},
        {"gateways": {"replicas": -1}},
        {"gateways": {"readinessPath": "/metrics"}},
        {"networkPolicy": {"apiServerPorts": []}},
    ],
)
def test_wrong_values_are_refused(values: Object) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    own = yaml.safe_load((CHART / "values.yaml").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merge(own, values), schema)


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


@pytest.mark.usefixtures("machine")
def test_kustomize_renders_the_same(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    shutil.copytree(PLAIN, tmp_path / "k")
    (tmp_path / "k" / "token").write_text(TOKEN)
    words = ["kubectl", "kustomize", str(tmp_path / "k")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = by_name(list(yaml.safe_load_all(done.stdout)))
    expected = by_name(plain_objects())
    assert set(found) == {key for key in expected if key[0] != "ScaledObject"}
    for key, one in found.items():
        assert one == expected[key] or key[0] in ("Deployment", "StatefulSet"), key
    for _, pod in pods(list(found.values())):
        assert pod["containers"][0]["image"] == "livescale:latest"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_helm_renders_the_same(values: Object, tmp_path: Path) -> None:
    if shutil.which("helm") is None:
        pytest.skip("no helm here: what is rendered is go_templates.py's")
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    words = ["helm", "template", "test-release", str(CHART), "--values", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert by_name(found) == by_name(chart_objects(values))
