"""Weights of the learned predictor of burstiness, as they come with the package.

`livescale bench variation --train` makes such a file;
`control/stages/formulas/attention.py` uses them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from livescale.common.settings import ConfigError
from livescale.values.scaling_policies import VariationWeights

_SHIPPED = Path(__file__).parent / "stage_variation.json"


def variation_weights(path: Path = _SHIPPED) -> VariationWeights:
    """Read a file of weights, without `path` those of the package. Raises ConfigError."""
    try:
        weights = msgspec.json.decode(path.read_bytes(), type=VariationWeights)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    hidden, wide = len(weights.projection), len(weights.layer)
    columns = {len(row) for row in weights.projection}
    fits = (
        len(columns) == 1
        and len(weights.attention) == 2 * hidden
        and {len(row) for row in weights.layer} == {hidden}
        and len(weights.layer_bias) == len(weights.output) == wide
    )
    if not fits:
        raise ConfigError(f"{path}: the rows have inconsistent lengths")
    return weights
