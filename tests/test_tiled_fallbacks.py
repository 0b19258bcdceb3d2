"""Families that make S x S masks themselves keep them, and run in checkpoint mode."""

import pytest

import offload
from offload.errors import LayerRefused
from tests.tiled import OWN_MASKS, V5, assert_close_step, assert_tiled, build, loss_on, tiled
from tests.tiled_pairs import AUTO, one_warning, pair

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
    loss_of = loss_on(2, 37, kind=kind)
    with one_warning(REASON):
        assert_close_step(plain, wrapped, loss_of)
    assert_tiled(wrapped, mode="checkpoint")
    offload.wrap(wrapped, policy=tiled())
    with pytest.raises(LayerRefused, match=REASON):
        loss_of(wrapped)
