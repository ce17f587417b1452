"""Choosing a device: what this machine has, and a sentence for what it does not."""

from __future__ import annotations

import pytest

from fusionllm.compute import warm_up
from fusionllm.compute.device import choose_device, list_devices
from fusionllm.errors import UserError


def test_every_listed_device_can_be_chosen_by_name_and_by_kind():
    devices = list_devices()
    assert devices[-1] == "cpu" and choose_device("auto") == devices[0]
    for device in devices:
        assert choose_device(device) == device
        assert choose_device(device.partition(":")[0]).partition(":")[0] == device.partition(":")[0]


@pytest.mark.parametrize("wish", ["", "gpu", "cuda:99", "cpu:", "cuda:x"])
def test_a_device_that_is_not_here_is_refused_with_those_that_are(wish):
    with pytest.raises(UserError, match=r"this machine has .*cpu"):
        warm_up("torch", wish)
