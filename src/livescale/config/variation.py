"""Weights of the learned predictor of burstiness, as they come with the package.

`livescale bench variation --train` makes such a file;
`control/stages/formulas/attention.py` uses them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from livescale.values.scaling_policies import VariationWeights

_SHIPPED = Path(__file__).parent / "stage_variation.json"


def variation_weights() -> VariationWeights:
    """The weights of the package."""
    return msgspec.json.decode(_SHIPPED.read_bytes(), type=VariationWeights)
