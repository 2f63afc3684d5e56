"""A warm process imports nothing more when it is given a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slowness import patient


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_the_modules_of_every_family_are_imported() -> None:
    program = (
        "import sys; from livescale.engine.warm_up import warm_up; warm_up();"
        "from livescale.engine.files.families import FAMILIES; before = set(sys.modules);"
        "import transformers; [getattr(transformers, name) for name in FAMILIES];"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING;"
        "[CONFIG_MAPPING[family.model_type]() for family in FAMILIES.values()];"
        "print(sorted(name for name in set(sys.modules) - before if '.models.' in name))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(60),
    )
    assert done.stdout.strip() == "[]"
