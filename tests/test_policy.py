import dataclasses

import pytest

import offload
from offload.policy import Codecs, format_bytes, parse_bytes


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tier": "disk"}, ValueError, "expected disk='/a/directory' with tier='disk'"),
        ({"disk_bytes": "1GiB"}, ValueError, "expected disk='/a/directory'"),
        ({"disk": "/x", "disk_bytes": "much"}, ValueError, "expected a size"),
        ({"disk": 5}, TypeError, "expected str, bytes or os.PathLike"),
        ({"codec": "zip"}, ValueError, "expected codec in"),
        ({"codec": "bits"}, ValueError, "expected codec in"),
        ({"codec": {"kv": "zip"}}, ValueError, "expected codec in"),
        ({"codec": {"keys": "fp8"}}, ValueError, r"expected codec for .*got one for \['keys'\]"),
        ({"codec": 8}, TypeError, "a name in .* or a mapping, got 8"),
        ({"debug": 1}, TypeError, "expected a bool for debug"),
    ],
)
def test_disk_codec_and_debug_are_validated(options, error, message):
    with pytest.raises(error, match=message):
        offload.Policy(**options)


def test_a_disk_is_held_as_a_path_and_its_cap_in_bytes(tmp_path):
    policy = offload.Policy(disk=tmp_path, disk_bytes="2GiB")
    assert (policy.disk, policy.disk_bytes) == (str(tmp_path), 2 << 30)


@pytest.mark.parametrize(
    ("codec", "codecs"),
    [
        (None, (None, None, None)),
        ("fp8", ("fp8", "fp8", "fp8")),
        ({"input": None, "kv": "int8"}, (None, "int8", None)),
        (Codecs(attention="fp8"), (None, None, "fp8")),
    ],
)
def test_a_codec_is_said_once_or_for_each_role(codec, codecs):
    policy = offload.Policy(codec=codec)
    assert policy.codecs == codecs
    assert dataclasses.replace(policy, keep_last=0).codecs == codecs
    assert hash(policy) == hash(offload.Policy(codec=codec))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
    ],
)
def test_sizes_are_written_as_they_are_read(nbytes, text):
    assert format_bytes(nbytes) == text
    assert parse_bytes(text) == nbytes
