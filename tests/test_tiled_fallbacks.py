"""Families that make S x S masks themselves keep them, and run in checkpoint mode."""

import pytest

from tests.tiled import OWN_MASKS, V5, build, loss_on
from tests.tiled_pairs import AUTO, assert_falls_back, pair

pytestmark = pytest.mark.filterwarnings("error:.*offload")
REASON = "'attention_mask' has 2 dimensions as long as the sequence"
PADDED = [*OWN_MASKS, *([] if V5 else ["opt"])]
UNPADDED = ["falcon, alibi", "bloom", "mpt"]
CASES = [*((name, "left") for name in PADDED), *((name, "whole") for name in UNPADDED)]
mpt = pytest.mark.skipif(not V5, reason="MPT of 4.57 makes its mask in float32: not in float64")


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*case, marks=mpt if case[0] == "mpt" else ()) for case in CASES],
)
def test_layers_given_a_mask_of_the_models_own_run_in_checkpoint_mode(store, name, kind):
    plain, wrapped = pair(build, AUTO, name=name)
    assert_falls_back(plain, wrapped, loss_on(2, 37, kind=kind), warning=REASON, refusal=REASON)
