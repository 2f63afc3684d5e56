"""BlitzScale's experiments (its Figure 17): a trace, a model and a cluster each.

In the paper's form, where each instance prefills or decodes, with the limits and the divided fixed
pools of the authors' configuration files; and colocated, where every instance does both.
"""

from __future__ import annotations

from dataclasses import replace

from livescale.lab.reproduce.base.half_loads import Setup
from livescale.sim.pools.limits import PooledRoles
from livescale.values.units import NS_PER_S

PLAYED_NS = 60 * NS_PER_S
"""Of each trace: its first minute, so that all claims can be measured in minutes."""
SETUPS = {
    "burstgpt": Setup(
        "burstgpt2gpt4_5539015_5min",
        "qwen2.5-72b",
        "blitzscale-a",
        tp_size=4,
        played_ns=PLAYED_NS,
        roles=PooledRoles(1, 7, 1, 7, split=(4, 4)),
    ),
    "azurecode": Setup(
        "azurecode_1320_5min",
        "llama-3-8b",
        "blitzscale-b",
        played_ns=PLAYED_NS,
        roles=PooledRoles(2, 14, 2, 14, split=(10, 6)),
    ),
    "azureconv": Setup(
        "azureconv_1270_8min",
        "mistral-24b",
        "blitzscale-b",
        tp_size=2,
        played_ns=PLAYED_NS,
        roles=PooledRoles(1, 7, 1, 7, split=(5, 3)),
    ),
}
"""With prefill and decode instances."""
NAMES = {"burstgpt": "BurstGPT", "azurecode": "AzureCode", "azureconv": "AzureConv"}
TWO_BURSTS = replace(SETUPS["azurecode"], trace="azurecode_0855_5min", played_ns=None)
"""All of AzureCode's other five minutes, whose bursts lie as far apart as the paper's."""
WHOLE = {name: replace(setup, played_ns=None) for name, setup in SETUPS.items()}
"""The same experiments over all of their traces, as the paper plays them."""
BASELINES = {"sllm": "serverlessllm-30s", "allcache": "allcache"}
OURS = "livescale-cold"
"""The paper compares how parameters move, under one policy for all systems, and the devices of an
instance that goes are revoked (§5.3): none keeps parameters, in no system."""
STEPS = {
    "sllm": "serverlessllm-30s",
    "network": "direct",
    "multicast": "livescale-stop-cold",
    "zigzag": OURS,
}
"""Figure 20's steps, as systems: host caches and storage; the network, every copy to its share, as
the authors' code has it; chains; live."""
