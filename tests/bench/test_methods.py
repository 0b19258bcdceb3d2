"""The registry: names are unique and known where they are used, policies are the spec's."""

import re

import pytest

from bench.forward import FORWARD_METHODS
from bench.methods import METHODS, select_methods
from bench.spec import REPOSITORY, StepSpec


def test_a_policy_takes_tier_and_tile_from_the_spec_unless_the_method_fixes_them():
    default = METHODS["offload"].make_policy(StepSpec("llama", 63))
    assert (default.mode, default.tier, default.tile_tokens) == ("auto", "auto", 2048)
    spec = StepSpec("llama", 63, tier="device", tile=17)
    tiled = METHODS["offload-tiled"].make_policy(spec)
    assert (tiled.mode, tiled.tier, tiled.tile_tokens) == ("tiled", "device", 17)
    assert METHODS["offload-host"].make_policy(spec).tier == "host"
    assert METHODS["offload-checkpoint"].make_policy(spec).mode == "checkpoint"


def test_unknown_and_repeated_methods_are_refused_with_what_was_expected():
    with pytest.raises(ValueError, match="expected some of plain, checkpoint"):
        select_methods("plain,fastest")
    with pytest.raises(ValueError, match="each once"):
        select_methods("plain,plain")
    with pytest.raises(ValueError, match="expected some of plain, offload"):
        select_methods("checkpoint", FORWARD_METHODS)
    assert next(iter(METHODS)) == "plain"


@pytest.mark.parametrize("path", ["bench/gpu_check.sh", "Makefile"])
def test_scripts_name_registered_methods(path):
    pattern = r"(?:--methods |DEMO_METHODS := )([a-z_+,-]+)"
    found = re.findall(pattern, (REPOSITORY / path).read_text())
    assert found
    for names in found:
        select_methods(names)
