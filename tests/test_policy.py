import dataclasses

import pytest

import offload
from offload.policy import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GB", 8 * 10**9), ("7.5GiB", 15 << 29), ("64 mib", 64 << 20), ("12", 12), (0, 0), (5, 5)],
)
def test_sizes_are_read_as_written(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "8 apples", "-1GB", "GB", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [None, 1.5, True, b"8GB"])
def test_what_is_no_number_or_text_is_refused(value):
    with pytest.raises(TypeError, match="expected an int or a str"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("mode", "fast", ValueError),
        ("tier", "moon", ValueError),
        ("keep_last", -1, ValueError),
        ("keep_last", 1.0, TypeError),
        ("keep_last", True, TypeError),
        ("min_bytes", -5, ValueError),
        ("host_bytes", "63MiB", ValueError),
        ("host_bytes", "much", ValueError),
    ],
)
def test_a_policy_validates_itself(field, value, error):
    with pytest.raises(error, match="expected"):
        offload.Policy(**{field: value})


def test_a_policy_holds_bytes_and_cannot_be_changed():
    policy = offload.Policy(host_bytes="1GiB", min_bytes="1KiB")
    assert (policy.host_bytes, policy.min_bytes) == (1 << 30, 1024)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.mode = "keep"
