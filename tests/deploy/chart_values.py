"""Values that the chart is rendered with in tests: every branch of the templates is taken."""

from __future__ import annotations

from typing import Any

VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gpu": {
        "image": {"repository": "example/livescale", "tag": "cuda"},
        "hosts": {
            "devices": 8,
            "device": "cuda",
            "runtimeClassName": "nvidia",
            "nodeSelector": {"accelerator": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "extraArgs": ["--arena-bytes=60GiB"],
            "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "400Gi"}},
        },
        "keda": {
            "enabled": True,
            "maxHosts": 16,
            "prometheus": "http://prometheus.monitoring:9090",
        },
    },
    "keys": {
        "apiKeys": {"secretName": "keys"},
        "tls": {"headSecret": "tls-head", "hostsSecret": "tls-hosts"},
        "https": {"secretName": "https"},
        "gateways": {
            "replicas": 5,
            "readinessPath": "/live",
            "extraArgs": ["--cors-origins=https://example.org"],
            "extraVolumes": [{"name": "cache", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache"}],
            "nodeSelector": {"zone": "edge"},
            "tolerations": [{"operator": "Exists"}],
            "maxUnavailable": "40%",
            "service": {"type": "LoadBalancer", "port": 443},
        },
        "networkPolicy": {"enabled": False},
        "keda": {"enabled": True, "minHosts": 0},
        "pool": {"drain_timeout_s": 120, "models": ["/models/a", "/models/b"]},
        "head": {
            "readinessPath": "/live",
            "extraArgs": ["--state=/state/pool"],
            "extraVolumes": [
                {"name": "state", "persistentVolumeClaim": {"claimName": "livescale-state"}}
            ],
            "extraVolumeMounts": [{"name": "state", "mountPath": "/state"}],
            "nodeSelector": {"disk": "fast"},
            "tolerations": [{"operator": "Exists"}],
        },
        "hosts": {
            "extraVolumes": [{"name": "cache", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache"}],
            "maxUnavailable": "25%",
        },
        "service": {"type": "LoadBalancer", "port": 80},
    },
    "two heads": {
        "standby": {
            "enabled": True,
            "extraArgs": ["--log-level=info"],
            "nodeSelector": {"disk": "fast"},
            "tolerations": [{"operator": "Exists"}],
        },
        "gateways": {"replicas": 0},
        "networkPolicy": {"apiServerPorts": [{"protocol": "TCP", "port": 16443}]},
        "pool": {"lease_ms": 5000},
    },
    "two heads by a file": {
        "standby": {
            "enabled": True,
            "lease": "/lease/pool.lease",
            "extraVolumes": [
                {"name": "lease", "persistentVolumeClaim": {"claimName": "livescale-lease"}}
            ],
            "extraVolumeMounts": [{"name": "lease", "mountPath": "/lease"}],
        },
        "head": {
            "extraVolumes": [
                {"name": "lease", "persistentVolumeClaim": {"claimName": "livescale-lease"}}
            ],
            "extraVolumeMounts": [{"name": "lease", "mountPath": "/lease"}],
        },
        "tls": {"headSecret": "h", "hostsSecret": "m", "gatewaysSecret": "g"},
    },
}
